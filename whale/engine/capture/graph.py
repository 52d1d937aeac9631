"""The ModelGraph out of what two runs on fake tensors showed.

Place in the flow: second half of `engine.capture`. What differs between runs of 2 and of 3 rows is
what grows with the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from whale.engine.capture.once import once
from whale.engine.split.lone import allows_rows, joined
from whale.engine.split.unit_marks import without_unread
from whale.engine.state.outside import Moved
from whale.engine.trace.draw_recorder import Drawn
from whale.engine.trace.examples import Example
from whale.engine.trace.program import Program, ValueSpec
from whale.engine.trace.readers import Offers, Read, layer_of
from whale.engine.trace.work import Counts, costs, line_through, signature
from whale.ir.model_graph import (
    BatchDims,
    Layer,
    Linear,
    ModelGraph,
    Node,
    Parameter,
    SplitOption,
    TaskGraph,
    Value,
)
from whale.ir.plan import AROUND, TRAVELLING
from whale.ir.strategy import Tag
from whale.nn.moe.layer import MoE
from whale.nn.randomness import Name
from whale.runtime.generators import Asked

Shapes = tuple[list[tuple[int, ...]], list[tuple[int, ...]]]


@dataclass(slots=True)
class Run:
    """What one run of the model on fakes showed."""

    order: list[str]
    work: dict[str, Counts]
    examples: dict[str, tuple[Any, Any]]
    options: dict[str, tuple[SplitOption, ...]]
    shapes: dict[str, Shapes]
    """What each module of a Layer reads and makes in its first call."""
    queues: dict[str, tuple[int, ...]]
    """What each mixture of experts that drops by order reads."""
    calls: dict[Name, Drawn]
    reads: dict[str, dict[Read, None]]
    """Who reads each parameter."""
    program: Program | None
    result: dict[str, Any]
    asked: Asked
    """What it drew from Python's and numpy's generators."""
    changes: frozenset[str] | None = None
    """What the forward changed in the model; None: it did not end."""
    shapes_again: dict[str, list[Shapes]] = field(default_factory=dict)
    """The same of its later calls."""
    probing: bool = False
    """Whether modules run to see what they offer, beside the model's own calls."""
    reasons: dict[str, dict[str, str]] = field(default_factory=dict)
    """By Layer, why modules of it stay whole."""
    moved: Moved = field(default_factory=dict)
    """What its code changed outside of modules."""
    transformed: set[str] = field(default_factory=set)
    """Layers that are called inside torch.func, which knows nothing of other ranks."""
    once: dict[str, str] = field(default_factory=dict)
    """By Layer, why its code may not run a second time."""
    opaque: set[str] = field(default_factory=set)
    """Layers that have no run on fakes: known is what they give."""
    traces: dict[str, str] = field(default_factory=dict)
    """By Layer, a fingerprint of its code."""
    rows: int = 0
    backwards: set[str] = field(default_factory=set)
    """Layers that have code of the user's in their backward."""
    differentiates: bool = False
    """Whether a forward asks for gradients itself."""

    @classmethod
    def empty(cls) -> Run:
        """A run that saw nothing yet."""
        return cls([], {}, {}, {}, {}, {}, {}, {}, None, {}, Asked())


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def graph_of(
    model: nn.Module,
    layers: dict[str, nn.Module],
    tags: dict[str, Tag],
    first: Run,
    second: Run,
    program: Program | None,
    examples: dict[str, Example],
    rows: tuple[int, int],
    others: Mapping[str, Run] | None = None,
) -> ModelGraph:
    """The ModelGraph from two runs with different numbers of rows.

    `others` are runs whose code may be another, by when it runs: it must allow what is offered.
    """
    others = others or {}
    order = first.order + [path for path in layers if path not in first.order]
    groups = _taskgraphs(order, tags)
    by_name = dict(model.named_parameters())
    by_id = {id(p): name for name, p in by_name.items()}
    graph_layers = []
    held = {
        path: frozenset(by_id[id(p)] for p in layer.parameters()) for path, layer in layers.items()
    }
    for path in order:
        offered = first.options.get(path, ())
        reasons = first.reasons.get(path, {})
        if any(path in run.transformed for run in (first, *others.values())):
            offered, reasons = (), {path: "it is called inside torch.func"}
        offers = Offers(path=path, options=offered, layers=held)
        options, whole = offers.without_readers(first.reads)
        for when, run in others.items():
            if path in run.options:
                options, whole = _in_both(offers, options, whole, run, when)
            else:  # it may be passed by there, and its parts called
                options, why = replace(offers, options=options).without_readers(run.reads)
                whole = (*whole, *why)
        meets = meets_of(layers[path], path, first)
        found = costs(first.work.get(path, Counts()), second.work.get(path, Counts()), rows)
        shapes = example.shapes if (example := examples.get(path)) is not None else []

        def known(option: SplitOption, path: str = path, meets: Any = meets) -> SplitOption:
            return replace(
                without_unread(option, path, program, first.result),
                dims=_batch_dims(option, first, second, rows),
                joined=_joined(option, path, program, layers, rows[0], others.values()),
                meets_before=_meets_before(option, list(meets), first),
                copies=_copies(option, first),
                read=_nbytes(option, 0, by_name, first, second, rows),
                made=_nbytes(option, 1, by_name, first, second, rows),
                instead=tuple(known(other) for other in option.instead),
            )

        graph_layers.append(
            Layer(
                path=path,
                kind=type(layers[path]).__name__,
                taskgraph=next(i for i, (_, paths) in enumerate(groups) if path in paths),
                params=tuple(dict.fromkeys(by_id[id(p)] for p in layers[path].parameters())),
                own=_own(path, layers[path], by_id, held, (first, second, *others.values())),
                meets=tuple(meets.values()),
                interleaved=_interleaved(list(meets), first, second),
                reasons=tuple(reasons.items()),
                once=once(path, layers[path], (first, second)),
                signature=signature(layers[path], found, shapes),
                **found,
                splits=tuple(
                    known(option)
                    for option in _in_order(options, first)
                    if option.rule != "row" or allows_rows(option, path, program, layers, rows[0])
                ),
                whole=whole,
            )
        )
    index = {layer.path: i for i, layer in enumerate(graph_layers)}
    return ModelGraph(
        layers=tuple(graph_layers),
        parameters=_parameters(model, graph_layers),
        taskgraphs=tuple(
            TaskGraph(index=i, tag=tag, layers=tuple(index[p] for p in paths))
            for i, (tag, paths) in enumerate(groups)
        ),
        nodes=_nodes(program, index, by_id_names=set(by_id.values())) if program else (),
    )


