"""Sums: a step's loss and its count over all ranks.

Place in the flow: begun by Step as soon as a rank's last forward is done, read after the backward.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from whale.runtime.executor import Totals


class GlobalSums:
    """The loss and its count over all ranks, on their way while the backward runs."""

    def __init__(self, num_ranks: int, device: torch.device) -> None:
        self.num_ranks = num_ranks
        self.numbers = torch.zeros(3, dtype=torch.float64, device=device)
        self.work: dist.Work | None = None
        self.started = False

    def start(self, totals: Totals) -> None:
        """This rank's part is complete."""
        self.numbers = totals.sums.clone()
        self._launch()

    def _launch(self) -> None:
        self.started = True
        if self.num_ranks > 1:
            self.work = dist.all_reduce(self.numbers, async_op=True)

    def wait(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(loss, count) of the global batch; a rank that ran nothing adds zeros."""
        if not self.started:
            self._launch()
        if self.work is not None:
            self.work.wait()
        return loss_and_count(self.numbers)


def loss_and_count(sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean loss and its count, from what all parts added."""
    count = torch.maximum(sums[1], sums[2])
    return sums[0] / count, count
