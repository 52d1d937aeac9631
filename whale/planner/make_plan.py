"""make_plan: the passes in order, from a ModelGraph and a Cluster to a checked Plan.

Place in the flow: the only entry of the planner. Deterministic: every rank computes the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from whale.config import Config
from whale.cost.compute import CostModel, Training
from whale.cost.price import price
from whale.errors import CaptureError, PlanError
from whale.ir.check import check_order, check_plan
from whale.ir.cluster import Cluster
from whale.ir.deadlock import check_schedule
from whale.ir.homes import FIRST_BUCKET_BYTES, sum_groups, sync_groups, syncs
from whale.ir.levels import all_level_groups
from whale.ir.model_graph import ModelGraph, TaskGraph
from whale.ir.plan import (
    TRAVELLING,
    Group,
    Plan,
    SplitLayer,
    StageLayer,
    StagePlan,
    TaskGraphPlan,
)
from whale.ir.profile import Profile
from whale.ir.schedule import Action, Schedule
from whale.planner.applying import in_groups
from whale.planner.candidate import Candidate
from whale.planner.candidates import automatic, orders
from whale.planner.fit import LARGE, Free, explained, fitted, overflow
from whale.planner.keep import Keeping, kept_so, weights_by_room
from whale.planner.layout import feeding, lay_out, stages_of
from whale.planner.outline import Outline, outline
from whale.planner.placement import Placement, place
from whale.planner.precision import precision_of
from whale.planner.reasons import reasons_of
from whale.planner.replicas import smaller_micro_batches
from whale.planner.rules import choose_levels
from whale.planner.schedules import rank_actions
from whale.planner.shares import Shares
from whale.planner.splits import cut, make_homes
from whale.planner.wire import wire_of
from whale.sim.simulate import simulate

Scored = tuple[tuple[float, float], int, Candidate, Plan]
"""A candidate as a plan: bytes over capacity and seconds or joules, and when it was tried."""


def make_plan(
    graph: ModelGraph,
    cluster: Cluster,
    config: Config,
    *,
    batch_rows: int,
    refusal: CaptureError | None = None,
    training: Training | None = None,
    profile: Profile | None = None,
) -> Plan:
    """The best plan for `graph` on `cluster` that fits, or the one that overflows least.

    Args:
        graph: The captured model.
        cluster: The devices.
        config: Settings; `cluster.balance` says how shares are chosen, `auto.objective` what is
            best.
        batch_rows: Rows of the global batch.
        refusal: Why the glue could not be traced, if it could not.
        training: Optimizer and precision; default: AdamW.
        profile: What was measured of the devices; default: data sheets.
    """
    if batch_rows < 1:
        raise PlanError("the batch has no rows", hint="give one global batch, rows in dim 0")
    num_micro_batch, _ = feeding(graph, config)
    if num_micro_batch > batch_rows:
        raise PlanError(
            f"{num_micro_batch} micro-batches of {batch_rows} rows; allowed: 1 to {batch_rows}",
            hint="raise the batch, or lower pipeline.num_micro_batch",
        )
    low = precision_of(config).autocast
    training = replace(training or Training(), autocast=low)
    costs = CostModel(graph, cluster, training, profile)
    rejected: list[str] = []
    auto = config.auto.auto_parallel and not any(t.tag for t in graph.taskgraphs)
    if auto:
        found = list(automatic(costs, config, batch_rows, rejected))
    else:
        num_groups = min(len(stages_of(graph, config)), cluster.num_devices)
        found = list(orders(costs, num_groups, config))
    scored: list[Scored] = []
    first_error: PlanError | None = None

    def build(candidate: Candidate, keeping: Keeping | None = None) -> Plan:
        return _build(candidate, graph.hash, costs, config, batch_rows, refusal, keeping)

    def fits(candidate: Candidate) -> bool:
        nonlocal first_error
        try:
            plan = build(candidate)
        except PlanError as error:
            first_error = first_error or error
            rejected.append(f"{candidate.about}: {error.message}")
            return False
        scored.append((_score(plan, config.auto.objective), len(scored), candidate, plan))
        return not scored[-1][0][0]

    fitting = [candidate for candidate in found if fits(candidate)]
    if auto and not fitting:
        for candidate in smaller_micro_batches(costs, config, batch_rows):
            if fits(candidate):
                break
    if not scored:
        raise first_error or _nothing(config, graph, rejected)
    if not any(score[0] == 0 for score, _, _, _ in scored):
        scored += list(_less_kept(scored, costs, config, build))
    scored.sort(key=lambda item: item[:2])
    (over_least, least), _, winner, best = scored[0]
    more = "slower" if config.auto.objective == "time" else "more energy"
    nearest = scored[1:9]
    # Data parallel is what everybody compares with.
    nearest += [s for s in scored[9:] if s[2].about.startswith("data parallel")][:1]
    for (over, value), _, candidate, _ in nearest:
        if over > over_least:
            text = f"does not fit, by {over / 1e9:.2f} GB on one device"
        else:
            text = f"{value / least - 1.0:.1%} {more}" if least else "no better"
        rejected.append(f"{candidate.about}: {text}")
    strategy = best.strategy if len(found) == 1 else f"{best.strategy} ({winner.about})"
    best = replace(best, strategy=strategy, rejected=(*best.rejected, *rejected))
    if refusal is not None and not any(layer.work for layer in graph.layers):
        best = _with_note(
            best, f"nothing was counted, so times lack all compute: {refusal.message}"
        )
    check_plan(best)
    schedule = best.schedule
    check_schedule(schedule, orders_of(schedule))
    return best


_FITTED = 4
"""Candidates that are made to fit by what they keep, those that lack least first."""


def _less_kept(
    scored: Sequence[Scored],
    costs: CostModel,
    config: Config,
    build: Callable[[Candidate, Keeping], Plan],
) -> Iterator[Scored]:
    """Where nothing fits as it is, the plans that do with less kept on the devices."""
    free = Free.of(config)
    few = 1 if costs.cluster.num_devices > LARGE else _FITTED
    nearest = sorted(scored, key=lambda item: item[:2])[:few]
    for _, number, candidate, plan in nearest:
        found = fitted(
            plan,
            Keeping.of(candidate.graph, config),
            partial(build, candidate),
            candidate.graph,
            costs,
            free,
        )
        if found is not None:
            about = replace(candidate, about=f"{candidate.about}, made to fit")
            yield _score(found, config.auto.objective), len(scored) + number, about, found


def _with_note(plan: Plan, note: str) -> Plan:
    assert plan.prices is not None
    prices = replace(plan.prices, sources=(note, *plan.prices.sources))
    return replace(plan, prices=prices, rejected=(note, *plan.rejected))


def orders_of(schedule: Schedule) -> dict[int, list[Action]]:
    """The actions of every device group: what runs, is checked, is simulated and is drawn."""
    return {g: rank_actions(schedule, g) for g in range(len(schedule.groups))}


def _nothing(config: Config, graph: ModelGraph, rejected: Sequence[str]) -> PlanError:
    text = (
        f"no plan with pipeline.num_stages = {config.pipeline.num_stages} for a model of "
        f"{len(graph.layers)} Layers"
    )
    if rejected:
        return PlanError(f"{text}; {rejected[0]}", hint="leave the number of stages to the planner")
    return PlanError(text, hint="a stage holds at least one Layer and runs on at least one device")


def _score(plan: Plan, objective: str) -> tuple[float, float]:
    """Bytes over capacity on the worst device, then seconds or joules."""
    key = "step_seconds" if objective == "time" else "joules_per_step"
    return overflow(plan), float(plan.predicted[key])


def _build(
    candidate: Candidate,
    model_hash: str,
    costs: CostModel,
    config: Config,
    batch_rows: int,
    refusal: CaptureError | None,
    keeping: Keeping | None = None,
) -> Plan:
    """One candidate as a priced plan; `keeping` is as the settings say, unless given."""
    graph, num_devices = candidate.graph, costs.cluster.num_devices
    layout = lay_out(graph, num_devices, config, order=candidate.order)
    if len(layout.stages) > 1 and not graph.nodes:
        raise refusal or PlanError(
            f"{len(layout.stages)} stages, but the model's glue was not traced",
            hint="use one stage, or capture the model with its batch",
        )
    rows = -(-batch_rows // layout.num_micro_batch)
    found = outline(graph, layout, costs, rows)
    keeping = Keeping.of(graph, config) if keeping is None else keeping
    shares = Shares(
        outline=found, costs=costs, rows=rows, keeping=keeping, mode=config.cluster.balance
    )
    placement = place(layout, shares)
    rejected: list[str] = []
    splits = {t.index: _splits(t.index, found, shares, config, rejected) for t in graph.taskgraphs}
    plan = Plan(
        model_hash=model_hash,
        num_ranks=num_devices,
        device_types=tuple(device.type for device in costs.cluster.devices),
        batch_rows=batch_rows,
        stages=_stage_plans(found, placement, joined=config.communication.batch_norm == "global"),
        taskgraphs=tuple(
            _taskgraph_plan(found, t, placement, splits[t.index]) for t in graph.taskgraphs
        ),
        homes=make_homes(
            graph,
            found.users,
            splits,
            [t.index for t in graph.taskgraphs if layout.bridged(t.index)],
        ),
        groups=(),
        schedule=found.schedule,
        precision=keeping.precision,
        wire=wire_of(config),
        bucket_bytes=_bucket_bytes(graph, config),
        num_communicators=config.communication.num_communicators,
        strategy=_describe(found, placement),
        rejected=(*shares.shortages, *found.rejected, *dict.fromkeys(rejected)),
    )
    check_order(plan, graph)
    plan = in_groups(kept_so(plan, keeping), config)
    plan = replace(plan, groups=groups_of(plan))

    def priced(plan: Plan) -> Plan:
        orders = orders_of(plan.schedule)
        return predicted(replace(plan, prices=price(plan, graph, costs, orders, shares.binds)))

    plan = priced(plan)
    weights = weights_by_room(plan, costs)
    if weights:
        plan = priced(replace(plan, state_weights=weights))
    return replace(plan, kept=tuple(explained(plan, graph, costs)))


def predicted(plan: Plan) -> Plan:
    """A priced plan with what the simulator says of it."""
    report = simulate(plan, orders_of(plan.schedule), events=False)
    return replace(
        plan,
        predicted={
            "fits": report.fits,
            "step_seconds": report.step_seconds,
            "samples_per_second": report.samples_per_second,
            "joules_per_step": report.joules_per_step,
            "lower_bound_seconds": report.lower_bound_seconds,
        },
        # All that must fit: what no tensor can have is a part of the capacity.
        peak_bytes=tuple(d.memory.with_reserve for d in report.devices),
    )


def _stage_plans(found: Outline, placement: Placement, *, joined: bool) -> tuple[StagePlan, ...]:
    return tuple(
        StagePlan(
            index=stage,
            taskgraphs=members,
            virtual_device=placement.stage_devices[stage],
            layers=stage_layers(found.graph, found.layers_of(stage), joined_norms=joined),
        )
        for stage, members in enumerate(found.layout.stages)
    )


def stage_layers(
    graph: ModelGraph, layers: Sequence[int], *, joined_norms: bool
) -> tuple[StageLayer, ...]:
    """The Layers of a stage as the plan names them."""
    return tuple(
        StageLayer(
            path=graph.layers[i].path,
            taskgraph=graph.layers[i].taskgraph,
            params=graph.layers[i].params,
            meets=tuple(
                "" if kind == "norm" and not joined_norms else kind
                for kind in graph.layers[i].meets
            ),
        )
        for i in layers
    )


def _splits(
    taskgraph: int,
    found: Outline,
    shares: Shares,
    config: Config,
    rejected: list[str],
) -> tuple[SplitLayer, ...]:
    layout, costs = found.layout, shares.costs
    replicas = layout.replicas(layout.stage_of(taskgraph), layout.widths[taskgraph])
    communication, splits = config.communication, []
    for option in found.options[taskgraph]:
        travels = option.rule in TRAVELLING and layout.bridged(taskgraph)
        splits.append(
            cut(
                option,
                [shares.units(option, ranks) for ranks in replicas],
                per_node=choose_levels(
                    option, replicas, costs, shares.rows, communication.all_to_all, rejected
                )
                if travels
                else 0,
                most_chunks=communication.token_chunks if travels else 1,
            )
        )
    return tuple(splits)


def _taskgraph_plan(
    outline: Outline, taskgraph: TaskGraph, placement: Placement, splits: tuple[SplitLayer, ...]
) -> TaskGraphPlan:
    graph = outline.graph
    layers = [graph.layers[i] for i in taskgraph.layers]
    cut = {name for split in splits for name, _ in split.params}
    names = list(dict.fromkeys(name for layer in layers for name in layer.params))
    total = sum(graph.parameter(name).numel for name in names)
    shared = sum(graph.parameter(name).numel for name in names if name in cut)
    flops = sum(layer.flops_per_row for layer in graph.layers) or 1.0
    # The bias of a row split is whole, its module is not.
    covered = {path for split in splits for path in split.modules}
    outside = [n.rpartition(".")[0] for n in names if n not in cut]
    whole = dict.fromkeys(module for module in outside if module not in covered)
    device = placement.taskgraph_devices[taskgraph.index]
    return TaskGraphPlan(
        index=taskgraph.index,
        name=taskgraph.name,
        kind=taskgraph.kind,
        stage=outline.layout.stage_of(taskgraph.index),
        layers=tuple(layer.path for layer in layers),
        virtual_device=device,
        splits=splits,
        whole=tuple(whole) if splits else (),
        reasons=reasons_of(layers, whole, device) if splits else (),
        split_share=shared / total if total else 0.0,
        flops_share=sum(layer.flops_per_row for layer in layers) / flops,
    )


def groups_of(plan: Plan) -> tuple[Group, ...]:
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
        for per_node in sorted({s.per_node for s in taskgraph.splits if s.per_node}):
            for replica in taskgraph.virtual_device.replicas:
                for ranks in all_level_groups(replica.ranks, per_node):
                    add("level", ranks)
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
    total = sum(p.nbytes for p in graph.parameters if p.trainable)
    return max(asked, -(-total // most))


def _pools(plan: Plan) -> list[Group]:
    """More communicators for gradient groups of several buckets, which then overlap."""
    nbytes: dict[tuple[int, ...], int] = {}
    for home in plan.homes:
        for _, _, syncs_found in syncs(plan, home):
            for sync in syncs_found:
                nbytes[sync.ranks] = nbytes.get(sync.ranks, 0) + home.nbytes
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


def _describe(found: Outline, placement: Placement) -> str:
    """The plan in one line; equal stages in a row are said once."""
    layout = found.layout
    parts: list[tuple[int, int, str]] = []
    for stage, members in enumerate(layout.stages):
        kinds = "+".join(found.graph.taskgraphs[t].kind for t in members)
        text = f"{kinds} on {len(placement.stage_devices[stage].ranks)}"
        if parts and parts[-1][2] == text:
            parts[-1] = (parts[-1][0], stage, text)
        else:
            parts.append((stage, stage, text))
    if len(layout.stages) == 1:
        text = parts[0][2]
    else:
        text = "; ".join(
            f"stage {a}: {text}" if a == b else f"stages {a}-{b}: {text} each"
            for a, b, text in parts
        )
    if len(layout.copies[0]) > 1:
        text += f"; {len(layout.copies[0])} copies"
    count = layout.num_micro_batch
    if len(layout.stages) > 1:
        return f"{text}; {layout.schedule}, {count} micro-batch{'es' if count > 1 else ''}"
    return f"{text}; {count} micro-batches" if count > 1 else text