def _own(
    path: str,
    layer: nn.Module,
    names: Mapping[int, str],
    held: Mapping[str, frozenset[str]],
    runs: Iterable[Run],
) -> tuple[str, ...]:
    """The parameters of a Layer that nothing but its own code reads, and only while it runs.

    Those of an RNN are left out, which keeps them in a memory of its own; so are all of a Layer
    that has code of the user's in its backward, where nobody sees who reads what.
    """
    runs = list(runs)
    if any(run.changes is None for run in runs[:2]) or any(path in run.backwards for run in runs):
        return ()  # nobody saw all of its code
    if any(module._backward_hooks or module._backward_pre_hooks for module in layer.modules()):
        return ()
    kept = {id(p) for m in layer.modules() if isinstance(m, nn.RNNBase) for p in m.parameters()}
    mine = dict.fromkeys(names[id(p)] for p in layer.parameters() if id(p) not in kept)
    return tuple(
        name
        for name in mine
        if sum(name in others for others in held.values()) == 1
        and all(
            read.module is not None and read.inside and layer_of(read.module, held) == path
            for run in runs
            for read in run.reads.get(name, ())
        )
    )


_ALONE = ("column", "row", "conv", "embedding")


def _in_both(
    offers: Offers,
    options: tuple[SplitOption, ...],
    whole: tuple[str, ...],
    other: Run,
    when: str,
) -> tuple[tuple[SplitOption, ...], tuple[str, ...]]:
    """The options that the code of another run allows too."""
    there, why = replace(offers, options=other.options[offers.path]).without_readers(other.reads)
    allowed = {(o.rule, o.path, o.params) for o in there}
    cut = {module for o in there for module in o.modules}
    # By rows a bias is whole, by columns it is cut: who reads it there is asked of each.
    unread, read = replace(offers, options=options).without_readers(other.reads)
    alone = {(o.rule, o.path, o.params) for o in unread if set(o.modules) <= cut}
    kept = tuple(
        replace(o, instead=tuple(x for x in o.instead if offers.unread(x, other.reads)))
        for o in options
        # A module split alone has whole inputs and outputs: it may be in a pair there.
        if (o.rule, o.path, o.params) in allowed
        or (o.rule in _ALONE and (o.rule, o.path, o.params) in alone)
    )
    why = (*why, *read)
    left = {(o.rule, o.path, o.params) for o in kept}
    lost = tuple(
        f"{o.path} is not split by {o.unit}: {when} its code is another"
        for o in options
        if (o.rule, o.path, o.params) not in left and not why
    )
    return kept, tuple(dict.fromkeys((*whole, *why, *lost)))


