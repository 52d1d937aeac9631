"""Who must agree on which gradient.

Every parameter's owners, cut into slices with one SUM group each.

Place in the flow: pure functions over a Plan. The planner lists the groups they ask for, the
runtime fills its buckets from them, the checker counts on them.

[Note: contributions] A replica contributes its gradient once. Inside a replica of several shards a
whole parameter has the same gradient on every shard, so those are copies, not contributions. Where
all contributions have the same number of copies, copy j of each forms a group of its own; otherwise
one group holds all owners and only the first copy of each contribution adds (`leads`), the others
add zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from whale.ir.model_graph import item_bytes
from whale.ir.plan import Home, Plan
from whale.ir.sharding import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """A SUM group and the ranks in it that contribute."""

    ranks: tuple[int, ...]
    leads: tuple[int, ...]


Stretch = tuple[int, Span | None, list[Sync]]
"""(dim, global span, SUM groups) of a part of a parameter; a span of None is all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A stretch of a parameter with one Sync. `span` is global, along `dim`; None.

    The whole local tensor.
    """

    home: Home
    dim: int
    span: Span | None
    sync: Sync
    counted: bool
    """Whether it is its Sync that answers where all must be counted once (the gradient norm)."""
    numel: int

    @property
    def owner(self) -> int:
        """The one rank that answers for it; -1: ranks of another Sync do."""
        return min(self.sync.ranks) if self.counted else -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Slices reduced in one collective. `position` orders all buckets of all ranks the same way."""

    position: tuple[int, tuple[int, ...]]
    sync: Sync
    dtype: str
    slices: tuple[Slice, ...]
    zero: int = 0
    """As of the homes of all its slices."""
    apply_group: int = 0


def syncs(plan: Plan, home: Home) -> list[Stretch]:
    """(dim, global span, SUM groups) for every stretch of a parameter.

    A span of None is all of it.
    """
    split_stages = {plan.taskgraphs[t].stage for t, _ in home.splits}
    devices = {stage: plan.stages[stage].virtual_device for stage in home.stages}
    devices.update(
        (plan.taskgraphs[t].stage, plan.taskgraphs[t].virtual_device) for t in home.around
    )
    everywhere = [
        replica.ranks
        for stage, device in devices.items()
        if stage not in split_stages
        for replica in device.replicas
    ]
    if not home.splits:
        return [(0, None, sum_groups(everywhere))]
    dim = 0
    holders: list[list[tuple[int, tuple[Span, ...]]]] = []
    points: set[int] = set()
    for taskgraph, path in home.splits:
        split = plan.split_of(taskgraph, path)
        sharding = dict(split.params)[home.name]
        dim = sharding.dim
        for index, replica in enumerate(plan.taskgraphs[taskgraph].virtual_device.replicas):
            held = [
                (rank, sharding.spans(*split.units(index, shard)))
                for shard, rank in enumerate(replica.ranks)
            ]
            points.update(point for _, spans in held for span in spans for point in span)
            holders.append(held)
    points.update((0, home.shape[dim]))
    ordered = sorted(points)
    place = {point: number for number, point in enumerate(ordered)}
    owners = [list(everywhere) for _ in ordered[1:]]
    for held in holders:
        ranks: list[list[int]] = [[] for _ in ordered[1:]]
        for rank, spans in held:
            for low, high in spans:
                for number in range(place[low], place[high]):
                    ranks[number].append(rank)
        for number, there in enumerate(ranks):
            owners[number] += [tuple(there)] if there else []
    return [
        (dim, span, sum_groups(there))
        for span, there in zip(pairwise(ordered), owners, strict=True)
    ]


def sum_groups(contributions: list[tuple[int, ...]]) -> list[Sync]:
    """The SUM groups of some contributions, each the ranks that hold copies of one gradient."""
    unique = list(dict.fromkeys(contributions))
    widths = {len(ranks) for ranks in unique}
    if len(widths) == 1:
        return [
            Sync(ranks=tuple(sorted(column)), leads=tuple(sorted(column)))
            for column in zip(*unique, strict=True)
        ]
    ranks = tuple(sorted({rank for owners in unique for rank in owners}))
    return [Sync(ranks=ranks, leads=tuple(sorted({owners[0] for owners in unique})))]


def sync_groups(plan: Plan) -> Iterator[tuple[int, ...]]:
    """The rank tuples of all gradient SUM groups, in parameter order, with repeats."""
    for _, stretches in all_syncs(plan):
        for _, _, groups in stretches:
            for sync in groups:
                if len(sync.ranks) > 1:
                    yield sync.ranks


