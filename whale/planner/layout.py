"""Layout: scopes and devices -> stages, device groups, and the ranks of every TaskGraph.

Place in the flow: second pass of `make_plan`. Rules (design, section 4): TaskGraphs with a device
count take disjoint devices in order; those without share all devices, unless they are stages;
devices left over replicate the whole. Paper section 3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from whale.config import Config
from whale.errors import AnnotationError, PlanError
from whale.ir.model_graph import ModelGraph, TaskGraph
from whale.ir.sharding import apportion, cuts
from whale.ir.strategy import Scope


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Which ranks do what, before anyone's share is known."""

    stages: tuple[tuple[int, ...], ...]
    """By stage, its TaskGraphs."""
    groups: tuple[tuple[int, ...], ...]
    """By device group, its stages."""
    copies: tuple[tuple[tuple[int, ...], ...], ...]
    """By device group, the ranks of each copy of the model."""
    widths: tuple[int, ...]
    """By TaskGraph, the ranks of a replica."""
    num_micro_batch: int
    schedule: str

    def stage_of(self, taskgraph: int) -> int:
        """The stage of a TaskGraph."""
        return self._stages[taskgraph]

    @cached_property
    def _stages(self) -> dict[int, int]:
        return {t: stage for stage, members in enumerate(self.stages) for t in members}

    def group_of(self, stage: int) -> int:
        """The device group of a stage."""
        return next(g for g, stages in enumerate(self.groups) if stage in stages)

    def base_width(self, stage: int) -> int:
        """The ranks of a replica of the stage's rows: those of all its TaskGraphs, if they agree.

        Where one TaskGraph is wider than another, it takes the rows of all replicas it spans.
        """
        distinct = {self.widths[t] for t in self.stages[stage]}
        return distinct.pop() if len(distinct) == 1 else 1

    def bridged(self, taskgraph: int) -> bool:
        """Whether a TaskGraph spans several replicas of its stage's rows."""
        return self.widths[taskgraph] != self.base_width(self.stage_of(taskgraph))

    def replicas(self, stage: int, width: int) -> list[tuple[int, ...]]:
        """The ranks of a stage, copy by copy, in replicas of so many."""
        return [
            ranks[start : start + width]
            for ranks in self.copies[self.group_of(stage)]
            for start in range(0, len(ranks), width)
        ]


def stages_of(graph: ModelGraph, config: Config) -> list[list[TaskGraph]]:
    """TaskGraphs grouped into stages, in execution order."""
    stage_scopes = {s.uid for t in graph.taskgraphs for s in t.tag if s.kind == "stage"}
    counted = [t for t in graph.taskgraphs if _own_count(t) is not None]
    if stage_scopes:
        return _by_scope(graph.taskgraphs)
    disjoint = (
        len(graph.taskgraphs) > 1
        and len(counted) == len(graph.taskgraphs)
        and not config.cluster.colocate_split_and_replicate
    )
    if disjoint:
        return [[t] for t in graph.taskgraphs]
    return [list(graph.taskgraphs)]


def _by_scope(taskgraphs: Sequence[TaskGraph]) -> list[list[TaskGraph]]:
    order: list[int] = []
    found: dict[int, list[TaskGraph]] = {}
    current: int | None = None
    early: list[TaskGraph] = []
    for t in taskgraphs:
        uid = next((s.uid for s in t.tag if s.kind == "stage"), current)
        if uid is None:
            early.append(t)
            continue
        current = uid
        if uid not in found:
            found[uid] = []
            order.append(uid)
        found[uid].append(t)
    found[order[0]][:0] = early
    return [found[uid] for uid in order]


def _own_count(taskgraph: TaskGraph) -> int | None:
    """Devices a TaskGraph asked for.

    The outermost count among its sharding scopes inside its stage.
    """
    inside = _inside_stage(taskgraph)
    return next((s.count for s in inside if s.shards and s.count is not None), None)


def _inside_stage(taskgraph: TaskGraph) -> tuple[Scope, ...]:
    kinds = [s.kind for s in taskgraph.tag]
    start = kinds.index("stage") + 1 if "stage" in kinds else 0
    return taskgraph.tag[start:]


def _split_scope(taskgraph: TaskGraph) -> Scope | None:
    return next((s for s in taskgraph.tag if s.kind == "split"), None)


def lay_out(
    graph: ModelGraph, num_devices: int, config: Config, *, order: Sequence[int] | None = None
) -> Layout:
    """Chooses ranks for every stage and TaskGraph.

    Devices are taken in `order` (default: by rank), so that a stage can have those that suit it.
    """
    stages = stages_of(graph, config)
    num_micro_batch, schedule = feeding(graph, config)
    num_groups, schedule = _num_groups(len(stages), num_devices, schedule, config)
    groups = tuple(tuple(range(g, len(stages), num_groups)) for g in range(num_groups))
    copies = _group_ranks(stages, groups, num_devices, config)
    if order is not None:
        copies = [
            [tuple(sorted(order[rank] for rank in copy)) for copy in ranks] for ranks in copies
        ]
    widths = {
        t.index: _shard_width(t, copies[stage % num_groups])
        for stage, members in enumerate(stages)
        for t in members
    }
    return Layout(
        stages=tuple(tuple(t.index for t in members) for members in stages),
        groups=groups,
        copies=tuple(map(tuple, copies)),
        widths=tuple(widths[t.index] for t in graph.taskgraphs),
        num_micro_batch=num_micro_batch,
        schedule=schedule,
    )


