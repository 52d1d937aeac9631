"""Shard: one rank's part of a split, and how values get in and out of it.

Place in the flow: made by `engine.lower` from a SplitLayer, used by every sharded module.
A split inside one replica sees the same rows on every member (`enter`/`leave`); a split that spans
several data parallel replicas gathers their rows on the way in and cuts them on the way out
(`enter_rows`/`leave_rows`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from whale.ir.sharding import DimSharding
from whale.nn.inside import Inside
from whale.runtime import collectives
from whale.runtime.context import RowLayout
from whale.runtime.groups import Communicator, communicator


@dataclass(slots=True, kw_only=True)
class Shard:
    """The units [low, high) of a split layer, on member `index` of `group`."""

    group: str
    index: int
    cuts: tuple[int, ...]
    params: dict[str, DimSharding]
    rows: RowLayout | None = None
    overlap: bool = False
    """Whether its weights are used once in a forward, so that their gradients may come late."""
    marks: tuple[tuple[str, str], ...] = ()
    """What else the rule does (`engine.split.unit_marks`)."""
    stays: bool = False
    """Whether all that reads the output of a lone column split works on its shards."""
    inside: Inside | None = None
    """The module in whose forward columns and rows run; None: not known, as in a trial."""

    @property
    def communicator(self) -> Communicator:
        """The group's communicator."""
        return communicator(self.group)

    @property
    def low(self) -> int:
        """First own unit."""
        return self.cuts[self.index]

    @property
    def high(self) -> int:
        """End of the own units."""
        return self.cuts[self.index + 1]

    @property
    def num_units(self) -> int:
        """Own units."""
        return self.high - self.low

    def local(self, size: int) -> int:
        """What `size` elements over all units become here."""
        return size // self.cuts[-1] * self.num_units

    def sizes(self, size: int) -> list[int]:
        """`size` elements over all units, by member."""
        unit = size // self.cuts[-1]
        return [(b - a) * unit for a, b in zip(self.cuts, self.cuts[1:], strict=False)]

    def span(self, local: int) -> tuple[int, int]:
        """(first, all) of a dim of which `local` elements belong to the own units."""
        unit = local // self.num_units if self.num_units else 1
        return self.low * unit, self.cuts[-1] * unit

    def all_rows(self) -> AbstractContextManager[None]:
        """Around code between `enter` and `leave`: the rows there are those of all members."""
        return nullcontext() if self.rows is None else self.rows.all_rows()

    def enter(
        self, x: torch.Tensor, meanwhile: collectives.Meanwhile | None = None
    ) -> torch.Tensor:
        """A whole input, for a product with sharded weights.

        `meanwhile` runs in backward while the input's gradient is summed; not across replicas.
        """
        collectives.refuse_transforms()
        if self.rows is None:
            return collectives.enter(x, self.group, meanwhile)
        sizes = rows_by_member(self.rows, x, self.index, self.group)
        return collectives.enter_rows(x, 0, sizes, self.group)

    def gather_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of all members, of something without a gradient."""
        collectives.refuse_transforms()
        if self.rows is None:
            return x
        sizes = rows_by_member(self.rows, x, self.index, self.group)
        return self.communicator.all_gather(x, 0, sizes)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """The whole output out of partial products."""
        collectives.refuse_transforms()
        if self.rows is None:
            return collectives.leave(x, self.group)
        return collectives.leave_rows(x, 0, self.rows.scaled(x.shape[0]), self.group)

    def cut(self, x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
        """The own part along `dim` of a whole input, `size` elements in all: back from `join`."""
        collectives.refuse_transforms()
        sizes = self.sizes(size)
        if self.rows is None:
            return collectives.scatter(x, dim, sizes, self.group)
        rows = rows_by_member(self.rows, x, self.index, self.group)
        return collectives.exchange(x, dim, sizes, 0, rows, self.group)

    def join(self, x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
        """The whole output out of shards along `dim`, `size` elements in all."""
        collectives.refuse_transforms()
        sizes = self.sizes(size)
        if self.rows is None:
            return collectives.gather(x, dim, sizes, self.group)
        return collectives.exchange(x, 0, self.rows.scaled(x.shape[0]), dim, sizes, self.group)


def rows_by_member(rows: RowLayout, x: torch.Tensor, index: int, group: str) -> list[int]:
    """The size of dim 0 of `x` on every member, each of which has its rows, times a factor.

    The factor (tokens of a sequence, say) is the same for all and known from the own rows, if there
    are any. Where a member has none, which all members know, the others tell it.
    """
    sizes = rows.sizes()
    if all(sizes):
        return rows.scaled_own(x.shape[0], index)
    own = torch.full((1,), x.shape[0], dtype=torch.long, device=x.device)
    found = communicator(group).all_gather(own, 0, [1] * len(sizes))
    return [int(size) for size in found.tolist()]
