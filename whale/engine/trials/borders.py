"""Borders: is what crosses between stages cut where its rows are? Tried at build time.

Place in the flow: called by `wh.parallelize` before lowering, and for each further kind of batch.
Stages of other widths send each other parts of a value: row r is taken to own its own stretch of
the dim that grows with the batch. Two views in one batch of 2B rows, or a time-major flatten, look
the same by their shapes. So some rows are computed at once and in parts, and what crosses must be
the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from whale.engine.capture.captured import Captured
from whale.engine.lower.stages import parts_of
from whale.engine.state.copies import copied
from whale.engine.trace.program import Program, ValueSpec
from whale.engine.trials.differences import allowed, close
from whale.engine.trials.held import MOST_COPIED, held, with_noise
from whale.engine.trials.replay import Replay
from whale.errors import CaptureError
from whale.ir.plan import Plan
from whale.nn.router_losses import has_router_losses
from whale.runtime import batch as batches

_ROWS = 6
_FAR = 2.5
"""Times as far may values be apart as a loss: rows in another place differ by all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Crossing:
    """A value that is sent between stages whose rows are cut otherwise."""

    value: int
    spec: ValueSpec
    stages: tuple[int, int]
    where: str
    doubtful: bool
    """Whether its shape alone does not say where its rows are."""


def check_borders(
    model: nn.Module, batch: Any, plan: Plan, captured: Captured, *, training: bool = True
) -> None:
    """Raises CaptureError where a part of a value is not what those rows make.

    `training`: whether the program is one of training.
    """
    found = list(_crossings(plan, captured))
    program = captured.program
    if has_router_losses(model):  # numbers that replicas make together
        found = [crossing for crossing in found if crossing.spec.batch_dim is not None]
    if not found or program is None:
        return
    proven: set[int] = set()
    for trial in _trials(model, program, batch, captured, training):
        for crossing in found:
            if _agrees(crossing, trial, plan):
                proven.add(crossing.value)
    for crossing in found:
        if crossing.doubtful and crossing.value not in proven:
            raise _error(
                crossing,
                plan,
                "and whether each row has its own place in it cannot be tried with this batch: it "
                "has one row, its rows are alike, or the model has no values yet",
                "give parallelize a batch whose rows differ and a model with weights, or ",
            )


def _crossings(plan: Plan, captured: Captured) -> Iterator[_Crossing]:
    program = captured.program
    if len(plan.stages) == 1 or program is None:
        return
    origins, by_rows = program.origins(), _by_rows(program)
    for part in parts_of(plan, captured.graph, program, captured.result):
        for source, values in part.incoming.items():
            if _shares(plan, source) == _shares(plan, part.index):
                continue
            for value in values:
                spec = program.specs[value]
                if value in by_rows:
                    yield _Crossing(
                        value=value,
                        spec=spec,
                        stages=(source, part.index),
                        where=origins.get(value, ""),
                        doubtful=spec.batch_dim is None or spec.factor > 1,
                    )


def _shares(plan: Plan, stage: int) -> tuple[float, ...]:
    weights = plan.stages[stage].virtual_device.weights
    return tuple(weight / sum(weights) for weight in weights)


def _by_rows(program: Program) -> set[int]:
    """The values that are made of rows of the batch."""
    found = {v for v in range(program.num_inputs) if program.specs[v].batch_dim is not None}
    for op in program.ops:
        if any(v in found for v in op.inputs):
            found.update(op.outputs)
        found.update(v for v in op.outputs if program.specs[v].batch_dim is not None)
    return found


@dataclass(frozen=True, slots=True)
class _Trial:
    """The values of some rows at once, and of parts of them by their first and last row."""

    rows: int
    whole: dict[int, Tensor]
    parts: dict[tuple[int, int], dict[int, Tensor]]
    varied: bool
    """Whether the rows of the batch differ."""


