"""Fake run: the user's model on fake tensors, once, with everything that watches it.

Place in the flow: under `engine.capture`, which makes a ModelGraph of several such runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext, suppress
from typing import Any

import torch
from torch import nn

from whale.engine.capture.graph import Run
from whale.engine.capture.opaque import REASON, or_opaque
from whale.engine.capture.seen import Seen
from whale.engine.split.match import split_options
from whale.engine.split.stacked_experts import give_shapes
from whale.engine.state import counters
from whale.engine.state.changes import changed as changed_state
from whale.engine.state.changes import state_of
from whale.engine.state.copies import own_tensors
from whale.engine.state.outside import as_it_was
from whale.engine.trace.draw_recorder import DrawRecorder
from whale.engine.trace.fakes import fake_batch, fake_copy
from whale.engine.trace.program import tensors_in, tree_map
from whale.engine.trace.readers import Readers
from whale.engine.trace.tracer import GlueTracer, add_constants, refuse_exchanged
from whale.engine.trace.work import WorkCounter
from whale.nn.forwards import mark_hooks, replace_forward, take_hooks
from whale.nn.keyed_modules import is_dropout
from whale.nn.moe.layer import MoE
from whale.nn.moe.router import Alone
from whale.nn.randomness import follow_all
from whale.nn.router_losses import computed_by, shapes_only
from whale.runtime import batch as batches
from whale.runtime import generators, recompute
from whale.runtime.compat import fake_mode, in_transform, unchecked_distributions, version

ROWS = (2, 3)
"""Numbers of rows of the two runs that a program is made of."""


def run_on_fakes(
    model: nn.Module, batch: Any, loss: batches.Loss | None, *args: Any, **more: Any
) -> Run:
    """One run on fakes; what its code changes outside of modules is put back."""
    with as_it_was(model, loss) as moved:
        run = run_there(model, batch, loss, *args, **more)
        run.moved = moved()
        return run


def run_there(
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
        run.backwards = readers.backwards
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
        inputs = [(tensor, version(tensor)) for tensor in tensors_in((args, kwargs))]
        probed = path in split_layers and path not in run.order
        before = counters.read(layer, buffers) if probed else {}
        with readers.within(path, inside):
            out = counter.layer(
                path, (args, kwargs), lambda: tracer.layer_call(path, own, args, kwargs)
            )
        tensors = own_tensors(layer)  # its own code may exchange what it likes
        if any(_items(held) != items for held, items in given):
            run.once[path] = "it changes a list or dict that it is given"
        elif any(version(tensor) != before for tensor, before in inputs):
            run.once[path] = "it writes to a tensor that it is given"
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
