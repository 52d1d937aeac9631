"""Sums: a step's loss and its count over all ranks.

Place in the flow: begun by Step as soon as a rank's last forward is done, read after the backward.
"""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist

from whale.errors import WhaleError
from whale.runtime.executor import Totals
from whale.runtime.weighing import NUMBERS, OTHER_COUNTS


class GlobalSums:
    """The loss and its count over all ranks, on their way while the backward runs."""

    def __init__(self, num_ranks: int, device: torch.device) -> None:
        self.num_ranks = num_ranks
        self.numbers = torch.zeros(NUMBERS, dtype=torch.float64, device=device)
        self.work: dist.Work | None = None

    def start(self, totals: Totals) -> None:
        """This rank's part is complete: zeros where it runs nothing."""
        self.numbers = totals.sums.clone()
        if self.num_ranks > 1:
            self.work = dist.all_reduce(self.numbers, async_op=True)

    def wait(self) -> torch.Tensor:
        """The numbers of the global batch."""
        work, self.work = self.work, None  # it holds on to the connections
        if work is not None:
            work.wait()
        return self.numbers


class SameSizes:
    """Looks whether means that are added had the same sizes for their rows on all parts.

    A mean of as many elements as its rows happen to have tokens may look like one over rows; with
    another mean beside it, no weight of a part is exact then. On a GPU nothing waits for the
    numbers: they are read when they have come, but for means over different counts (`waits`), where
    any batch may be of another sort.
    """

    def __init__(self, *, waits: bool = False) -> None:
        self._waits = waits
        self._coming: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque(maxlen=64)

    def note(self, numbers: torch.Tensor) -> None:
        """The numbers of a step, over all ranks."""
        if self._waits or not numbers.is_cuda:
            refuse_other_sizes(numbers.tolist())
            return
        copied = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        copied.copy_(numbers, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._coming.append((copied, event))
        while self._coming and self._coming[0][1].query():
            refuse_other_sizes(self._coming.popleft()[0].tolist())


def refuse_other_sizes(numbers: list[float]) -> None:
    """Refuses sums of means whose sizes were not in the same ratio on all parts."""
    parts, mark, squares = numbers[4:]
    spread = parts * squares - mark * mark
    if parts and not spread <= 1e-9 * mark * mark:
        raise WhaleError(
            "the loss adds means over different counts, which are in another ratio on some parts "
            f"than on others (over {parts:.0f} parts, a mean of "
            f"{mark / parts:.6g} and a spread of {max(spread, 0.0) ** 0.5 / parts:.3g} of what "
            "should be one number): no single weight of a part makes their sum exact",
            hint=f"select the elements with a mask (x[mask].mean()); {OTHER_COUNTS}",
        )
