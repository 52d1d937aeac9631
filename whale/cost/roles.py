"""Roles: ranks and replicas that are alike, so that each kind is priced once.

Place in the flow: under `cost.price`. A cluster of hundreds of devices has a handful of roles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from whale.ir.homes import Stretch, sum_groups
from whale.ir.plan import Home, Plan, StagePlan


def stages_by_rank(plan: Plan) -> list[tuple[int, ...]]:
    """`plan.stages_of` for all ranks at once."""
    found: list[tuple[int, ...]] = [()] * plan.num_ranks
    for stage in plan.stages:
        for rank in stage.virtual_device.ranks:
            found[rank] = (*found[rank], stage.index)
    return found


def roles(plan: Plan) -> list[object]:
    """By rank, a key that is equal for ranks with pieces of the same size and as many rows."""
    parts: list[list[object]] = [[] for _ in range(plan.num_ranks)]
    for t in plan.taskgraphs:
        for index, replica in enumerate(t.virtual_device.replicas):
            for shard, rank in enumerate(replica.ranks):
                units = (s.units(index, shard) for s in t.splits)
                sizes = tuple(high - low for low, high in units)
                parts[rank].append((t.index, len(replica.ranks), replica.weight, sizes))
    return list(zip(stages_by_rank(plan), map(tuple, parts), strict=True))


def groups_inside(plan: Plan, stage: StagePlan) -> Mapping[int, list[tuple[int, ...]]]:
    """By rank, the groups of ranks whose collectives run inside the stage's Layers."""
    found: dict[int, list[tuple[int, ...]]] = {rank: [] for rank in stage.virtual_device.ranks}
    groups: list[tuple[int, ...]] = []
    if any(any(layer.meets) for layer in stage.layers):
        groups += [s.ranks for s in sum_groups([r.ranks for r in stage.virtual_device.replicas])]
    for index in stage.taskgraphs:
        t = plan.taskgraphs[index]
        groups += [replica.ranks for replica in t.virtual_device.replicas] if t.splits else []
    for group in groups:
        for rank in group:
            if rank in found:
                found[rank].append(group)
    return found


def ranks_that_differ(known: Sequence[tuple[Home, list[Stretch]]]) -> list[int]:
    """The first rank of each kind: ranks in the same groups cut the same buckets."""
    member: dict[int, list[tuple[int, int]]] = {}
    # Parameters that live together share one answer.
    for number, stretches in {id(found): found for _, found in known}.items():
        groups = [sync for _, _, syncs in stretches for sync in syncs]
        for place, sync in enumerate(groups):
            for rank in sync.ranks:
                member.setdefault(rank, []).append((number, place))
    first: dict[object, int] = {}
    for rank in sorted(member):
        first.setdefault(tuple(member[rank]), rank)
    return list(first.values())
