"""Rehearsal: each installed split runs a few rows beside the whole module, before it is trusted.

Place in the flow: a step of `engine.lower`, on the real groups, when all sharded forwards are in
place and before dropout is keyed. What a rule replaces, skips or never sees shows in numbers:
outputs, input gradients and parameter gradients are compared with those of the user's own module,
in float64 where it runs in float64. Layers of one kind are tried once. Stacked experts, which are
known by their looks only, are tried once more with choices that reach all of them. Nothing stays
behind: buffers, attributes, gradients and random states are put back.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from whale.engine.capture.captured import Captured
from whale.engine.lower.weights import take
from whale.engine.state.copies import copied
from whale.engine.state.stillness import Still, as_before
from whale.engine.trace.program import tensors_in, tree_map
from whale.engine.trials.rehearsal_trials import Trial, find_trials
from whale.errors import PlanError, WhaleError
from whale.ir.plan import Plan, TaskGraphPlan
from whale.ir.sharding import Piece
from whale.nn.column_shard import plain
from whale.runtime import batch as batches
from whale.runtime.context import StepContext, step_backward
from whale.runtime.heartbeat import is_communication_error
from whale.runtime.units import stand_in

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 3e-3}
_COARSE = 8e-2
_NARROW = 1e-4
"""Where code in double precision computes something in float32 all the same (a softmax, say)."""


@dataclass(slots=True)
class Verdict:
    """What one rank found."""

    wrong: str = ""
    note: str = ""
    sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Of each parameter's gradient, this rank's part of two weighted sums."""
    truth: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    """The whole gradient's, and what they are measured against."""
    tolerance: float = 0.0


def rehearse(
    local: nn.Module,
    pieces: dict[str, Piece],
    context: StepContext,
    *,
    model: nn.Module,
    plan: Plan,
    captured: Captured,
    batch: Any,
    loss: batches.Loss | None,
    rank: int,
    device: torch.device,
) -> list[str]:
    """Raises on every rank if a split computes anything else; gives what could not be tried."""
    if not any(t.splits for t in plan.taskgraphs):
        return []
    notes: list[str] = []
    trials = find_trials(model, plan, captured, batch, loss, device, notes)
    found: dict[int, Verdict] = {}
    modules = dict(local.named_modules(remove_duplicate=False))
    names = {id(p): name for name, p in model.named_parameters()}
    parameters = dict(local.named_parameters())
    absent = [p for name, p in parameters.items() if name in plan.away]
    before = copy.copy(context)
    for number, trial in enumerate(trials):
        if rank not in trial.taskgraph.virtual_device.ranks:
            continue
        stage = plan.stages[trial.taskgraph.stage].virtual_device
        start, end = stage.rows(rank, trial.rows)
        # A step before the first: calls that are numbered by step begin anew afterwards.
        context.step, context.stage, context.micro_batch = -1, trial.taskgraph.stage, 0
        context.micro_rows, context.first_row, context.rows = trial.rows, start, end - start
        whole = model.get_submodule(trial.path)
        own = modules[trial.path]
        share = _Share(plan, trial.taskgraph, rank, pieces, names, absent)
        with as_before(own), torch.autocast(device.type, enabled=False), torch.enable_grad():
            found[number] = _compare(trial, whole, own, share, (start, end), device, number)
    for name in ("step", "stage", "micro_batch", "micro_rows", "first_row", "rows"):
        setattr(context, name, getattr(before, name))
    _judge(trials, _everyone(found), notes)
    return notes


