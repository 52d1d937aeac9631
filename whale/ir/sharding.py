"""Cuts and owners: how a dimension is divided, evenly or not, and which piece a shard holds.

Place in the flow: the arithmetic under plans, checkpoints, gradient synchronisation and the split
rules. Everything is intervals of integers, so uneven is the normal case and even a coincidence.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

Span = tuple[int, int]


def apportion(total: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Divides `total` in proportion to `weights`, largest remainder first.

    Deterministic, sums to `total` exactly, and gives nothing to a weight of 0.
    """
    whole = sum(weights)
    assert total >= 0 and whole > 0 and min(weights) >= 0, (total, weights)
    base = [total * weight // whole for weight in weights]
    order = sorted(range(len(weights)), key=lambda i: (-(total * weights[i] % whole), i))
    for index in order[: total - sum(base)]:
        base[index] += 1
    return tuple(base)


def cuts(sizes: Iterable[int]) -> tuple[int, ...]:
    """Cut points of consecutive sizes: `(3, 2)` gives `(0, 3, 5)`."""
    return (0, *accumulate(sizes))


def intersect(a: Span, b: Span) -> Span | None:
    """The common part of two half-open spans, or None."""
    low, high = max(a[0], b[0]), min(a[1], b[1])
    return (low, high) if low < high else None


@dataclass(frozen=True, slots=True, kw_only=True)
class DimSharding:
    """How one dimension of a parameter may be cut, in `units` that must stay whole.

    `sections` are the stretches of the dimension that are each cut at the same unit points: one for
    a plain Linear, three for a fused query-key-value weight whose unit is a head.
    """

    dim: int
    sections: tuple[int, ...]
    units: int

    def __post_init__(self) -> None:
        assert all(size % self.units == 0 for size in self.sections), (self.sections, self.units)

    @property
    def size(self) -> int:
        """Elements along the dimension."""
        return sum(self.sections)

    def spans(self, low: int, high: int) -> tuple[Span, ...]:
        """The element spans that units [low, high) cover, one per section, in storage order."""
        offsets = cuts(self.sections)
        return tuple(
            (offset + size // self.units * low, offset + size // self.units * high)
            for offset, size in zip(offsets, self.sections, strict=False)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one rank holds of a tensor: spans along some dims, everything along the others."""

    dims: tuple[tuple[int, tuple[Span, ...]], ...] = ()

    @property
    def whole(self) -> bool:
        """Whether this is the whole tensor."""
        return not self.dims

    def shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The local shape of a tensor of global `shape`."""
        local = list(shape)
        for dim, spans in self.dims:
            local[dim] = sum(high - low for low, high in spans)
        return tuple(local)

    def blocks(self, shape: Sequence[int]) -> list[tuple[tuple[Span, ...], tuple[Span, ...]]]:
        """Rectangles of the piece as (spans in the local tensor, spans in the global tensor)."""
        blocks: list[tuple[list[Span], list[Span]]] = [([], [])]
        held = dict(self.dims)
        for dim, size in enumerate(shape):
            spans = held.get(dim, ((0, size),))
            starts = cuts(high - low for low, high in spans)
            blocks = [
                ([*local, (start, start + high - low)], [*globally, (low, high)])
                for local, globally in blocks
                for start, (low, high) in zip(starts, spans, strict=False)
            ]
        return [
            (tuple(local), tuple(globally))
            for local, globally in blocks
            if all(low < high for low, high in globally)
        ]


WHOLE = Piece()
