"""VirtualDevice: the ranks of one TaskGraph, as replicas (of rows) of shards (of weights).

Place in the flow: made by the planner's placement, read by everything after it. Paper section 3.1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import ClassVar

from whale.ir.codec import from_plain, to_plain
from whale.ir.sharding import Span, apportion, cuts
from whale.ir.text import dumps, loads


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One copy of a TaskGraph.

    `ranks` are its shards in order, `weight` its share of every batch's rows.
    """

    ranks: tuple[int, ...]
    weight: int = 1


@dataclass(frozen=True, kw_only=True)
class VirtualDevice:
    """The devices of a TaskGraph. Row shares follow the weights.

    A weight of 0 leaves a replica idle.
    """

    replicas: tuple[Replica, ...]
    _only_field: ClassVar[str] = "replicas"

    @classmethod
    def of(
        cls, groups: Iterable[Iterable[int]], weights: Iterable[int] | None = None
    ) -> VirtualDevice:
        """`of([(0, 1), (2, 3)])` is two replicas of two shards each."""
        members = [tuple(group) for group in groups]
        chosen = list(weights) if weights is not None else [1] * len(members)
        return cls(
            replicas=tuple(
                Replica(ranks=ranks, weight=weight)
                for ranks, weight in zip(members, chosen, strict=True)
            )
        )

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks, replica by replica."""
        return tuple(rank for replica in self.replicas for rank in replica.ranks)

    @property
    def active(self) -> tuple[int, ...]:
        """Ranks of the replicas that get rows."""
        return tuple(rank for r in self.replicas if r.weight > 0 for rank in r.ranks)

    @property
    def weights(self) -> tuple[int, ...]:
        """Row weights by replica."""
        return tuple(replica.weight for replica in self.replicas)

    def position(self, rank: int) -> tuple[int, int]:
        """(replica, shard) of a rank."""
        return self._positions[rank]

    @cached_property
    def _positions(self) -> dict[int, tuple[int, int]]:
        # Hundreds of ranks are each asked about in every plan.
        return {
            rank: (index, shard)
            for index, replica in enumerate(self.replicas)
            for shard, rank in enumerate(replica.ranks)
        }

    def row_cuts(self, rows: int) -> tuple[int, ...]:
        """Where the replicas' rows begin and end in a micro-batch of `rows`."""
        return cuts(apportion(rows, self.weights))

    def all_rows(self, rows: int, num_micro_batch: int) -> tuple[int, ...]:
        """By replica, its rows of a global batch: of all micro-batches."""
        sizes = Counter(b - a for a, b in pairwise(micro_batch_cuts(rows, num_micro_batch)))
        parts = [(times, self.row_cuts(size)) for size, times in sizes.items()]
        return tuple(
            sum(times * (points[i + 1] - points[i]) for times, points in parts)
            for i in range(len(self.replicas))
        )

    def rows(self, rank: int, rows: int) -> Span:
        """The rows of a micro-batch that `rank` computes."""
        return _rows(self, rank, rows)

    def to_text(self) -> str:
        """The text form (`ir/text.py`); `from_text` gives an equal VirtualDevice back."""
        return dumps({"replicas": to_plain(self)}, title="virtual-device")

    @classmethod
    def from_text(cls, text: str) -> VirtualDevice:
        """The inverse of `to_text`."""
        return from_plain(
            cls, loads(text, title="virtual-device")["replicas"], "the virtual device"
        )


@lru_cache(maxsize=4096)
def _rows(device: VirtualDevice, rank: int, rows: int) -> Span:
    replica, _ = device.position(rank)
    points = device.row_cuts(rows)
    return points[replica], points[replica + 1]


def micro_batch_cuts(rows: int, num_micro_batch: int) -> tuple[int, ...]:
    """Where the micro-batches of a global batch of `rows` begin and end.

    Sizes differ by at most one.
    """
    return cuts(apportion(rows, (1,) * num_micro_batch))