def feeding(graph: ModelGraph, config: Config) -> tuple[int, str]:
    """Micro-batches per step and the schedule, from the pipeline scope or the settings."""
    pipelines = {s.uid: s for t in graph.taskgraphs for s in t.tag if s.kind == "pipeline"}
    if len(pipelines) > 1:
        first, second = list(pipelines.values())[:2]
        raise AnnotationError(
            f"two pipelines in one model (the other at {first.where})",
            hint="put all stages inside one `wh.pipeline`",
            where=second.where,
        )
    scope = next(iter(pipelines.values()), None)
    num_micro_batch = (scope and scope.num_micro_batch) or config.pipeline.num_micro_batch
    schedule = (scope and scope.schedule) or config.pipeline.schedule
    return num_micro_batch, schedule


def _num_groups(
    num_stages: int, num_devices: int, schedule: str, config: Config
) -> tuple[int, str]:
    """Device groups of the pipeline; more stages than groups are interleaved, round robin."""
    chunks = config.pipeline.num_chunks
    if num_stages == 1:
        return 1, schedule
    if chunks is None:
        interleaved = schedule == "interleaved" and num_stages > 2
        chunks = 2 if interleaved else 1
        if -(-num_stages // chunks) > num_devices:
            chunks = -(-num_stages // num_devices)
    groups = -(-num_stages // chunks)
    if groups > num_devices:
        raise PlanError(
            f"{num_stages} stages in {chunks} chunks need {groups} devices, there are "
            f"{num_devices}",
            hint="raise pipeline.num_chunks, or leave it out",
        )
    return groups, "interleaved" if chunks > 1 and schedule == "1f1b" else schedule


def _group_ranks(
    stages: list[list[TaskGraph]],
    groups: tuple[tuple[int, ...], ...],
    num_devices: int,
    config: Config,
) -> list[list[tuple[int, ...]]]:
    """For every device group, the ranks of each copy of the model."""
    members = [[t for s in group for t in stages[s]] for group in groups]
    explicit = [_explicit_ranks(ts) for ts in members]
    if any(ranks is not None for ranks in explicit):
        return _explicit_groups(members, explicit, num_devices)
    counts = [_group_count(ts) for ts in members]
    elastic_split = any(
        (scope := _split_scope(t)) is not None and scope.count is None and counts[g] is None
        for g, ts in enumerate(members)
        for t in ts
    )
    free = [g for g, count in enumerate(counts) if count is None]
    fixed = sum(count for count in counts if count is not None)
    if len(groups) == 1:
        widths = [counts[0] or num_devices]
    elif elastic_split or (not fixed and num_devices % len(groups)):
        spread = apportion(max(num_devices - fixed, 0), (1,) * len(free)) if free else ()
        share = dict(zip(free, spread, strict=True))
        widths = [c if c is not None else share[g] for g, c in enumerate(counts)]
    else:
        widths = [c if c is not None else 1 for c in counts]
    total = sum(widths)
    where = next((t.where for ts in members for t in ts if _own_count(t)), None)
    if total > num_devices or 0 in widths or num_devices % total:
        raise PlanError(
            f"the annotations take {total} devices ({' + '.join(map(str, widths))}), the cluster "
            "has "
            f"{num_devices}",
            hint=f"use {total} devices or a multiple of it (what is left over replicates the "
            "whole), "
            "or change the device counts",
            where=where,
        )
    copies = num_devices // total
    offsets = cuts(widths)
    if config.cluster.device_place_prefer_intra_node:
        return [
            [
                tuple(range(c * total + offsets[g], c * total + offsets[g + 1]))
                for c in range(copies)
            ]
            for g in range(len(groups))
        ]
    return [
        [
            tuple(
                range(
                    copies * offsets[g] + c * widths[g], copies * offsets[g] + (c + 1) * widths[g]
                )
            )
            for c in range(copies)
        ]
        for g in range(len(groups))
    ]


def _explicit_ranks(taskgraphs: list[TaskGraph]) -> tuple[int, ...] | None:
    found = [s.ranks for t in taskgraphs for s in t.tag if s.ranks is not None]
    return found[0] if found else None


def _explicit_groups(
    members: list[list[TaskGraph]], explicit: list[tuple[int, ...] | None], num_devices: int
) -> list[list[tuple[int, ...]]]:
    used: dict[int, int] = {}
    for group, ranks in enumerate(explicit):
        where = members[group][0].where
        if ranks is None:
            raise AnnotationError(
                "this TaskGraph names no devices while others name theirs",
                hint="give every stage a slice of `wh.cluster(...)`, or none",
                where=where,
            )
        for rank in ranks:
            if rank in used or rank >= num_devices:
                raise AnnotationError(
                    f"device {rank} is taken twice, or the cluster has only {num_devices}",
                    hint="slices of different TaskGraphs must be disjoint",
                    where=where,
                )
            used[rank] = group
    return [[tuple(sorted(ranks))] for ranks in explicit if ranks is not None]


def _group_count(taskgraphs: list[TaskGraph]) -> int | None:
    found = [count for t in taskgraphs if (count := _own_count(t)) is not None]
    return max(found) if found else None


def _shard_width(taskgraph: TaskGraph, copies: list[tuple[int, ...]]) -> int:
    """Ranks per replica: 1 for replicate; for split its count, or all devices of the copy."""
    scope = _split_scope(taskgraph)
    if scope is None:
        return 1
    available = len(copies[0])
    width = scope.count or available
    if available % width:
        raise AnnotationError(
            f"{scope} on {available} devices: {available} is no multiple of {width}",
            hint="use a device count that divides the devices of its stage",
            where=scope.where,
        )
    return width
