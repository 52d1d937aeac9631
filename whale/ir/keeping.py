"""Keeping: what a rank keeps, updates and saves of a parameter, beside what it computes with.

Place in the flow: pure functions over a Plan, beside `ir.homes`. Ranks that compute with copies of
one piece may share it out (`Home.zero`): each keeps a stretch along one dim and updates that alone.
The runtime's store moves between the two, checkpoints speak of what is kept.

[Note: the dim] A stretch has the parameter's own dims, so optimizers that look at a tensor's
number of dims see what they would on one device, and a checkpoint's blocks stay rectangles. It is
cut along dim 0 where that is long enough for all, else along the longest. Where replicas are cut at
different points, a rank is in several groups at once, each for a part along the dim of the split;
then that dim is the one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from whale.ir.homes import Slice, Stretch, rank_slices
from whale.ir.plan import Home, Plan
from whale.ir.sharding import Piece, Span, apportion, cuts

_ENOUGH = 4
"""Elements of dim 0 for each who shares; with fewer, their parts would be too unequal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A slice of a parameter that the ranks of its Sync share out."""

    slice: Slice
    shape: tuple[int, ...]
    """Of the slice, on each of them."""
    dim: int
    cuts: tuple[int, ...]
    """Along `dim` of the slice: member i keeps [cuts[i], cuts[i + 1])."""

    def numel(self, member: int) -> int:
        """Elements that a member keeps."""
        low, high = self.part(member)
        if not self.shape:
            return high - low
        other = 1
        for dim, size in enumerate(self.shape):
            other *= 1 if dim == self.dim else size
        return other * (high - low)

    def part(self, member: int) -> Span:
        """What a member keeps, along `dim`."""
        return self.cuts[member], self.cuts[member + 1]


def shared(plan: Plan, piece: Slice, held: Piece) -> Shared:
    """How a slice is shared out; `held` is what each of its ranks computes with."""
    shape = held.shape(piece.home.shape)
    dim = piece.dim
    if piece.span is not None:
        low, high = piece.span
        shape = (*shape[:dim], high - low, *shape[dim + 1 :])
    ranks = piece.sync.ranks
    if piece.span is None and shape:
        dim = 0 if shape[0] >= _ENOUGH * len(ranks) else shape.index(max(shape))
    weights = [plan.state_weights[r] for r in ranks] if plan.state_weights else [1] * len(ranks)
    # A number alone is kept by the first.
    size = shape[dim] if shape else 1
    return Shared(slice=piece, shape=shape, dim=dim, cuts=cuts(apportion(size, weights)))


def kept_pieces(
    plan: Plan, rank: int, known: list[tuple[Home, list[Stretch]]] | None = None
) -> dict[str, Piece]:
    """By parameter, what `rank` keeps; those of which it keeps nothing are left out.

    `known` is as for `rank_slices`.
    """
    pieces = {h.name: piece for h in plan.homes if (piece := plan.piece(h, rank)) is not None}
    found = {h.name: pieces[h.name] for h in plan.homes if h.name in pieces and not h.zero}
    for name, stretches in shares_of(plan, rank, known).items():
        if any(how.numel(member) for how, member in stretches):
            found[name] = _kept(pieces[name], stretches)
    return {h.name: found[h.name] for h in plan.homes if h.name in found}


Share = tuple[Shared, int]
"""A slice that is shared out, and which member a rank is."""


def shares_of(
    plan: Plan, rank: int, known: list[tuple[Home, list[Stretch]]] | None = None
) -> dict[str, list[Share]]:
    """By parameter that is shared out, the slices of it that `rank` takes part in."""
    found: dict[str, list[Share]] = {}
    for own in rank_slices(plan, rank, known):
        if own.home.zero:
            held = plan.piece(own.home, rank)
            assert held is not None
            member = own.sync.ranks.index(rank)
            found.setdefault(own.home.name, []).append((shared(plan, own, held), member))
    return found


def _kept(held: Piece, own: Sequence[Share]) -> Piece:
    first = own[0][0]
    if not first.shape:
        return held
    spans: list[Span] = []
    for how, member in own:
        low, high = how.part(member)
        if how.slice.span is not None:
            start = how.slice.span[0]
            spans.append((start + low, start + high))
        else:
            whole = ((0, how.shape[how.dim]),)
            spans += _stretch(dict(held.dims).get(how.dim, whole), low, high)
    dims = {**dict(held.dims), first.dim: _joined(spans)}
    return Piece(dims=tuple(sorted(dims.items())))


def _joined(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Without empty ones; those that touch are one. They come in the order of their positions."""
    found: list[Span] = []
    for low, high in spans:
        if low < high and found and found[-1][1] == low:
            found[-1] = (found[-1][0], high)
        elif low < high:
            found.append((low, high))
    return tuple(found)


def _stretch(spans: Sequence[Span], low: int, high: int) -> list[Span]:
    """Positions [low, high) of spans that lie one after another in memory."""
    found, start = [], 0
    for a, b in spans:
        first, last = max(low, start), min(high, start + b - a)
        if first < last:
            found.append((a + first - start, a + last - start))
        start += b - a
    return found
