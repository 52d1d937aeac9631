"""make_plan: the passes in order, from a ModelGraph and a Cluster to a checked Plan.

Place in the flow: the only entry of the planner. Deterministic: every rank computes the same plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from whale.config import Config
from whale.errors import CaptureError, PlanError
from whale.ir.check import check_plan
from whale.ir.cluster import Cluster
from whale.ir.deadlock import check_schedule
from whale.ir.homes import FIRST_BUCKET_BYTES, ITEM_BYTES, sum_groups, sync_groups, syncs
from whale.ir.model_graph import ModelGraph, TaskGraph, assign_stages
from whale.ir.plan import Group, Plan, SplitLayer, StageLayer, StagePlan, TaskGraphPlan
from whale.ir.schedule import Schedule
from whale.ir.strategy import Scope
from whale.planner.partition import balanced_cuts
from whale.planner.placement import Placement, place, speeds
from whale.planner.schedules import canonical_kind, rank_actions
from whale.planner.splits import choose_splits, make_homes, users_of


def make_plan(
    graph: ModelGraph,
    cluster: Cluster,
    config: Config,
    *,
    batch_rows: int,
    refusal: CaptureError | None = None,
) -> Plan:
    """A plan for `graph` on `cluster`.

    `refusal` is why the glue could not be traced, if it could not.
    """
    model_hash = graph.hash
    graph = _auto_stages(graph, config)
    placement = place(graph, cluster, config)
    if len(placement.stages) > 1 and not graph.nodes:
        raise refusal or PlanError(
            f"{len(placement.stages)} stages, but the model's glue was not traced",
            hint="use one stage, or capture the model with its batch",
        )
    stage_of_taskgraph = {t: s for s, members in enumerate(placement.stages) for t in members}
    stage_of_layer = [stage_of_taskgraph[layer.taskgraph] for layer in graph.layers]
    stage_of_node, edges = assign_stages(graph.nodes, stage_of_layer)
    users = users_of(graph, stage_of_layer, stage_of_node)
    splits = _splits(graph, placement, speeds(cluster), stage_of_layer)
    bridged = [
        t.index
        for t in graph.taskgraphs
        if placement.taskgraph_devices[t.index]
        != placement.stage_devices[stage_of_taskgraph[t.index]]
    ]
    plan = Plan(
        model_hash=model_hash,
        num_ranks=cluster.num_devices,
        device_types=tuple(device.type for device in cluster.devices),
        batch_rows=batch_rows,
        stages=tuple(
            StagePlan(
                index=s,
                taskgraphs=members,
                virtual_device=placement.stage_devices[s],
                layers=_stage_layers(graph, stage_of_layer, stage_of_node, s),
            )
            for s, members in enumerate(placement.stages)
        ),
        taskgraphs=tuple(
            _taskgraph_plan(graph, t, stage_of_taskgraph[t.index], placement, splits[t.index])
            for t in graph.taskgraphs
        ),
        homes=make_homes(graph, users, splits, bridged),
        groups=(),
        schedule=Schedule(
            kind=canonical_kind(placement.schedule),
            num_micro_batch=placement.num_micro_batch,
            groups=placement.groups,
            edges=edges,
        ),
        bucket_bytes=_bucket_bytes(graph, config),
        num_communicators=config.communication.num_communicators,
        strategy=_describe(graph, placement),
    )
    plan = replace(plan, groups=_groups_of(plan))
    check_plan(plan)
    schedule = plan.schedule
    check_schedule(schedule, {g: rank_actions(schedule, g) for g in range(len(schedule.groups))})
    return plan


def _stage_layers(
    graph: ModelGraph, stage_of_layer: list[int], stage_of_node: tuple[int | None, ...], stage: int
) -> tuple[StageLayer, ...]:
    """The Layers a stage runs, in execution order; one called again later runs there again."""
    if graph.nodes:
        order = [
            node.layer
            for node, where in zip(graph.nodes, stage_of_node, strict=True)
            if where == stage and node.layer is not None
        ]
    else:
        order = [i for i, s in enumerate(stage_of_layer) if s == stage]
    return tuple(
        StageLayer(
            path=graph.layers[i].path,
            taskgraph=graph.layers[i].taskgraph,
            params=graph.layers[i].params,
            num_norms=graph.layers[i].num_norms,
        )
        for i in order
    )


def _auto_stages(graph: ModelGraph, config: Config) -> ModelGraph:
    """Stages by cost when the user asked for them and wrote no scopes."""
    if not config.auto.auto_parallel:
        return graph
    scoped = [t for t in graph.taskgraphs if t.tag]
    if scoped:
        raise PlanError(
            "auto.auto_parallel is on, but the model has annotations",
            hint="drop the annotations or auto; completing part of them comes with the cost model",
            where=scoped[0].where,
        )
    num_stages = config.pipeline.num_stages or 1
    if num_stages > len(graph.layers):
        raise PlanError(
            f"pipeline.num_stages is {num_stages}, the model has {len(graph.layers)} Layers",
            hint="a stage holds at least one Layer",
        )
    points = balanced_cuts([layer.flops_per_row for layer in graph.layers], num_stages)
    taskgraphs, layers = [], list(graph.layers)
    for index in range(num_stages):
        members = tuple(range(points[index], points[index + 1]))
        tag = (Scope(kind="stage", uid=-1 - index, where="auto"),)
        taskgraphs.append(TaskGraph(index=index, tag=tag, layers=members))
        for member in members:
            layers[member] = replace(layers[member], taskgraph=index)
    return replace(graph, layers=tuple(layers), taskgraphs=tuple(taskgraphs))


def _splits(
    graph: ModelGraph, placement: Placement, weights: tuple[int, ...], stage_of_layer: list[int]
) -> dict[int, tuple[SplitLayer, ...]]:
    glue = {name for node in graph.nodes if node.layer is None for name in node.params}
    in_layers = {name for layer in graph.layers for name in layer.params}
    glue |= {p.name for p in graph.parameters if p.name not in in_layers}
    found: dict[int, tuple[SplitLayer, ...]] = {}
    for t in graph.taskgraphs:
        if t.kind != "split":
            found[t.index] = ()
            continue
        stage = next(s for s, members in enumerate(placement.stages) if t.index in members)
        stage_layers = [i for i, s in enumerate(stage_of_layer) if s == stage]
        device = placement.taskgraph_devices[t.index]
        bridged = device != placement.stage_devices[stage]
        found[t.index] = choose_splits(graph, t, device, weights, stage_layers, glue, bridged)
    return found


def _taskgraph_plan(
    graph: ModelGraph,
    taskgraph: TaskGraph,
    stage: int,
    placement: Placement,
    splits: tuple[SplitLayer, ...],
) -> TaskGraphPlan:
    layers = [graph.layers[i] for i in taskgraph.layers]
    cut = {name for split in splits for name, _ in split.params}
    names = list(dict.fromkeys(name for layer in layers for name in layer.params))
    total = sum(graph.parameter(name).numel for name in names)
    shared = sum(graph.parameter(name).numel for name in names if name in cut)
    flops = sum(layer.flops_per_row for layer in graph.layers) or 1.0
    whole = dict.fromkeys(n.rpartition(".")[0] for n in names if n not in cut)
    return TaskGraphPlan(
        index=taskgraph.index,
        name=taskgraph.name,
        kind=taskgraph.kind,
        stage=stage,
        layers=tuple(layer.path for layer in layers),
        virtual_device=placement.taskgraph_devices[taskgraph.index],
        splits=splits,
        whole=tuple(whole) if splits else (),
        split_share=shared / total if total else 0.0,
        flops_share=sum(layer.flops_per_row for layer in layers) / flops,
    )


def _groups_of(plan: Plan) -> tuple[Group, ...]:
    """Every process group of the plan, each once, in an order all ranks agree on."""
    found: dict[tuple[int, ...], str] = {}
    if plan.num_ranks > 1:
        found[tuple(range(plan.num_ranks))] = "world"

    def add(prefix: str, ranks: tuple[int, ...]) -> None:
        if len(ranks) > 1 and ranks not in found:
            found[ranks] = f"{prefix}:{'-'.join(map(str, ranks))}"

    for taskgraph in plan.taskgraphs:
        if taskgraph.splits:
            for replica in taskgraph.virtual_device.replicas:
                add("split", replica.ranks)
    for stage in plan.stages:
        for sync in sum_groups([replica.ranks for replica in stage.virtual_device.replicas]):
            add("rows", sync.ranks)
    for ranks in sync_groups(plan):
        add("sum", ranks)
    groups = [Group(name=name, ranks=ranks) for ranks, name in found.items()]
    groups += _pools(plan)
    for source, target in sorted(set(_channels(plan))):
        groups.append(Group(name=f"p2p:{source}>{target}", ranks=tuple(sorted((source, target)))))
    return tuple(groups)


def _bucket_bytes(graph: ModelGraph, config: Config) -> int:
    """The bucket size asked for, or a larger one where `max_splits` allows fewer buckets."""
    asked, most = config.communication.bucket_bytes, config.communication.max_splits
    if most is None:
        return asked
    total = sum(p.numel * ITEM_BYTES[p.dtype] for p in graph.parameters if p.trainable)
    return max(asked, -(-total // most))


def _pools(plan: Plan) -> list[Group]:
    """More communicators for gradient groups of several buckets, which then overlap."""
    nbytes: dict[tuple[int, ...], int] = {}
    for home in plan.homes:
        size = 1
        for extent in home.shape:
            size *= extent
        for _, _, syncs_found in syncs(plan, home):
            for sync in syncs_found:
                nbytes[sync.ranks] = nbytes.get(sync.ranks, 0) + size * ITEM_BYTES[home.dtype]
    return [
        Group(name=f"sum{k}:{'-'.join(map(str, ranks))}", ranks=ranks)
        for ranks, total in nbytes.items()
        for k in range(1, plan.num_communicators)
        if len(ranks) > 1 and total > FIRST_BUCKET_BYTES
    ]


def _channels(plan: Plan) -> Iterator[tuple[int, int]]:
    """Pairs of ranks that may send to each other: every replica pair of an edge, both ways."""
    for a, b in plan.schedule.edges:
        for producer in plan.stages[a].virtual_device.replicas:
            for consumer in plan.stages[b].virtual_device.replicas:
                for j, rank in enumerate(consumer.ranks):
                    source = producer.ranks[j % len(producer.ranks)]
                    if source != rank:
                        yield source, rank
                for i, rank in enumerate(producer.ranks):
                    source = consumer.ranks[i % len(consumer.ranks)]
                    if source != rank:
                        yield source, rank


def _describe(graph: ModelGraph, placement: Placement) -> str:
    parts = []
    for stage, members in enumerate(placement.stages):
        names = [f"{graph.taskgraphs[t].kind}" for t in members]
        device = placement.stage_devices[stage]
        parts.append(f"stage {stage}: {'+'.join(names)} on {len(device.ranks)}")
    text = "; ".join(parts)
    if placement.num_copies > 1:
        text += f"; {placement.num_copies} copies"
    return f"{text}; {placement.num_micro_batch} micro-batches, {placement.schedule}"
