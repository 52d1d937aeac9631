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
        self.numbers = torch.zeros(4, dtype=torch.float64, device=device)
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

    def wait(self) -> torch.Tensor:
        """The numbers of the global batch; a rank that ran nothing adds zeros."""
        if not self.started:
            self._launch()
        if self.work is not None:
            self.work.wait()
        return self.numbers


def mean_loss(sums: torch.Tensor) -> torch.Tensor:
    """The mean loss, from what all parts added (`Weighed.numbers`)."""
    return sums[0] / torch.maximum(sums[1], sums[2])


def gradient_factor(sums: torch.Tensor) -> torch.Tensor:
    """What gradients of sums are multiplied by.

    torch's means over nothing (a batch of padding) are nan, and their gradients zero.
    """
    count = torch.maximum(sums[1], sums[2])
    nothing = (count == 0) & (sums[3] == 0)
    return 1.0 / torch.where(nothing, torch.ones_like(count), count)