def _trials(
    model: nn.Module, program: Program, batch: Any, captured: Captured, training: bool
) -> Iterator[_Trial]:
    """The rows as they are, and with noise: rows of an example may be alike."""
    total = batches.num_rows(batch)
    tensors = [*model.parameters(), *model.buffers(), *batches.leaves(batch)]
    if total < 2 or any(t.is_meta for t in tensors):
        return
    if sum(p.numel() for p in model.parameters()) <= MOST_COPIED:
        model = with_noise(copied(model))
    replay = Replay(model, program, captured.random.dims)
    rows = min(_ROWS, total)
    few = batches.spread_rows(batch, rows, replay.device)
    for tried in (few, _noisy(few, rows)):
        try:
            whole = _values(replay, tried, 0, rows, training)
            parts = {
                span: _values(replay, batches.take_rows(tried, *span), span[0], rows, training)
                for middle in dict.fromkeys((1, rows // 2))
                for span in ((0, middle), (middle, rows))
            }
        except Exception:  # noqa: BLE001, S112 - the step itself says what is wrong
            continue
        yield _Trial(rows, whole, parts, _varied(tried, rows))


def _varied(batch: Any, rows: int) -> bool:
    with_rows = [t for t in batches.leaves(batch) if batches.has_rows(t, rows)]
    return any(not torch.equal(t[0], t[row]) for t in with_rows for row in range(1, rows))


def _values(
    replay: Replay, batch: Any, first: int, total: int, training: bool
) -> dict[int, Tensor]:
    rows = batches.num_rows(batch)
    keep = held(replay.model, training=training)
    with torch.no_grad(), keep, replay.drawing(first, rows, total) as draws:
        return replay.values(draws, batch)


def _noisy(batch: Any, rows: int) -> Any:
    generator = torch.Generator().manual_seed(7)

    def noise(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or not batches.has_rows(tensor, rows):
            return tensor
        size = float(tensor.detach().double().square().mean().sqrt()) or 1.0
        drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
        return tensor + (0.1 * size * drawn).to(tensor)

    return batches.rebuild(batch, [noise(t) for t in batches.leaves(batch)])


def _agrees(crossing: _Crossing, trial: _Trial, plan: Plan) -> bool:
    """Whether the trial shows that it is cut by rows; raises where it shows that it is not."""
    spec, whole = crossing.spec, trial.whole[crossing.value]
    far = _FAR * allowed(whole.dtype)
    dim, factor = spec.batch_dim, spec.factor

    def stretch(low: int, high: int) -> Tensor:
        return whole if dim is None else whole.narrow(dim, low * factor, (high - low) * factor)

    if tuple(whole.shape) != spec.at(trial.rows):
        return False  # the step itself says so
    for (low, high), values in trial.parts.items():
        if close(stretch(low, high), values[crossing.value], far):
            continue
        what = "which has no rows itself, though it is made of rows"
        if dim is not None:
            what = (
                f"and rows {low} to {high} of {trial.rows} alone give other numbers than its "
                f"elements {low * factor} to {high * factor} along dim {dim}"
            )
        raise _error(crossing, plan, what, "")
    if not _finite(whole):
        return False
    if dim is None:
        return trial.varied
    first = stretch(0, 1)
    return any(not close(first, stretch(r, r + 1), 0.0) for r in range(1, trial.rows))


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().any())


def _error(crossing: _Crossing, plan: Plan, what: str, first: str) -> CaptureError:
    source, target = crossing.stages
    counts = [len(plan.stages[s].virtual_device.replicas) for s in crossing.stages]
    return CaptureError(
        f"a value of shape {crossing.spec.shape} (of 2 rows) goes from stage {source} to stage "
        f"{target}, which cut the rows otherwise ({counts[0]} and {counts[1]} replicas), {what}",
        hint=first + "give both stages the same replicas; or let a row of the batch keep its own "
        "place: stack two views along another dim (torch.stack([a, b], 1)), flatten with the batch "
        "first, reduce rows in the stage that uses the result",
        where=crossing.where,
    )
