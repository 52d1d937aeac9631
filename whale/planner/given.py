"""A Plan that was given, not made here: does it fit the model it is to run?

Place in the flow: asked by `wh.parallelize` and `wh.verify` for a `plan=`. A plan is JSON that
people keep and edit. What decides it (devices, shares, cuts, stages of TaskGraphs, the schedule)
may be anything that `ir.check` allows; all else in it follows from that and from the model, and is
held against what the planner itself would write there.
"""

from __future__ import annotations

from dataclasses import replace

from whale.config import Config
from whale.errors import PlanError, WhaleError
from whale.ir.check import check_offers, check_plan, wider
from whale.ir.deadlock import check_schedule
from whale.ir.model_graph import ModelGraph, SplitOption, assign_stages
from whale.ir.plan import TRAVELLING, Home, Plan, SplitLayer, TaskGraphPlan
from whale.planner.keep import check_kept
from whale.planner.make_plan import groups_of, orders_of, stage_layers
from whale.planner.outline import layers_of_stage
from whale.planner.precision import precision_of
from whale.planner.schedules import canonical_kind
from whale.planner.splits import glue_params, has_rows, make_homes, read_whole, users_of
from whale.planner.wire import wire_of

_AGAIN = "make the plan again: wh.plan(model, ...), or `whale plan --json F`"


def check_given(plan: Plan, graph: ModelGraph) -> Plan:
    """Returns `plan` unchanged, or raises PlanError."""
    if plan.model_hash != graph.hash:
        raise PlanError(
            f"the plan is for model {plan.model_hash}, this model is {graph.hash}",
            hint="make a plan for this model: wh.plan(model, ...)",
        )
    try:
        _check(plan, graph)
    except WhaleError:
        raise
    except _NONSENSE as error:
        raise PlanError(
            f"the plan holds a value of a wrong kind: {type(error).__name__}: {error}", hint=_AGAIN
        ) from error
    return plan


def check_settings(plan: Plan, config: Config) -> None:
    """Raises PlanError where the settings ask for other numbers than the plan's, which count."""
    precision, wire = precision_of(config), wire_of(config)
    for asked, has, keys in (
        (precision, plan.precision, "amp"),
        (wire, plan.wire, "communication"),
    ):
        if asked not in (has, type(asked)()):
            raise PlanError(
                f"the settings {keys}.* mean {asked}, but the plan was made with {has}",
                hint=f"leave {keys}.* out, or make the plan again with these settings",
            )


# What code that counts on numbers and positions says of values that an editor put in their place.
_NONSENSE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    StopIteration,
    TypeError,
    ValueError,
)


def _check(plan: Plan, graph: ModelGraph) -> None:
    check_plan(plan)
    stage_of_path = _stages_of_layers(plan, graph)
    chosen = {t.index: _options(plan, t, graph) for t in plan.taskgraphs}
    stage_of_layer = [stage_of_path[layer.path] for layer in graph.layers]
    if len(plan.stages) > 1 and not graph.nodes:
        raise PlanError(
            f"the plan has {len(plan.stages)} stages, but the model's glue was not traced",
            hint="use one stage, or capture the model with its batch",
        )
    stage_of_node, edges = assign_stages(graph.nodes, stage_of_layer)
    _check_readers(plan, graph, chosen, stage_of_layer)
    _same("edges of the schedule", plan.schedule.edges, edges)
    _check_layers(plan, graph, stage_of_layer, stage_of_node)
    bridged = [
        t.index for t in plan.taskgraphs if t.virtual_device != plan.stages[t.stage].virtual_device
    ]
    users = users_of(graph, stage_of_layer, stage_of_node)
    homes = make_homes(graph, users, {t.index: t.splits for t in plan.taskgraphs}, bridged)
    _same("homes", [h.name for h in plan.homes], [h.name for h in homes])
    for found, wanted in zip(plan.homes, homes, strict=True):
        _same(f"home of {wanted.name}", _undecided(found), wanted)
        if found.apply_group < 0:
            raise PlanError(
                f"{found.name} is in apply group {found.apply_group}; allowed: from 0 on",
                hint=_AGAIN,
            )
    check_kept(plan, graph)
    _same("process groups", sorted(map(str, plan.groups)), sorted(map(str, groups_of(plan))))
    _check_schedule(plan)