@dataclass(frozen=True, slots=True)
class _Share:
    """Which part of a gradient is this rank's."""

    plan: Plan
    taskgraph: TaskGraphPlan
    rank: int
    pieces: dict[str, Piece]
    names: dict[int, str]
    absent: list[nn.Parameter]
    """Parameters that are here only while their Layer runs."""

    def copies(self, name: str) -> int:
        """Ranks that compute the same gradient as this one."""
        home = next(home for home in self.plan.homes if home.name == name)
        device = self.taskgraph.virtual_device
        cut = {n for split in self.taskgraph.splits for n, _ in split.params}
        if name in cut:
            return 1
        if self.taskgraph.index in home.around:
            return len(device.replicas[device.position(self.rank)[0]].ranks)
        stage = self.plan.stages[self.taskgraph.stage].virtual_device
        return len(stage.replicas[stage.position(self.rank)[0]].ranks)


# ---- one trial -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Ran:
    outputs: list[torch.Tensor]
    inputs: list[torch.Tensor | None]
    drew: bool
    narrow: bool


def _run(
    module: nn.Module,
    trial: Trial,
    span: tuple[int, int],
    device: torch.device,
    wide: bool,
    cotangents: Callable[[list[torch.Tensor]], list[torch.Tensor | None]],
) -> _Ran:
    """Forward and backward on the rows of `span`."""
    shapes, made = iter(trial.shapes), {}
    inputs: list[torch.Tensor | None] = []

    def argument(tensor: torch.Tensor) -> torch.Tensor:
        shape = next(shapes)
        if id(tensor) not in made:
            part = tensor.detach()
            if shape.batch_dim is not None:
                factor = shape.shape[shape.batch_dim]
                part = part.narrow(shape.batch_dim, span[0] * factor, (span[1] - span[0]) * factor)
            leaf = _wider(part.to(device)) if wide else part.to(device)
            leaf = leaf.clone()
            if shape.requires_grad and leaf.is_floating_point():
                leaf.requires_grad_()
            inputs.append(leaf if shape.batch_dim is not None else None)
            made[id(tensor)] = leaf.clone()
        return made[id(tensor)]

    args, kwargs = tree_map(
        (trial.args, trial.kwargs),
        lambda leaf: argument(leaf) if isinstance(leaf, torch.Tensor) else leaf,
    )
    still = Still()
    with still:
        outputs = [plain(t) for t in tensors_in(module(*args, **kwargs))]
    pairs = [
        (out, cotangent)
        for out, cotangent in zip(outputs, cotangents(outputs), strict=True)
        if cotangent is not None and out.requires_grad
    ]
    with still:  # a backward may compute a forward anew
        if pairs:
            with step_backward.run():
                torch.autograd.backward([p[0] for p in pairs], [p[1] for p in pairs])
    return _Ran(outputs, inputs, still.drew, still.narrow)


_WIDER = {
    torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64,
    torch.complex64: torch.complex128,
}  # fmt: skip


