"""StepContext: which step, micro-batch and rows a rank is computing now.

Place in the flow: written by the executor before every forward, read by modules whose result
depends on it: bridges along rows, keyed dropout, batch norm. One per Step, handed to them at
lowering.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from whale.ir.virtual_device import VirtualDevice


@dataclass(frozen=True, slots=True)
class Place:
    """Where a computation is: kept with what a forward made, and set around its backward too."""

    stage: int
    micro_batch: int
    micro_rows: int
    first_row: int
    rows: int


@dataclass(slots=True)
class StepContext:
    """The position of a rank in the step. `first_row` counts from the start of the global batch."""

    seed: int = 0
    step: int = 0
    stage: int = 0
    micro_batch: int = 0
    micro_rows: int = 0
    first_row: int = 0
    rows: int = 0
    batch_rows: int = 0
    """Rows of the global batch."""

    @property
    def place(self) -> Place:
        """Where it is now, to come back to."""
        return Place(self.stage, self.micro_batch, self.micro_rows, self.first_row, self.rows)

    @place.setter
    def place(self, place: Place) -> None:
        self.stage, self.micro_batch, self.micro_rows = (
            place.stage,
            place.micro_batch,
            place.micro_rows,
        )
        self.first_row, self.rows = place.first_row, place.rows


def evaluation_step(num_steps: int) -> int:
    """The step that an evaluation after `num_steps` steps draws by: its own, never one that trains.

    So whatever was trained or evaluated before, it draws the same numbers.
    """
    return -1 - num_steps


@dataclass(slots=True)
class BackwardPass:
    """Whether a step's own backward runs, in whatever thread the engine runs it.

    A user's forward may differentiate too: what that backward finds is not the step's gradient.
    """

    running: bool = False

    @contextmanager
    def run(self) -> Iterator[None]:
        """Inside, it runs."""
        self.running = True
        try:
            yield
        finally:
            self.running = False


step_backward = BackwardPass()
"""Of this process: steps run one after another."""


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The rows of each member of a split group that spans several replicas of its stage."""

    context: StepContext
    device: VirtualDevice
    members: tuple[int, ...]
    rank: int

    def sizes(self) -> list[int]:
        """Rows of the current micro-batch by member, in group order."""
        points = self.device.row_cuts(self.context.micro_rows)
        positions = [self.device.position(rank)[0] for rank in self.members]
        return [points[p + 1] - points[p] for p in positions]

    @contextmanager
    def all_rows(self) -> Iterator[None]:
        """Inside, the context's own rows are those of all members."""
        context, sizes = self.context, self.sizes()
        own = (context.first_row, context.rows)
        points = self.device.row_cuts(context.micro_rows)
        mine = self.device.position(self.rank)[0]
        first = self.device.position(self.members[0])[0]
        context.first_row += points[first] - points[mine]
        context.rows = sum(sizes)
        try:
            yield
        finally:
            context.first_row, context.rows = own

    def scaled(self, total: int) -> list[int]:
        """The same for a dim of `total` elements over all rows (tokens of a sequence, say)."""
        sizes = self.sizes()
        factor = total // max(1, sum(sizes))
        return [size * factor for size in sizes]

    def scaled_own(self, own: int, index: int) -> list[int]:
        """The same from the size on a member that has rows."""
        sizes = self.sizes()
        factor = own // sizes[index]
        return [size * factor for size in sizes]