def _joined(
    option: SplitOption,
    path: str,
    program: Program | None,
    layers: dict[str, nn.Module],
    rows: int,
    others: Iterable[Run],
) -> str:
    """What becomes of its output, where all runs agree."""
    found = joined(option, path, program, layers, rows)
    for other in others if found == "loss" else ():
        same = next((o for o in other.options.get(path, ()) if o.path == option.path), None)
        if same is None or joined(same, path, other.program, layers, other.rows) != "loss":
            return "gather"
    return found


def meets_of(layer: nn.Module, path: str, run: Run) -> dict[str, str]:
    """Modules in which replicas meet, by path, in the order they ran; how they meet."""
    found = {
        name: kind
        for name, module in layer.named_modules(prefix=path)
        if (kind := meeting_of(module)) is not None
    }
    done = {name: i for i, name in enumerate(run.shapes)}
    return dict(sorted(found.items(), key=lambda item: done.get(item[0], len(done))))


def meeting_of(module: nn.Module) -> str | None:
    """How the replicas of a module meet, as `ir.expand` names it; None: they do not."""
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return "norm"
    if isinstance(module, MoE):
        kind = "choice" if module.router_kind == "expert-choice" else "route"
        return f"{kind}+loss" if module.has_loss else kind
    return None


def _interleaved(meets: list[str], first: Run, second: Run) -> tuple[tuple[str, int | None], ...]:
    """Those that drop by order and whose batch is not in dim 0, with the dim it is in.

    One that did not run on fake tensors is not known, and a batch that was flattened behind another
    dim looks as if it were the first.
    """
    found = {
        path: changed(first.queues[path], second.queues[path])
        for path in meets
        if path in first.queues and path in second.queues
    }
    return tuple((path, dim) for path, dim in found.items() if dim != 0)


def _in_order(options: tuple[SplitOption, ...], run: Run) -> list[SplitOption]:
    """Options in the order in which their last modules ran; in some (experts') not all did."""
    done = {name: i for i, name in enumerate(run.shapes)}

    def last(option: SplitOption) -> int:
        return max((done[name] for name in option.modules if name in done), default=len(done))

    return sorted(options, key=last)


def _meets_before(option: SplitOption, meets: list[str], run: Run) -> int:
    """Meetings that were over when the option's last module made its collectives."""
    if option.path in meets:
        return meets.index(option.path) + 1  # a router meets before it sends
    done = list(run.shapes)
    if option.modules[-1] not in run.shapes:
        return 0
    return len(set(meets) & set(done[: done.index(option.modules[-1])]))


def _copies(option: SplitOption, run: Run) -> int:
    """Rows that travel for each that comes in: stacked experts are told the choices of each."""
    if not option.rule.startswith("stacked ") or option.path not in run.shapes:
        return option.copies
    choices = run.shapes[option.path][0][1]
    return int(choices[-1])


def _nbytes(
    option: SplitOption,
    side: int,
    params: dict[str, nn.Parameter],
    first: Run,
    second: Run,
    rows: tuple[int, int],
) -> Linear:
    """Bytes of what a module that is split alone reads (side 0) or makes (1)."""
    if option.rule not in ("column", "row", "conv", *TRAVELLING) or option.path not in first.shapes:
        return Linear()
    item = params[option.params[0][0]].element_size()
    a, b = (
        float(item * sum(torch.Size(shape).numel() for shape in run.shapes[option.path][side]))
        for run in (first, second)
    )
    return line_through(a, b, rows)