def _wider(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(_WIDER.get(tensor.dtype, tensor.dtype))


def _widen(module: nn.Module, absent: Collection[nn.Parameter] = ()) -> None:
    """Its parameters and buffers in double precision (`as_before` puts them back).

    Of those that are `absent` their Layer brings the values, in the dtype that they have.
    """
    away = {id(parameter) for parameter in absent}
    for parameter in module.parameters():
        if id(parameter) in away:
            like = _wider(parameter.data.new_empty(0))
            parameter.data = stand_in(like, tuple(parameter.shape))
        else:
            parameter.data = _wider(parameter.data)
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = _wider(buffer)


def _compare(
    trial: Trial,
    whole: nn.Module,
    own: nn.Module,
    share: _Share,
    span: tuple[int, int],
    device: torch.device,
    number: int,
) -> Verdict:
    generator = torch.Generator().manual_seed(number)
    seeds: list[torch.Tensor] = []

    def at_random(outputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
        for out in outputs:
            seeds.append(torch.randn(out.shape, generator=generator, dtype=torch.float64))
        return [
            s.to(out) if out.is_floating_point() and i not in trial.unread else None
            for i, (s, out) in enumerate(zip(seeds, outputs, strict=True))
        ]

    dtypes = {p.dtype for p in whole.parameters() if p.is_floating_point()}
    all_rows = (0, trial.rows)
    alike = copied(whole).to(device)
    if trial.training is not None:
        for module in (alike, own):  # `rehearse` puts the own one back
            module.train(trial.training)
    for parameter in alike.parameters():
        parameter.grad = None
    wide = True
    try:
        with as_before(alike):
            _widen(alike)
            expected = _run(alike, trial, all_rows, device, True, at_random)
            gradients = _gradients(alike, whole, share.names)
    except Exception:  # noqa: BLE001 - code that makes float32 tensors of its own
        wide = False
        seeds.clear()
        generator.manual_seed(number)
        for parameter in alike.parameters():
            parameter.grad = None
        try:
            with as_before(alike):
                expected = _run(alike, trial, all_rows, device, False, at_random)
                gradients = _gradients(alike, whole, share.names)
        except Exception as error:  # noqa: BLE001 - it needs what only the model gives it
            why = f"{type(error).__name__}: {error}"[:200]
            return Verdict(note=f"{trial.path} was not tried: alone it raises {why}")
    coarse = max((_TOLERANCE.get(d, _COARSE) for d in dtypes), default=_COARSE)
    fine = _NARROW if expected.narrow else _TOLERANCE[torch.float64]
    verdict = Verdict(tolerance=fine if wide else coarse)
    dims: list[int | None] = []

    def own_part(outputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
        found: list[torch.Tensor | None] = []
        every = zip(outputs, seeds, expected.outputs, strict=True)
        for i, (out, seed, wanted) in enumerate(every):
            if i in trial.unread:
                dims.append(None)
                found.append(None)
                continue
            dim = _rows_dim(tuple(out.shape), tuple(wanted.shape), trial.rows, span)
            dims.append(dim)
            part = _part(seed, dim, trial.rows, span)
            if dim is None:
                # What is the same for all replicas is in the loss of each, by its share of rows.
                part = part * ((span[1] - span[0]) / trial.rows)
            found.append(part.to(out) if out.is_floating_point() else None)
        return found

    if wide:
        _widen(own, share.absent)
    try:
        got = _run(own, trial, span, device, wide, own_part)
    except WhaleError:
        raise
    except Exception as error:  # the whole module ran, so it is the split
        if is_communication_error(error):
            raise
        return Verdict(wrong=f"it raises {type(error).__name__}: {error}"[:300])
    mine = _gradients(own, whole, share.names)
    if expected.drew or got.drew:
        return Verdict(note=f"{trial.path} was not tried: it draws random numbers")
    pairs = [
        (f"output {i}", out, _part(wanted, dim, trial.rows, span))
        for i, (out, wanted, dim) in enumerate(
            zip(got.outputs, expected.outputs, dims, strict=True)
        )
        if i not in trial.unread
    ]
    for i, (a, b) in enumerate(zip(got.inputs, expected.inputs, strict=True)):
        if a is None or b is None or b.grad is None or not a.is_floating_point():
            continue
        dim = _rows_dim(tuple(a.shape), tuple(b.shape), trial.rows, span)
        grad = a.grad if a.grad is not None else torch.zeros_like(a)
        pairs.append((f"the gradient of input {i}", grad, _part(b.grad, dim, trial.rows, span)))
    verdict.wrong = _first_wrong(pairs, verdict.tolerance)
    for name, gradient in gradients.items():
        weights = _weights(gradient.shape)
        sums = [float((gradient.double().cpu() * w).sum()) for w in weights]
        size = float(gradient.double().abs().sum())
        verdict.truth[name] = (sums[0], sums[1], size)
        if name in mine and name in share.pieces:
            piece = mine[name].double().cpu()
            parts = [float((piece * take(w, share.pieces[name])).sum()) for w in weights]
            copies = share.copies(name)
            verdict.sums[name] = (parts[0] / copies, parts[1] / copies)
    return verdict


def _gradients(
    module: nn.Module, whole: nn.Module, names: dict[int, str]
) -> dict[str, torch.Tensor]:
    """Gradients by the first names of the user's parameters; zeros where there is none."""
    found = {}
    for (_, theirs), (_, mine) in zip(
        whole.named_parameters(), module.named_parameters(), strict=True
    ):
        if mine.requires_grad:
            grad = mine.grad if mine.grad is not None else torch.zeros_like(mine)
            found[names[id(theirs)]] = grad
    return found


def _rows_dim(
    own: tuple[int, ...], whole: tuple[int, ...], rows: int, span: tuple[int, int]
) -> int | None:
    """Where the rows are in an output; None: nowhere, or all of them are here."""
    if own == whole:
        return None
    count = span[1] - span[0]
    for dim, (a, b) in enumerate(zip(own, whole, strict=False)):
        if a != b and a * rows == b * count:
            return dim
    return None


def _part(tensor: torch.Tensor, dim: int | None, rows: int, span: tuple[int, int]) -> torch.Tensor:
    if dim is None:
        return tensor
    factor = tensor.shape[dim] // rows
    return tensor.narrow(dim, span[0] * factor, (span[1] - span[0]) * factor)


def _first_wrong(pairs: list[tuple[str, torch.Tensor, torch.Tensor]], tolerance: float) -> str:
    for name, got, wanted in pairs:
        if got.shape != wanted.shape:
            return (
                f"{name} has shape {tuple(got.shape)}, that of the whole module "
                f"{tuple(wanted.shape)}"
            )
        if not got.numel():
            continue
        a, b = got.detach().to(torch.complex128), wanted.detach().to(torch.complex128)
        same = (a == b) | (a.isnan() & b.isnan())
        error = torch.where(same, 0.0, (a - b).abs()).max()
        scale = torch.where(b.isfinite(), b.abs(), 0.0).max().clamp(min=1e-6)
        if not error <= tolerance * scale:
            return f"{name} is off by {float(error / scale):.2g} of its largest entry"
    return ""


def _weights(shape: torch.Size) -> list[torch.Tensor]:
    """Two weights of every entry, by its place: sums by both are equal only for equal tensors."""
    places = torch.arange(1, shape.numel() + 1, dtype=torch.float64).view(shape)
    return [(places * step) % 1.0 - 0.5 for step in (0.6180339887498949, 0.4142135623730951)]


# ---- what all ranks say --------------------------------------------------------------------------


def _everyone(found: dict[int, Verdict]) -> list[dict[int, Verdict]]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [found]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    return gathered


def _judge(trials: list[Trial], everyone: list[dict[int, Verdict]], notes: list[str]) -> None:
    for number, trial in enumerate(trials):
        verdicts = {r: found[number] for r, found in enumerate(everyone) if number in found}
        notes += dict.fromkeys(v.note for v in verdicts.values() if v.note)
        for rank, verdict in verdicts.items():
            if verdict.wrong:
                raise _refusal(trial, f"{verdict.wrong} (rank {rank})")
        if any(v.note for v in verdicts.values()) or not verdicts:
            continue
        first = next(iter(verdicts.values()))
        largest = max((size for _, _, size in first.truth.values()), default=0.0)
        for name, (*wanted, size) in first.truth.items():
            scale = max(size, 1e-3 * largest, 1e-9)
            for i, want in enumerate(wanted):
                got = sum(v.sums[name][i] for v in verdicts.values() if name in v.sums)
                if not abs(got - want) <= first.tolerance * scale:
                    error = abs(got - want) / scale
                    raise _refusal(trial, f"the gradient of {name} is off by {error:.2g}")


def _refusal(trial: Trial, what: str) -> PlanError:
    mode = " in evaluation" if trial.training is False else ""
    return PlanError(
        f"{trial.path} does not compute the same{mode} when it is split ({trial.rules}): {what}",
        hint="its code does something the rule does not know of: `replicate` this module, or "
        "register a rule for its type (wh.register_rule); Config check_splits=False trusts it",
    )