def _undecided(home: Home) -> Home:
    """A home without what a planner may decide of it."""
    return replace(home, zero=0, tier="device", fetched=False, apply_group=0)


def check_kind(plan: Plan, graph: ModelGraph, called: frozenset[str], read: frozenset[str]) -> None:
    """Raises where code that runs on another kind of batch does not allow what the plan splits.

    Modules that it does not call are nobody's concern, unless it reads their parameters.
    """
    check_offers(plan, graph, called)
    for split in (s for t in plan.taskgraphs for s in t.splits if not s.is_in(called)):
        names = sorted(read & {name for name, _ in split.params})
        if names:
            raise PlanError(
                f"the plan splits {split.path}, which is not called here, and {names[0]} is read, "
                "of which a rank holds a part",
                hint="call the module, or leave it out of `split`",
            )
    stage_of_path = {path: t.stage for t in plan.taskgraphs for path in t.layers}
    chosen = {
        t.index: [_option(t, s, graph, alone=True) for s in t.splits if s.is_in(called)]
        for t in plan.taskgraphs
    }
    _check_readers(plan, graph, chosen, [stage_of_path[layer.path] for layer in graph.layers])
    own = {name for layer in graph.layers for name in layer.own}
    away = next((h.name for h in plan.homes if not h.resident and h.name in read - own), None)
    if away is not None:
        raise PlanError(
            f"{away} is here only while its Layer runs, and other code reads it",
            hint="set zero.level to v1, or move that code into the Layer",
        )


def _check_schedule(plan: Plan) -> None:
    schedule = plan.schedule
    if schedule.orders is None:
        canonical_kind(schedule.kind)
    orders = orders_of(schedule)
    check_schedule(schedule, orders)
    # Weight gradients are put off where the schedule is of that kind, and only there.
    wrong = "B" if schedule.kind == "zero-bubble" else "W"
    if any(action.kind == wrong for actions in orders.values() for action in actions):
        raise PlanError(
            f"the orders of a {schedule.kind} schedule hold {wrong} actions",
            hint="zero-bubble runs I and W for every backward, all other kinds B",
        )