def _batch_dims(option: SplitOption, first: Run, second: Run, rows: tuple[int, int]) -> BatchDims:
    """Where the batch is in what the option's module (for attention.

    The module around it) reads and makes.
    """
    path = option.path if option.rule in AROUND else option.modules[0]
    a, b = (run.shapes.get(path, ([], [])) for run in (first, second))

    def dim(a: tuple[int, ...], b: tuple[int, ...]) -> int | None:
        found = changed(a, b)
        # Rows with something beside them cannot be gathered either.
        return found if found is not None and a[found] * rows[1] == b[found] * rows[0] else None

    def dims(a: Shapes, b: Shapes) -> BatchDims:
        read, made = (tuple(map(dim, x, y)) for x, y in zip(a, b, strict=True))
        return read, made

    found = dims(a, b)
    again = [run.shapes_again.get(path, []) for run in (first, second)]
    same = len(again[0]) == len(again[1])
    if not same or any(dims(x, y) != found for x, y in zip(*again, strict=True)):
        # Not every call has rows, or has them there: they cannot be gathered around it.
        return (None,) * len(a[0]), (None,) * len(a[1])
    return found


def changed(a: tuple[int, ...], b: tuple[int, ...]) -> int | None:
    """The dim in which two shapes differ."""
    found = [dim for dim, (x, y) in enumerate(zip(a, b, strict=False)) if x != y]
    return found[0] if found else None


def _taskgraphs(order: list[str], tags: dict[str, Tag]) -> list[tuple[Tag, list[str]]]:
    """TaskGraphs in execution order; a Layer without a tag stays with the TaskGraph before it.

    Untagged Layers before the first tagged one join it, unless that one is a bare `split`: then
    they are a data parallel TaskGraph of their own on the same devices.
    """
    groups: list[tuple[Tag, list[str]]] = []
    current: tuple[Tag, list[str]] | None = None
    leading: list[str] = []
    for path in order:
        tag = tags[path]
        if tag:
            current = next((g for g in groups if g[0] == tag), None)
            if current is None:
                current = (tag, [])
                groups.append(current)
            current[1].append(path)
        elif current is None:
            leading.append(path)
        else:
            current[1].append(path)
    if leading:
        bare_split = groups and groups[0][0][0].kind == "split"
        if not groups or bare_split:
            groups.insert(0, ((), leading))
        else:
            groups[0][1][:0] = leading
    return groups


def _parameters(model: nn.Module, layers: list[Layer]) -> tuple[Parameter, ...]:
    """Parameters in the order the Layers use them, the model's own (glue) ones first."""
    first_names = dict(model.named_parameters())
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    used = dict.fromkeys(name for layer in layers for name in layer.params)
    order = [name for name in first_names if name not in used] + list(used)
    return tuple(
        Parameter(
            name=name,
            shape=tuple(first_names[name].shape),
            dtype=dtype_name(first_names[name].dtype),
            trainable=first_names[name].requires_grad,
            aliases=tuple(n for n in aliases[id(first_names[name])] if n != name),
        )
        for name in order
    )


def _value(spec: ValueSpec) -> Value:
    if spec.batch_dim is None or spec.batch_dim < 0:
        nbytes = Linear(fixed=float(math.prod(spec.shape) * spec.dtype.itemsize))
    else:
        nbytes = Linear(per_row=float(math.prod(spec.at(1)) * spec.dtype.itemsize))
    return Value(nbytes=nbytes, grad=spec.grad)


def _nodes(program: Program, layers: dict[str, int], by_id_names: set[str]) -> tuple[Node, ...]:
    producer: dict[int, tuple[int, int]] = {}
    nodes: list[Node] = []
    for number, op in enumerate(program.ops):
        reads = dict.fromkeys(producer[i] for i in op.inputs if i in producer)
        for place, value in enumerate(op.outputs):
            producer[value] = (number, place)
        nodes.append(
            Node(
                name=op.layer if op.layer is not None else getattr(op.target, "__name__", "op"),
                layer=layers[op.layer] if op.layer is not None else None,
                made=tuple(_value(program.specs[value]) for value in op.outputs),
                reads=tuple(reads),
                params=tuple(name for name in op.state if name in by_id_names),
                pure=op.pure,
            )
        )
    return tuple(nodes)
