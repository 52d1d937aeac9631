"""The law of the IR: what every Plan must satisfy.

Run after each planning pass and before anything starts.

Place in the flow: a Plan that passes here can be lowered; one that does not is refused with both
values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from whale.errors import PlanError
from whale.ir.homes import sync_groups
from whale.ir.model_graph import ModelGraph, SplitOption
from whale.ir.plan import Plan, SplitLayer, TaskGraphPlan


def check_plan(plan: Plan) -> Plan:
    """Returns `plan` unchanged, or raises PlanError."""
    _require(
        isinstance(plan.strategy, str),
        f"the plan's strategy is {plan.strategy!r}; allowed: a text",
        "make the plan again: `whale plan --json F`",
    )
    _check_numbers(plan)
    plan.precision.check()
    plan.wire.check()
    _check_stages(plan)
    for taskgraph in plan.taskgraphs:
        _check_taskgraph(plan, taskgraph)
    _check_homes(plan)
    _check_groups(plan)
    return plan


def check_order(plan: Plan, graph: ModelGraph) -> None:
    """Refuses replicas whose tokens would be out of order where their order decides.

    A capacity drops later tokens first. Replicas queue one after the other, as rows do on one
    device if the batch is dim 0; behind another dim one device has their tokens interleaved.
    """
    layers = {layer.path: layer for layer in graph.layers}
    for stage in plan.stages:
        num_replicas = sum(weight > 0 for weight in stage.virtual_device.weights)
        if num_replicas == 1:
            continue
        for layer in stage.layers:
            for path, dim in layers[layer.path].interleaved:
                batch = "it sees no batch" if dim is None else f"its batch is in dim {dim}, not 0"
                raise PlanError(
                    f"{path} has a capacity_factor, which drops tokens by their order, and "
                    f"{batch}: the {num_replicas} replicas of stage {stage.index} would drop "
                    "others than one device does",
                    hint="move the batch to dim 0 before it (x.transpose(0, 1)), or set "
                    "capacity_factor=None, or give its stage one replica",
                )


def check_offers(plan: Plan, graph: ModelGraph, called: Collection[str] | None = None) -> None:
    """Refuses splits that the model's code does not allow, whoever wrote the plan.

    With `called`, only those of modules that were called: code of another batch may need fewer.
    """
    options = [
        o for layer in graph.layers for option in layer.splits for o in (option, *option.instead)
    ]
    offered = {(o.rule, o.path): (o.joined, dict(o.params), o.marks) for o in options}
    for taskgraph in plan.taskgraphs:
        for split in taskgraph.splits:
            if not split.is_in(called):
                continue
            found = offered.get((split.rule, split.path))
            if found == (split.joined, dict(split.params), split.marks):
                continue
            if called is not None and wider(split, options) is not None:
                continue
            why = [line for layer in graph.layers for line in layer.whole if split.path in line]
            raise PlanError(
                f"the plan splits {split.path} by {split.unit} ({split.rule}, output: "
                f"{split.joined}), which this model's code does not allow"
                + (f": {why[0]}" if why else ""),
                hint="make a plan for this model as it is now (wh.plan), or leave it out "
                "of `split`",
            )


def wider(split: SplitLayer, options: Iterable[SplitOption]) -> SplitOption | None:
    """An option that splits more, where the code allows it: this one is exact there too.

    A Linear that is split alone takes and gives whole tensors, so it runs wherever code does
    nothing with it but call it.
    """
    if split.rule not in ("column", "row") or split.joined != "gather" or split.marks:
        return None
    return next((o for o in options if not o.marks and split.path in o.modules), None)


def _require(condition: bool, message: str, hint: str) -> None:
    if not condition:
        raise PlanError(message, hint=hint)


def _check_numbers(plan: Plan) -> None:
    """Counts are whole numbers, indices are positions: JSON that was edited may hold anything."""
    counts = {
        "num_ranks": plan.num_ranks,
        "bucket_bytes": plan.bucket_bytes,
        "num_communicators": plan.num_communicators,
        "num_micro_batch": plan.num_micro_batch,
    }
    for name, count in counts.items():
        _require(
            _whole(count) and count >= 1,
            f"{name} is {count!r}",
            "allowed: a whole number of at least 1",
        )
    _require(
        len(plan.device_types) == plan.num_ranks,
        f"the plan lists {len(plan.device_types)} devices for {plan.num_ranks} ranks",
        "a device for every rank",
    )
    for what, items in (("stage", plan.stages), ("TaskGraph", plan.taskgraphs)):
        _require(
            [item.index for item in items] == list(range(len(items))),
            f"the indices of the plan's {what}s are {[item.index for item in items]}",
            "they count from 0, in order",
        )
    devices = [s.virtual_device for s in plan.stages] + [t.virtual_device for t in plan.taskgraphs]
    for replica in (replica for device in devices for replica in device.replicas):
        _require(
            _whole(replica.weight) and all(_whole(rank) for rank in replica.ranks),
            f"a replica has ranks {replica.ranks} and weight {replica.weight!r}",
            "ranks and weights are whole numbers",
        )
        _require(bool(replica.ranks), "a replica has no ranks", "each replica has a rank or more")


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_stages(plan: Plan) -> None:
    listed = sorted(t for stage in plan.stages for t in stage.taskgraphs)
    _require(
        listed == list(range(len(plan.taskgraphs)))
        and all(
            plan.taskgraphs[t].stage == stage.index
            for stage in plan.stages
            for t in stage.taskgraphs
        ),
        f"the stages list TaskGraphs {[list(s.taskgraphs) for s in plan.stages]}, which say they "
        f"are in stages {[t.stage for t in plan.taskgraphs]}",
        "every TaskGraph is in one stage, and both say so",
    )
    in_schedule = sorted(stage for group in plan.schedule.groups for stage in group)
    _require(
        in_schedule == list(range(len(plan.stages))),
        f"the schedule runs stages {in_schedule}, the plan has {len(plan.stages)}",
        "every stage belongs to exactly one device group of the schedule",
    )
    owner: dict[int, int] = {}
    for group, stages in enumerate(plan.schedule.groups):
        for stage in stages:
            device = plan.stages[stage].virtual_device
            _require(
                len(set(device.ranks)) == len(device.ranks) and bool(device.ranks),
                f"stage {stage} lists ranks {device.ranks}: a rank twice, or none",
                "each rank of a stage is one shard of one replica",
            )
            _require(
                min(device.weights) >= 0 and sum(device.weights) > 0,
                f"stage {stage} has row weights {device.weights}",
                "weights are 0 or more and not all 0",
            )
            for rank in device.ranks:
                _require(
                    0 <= rank < plan.num_ranks,
                    f"stage {stage} uses rank {rank}, the plan has {plan.num_ranks} ranks",
                    "ranks count from 0",
                )
                _require(
                    owner.setdefault(rank, group) == group,
                    f"rank {rank} is in device groups {owner[rank]} and {group}",
                    "stages either share all their ranks (one group) or none",
                )


def _check_taskgraph(plan: Plan, taskgraph: TaskGraphPlan) -> None:
    stage = plan.stages[taskgraph.stage]
    device = taskgraph.virtual_device
    _require(
        sorted(device.ranks) == sorted(stage.virtual_device.ranks),
        f"TaskGraph {taskgraph.name} uses ranks {sorted(device.ranks)}, its stage {stage.index} "
        f"{sorted(stage.virtual_device.ranks)}",
        "TaskGraphs of one stage are colocated: same ranks",
    )
    # Rows of a coarser TaskGraph replica must be the rows of whole stage replicas, in order, so
    # that a
    # gather along rows inside the replica is all the bridge there is.
    for replica in device.replicas:
        inside = [r for r in stage.virtual_device.replicas if set(r.ranks) <= set(replica.ranks)]
        _require(
            tuple(rank for r in inside for rank in r.ranks) == replica.ranks
            and sum(r.weight for r in inside) == replica.weight,
            f"TaskGraph {taskgraph.name}: replica {replica.ranks} (weight {replica.weight}) does "
            "not hold "
            f"whole replicas of stage {stage.index}: {stage.virtual_device}",
            "a split spans one or more whole replicas of its stage",
        )
    for split in taskgraph.splits:
        _check_split(taskgraph, split)


def _check_split(taskgraph: TaskGraphPlan, split: SplitLayer) -> None:
    replicas = taskgraph.virtual_device.replicas
    _require(
        len(split.cuts) in (1, len(replicas)),
        f"{split.path}: {len(split.cuts)} rows of cuts for {len(replicas)} replicas",
        "give one row for all replicas or one per replica",
    )
    for index, replica in enumerate(replicas):
        row = split.cuts_of(index)
        units = split.params[0][1].units
        _require(
            all(_whole(point) for point in row)
            and len(row) == len(replica.ranks) + 1
            and row[0] == 0
            and row[-1] == units
            and all(a <= b for a, b in zip(row, row[1:], strict=False)),
            f"{split.path}: cuts {row} for {len(replica.ranks)} shards of {units} {split.unit}",
            "cuts start at 0, never fall, end at the number of units, one more than shards",
        )


def _splits(plan: Plan, taskgraph: int) -> tuple[SplitLayer, ...]:
    return plan.taskgraphs[taskgraph].splits


def _check_homes(plan: Plan) -> None:
    for home in plan.homes:
        _require(
            bool(home.stages) and all(0 <= s < len(plan.stages) for s in home.stages),
            f"parameter {home.name} lives in stages {home.stages}, the plan has {len(plan.stages)}",
            "every parameter has at least one stage",
        )
        _require(
            all(
                0 <= t < len(plan.taskgraphs)
                and any(s.path == path and home.name in dict(s.params) for s in _splits(plan, t))
                for t, path in home.splits
            ),
            f"parameter {home.name} is cut by {list(home.splits)}, where the plan has no such "
            "split of it",
            "a home names (TaskGraph, module) of splits that cut it",
        )
        dims = {dict(plan.split_of(t, path).params)[home.name].dim for t, path in home.splits}
        _require(
            len(dims) <= 1,
            f"tied parameter {home.name} is cut along dims {sorted(dims)}",
            "the users of a tied parameter must cut the same dim",
        )
        held: dict[int, object] = {}
        for t, path in home.splits:
            split, device = plan.split_of(t, path), plan.taskgraphs[t].virtual_device
            sharding = dict(split.params)[home.name]
            for rank in device.ranks:
                spans = sharding.spans(*split.units(*device.position(rank)))
                _require(
                    held.setdefault(rank, spans) == spans,
                    f"rank {rank} would hold {held[rank]} and {spans} of {home.name}",
                    "the users of a tied parameter on one rank must cut it at the same points",
                )


def _check_groups(plan: Plan) -> None:
    listed = {group.ranks for group in plan.groups}
    names = [group.name for group in plan.groups]
    _require(
        len(names) == len(set(names)), f"process group names repeat: {names}", "names are unique"
    )
    for ranks in sync_groups(plan):
        _require(
            ranks in listed,
            f"gradients are summed over ranks {ranks}, but the plan lists no such group",
            "list every process group, in the order all ranks create them",
        )
