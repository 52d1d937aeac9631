"""Capture: an annotated module and a batch's shapes -> ModelGraph, on fake tensors.

Place in the flow: first step of `wh.parallelize`. Weights take no memory here, whatever the model's
size. The model runs twice, with 2 and with 3 rows: what differs between the two tells the batch dim
of every value, the FLOPs per row, and the constants of the glue that grow with the batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from whale.annotations import apply_default
from whale.engine.capture.causality import CausalWatch
from whale.engine.capture.fake_run import ROWS, run_on_fakes, run_there
from whale.engine.capture.graph import Run, graph_of
from whale.engine.capture.layers import (
    close_around,
    find_layers,
    large_layers,
    layer_tags,
    open_uncalled,
)
from whale.engine.capture.probe import seen_draws
from whale.engine.capture.seen import Seen
from whale.engine.state.changes import spare_loss
from whale.engine.state.outside import Moved, as_it_was
from whale.engine.trace.draw_recorder import Randomness
from whale.engine.trace.examples import Example, example_of
from whale.engine.trace.program import Program, check_rows, merge
from whale.errors import CaptureError, WhaleError
from whale.ir.model_graph import (
    ModelGraph,
)
from whale.runtime import batch as batches
from whale.runtime import generators

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
    if layers is None:
        apply_default()
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
                run_on_fakes(model, batch, loss, r, considered, True, training, seen) for r in ROWS
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
        read=frozenset(first.reads),
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
        runs = [run_there(model, batch, loss, rows, set(), True, training, seen) for _ in "12"]
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
        program = run_on_fakes(model, batch, loss, rows, set(), True, False, seen).program
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
    return run_on_fakes(
        model, batch, loss, rows, split_layers, True, False, seen, evaluates, offers=True
    )


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
            run_on_fakes(model, batch, loss, r, split_layers, False, training, seen) for r in ROWS
        )
    except WhaleError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a user's forward raises on fake tensors
        if split_layers:
            raise refusal from error
        return Run.empty(), Run.empty()
    return first, second
