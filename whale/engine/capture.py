"""Capture: an annotated module and a batch's shapes -> ModelGraph, on fake tensors.

Place in the flow: first step of `wh.parallelize`. Weights take no memory here, whatever the model's
size. The model runs twice, with 2 and with 3 rows: what differs between the two tells the batch dim
of every value, the FLOPs per row, and the constants of the glue that grow with the batch.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from whale.engine.examples import Example, example_of
from whale.engine.graph import Run, changed, graph_of
from whale.engine.layers import find_layers, layer_tags
from whale.engine.match import split_options
from whale.engine.program import Program, merge, tensors_in, tree_map
from whale.engine.readers import Readers
from whale.engine.stacked_experts import give_shapes, refuse_balance
from whale.engine.trace import GlueTracer, RandomCall, add_constants
from whale.engine.work import WorkCounter
from whale.errors import CaptureError, WhaleError
from whale.ir.model_graph import (
    ModelGraph,
)
from whale.nn.forwards import mark_hooks, replace_forward, runs
from whale.nn.moe.layer import MoE
from whale.nn.moe.router import Alone
from whale.runtime import batch as batches
from whale.runtime.compat import fake_mode, real_tensors

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
    examples: dict[str, Example]
    """What each Layer was called with, where that can be said for any number of rows."""


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
    evaluates: bool = False,
) -> Run:
    with fake_mode():
        fake, names, values = _fake_copy(model)
        if evaluates:
            fake.eval()
        mark_hooks(fake)
        give_shapes(fake)
        inputs = _fake_batch(batch, rows)
        run = Run.empty()
        tracer = GlueTracer(batches.leaves(inputs), names)
        add_constants(tracer, values)
        run.calls = tracer.calls
        # A loss may close over the parameters of the model itself.
        known = {**names, **{id(p): name for name, p in model.named_parameters()}}
        readers = Readers(known, {id(m): path for path, m in fake.named_modules()})
        run.reads = readers.reads
        counter = WorkCounter(
            [*fake.parameters(), *fake.buffers(), *batches.leaves(inputs), *values.values()]
        )
        run.work = counter.layers
        _watch_dropouts(fake, run, counter)
        _watch_queues(fake, run)
        tracer.training = fake.training
        for path, layer in find_layers(fake).items():
            if path in split_layers:
                _watch_inputs(path, layer, run)
            replace_forward(
                layer, _watched(path, layer, tracer, counter, run, split_layers, names, readers)
            )
        with counter, readers, readers.functions(), torch.enable_grad():
            if traced:
                with (
                    tracer,
                    tracer.functions(),
                    suppress(Exception) if evaluates else nullcontext(),
                ):
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
    counter: WorkCounter,
    run: Run,
    split_layers: set[str],
    names: dict[int, str],
    readers: Readers,
) -> Callable[..., Any]:
    forward, replaced = layer.forward, layer.__dict__.get("forward")

    def watched(*args: Any, **kwargs: Any) -> Any:
        out = counter.layer(
            path, (args, kwargs), lambda: tracer.layer_call(path, forward, args, kwargs)
        )
        if path not in run.order:
            run.order.append(path)
            run.examples[path] = (args, kwargs)
            if path in split_layers:
                inner = layer.__dict__.pop("forward")
                if replaced is not None:
                    replace_forward(layer, replaced)
                try:
                    with _Paused(tracer), readers.paused():
                        why: dict[str, str] = {}
                        run.reasons[path] = why
                        run.options[path] = counter.paused(
                            lambda: split_options(path, layer, args, kwargs, names, why)
                        )
                finally:
                    replace_forward(layer, inner)
        return out

    return watched


def _watch_dropouts(fake: nn.Module, run: Run, counter: WorkCounter) -> None:
    """Dropout modules are keyed by their own path; here they only show their shapes."""
    for path, module in fake.named_modules():
        if type(module) is nn.Dropout and runs(module, nn.Dropout):

            def look(x: torch.Tensor, path: str = path, drops: bool = _drops(module)) -> Any:
                run.dropouts.setdefault(path, tuple(x.shape))
                if drops:
                    counter.dropout(x)
                return x.view_as(x)

            replace_forward(module, look)


def _drops(module: nn.Dropout) -> bool:
    return module.training and module.p > 0.0


def _watch_queues(fake: nn.Module, run: Run) -> None:
    """Keeps the shapes of what mixtures of experts read that drop by order."""
    for path, module in fake.named_modules():
        if isinstance(module, MoE) and module.drops_by_order:

            def look(x: torch.Tensor, valid: Any, path: str = path, module: MoE = module) -> Any:
                run.queues.setdefault(path, tuple(x.shape))
                return module.run(x, valid, Alone(), module.here)

            module.run_by(look)


def _watch_inputs(path: str, layer: nn.Module, run: Run) -> None:
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
    if split_layers:
        refuse_balance(model, "by code that a `split` cannot see into")
    # Where nothing is annotated, `auto` may choose to split the largest.
    considered = split_layers if any(tags.values()) else large_layers(model, layers)
    refusal: CaptureError | None = None
    program: Program | None = None
    try:
        first, second = (_run(model, batch, loss, r, considered, True) for r in ROWS)
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
    evaluated = _evaluated(model, batch, loss, considered) if considered else None
    examples = {
        path: example
        for path, call in first.examples.items()
        if path in second.examples and (example := example_of(call, second.examples[path], ROWS))
    }
    graph = graph_of(model, layers, tags, first, second, program, examples, ROWS, evaluated)
    return Captured(
        graph=graph,
        program=program,
        refusal=refusal,
        result=first.result,
        dropouts={
            path: changed(shape, second.dropouts.get(path, shape))
            for path, shape in first.dropouts.items()
        },
        random=_random_calls(first.calls, second.calls),
        examples=examples,
    )


LARGE = 0.25
"""Of a model's parameters: a smaller Layer is not worth gathering the rows of all replicas for."""


def large_layers(model: nn.Module, layers: Mapping[str, nn.Module]) -> set[str]:
    """Linears and embeddings that hold much of the model, and share no weight."""
    users = Counter(id(p) for layer in layers.values() for p in layer.parameters())
    total = sum(p.numel() for p in model.parameters())
    return {
        path
        for path, layer in layers.items()
        if isinstance(layer, nn.Linear | nn.Embedding)
        and sum(p.numel() for p in layer.parameters()) >= LARGE * total
        and all(users[id(p)] == 1 for p in layer.parameters())
    }


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
        found[a.layer, number] = changed(a.shape, b.shape)
    return found


def _evaluated(
    model: nn.Module, batch: Any, loss: batches.Loss | None, split_layers: set[str]
) -> Run:
    """A run in evaluation, whose code may be another; up to where it does not run on fakes."""
    return _run(model, batch, loss, ROWS[0], split_layers, True, evaluates=True)


def _untraced(
    model: nn.Module,
    batch: Any,
    loss: batches.Loss | None,
    split_layers: set[str],
    refusal: CaptureError,
) -> tuple[Run, Run]:
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
        return Run.empty(), Run.empty()
    return first, second
