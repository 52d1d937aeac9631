"""Splits and homes: which modules of a split TaskGraph are cut and where.

Where every parameter lives.

Place in the flow: third pass of `make_plan`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from whale.cost.compute import CostModel
from whale.errors import AnnotationError
from whale.ir.model_graph import ModelGraph, SplitOption, TaskGraph
from whale.ir.plan import AROUND, Home, SplitLayer
from whale.ir.sharding import cuts
from whale.planner.layout import Layout
from whale.planner.rules import choose_rules


def users_of(
    graph: ModelGraph, stage_of_layer: Sequence[int], stage_of_node: Sequence[int | None]
) -> dict[str, set[int]]:
    """The stages that read each parameter, through a Layer or directly in glue."""
    users: dict[str, set[int]] = {p.name: set() for p in graph.parameters}
    for index, layer in enumerate(graph.layers):
        for name in layer.params:
            users[name].add(stage_of_layer[index])
    for node, stage in zip(graph.nodes, stage_of_node, strict=True):
        if stage is None:
            continue
        # A Layer reads its own, and what is given to it as an argument.
        own = () if node.layer is None else graph.layers[node.layer].params
        for name in (*node.params, *own):
            users[name].add(stage)
    for stages in users.values():
        if not stages:
            stages.add(0)  # a parameter nothing reads still has a home
    return users


def glue_params(graph: ModelGraph) -> set[str]:
    """Parameters that glue reads, gives to a Layer, or that no Layer has: never cut."""
    in_layers = {name for layer in graph.layers for name in layer.params}
    glue = {name for node in graph.nodes for name in node.params}
    return glue | {p.name for p in graph.parameters if p.name not in in_layers}


def choose_options(
    graph: ModelGraph,
    taskgraph: TaskGraph,
    layout: Layout,
    stage_of_layer: Sequence[int],
    costs: CostModel,
    rows: int,
    rejected: list[str],
) -> tuple[SplitOption, ...]:
    """What of a TaskGraph is split, and how, for micro-batches of so many rows.

    An option is left out when a shard would get no unit, or when a parameter it cuts is read whole
    elsewhere in the same stage (one rank cannot hold both), or when the split spans several data
    parallel replicas (it is bridged) and its input has no rows to gather. Of a Linear's two the
    cheaper stays; what lost goes to `rejected`.
    """
    width = layout.widths[taskgraph.index]
    if taskgraph.kind != "split" or width == 1:
        return ()
    stage, bridged = layout.stage_of(taskgraph.index), layout.bridged(taskgraph.index)
    options = [o for index in taskgraph.layers for o in graph.layers[index].splits]
    whole = [line for index in taskgraph.layers for line in graph.layers[index].whole]
    rejected += whole
    options = [way for o in options for way in ((o,) if o.units >= width else o.instead)]
    options = [o for o in options if o.units >= width]
    whole += [
        f"{o.path}: not every call has the rows in dim 0, and nothing beside them, so replicas "
        "cannot gather them"
        for o in options
        if bridged and not has_rows(o)
    ]
    options = [o for o in options if has_rows(o) or not bridged]
    if bridged:
        # What else is in a module around which rows are gathered sees those of all replicas.
        around = [f"{o.path}." if o.path else "" for o in options if o.rule in AROUND]
        options = [o for o in options if o.rule in AROUND or not o.path.startswith(tuple(around))]
    # The other users of a tied weight (an embedding, most often) cut what are columns here.
    tied = {p.name for p in graph.parameters if p.aliases}
    options = [o for o in options if o.rule != "row" or o.params[0][0] not in tied]
    stage_layers = [i for i, s in enumerate(stage_of_layer) if s == stage]
    glue = glue_params(graph)
    changed = True
    while changed:
        kept = [o for o in options if not read_whole(graph, o, options, stage_layers, glue)]
        changed = len(kept) != len(options)
        options = kept
    if not options:
        raise _nothing(graph, taskgraph, width, whole)
    replicas = layout.replicas(stage, width)
    return tuple(choose_rules(options, replicas, costs, rows, bridged, rejected))


def _nothing(
    graph: ModelGraph, taskgraph: TaskGraph, width: int, whole: Sequence[str]
) -> AnnotationError:
    listed = [graph.layers[i].reasons for i in taskgraph.layers]
    why = [*whole, *(f"{path}: {reason}" for found in listed for path, reason in found)]
    return AnnotationError(
        f"nothing in TaskGraph {taskgraph.name} can be split over {width} devices "
        f"(Layers: {', '.join(graph.layers[i].kind for i in taskgraph.layers)})"
        + (f"; {why[0]}" if why else ""),
        hint="use `replicate` for it, split a part with Linear, attention, embedding or "
        "convolution modules, or register a rule (wh.register_rule)",
        where=taskgraph.where,
    )


def has_rows(option: SplitOption) -> bool:
    """Whether a bridge along rows can go around it: what it reads has rows, in dim 0.

    Attention with a second input that has rows (a mask) is left whole: models drop a mask that
    hides nothing, each rank by its own rows, and the ranks would no longer gather the same tensors.
    """
    if option.rule == "batched experts":
        return False  # its rows are sorted by expert, not by replica
    dims = set(option.dims[0]) | set(option.dims[1])
    inputs = option.dims[0].count(0)
    return dims <= {0, None} and (inputs == 1 if option.rule in AROUND else inputs > 0)


def read_whole(
    graph: ModelGraph,
    option: SplitOption,
    options: Sequence[SplitOption],
    stage_layers: Sequence[int],
    glue_params: set[str],
) -> bool:
    """Whether a parameter that an option cuts is read whole in the same stage."""
    for name, sharding in option.params:
        if name in glue_params:
            return True
        for index in stage_layers:
            layer = graph.layers[index]
            if name not in layer.params:
                continue
            same = [
                o
                for split in layer.splits
                for o in (split, *split.instead)
                if any(n == name and s == sharding for n, s in o.params) and o in options
            ]
            if not same:
                return True
    return False


def cut(
    option: SplitOption,
    units: Sequence[tuple[int, ...]],
    *,
    per_node: int,
    most_chunks: int,
) -> SplitLayer:
    """An option whose shards have so many units, by replica.

    Rows that travel do so in at most `most_chunks` parts, with `per_node` as in the plan.
    """
    rows = tuple(map(cuts, units))
    fewest = min(map(min, units))
    return SplitLayer(
        rule=option.rule,
        path=option.path,
        modules=option.modules,
        unit=option.unit,
        cuts=rows[:1] if len(set(rows)) == 1 else rows,
        params=option.params,
        dims=option.dims,
        inside=option.inside,
        entered=option.entered,
        joined=option.joined,
        meets_before=option.meets_before,
        copies=option.copies,
        per_node=per_node,
        chunks=min(most_chunks, fewest),
        marks=option.marks,
    )


def make_homes(
    graph: ModelGraph,
    users: Mapping[str, Collection[int]],
    splits: Mapping[int, tuple[SplitLayer, ...]],
    bridged: Sequence[int],
) -> tuple[Home, ...]:
    """A home for every parameter, in the order gradients are least likely to be ready."""
    cut_by: dict[str, list[tuple[int, str]]] = {}
    for taskgraph, layers in splits.items():
        for layer in layers:
            for name, _ in layer.params:
                cut_by.setdefault(name, []).append((taskgraph, layer.path))
    around: dict[str, list[int]] = {}
    for taskgraph in bridged:
        for layer in splits[taskgraph]:
            for p in graph.parameters:
                inside = p.name.startswith(f"{layer.path}.") and layer.around
                if inside and p.name not in cut_by:
                    around.setdefault(p.name, []).append(taskgraph)
    return tuple(
        Home(
            name=p.name,
            shape=p.shape,
            stages=tuple(sorted(users[p.name])),
            splits=tuple(cut_by.get(p.name, ())),
            around=tuple(around.get(p.name, ())),
            dtype=p.dtype,
        )
        for p in graph.parameters
    )