def _same(what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise PlanError(f"{what}: the plan has {found}, this model needs {wanted}", hint=_AGAIN)


def _stages_of_layers(plan: Plan, graph: ModelGraph) -> dict[str, int]:
    listed = [path for t in plan.taskgraphs for path in t.layers]
    _same("Layers of the TaskGraphs", sorted(listed), sorted(layer.path for layer in graph.layers))
    return {path: t.stage for t in plan.taskgraphs for path in t.layers}


def _check_layers(
    plan: Plan,
    graph: ModelGraph,
    stage_of_layer: list[int],
    stage_of_node: tuple[int | None, ...],
) -> None:
    """What each stage runs, in order; whether batch norms meet is the plan's to say."""
    owner = {path: t.index for t in plan.taskgraphs for path in t.layers}
    said = [kind for s in plan.stages for layer in s.layers for kind in layer.meets]
    for stage in plan.stages:
        layers = layers_of_stage(graph, stage_of_layer, stage_of_node, stage.index)
        wanted = stage_layers(graph, layers, joined_norms="" not in said)
        _same(
            f"Layers of stage {stage.index}",
            [(x.path, x.taskgraph, x.params, x.meets) for x in stage.layers],
            [(x.path, owner[x.path], x.params, x.meets) for x in wanted],
        )


def _options(plan: Plan, taskgraph: TaskGraphPlan, graph: ModelGraph) -> list[SplitOption]:
    """The options of the model that a TaskGraph's splits are."""
    chosen = []
    for split in taskgraph.splits:
        option = _option(taskgraph, split, graph)
        _check_split(plan, taskgraph, split, option)
        chosen.append(option)
    return chosen


def _option(
    taskgraph: TaskGraphPlan, split: SplitLayer, graph: ModelGraph, *, alone: bool = False
) -> SplitOption:
    """What a split is in this graph; if it may be `alone`, as part of what is offered there."""
    listed = [o for x in graph.layers if x.path in taskgraph.layers for o in x.splits]
    offered = [o for option in listed for o in (option, *option.instead)]
    found = [o for o in offered if (o.rule, o.path) == (split.rule, split.path)]
    more = wider(split, offered) if alone and not found else None
    if more is not None:
        return more
    if not found:
        raise PlanError(
            f"TaskGraph {taskgraph.name} splits {split.path} by the rule {split.rule!r}, which "
            "this model does not offer there",
            hint=_AGAIN,
        )
    return found[0]


def _check_readers(
    plan: Plan,
    graph: ModelGraph,
    chosen: dict[int, list[SplitOption]],
    stage_of_layer: list[int],
) -> None:
    """No rank may need whole what it holds a part of; rows can be gathered where there are some.

    The planner's own choice keeps to both.
    """
    glue = glue_params(graph)
    tied = {p.name for p in graph.parameters if p.aliases}
    for taskgraph in plan.taskgraphs:
        options = chosen[taskgraph.index]
        here = [i for i, stage in enumerate(stage_of_layer) if stage == taskgraph.stage]
        bridged = taskgraph.virtual_device != plan.stages[taskgraph.stage].virtual_device
        for option in options:
            if (
                (bridged and not has_rows(option))
                or (option.rule == "row" and option.params[0][0] in tied)
                or read_whole(graph, option, options, here, glue)
            ):
                raise PlanError(
                    f"TaskGraph {taskgraph.name} splits {option.path}, whose weights are read "
                    "whole elsewhere in its stage, or whose rows cannot be gathered",
                    hint=_AGAIN,
                )


def _check_split(
    plan: Plan, taskgraph: TaskGraphPlan, split: SplitLayer, option: SplitOption
) -> None:
    _same(f"split of {split.path}", _facts(split), _facts(option))
    if [s.path for s in taskgraph.splits].count(split.path) > 1:
        raise PlanError(f"TaskGraph {taskgraph.name} splits {split.path} twice", hint=_AGAIN)
    travels = split.rule in TRAVELLING and (
        taskgraph.virtual_device != plan.stages[taskgraph.stage].virtual_device
    )
    widths = {len(replica.ranks) for replica in taskgraph.virtual_device.replicas}
    fewest = min(b - a for row in split.cuts for a, b in zip(row, row[1:], strict=False))
    if fewest < 1:
        raise PlanError(
            f"split of {split.path}: cuts {split.cuts} leave a shard without {split.unit}",
            hint="give every device one at least, or leave the device out of the TaskGraph",
        )
    levels = split.per_node == 0 or (
        travels and split.per_node > 0 and all(width % split.per_node == 0 for width in widths)
    )
    chunks = split.chunks == 1 or (travels and 1 <= split.chunks <= max(1, fewest))
    if not levels or not chunks:
        raise PlanError(
            f"{split.path}: per_node = {split.per_node}, chunks = {split.chunks} for replicas of "
            f"{sorted(widths)} ranks",
            hint="per_node is 0 or divides the ranks of a replica, chunks is 1 or at most the "
            "units of a shard; both only where rows travel to experts",
        )


def _facts(split: SplitLayer | SplitOption) -> tuple[object, ...]:
    """What of a split follows from the model alone."""
    return (
        split.modules,
        split.unit,
        split.params,
        split.dims,
        split.inside,
        split.entered,
        split.joined,
        split.meets_before,
        split.copies,
        split.marks,
    )