def all_syncs(plan: Plan) -> list[tuple[Home, list[Stretch]]]:
    """`syncs` of every parameter, in order; whole ones that live together share one answer."""
    known: dict[object, list[Stretch]] = {}
    found = []
    for home in plan.homes:
        key = (home.stages, home.around, home.splits, home.name if home.splits else "")
        if key not in known:
            known[key] = syncs(plan, home)
        found.append((home, known[key]))
    return found


def rank_slices(
    plan: Plan, rank: int, known: list[tuple[Home, list[Stretch]]] | None = None
) -> list[Slice]:
    """The slices `rank` owns, last parameter first: the order gradients come in.

    `known` is `all_syncs` of the plan, for who asks of many ranks.
    """
    slices: list[Slice] = []
    stages = set(plan.stages_of(rank))
    alike: dict[int, bool] = {}
    for home, stretches in reversed(all_syncs(plan) if known is None else known):
        if stages.isdisjoint(home.stages):
            continue
        if id(stretches) not in alike:
            alike[id(stretches)] = _alike(stretches, rank)
        found = [
            Slice(
                home=home,
                dim=dim,
                span=span,
                sync=mine,
                counted=mine is groups[0],
                numel=_numel(home, dim, span),
            )
            for dim, span, groups in stretches
            for mine in groups
            if rank in mine.ranks
        ]
        slices += [_joined(found)] if found and alike[id(stretches)] else found
    return slices


def _alike(stretches: list[Stretch], rank: int) -> bool:
    """Whether all members of the rank's groups hold exactly the stretches it holds.

    Then each may treat what it holds as one slice; otherwise the others would lay out the same
    elements in another order, or cut their buckets elsewhere.
    """
    held: dict[int, list[int]] = {}
    for index, (_, _, groups) in enumerate(stretches):
        for sync in groups:
            for member in sync.ranks:
                held.setdefault(member, []).append(index)
    mine = [s for _, _, groups in stretches for s in groups if rank in s.ranks]
    members = {member for sync in mine for member in sync.ranks}
    return len(set(mine)) == 1 and all(held[member] == held[rank] for member in members)


def _joined(found: list[Slice]) -> Slice:
    first = found[0]
    return Slice(
        home=first.home,
        dim=0,
        span=None,
        sync=first.sync,
        counted=first.counted,
        numel=sum(piece.numel for piece in found),
    )


def _numel(home: Home, dim: int, span: Span | None) -> int:
    shape = list(home.shape)
    if span is not None:
        shape[dim] = span[1] - span[0]
    numel = 1
    for size in shape:
        numel *= size
    return numel


FIRST_BUCKET_BYTES = 1 << 20
_Kind = tuple[Sync, str, int, int]


def rank_buckets(
    plan: Plan,
    rank: int,
    trainable: frozenset[str],
    known: list[tuple[Home, list[Stretch]]] | None = None,
) -> list[Bucket]:
    """Slices of equal Sync, dtype, level of ZeRO and apply group, in the order all reduce them.

    Members of a group see the same slices in the same order, so they cut the same buckets. Those
    that ranks of several device groups sum come last. `known` is as for `rank_slices`.
    """
    order = {home.name: index for index, home in enumerate(reversed(plan.homes))}
    open_slices: dict[_Kind, list[Slice]] = {}
    sizes: dict[_Kind, int] = {}
    buckets: list[Bucket] = []
    begun: set[_Kind] = set()

    def close(key: _Kind) -> None:
        slices = open_slices.pop(key)
        del sizes[key]
        sync, dtype, zero, group = key
        buckets.append(
            Bucket(
                position=(max(order[s.home.name] for s in slices), sync.ranks),
                sync=sync,
                dtype=dtype,
                slices=tuple(slices),
                zero=zero,
                apply_group=group,
            )
        )

    for piece in rank_slices(plan, rank, known):
        if piece.home.name not in trainable:
            continue
        home = piece.home
        key = (piece.sync, plan.precision.summed(home.dtype), home.zero, home.apply_group)
        open_slices.setdefault(key, []).append(piece)
        sizes[key] = sizes.get(key, 0) + piece.numel * item_bytes(key[1])
        # The first bucket of a group is small, so that communication starts early in the backward.
        limit = plan.bucket_bytes if key in begun else min(FIRST_BUCKET_BYTES, plan.bucket_bytes)
        if sizes[key] >= limit:
            begun.add(key)
            close(key)
    for key in list(open_slices):
        close(key)
    return sorted(buckets, key=lambda bucket: (crosses(plan, bucket.sync), bucket.position))


def crosses(plan: Plan, sync: Sync) -> bool:
    """Whether ranks of several device groups of a pipeline sum together: tied weights."""
    lead = set(sync.ranks)
    return not any(
        lead <= {rank for stage in stages for rank in plan.stages[stage].virtual_device.ranks}
        for stages in plan.schedule.groups
    )
