"""Capture: an annotated module and a batch's shapes -> ModelGraph, on fake tensors.

Place in the flow: first step of `wh.parallelize`. Weights take no memory here, whatever the model's
size. The model runs twice, with 2 and with 3 rows: what differs between the two tells the batch dim
of every value, the FLOPs per row, and the constants of the glue that grow with the batch.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from whale.engine.layers import find_layers, layer_tags
from whale.engine.match import split_options
from whale.engine.program import Program, merge, tensors_in, tree_map
from whale.engine.trace import GlueTracer, RandomCall, add_constants
from whale.errors import CaptureError, WhaleError
from whale.ir.model_graph import (
    BatchDims,
    Layer,
    ModelGraph,
    Node,
    Parameter,
    SplitOption,
    TaskGraph,
)
from whale.ir.plan import AROUND
from whale.ir.strategy import Tag
from whale.nn.forwards import replace_forward
from whale.runtime import batch as batches
from whale.runtime.compat import fake_mode, flop_counter, real_tensors

ROWS = (2, 3)


@dataclass(slots=True, kw_only=True)
class Captured:
    """A ModelGraph, and the Program that stages are cut from (or why there is none)."""

    graph: ModelGraph
    program: Program | None
    refusal: CaptureError | None
    result: dict[str, Any]
    dropouts: dict[str, int | None]
    """Batch dim of what each dropout module sees."""
    random: dict[tuple[str, int], int | None]
    """Batch dim of every functional dropout, by Layer and number in it."""


@dataclass(slots=True)
class _Run:
    order: list[str]
    flops: dict[str, int]
    options: dict[str, tuple[SplitOption, ...]]
    shapes: dict[str, tuple[list[tuple[int, ...]], list[tuple[int, ...]]]]
    dropouts: dict[str, tuple[int, ...]]
    calls: list[RandomCall]
    program: Program | None
    result: dict[str, Any]

    @classmethod
    def empty(cls) -> _Run:
        """A run that saw nothing yet."""
        return cls([], {}, {}, {}, {}, [], None, {})


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def named_state(model: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, torch.Tensor]]:
    """Parameters and buffers by their first names, each tied tensor once."""
    return dict(model.named_parameters()), dict(model.named_buffers())


def _fake_copy(model: nn.Module) -> tuple[nn.Module, dict[int, str], dict[int, torch.Tensor]]:
    """The model on fake tensors; names of its state by id; real values of its buffers by id."""
    parameters, buffers = named_state(model)
    memo: dict[int, Any] = {}
    names: dict[int, str] = {}
    values: dict[int, torch.Tensor] = {}
    for name, parameter in parameters.items():
        fake = nn.Parameter(
            torch.empty(parameter.shape, dtype=parameter.dtype),
            requires_grad=parameter.requires_grad,
        )
        memo[id(parameter)] = fake
        names[id(fake)] = name
    for name, buffer in buffers.items():
        fake_buffer = torch.empty(buffer.shape, dtype=buffer.dtype)
        memo[id(buffer)] = fake_buffer
        names[id(fake_buffer)] = name
        if not buffer.is_meta:
            with real_tensors():
                values[id(fake_buffer)] = buffer.detach().cpu()
    try:
        fake_model = copy.deepcopy(model, memo)
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__} cannot be copied: {error}",
            hint="attributes such as locks, files or process groups must not sit on modules",
        ) from error
    # The memo keeps the originals' ids alive; the fakes live in the copied model.
    return fake_model, names, values


def _fake_batch(batch: Any, rows: int) -> Any:
    total = batches.num_rows(batch)

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        shape = list(tensor.shape)
        if batches.has_rows(tensor, total):
            shape[0] = rows
        return torch.empty(shape, dtype=tensor.dtype)

    return batches.rebuild(batch, [fake(t) for t in batches.leaves(batch)])


def _run(
    model: nn.Module,
    batch: Any,
    loss: batches.Loss | None,
    rows: int,
    split_layers: set[str],
    traced: bool,
) -> _Run:
    with fake_mode():
        fake, names, values = _fake_copy(model)
        inputs = _fake_batch(batch, rows)
        run = _Run.empty()
        tracer = GlueTracer(batches.leaves(inputs), names)
        add_constants(tracer, values)
        run.calls = tracer.calls
        _watch_dropouts(fake, run)
        counter = flop_counter()
        tracer.training = fake.training
        for path, layer in find_layers(fake).items():
            if path in split_layers:
                _watch_inputs(path, layer, run)
            replace_forward(layer, _watched(path, layer, tracer, counter, run, split_layers, names))
        with counter:
            if traced:
                with tracer:
                    out = batches.call_model(fake, loss, inputs)
                run.result = {
                    name: tree_map(value, lambda leaf: _result_ref(tracer, leaf))
                    for name, value in out.items()
                }
                run.program = tracer.program
            else:
                tracer.paused = 1
                out = batches.call_model(fake, loss, inputs)
                run.result = {name: None for name in out}
        return run


def _result_ref(tracer: GlueTracer, leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and id(leaf) in tracer.refs:
        return tracer.reference(leaf, "the model's output")[0]
    return None


def _watched(
    path: str,
    layer: nn.Module,
    tracer: GlueTracer,
    counter: Any,
    run: _Run,
    split_layers: set[str],
    names: dict[int, str],
) -> Callable[..., Any]:
    forward = layer.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        before = counter.get_total_flops()
        out = tracer.layer_call(path, forward, args, kwargs)
        run.flops[path] = run.flops.get(path, 0) + counter.get_total_flops() - before
        if path not in run.order:
            run.order.append(path)
            if path in split_layers:
                inner = layer.__dict__.pop("forward")
                try:
                    with _Paused(tracer):
                        run.options[path] = split_options(path, layer, args, kwargs, names)
                finally:
                    replace_forward(layer, inner)
        return out

    return watched


def _watch_dropouts(fake: nn.Module, run: _Run) -> None:
    """Dropout modules are keyed by their own path; here they only show their shapes."""
    for path, module in fake.named_modules():
        if type(module) is nn.Dropout:

            def look(x: torch.Tensor, path: str = path) -> torch.Tensor:
                run.dropouts.setdefault(path, tuple(x.shape))
                return x.view_as(x)

            replace_forward(module, look)


def _watch_inputs(path: str, layer: nn.Module, run: _Run) -> None:
    """Keeps the shapes of what every module of a Layer reads and makes."""
    for name, module in layer.named_modules(prefix=path):

        def look(_: Any, args: Any, kwargs: Any, out: Any, name: str = name) -> None:
            read = [tuple(t.shape) for t in tensors_in((args, kwargs))]
            run.shapes.setdefault(name, (read, [tuple(t.shape) for t in tensors_in(out)]))

        module.register_forward_hook(look, with_kwargs=True)


class _Paused:
    def __init__(self, tracer: GlueTracer) -> None:
        self.tracer = tracer

    def __enter__(self) -> None:
        self.tracer.paused += 1

    def __exit__(self, *exc: object) -> None:
        self.tracer.paused -= 1


def capture(model: nn.Module, batch: Any, loss: batches.Loss | None) -> Captured:
    """The ModelGraph of an annotated model; nothing of the model is changed or materialised."""
    layers = find_layers(model)
    tags = layer_tags(model, layers)
    split_layers = {p for p, tag in tags.items() if any(s.kind == "split" for s in tag)}
    refusal: CaptureError | None = None
    program: Program | None = None
    try:
        first, second = (_run(model, batch, loss, r, split_layers, True) for r in ROWS)
        assert first.program is not None and second.program is not None
        program = merge(first.program, second.program, ROWS)
    except WhaleError as error:
        if not isinstance(error, CaptureError):
            raise
        refusal = error
        first, second = _untraced(model, batch, loss, split_layers, error)
    except Exception as error:  # noqa: BLE001 - a user's forward on fake tensors
        refusal = CaptureError(
            f"the model cannot run on fake tensors: {type(error).__name__}: {error}"[:600],
            hint="stages and `split` need a forward whose shapes do not depend on values; data "
            "parallelism does not",
        )
        first, second = _untraced(model, batch, loss, split_layers, refusal)
    graph = _graph(model, layers, tags, first, second, program)
    return Captured(
        graph=graph,
        program=program,
        refusal=refusal,
        result=first.result,
        dropouts={
            path: _changed(shape, second.dropouts.get(path, shape))
            for path, shape in first.dropouts.items()
        },
        random=_random_calls(first.calls, second.calls),
    )


def _random_calls(
    first: list[RandomCall], second: list[RandomCall]
) -> dict[tuple[str, int], int | None]:
    """Batch dims of the functional dropouts; what cannot be keyed is said once."""
    numbers: dict[str, int] = {}
    found: dict[tuple[str, int], int | None] = {}
    for a, b in zip(first, second, strict=False):
        if a.shape is None or b.shape is None:
            warnings.warn(
                f"{a.layer or 'the glue'} calls {a.name}: its random numbers will depend on the "
                "layout",
                stacklevel=2,
            )
            continue
        number = numbers.get(a.layer, 0)
        numbers[a.layer] = number + 1
        found[a.layer, number] = _changed(a.shape, b.shape)
    return found


def _untraced(
    model: nn.Module,
    batch: Any,
    loss: batches.Loss | None,
    split_layers: set[str],
    refusal: CaptureError,
) -> tuple[_Run, _Run]:
    """The runs of a model whose glue cannot be traced: good enough for one stage.

    Code that reads values cannot run on fake tensors at all; then nothing is known but the modules,
    which is all that data parallelism needs.
    """
    try:
        first, second = (_run(model, batch, loss, r, split_layers, False) for r in ROWS)
    except WhaleError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a user's forward raises on fake tensors
        if split_layers:
            raise refusal from error
        return _Run.empty(), _Run.empty()
    return first, second


def _graph(
    model: nn.Module,
    layers: dict[str, nn.Module],
    tags: dict[str, Tag],
    first: _Run,
    second: _Run,
    program: Program | None,
) -> ModelGraph:
    order = first.order + [path for path in layers if path not in first.order]
    groups = _taskgraphs(order, tags)
    by_id = {id(p): name for name, p in model.named_parameters()}
    graph_layers = []
    for path in order:
        slope = (second.flops.get(path, 0) - first.flops.get(path, 0)) / (ROWS[1] - ROWS[0])
        graph_layers.append(
            Layer(
                path=path,
                kind=type(layers[path]).__name__,
                taskgraph=next(i for i, (_, paths) in enumerate(groups) if path in paths),
                params=tuple(dict.fromkeys(by_id[id(p)] for p in layers[path].parameters())),
                num_norms=sum(
                    isinstance(m, nn.modules.batchnorm._BatchNorm) for m in layers[path].modules()
                ),
                flops=first.flops.get(path, 0) - slope * ROWS[0],
                flops_per_row=slope,
                splits=tuple(
                    replace(
                        option,
                        dims=_batch_dims(option, first, second),
                        joined=_joined(option, path, program),
                    )
                    for option in first.options.get(path, ())
                ),
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


def _batch_dims(option: SplitOption, first: _Run, second: _Run) -> BatchDims:
    """Where the batch is in what the option's module (for attention.

    The module around it) reads and makes.
    """
    path = option.path if option.rule in AROUND else option.modules[0]
    a, b = (run.shapes.get(path, ([], [])) for run in (first, second))

    def dims(side: int) -> tuple[int | None, ...]:
        return tuple(_changed(x, y) for x, y in zip(a[side], b[side], strict=False))

    return dims(0), dims(1)


_KEEPS_COLUMNS = {
    "view",
    "reshape",
    "flatten",
    "float",
    "double",
    "to",
    "contiguous",
    "__getitem__",
}


def _joined(option: SplitOption, path: str, program: Program | None) -> str:
    """Whether a lone column split's output goes straight into a cross-entropy."""
    if option.joined != "returned" or option.rule != "column" or program is None:
        return "gather"
    makers = [op for op in program.ops if op.layer == path]
    values = {v for op in makers for v in op.outputs}
    for op in program.ops:
        if not values.intersection(op.inputs):
            continue
        name = getattr(op.target, "__name__", "")
        if name == "cross_entropy":
            return "loss"
        if name not in _KEEPS_COLUMNS:
            return "gather"
        values.update(op.outputs)
    return "gather"


def _changed(a: tuple[int, ...], b: tuple[int, ...]) -> int | None:
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


def _nodes(program: Program, layers: dict[str, int], by_id_names: set[str]) -> tuple[Node, ...]:
    producer: dict[int, int] = {}
    nodes: list[Node] = []
    for number, op in enumerate(program.ops):
        inputs = dict.fromkeys(producer[i] for i in op.inputs if i in producer)
        for value in op.outputs:
            producer[value] = number
        nodes.append(
            Node(
                name=op.layer if op.layer is not None else getattr(op.target, "__name__", "op"),
                layer=layers[op.layer] if op.layer is not None else None,
                inputs=tuple(inputs),
                params=tuple(name for name in op.state if name in by_id_names),
                pure=op.pure,
            )
        )
    return tuple(nodes)
