"""Roles: ranks and replicas that are alike, so that each kind is priced once.

Place in the flow: under `cost.price`. A cluster of hundreds of devices has a handful of roles.
"""

from __future__ import annotations

from collections.abc import Mapping

from whale.ir.homes import sum_groups
from whale.ir.plan import Plan, StagePlan


def stages_by_rank(plan: Plan) -> list[tuple[int, ...]]:
    """`plan.stages_of` for all ranks at once."""
    found: list[tuple[int, ...]] = [()] * plan.num_ranks
    for stage in plan.stages:
        for rank in stage.virtual_device.ranks:
            found[rank] = (*found[rank], stage.index)
    return found


def roles(plan: Plan) -> list[object]:
    """By rank, a key that is equal for ranks with the same pieces and the same share of rows."""
    parts: list[list[object]] = [[] for _ in range(plan.num_ranks)]
    for t in plan.taskgraphs:
        for index, replica in enumerate(t.virtual_device.replicas):
            cuts = tuple(s.cuts_of(index) for s in t.splits)
            for shard, rank in enumerate(replica.ranks):
                parts[rank].append((t.index, shard, len(replica.ranks), replica.weight, cuts))
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
