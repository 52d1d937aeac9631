"""Capture: an annotated module and a batch's shapes -> ModelGraph, on fake tensors.

Place in the flow: first step of `wh.parallelize`. Weights take no memory here, whatever the model's
size. The model runs twice, with 2 and with 3 rows: what differs between the two tells the batch dim
of every value, the FLOPs per row, and the constants of the glue that grow with the batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from whale.engine import counters
from whale.engine.causality import CausalWatch
from whale.engine.changes import changed as changed_state
from whale.engine.changes import spare_loss, state_of
from whale.engine.draw_recorder import DrawRecorder, Randomness
from whale.engine.examples import Example, example_of
from whale.engine.fakes import fake_batch, fake_copy
from whale.engine.graph import Run, graph_of
from whale.engine.layers import (
    close_around,
    find_layers,
    large_layers,
    layer_tags,
    open_uncalled,
)
from whale.engine.match import split_options
from whale.engine.opaque import REASON, or_opaque
from whale.engine.outside import Moved, as_it_was
from whale.engine.probe import seen_draws
from whale.engine.program import Program, check_rows, merge, tensors_in, tree_map
from whale.engine.readers import Readers
from whale.engine.seen import Seen
from whale.engine.stacked_experts import give_shapes
from whale.engine.trace import GlueTracer, add_constants, refuse_exchanged
from whale.engine.weights import own_tensors
from whale.engine.work import WorkCounter
from whale.errors import CaptureError, WhaleError
from whale.ir.model_graph import (
    ModelGraph,
)
from whale.nn.forwards import mark_hooks, replace_forward, take_hooks
from whale.nn.keyed_modules import is_dropout
from whale.nn.moe.layer import MoE
from whale.nn.moe.router import Alone
from whale.nn.randomness import follow_all
from whale.nn.router_losses import computed_by, shapes_only
from whale.runtime import batch as batches
from whale.runtime import generators, recompute
from whale.runtime.compat import fake_mode, in_transform, unchecked_distributions

ROWS = (2, 3)
_MOST_ROWS = 256
"""Of a run on as many rows as there really are: code may loop over them."""


@dataclass(slots=True, kw_only=True)
class Captured:
    """A ModelGraph, and the Program that stages are cut from (or why there is none)."""

    graph: ModelGraph
    program: Program | None
    refusal: CaptureError | None
    result: dict[str, Any]
    random: Randomness
    """The random numbers it draws."""
    examples: dict[str, Example]
    """What each Layer was called with, where that can be said for any number of rows."""
    changes: frozenset[str] | None
    """What a forward changes in the model, by name; None: it does not run on fake tensors."""
    called: frozenset[str]
    """Paths of all modules that were called."""
    traces: dict[str, str]
    """Of each Layer that may be split, a fingerprint of its code."""
    read: frozenset[str]
    """Parameters that any code reads."""
    differentiates: bool = False
    """Whether a forward asks for gradients itself."""
    counted: CaptureError | None = None
    """Why stages cannot run it: the glue reads what it changes itself."""
    moved: Moved = field(default_factory=dict)
    """What code changes outside of modules."""


def _run(model: nn.Module, batch: Any, loss: batches.Loss | None, *args: Any, **more: Any) -> Run:
    """One run on fakes; what its code changes outside of modules is put back."""
    with as_it_was(model, loss) as moved:
        run = _run_there(model, batch, loss, *args, **more)
        run.moved = moved()
        return run


def _run_there(
    model: nn.Module,
    batch: Any,
    loss: batches.Loss | None,
    rows: int,
    split_layers: set[str],
    traced: bool,
    training: bool,
    seen: Seen,
    evaluates: bool = False,
    offers: bool = False,
) -> Run:
    """One run on fakes of `rows` rows; `seen` says which Layers there are, and learns of calls.

    Whether Layers are asked what they offer: in that of the fewest rows, and where told to.
    """
    with generators.seeded(0) as asked, fake_mode(), computed_by(model, shapes_only):
        fake, names, values = fake_copy(model)
        if evaluates:
            fake.eval()
        elif training and not fake.training:
            fake.train()
        mark_hooks(fake)
        give_shapes(fake)
        inputs = fake_batch(batch, rows)
        run = Run.empty()
        run.asked, run.rows = asked, rows
        tracer = GlueTracer(batches.leaves(inputs), names, model)
        add_constants(tracer, values)
        run.calls = tracer.recorder.calls
        # A loss may close over the parameters of the model itself.
        known = {**names, **{id(p): name for name, p in model.named_parameters()}}
        readers = Readers(known, {id(m): path for path, m in fake.named_modules()})
        run.reads = readers.reads
        counter = WorkCounter(
            [*fake.parameters(), *fake.buffers(), *batches.leaves(inputs), *values.values()]
        )
        run.work = counter.layers
        tracer.recorder.quietly = counter.paused
        _watch_dropouts(fake, tracer.recorder, counter)
        _watch_queues(fake, run)
        modules = dict(fake.named_modules(remove_duplicate=False))
        offering = split_layers if offers or rows == ROWS[0] else set()
        for path in seen.layers:
            layer = modules[path]
            inner, real = take_hooks(layer), model.get_submodule(path)
            own = or_opaque(path, layer, inner, real, counter, run, seen)
            if path in split_layers:
                _watch_inputs(path, layer, run)
            replace_forward(
                layer, _watched(path, layer, own, tracer, counter, run, offering, names, readers)
            )
        follow_all(tracer.recorder.names, fake.named_modules())
        before = state_of(fake, loss, values=False)
        seeing = (counter, readers, readers.functions(), recompute.watched(tracer))
        with ExitStack() as stack:
            stack.callback(lambda: seen.called.update(run.order))  # also those by `.forward(...)`
            grad, stuck = torch.set_grad_enabled(seen.grad), seen.stuck_in(fake)
            for sight in (*seeing, unchecked_distributions(), grad, seen.calls(fake), stuck):
                stack.enter_context(sight)
            if traced:
                with (
                    tracer,
                    tracer.functions(),
                    suppress(Exception) if offers else nullcontext(),
                ):
                    out = batches.call_model(fake, tracer.noting(loss), inputs)
                    run.result = {
                        name: tree_map(value, lambda leaf: _result_ref(tracer, leaf))
                        for name, value in out.items()
                    }
                    run.program = tracer.program
            else:
                tracer.paused = 1
                with tracer:
                    out = batches.call_model(fake, loss, inputs)
                run.result = {name: None for name in out}
        tracer.program.written = tracer.written()
        run.changes = changed_state(before, state_of(fake, loss, values=False))
        run.differentiates = readers.differentiates
        return run


def _result_ref(tracer: GlueTracer, leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and id(leaf) in tracer.refs:
        return tracer.reference(leaf, "the model's output")[0]
    return None


def _watched(
    path: str,
    layer: nn.Module,
    own: Callable[..., Any],
    tracer: GlueTracer,
    counter: WorkCounter,
    run: Run,
    split_layers: set[str],
    names: dict[int, str],
    readers: Readers,
) -> Callable[..., Any]:
    replaced = layer.__dict__.get("forward")
    tensors = own_tensors(layer)
    inside = frozenset(id(module) for module in layer.modules())
    buffers = frozenset(name for name, _ in layer.named_buffers())

    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal tensors
        if not tracer.paused:
            refuse_exchanged(path, tensors, own_tensors(layer))
        if in_transform():
            run.transformed.add(path)
        given = [(held, _items(held)) for held in _containers((args, kwargs))]
        probed = path in split_layers and path not in run.order
        before = counters.read(layer, buffers) if probed else {}
        with readers.within(inside):
            out = counter.layer(
                path, (args, kwargs), lambda: tracer.layer_call(path, own, args, kwargs)
            )
        tensors = own_tensors(layer)  # its own code may exchange what it likes
        if path not in run.order:
            run.order.append(path)
            run.examples[path] = (args, kwargs)
            if any(_items(held) != items for held, items in given):
                run.reasons[path] = {path: "it changes a list or dict that it is given"}
            elif path in run.opaque:
                run.reasons[path] = {path: REASON}
            elif probed and path not in run.transformed:
                inner = layer.__dict__.pop("forward")
                if replaced is not None:
                    replace_forward(layer, replaced)
                try:
                    # As it was called, where it counts its calls.
                    as_called = counters.lent(
                        layer, counters.moved(counters.read(layer, buffers), before)
                    )
                    with _Paused(tracer), tracer.recorder.off(), readers.paused(), as_called:
                        why: dict[str, str] = {}
                        run.reasons[path], run.probing = why, True
                        run.options[path] = counter.paused(
                            lambda: split_options(path, layer, args, kwargs, names, why, run.traces)
                        )
                finally:
                    run.probing = False
                    replace_forward(layer, inner)
        return out

    return watched


def _containers(value: Any) -> Iterator[Any]:
    """The lists and dicts among arguments."""
    if isinstance(value, list | dict):
        yield value
    if isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _containers(item)


def _items(held: Any) -> list[Any]:
    return [(k, id(v)) for k, v in held.items()] if isinstance(held, dict) else list(map(id, held))


def _watch_dropouts(fake: nn.Module, recorder: DrawRecorder, counter: WorkCounter) -> None:
    """Dropout modules are keyed by their own path; here they only show their shapes."""
    for module in fake.modules():
        if is_dropout(module):

            def look(x: torch.Tensor, drops: bool = _drops(module)) -> Any:
                recorder.note(nn.Dropout, x.shape, drops)
                if drops:
                    counter.dropout(x)
                return x.view_as(x)

            replace_forward(module, look)


def _drops(module: Any) -> bool:
    return bool(module.training and module.p > 0.0)


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
            if run.probing:
                return
            given = tensors_in((args, kwargs))
            first = {id(t): place for place, t in reversed(list(enumerate(given)))}
            # A tensor that is given again (x, x, x) brings no rows of its own.
            read = [tuple(t.shape) if first[id(t)] == i else () for i, t in enumerate(given)]
            made = [tuple(t.shape) for t in tensors_in(out)]
            if name in run.shapes:
                run.shapes_again.setdefault(name, []).append((read, made))
            run.shapes.setdefault(name, (read, made))

        module.register_forward_hook(look, with_kwargs=True)


class _Paused:
    def __init__(self, tracer: GlueTracer) -> None:
        self.tracer = tracer

    def __enter__(self) -> None:
        self.tracer.paused += 1

    def __exit__(self, *exc: object) -> None:
        self.tracer.paused -= 1


def capture(
    model: nn.Module,
    batch: Any,
    loss: batches.Loss | None,
    *,
    training: bool = True,
    grad: bool = True,
    layers: Collection[str] | None = None,
    rows: int | None = None,
) -> Captured:
    """The ModelGraph of an annotated model; nothing of the model is changed or materialised.

    A model in eval mode is seen as it trains, unless not `training`; without `grad`, as it is
    evaluated. The Layers are found, unless given. `rows` are those of the batch that is to run, if
    they are not those of `batch`.
    """
    if rows is None:
        rows = batches.num_rows(batch)
    modules = dict(model.named_modules(remove_duplicate=False))
    found = find_layers(model) if layers is None else {path: modules[path] for path in layers}
    with generators.kept():
        while True:
            seen = Seen(found, grad)
            refused: CaptureError | None = None
            try:
                captured = _capture(model, batch, loss, training, found, seen, rows)
            except CaptureError as error:
                refused = error
            other = open_uncalled(found, seen.called) if layers is None else None
            if other is None and layers is None and (refused or captured.refusal):
                other = close_around(model, found, seen.stuck)
            if other is not None:
                found = other
            elif refused is not None:
                raise refused
            else:
                return captured


def _capture(
    model: nn.Module,
    batch: Any,
    loss: batches.Loss | None,
    training: bool,
    layers: dict[str, nn.Module],
    seen: Seen,
    rows: int,
) -> Captured:
    loss = spare_loss(loss)
    tags = layer_tags(model, layers)
    split_layers = {p for p, tag in tags.items() if any(s.kind == "split" for s in tag)}
    # Where nothing is annotated, `auto` may choose to split the largest.
    considered = split_layers if any(tags.values()) else large_layers(model, layers)
    refusal: CaptureError | None = None
    program: Program | None = None
    watch = CausalWatch(model)
    try:
        with watch:
            first, second = (
                _run(model, batch, loss, r, considered, True, training, seen) for r in ROWS
            )
        assert first.program is not None and second.program is not None
        program = merge(first.program, second.program, ROWS)
    except WhaleError as error:
        if not isinstance(error, CaptureError):
            raise
        refusal = error
    except Exception as error:  # noqa: BLE001 - a user's forward on fake tensors
        refusal = CaptureError(
            f"the model cannot run on fake tensors: {type(error).__name__}: {error}"[:600],
            hint="stages and `split` need a forward whose shapes do not depend on values; data "
            "parallelism does not",
        )
    if refusal is not None:
        first, second = _untraced(model, batch, loss, split_layers, refusal, training, seen)
    watch.warn()
    random = seen_draws(first, second, model, batch, loss, training, traced=program is not None)
    if random.foreign and program is not None:
        refusal, program = _refuse_foreign(random.foreign), None
    counted = None
    if program is not None and first.moved:
        moved = next(iter(first.moved.values()))
        counted = _counted(model, batch, loss, program, training, seen, moved)
    others: dict[str, Run] = {}
    if considered:
        many = _no_size(model, batch, rows)
        others["in evaluation"] = _other(model, batch, loss, considered, seen, many, evaluates=True)
        if many not in ROWS:
            others[f"for {many} rows"] = _other(model, batch, loss, considered, seen, many)
    examples = {
        path: example
        for path, call in first.examples.items()
        if path in second.examples and (example := example_of(call, second.examples[path], ROWS))
    }
    graph = graph_of(model, layers, tags, first, second, program, examples, ROWS, others)
    return Captured(
        graph=graph,
        program=program,
        refusal=refusal,
        result=first.result,
        random=random,
        examples=examples,
        changes=first.changes,
        called=frozenset(seen.called),
        traces=first.traces,
        read=frozenset(name for run in (first, *others.values()) for name in run.reads),
        differentiates=any(run.differentiates for run in (first, *others.values())),
        counted=counted,
        moved=first.moved,
    )


def _counted(
    model: nn.Module,
    batch: Any,
    loss: batches.Loss | None,
    program: Program,
    training: bool,
    seen: Seen,
    moved: str,
) -> CaptureError | None:
    """A trace is of one forward: is the glue of the next one the same?"""
    rows, seen = ROWS[0], Seen(seen.layers, seen.grad)
    with as_it_was(model, loss):
        runs = [_run_there(model, batch, loss, rows, set(), True, training, seen) for _ in "12"]
    second = runs[1].program
    assert second is not None
    try:
        check_rows(program, second, rows)
    except CaptureError as error:
        return CaptureError(
            f"code between Layers, or the loss, changes {moved} and reads it, and was traced "
            f"with the value it had: {error.message}",
            hint="count inside one annotated module, or in the script, and pass the number in the "
            "batch as a tensor without dims; or use one stage",
        )
    return None


def _refuse_foreign(who: str) -> CaptureError:
    return CaptureError(
        f"the model draws from {who}, whose numbers a stage cannot draw alone",
        hint="draw with torch's functions, which are keyed by seed, step and row; or use one stage",
    )


def trace(
    model: nn.Module,
    batch: Any,
    loss: batches.Loss | None,
    rows: int,
    *,
    grad: bool = True,
    layers: Collection[str] | None = None,
) -> Program:
    """The glue as it runs for exactly `rows` rows: what a captured Program is held against."""
    with generators.kept():
        seen = Seen(find_layers(model) if layers is None else layers, grad)
        program = _run(model, batch, loss, rows, set(), True, False, seen).program
    assert program is not None
    return program


def _other(
    model: nn.Module,
    batch: Any,
    loss: batches.Loss | None,
    split_layers: set[str],
    seen: Seen,
    rows: int,
    *,
    evaluates: bool = False,
) -> Run:
    """A run whose code may be another: in evaluation, or on as many rows as there really are.

    Up to where it does not run on fakes.
    """
    seen = Seen(seen.layers, seen.grad and not evaluates)
    return _run(model, batch, loss, rows, split_layers, True, False, seen, evaluates, offers=True)


def _no_size(model: nn.Module, batch: Any, rows: int) -> int:
    """As many rows, or a few more, so that no other size looks like them; not very many."""
    sizes = {size for tensor in model.parameters() for size in tensor.shape}
    sizes |= {size for tensor in batches.leaves(batch) for size in tensor.shape[1:]}
    return next(n for n in itertools.count(min(max(rows, ROWS[0]), _MOST_ROWS)) if n not in sizes)


def _untraced(
    model: nn.Module,
    batch: Any,
    loss: batches.Loss | None,
    split_layers: set[str],
    refusal: CaptureError,
    training: bool,
    seen: Seen,
) -> tuple[Run, Run]:
    """The runs of a model whose glue cannot be traced: good enough for one stage.

    Code that reads values cannot run on fake tensors at all; then nothing is known but the modules,
    which is all that data parallelism needs.
    """
    try:
        first, second = (
            _run(model, batch, loss, r, split_layers, False, training, seen) for r in ROWS
        )
    except WhaleError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a user's forward raises on fake tensors
        if split_layers:
            raise refusal from error
        return Run.empty(), Run.empty()
    return first, second
