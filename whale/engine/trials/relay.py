"""Relay: the stages of a pipeline one after another in this process, beside the model's own code.

Place in the flow: called by `engine.trials.look` before lowering, and for each further kind of
batch. A trace sees torch functions. It does not see a view that is edited after its base was sent,
a list that one Layer fills and another empties, a count that numpy made of the batch's shape. So
the stages run here as they will on their ranks, each on a copy of the model and with copies of what
is sent, and what they give together must be what the model gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from whale.engine.capture.captured import Captured, trace
from whale.engine.lower.loss_parts import LossParts
from whale.engine.lower.random import place_draws
from whale.engine.lower.stages import CutStage, StageProgram, parts_of
from whale.engine.state.copies import copied
from whale.engine.state.outside import as_it_was
from whale.engine.trace.program import Op, check_rows
from whale.engine.trials.differences import GRADIENT, allowed, close
from whale.engine.trials.held import MOST_COPIED, undisturbed, with_noise
from whale.errors import CaptureError, WhaleError
from whale.ir.plan import Plan
from whale.nn.randomness import PlainDraws
from whale.runtime import batch as batches
from whale.runtime import generators
from whale.runtime.compat import about_fakes

_ROWS, _FEW_ROWS = 5, 4
"""Rows that run: others than those of the traces, whose constants would hide in them."""
_LARGE = 1e9
"""Parameters times elements of a row, from which on fewer rows run."""
MOST_TRIED = 10 * MOST_COPIED
"""Parameters of the largest model that is tried."""
_FLOOR = 1e-3
"""Of the largest gradient: what is smaller than this is compared as if it were as large."""
_HINT = (
    "code between stages may not change a tensor, list, dict or object that another stage reads "
    "(through a view of it, `detach()`, `out=`, or inside a Layer that is given it), nor count "
    "rows by other means than torch: put it inside one annotated module, or let the stage that "
    "changes a value return it"
)


def check_relay(
    model: nn.Module,
    batch: Any,
    loss: batches.Loss | None,
    plan: Plan,
    captured: Captured,
    *,
    training: bool,
) -> None:
    """Raises CaptureError where the stages, each by itself, are not the model.

    Compared are the loss, the gradients, what is in buffers afterwards. Nothing is tried on the
    meta device, nor where the model's own code does not run on a few rows.
    """
    program = captured.program
    tensors = [*model.parameters(), *model.buffers(), *batches.leaves(batch)]
    size = sum(p.numel() for p in model.parameters())
    total = batches.num_rows(batch)
    meta = any(t.is_meta for t in tensors)
    if len(plan.stages) == 1 or program is None or size > MOST_TRIED or meta or not total:
        return
    parts = parts_of(plan, captured.graph, program, captured.result)
    rows = few_rows(batch, size)
    team = Team(model, parts, captured, training, size)
    fed = two_feeds(batch, rows, team.device)
    overlaps = plan.num_micro_batch > 1
    try:
        with as_it_was(team.model, loss):
            want = team.alone(fed, loss)
    except Exception:  # noqa: BLE001 - other trials, or the step itself, say what is wrong
        return
    try:
        with as_it_was(team.model, loss):
            got = team.together(fed, overlaps=overlaps)
    except WhaleError:
        raise
    except Exception as error:
        if about_fakes(error):
            raise
        _say_rows(model, fed[0], loss, captured, rows)
        raise CaptureError(
            f"the model runs on {rows} rows, but its {len(parts)} stages do not, each by itself: "
            f"{type(error).__name__}: {error}"[:600],
            hint=_HINT,
        ) from error
    what = difference(want, got)
    if what:
        _say_rows(model, fed[0], loss, captured, rows)
        raise CaptureError(
            f"the {len(parts)} stages, each run by itself on {rows} rows, do not compute what the "
            f"model does: {what}",
            hint=_HINT,
        )


def few_rows(batch: Any, size: int) -> int:
    """How many rows are tried of a model of so many parameters."""
    total = batches.num_rows(batch)
    width = max(t.numel() // total for t in batches.leaves(batch) if batches.has_rows(t, total))
    return min(_FEW_ROWS if size * width > _LARGE else _ROWS, total)


def two_feeds(batch: Any, rows: int, device: torch.device) -> list[Any]:
    """Two micro-batches of a batch: so many rows from all over it, and its last ones."""
    total = batches.num_rows(batch)
    return [
        batches.spread_rows(batch, rows, device),
        batches.take_rows(batch, max(0, total - _FEW_ROWS), total, device),
    ]


def _say_rows(
    model: nn.Module, few: Any, loss: batches.Loss | None, captured: Captured, rows: int
) -> None:
    """Raises with file and line where it is the number of rows that makes the difference."""
    assert captured.program is not None
    layers = [layer.path for layer in captured.graph.layers]
    try:
        traced = trace(model, few, loss, rows, layers=layers)
    except Exception:  # noqa: BLE001 - something else is wrong
        return
    check_rows(captured.program, traced, rows)


@dataclass(frozen=True, slots=True)
class Ran:
    """What forwards and their backwards gave."""

    losses: list[Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    """Those that were changed."""


@dataclass(frozen=True, slots=True)
class _Flight:
    """A micro-batch between its forward and its backward: by stage, what it made and received."""

    loss: Tensor
    stages: list[tuple[dict[int, Tensor], dict[int, Tensor]]]


class _Beside:
    """What a stage runs in here: draws of the same names as in the whole model."""

    def __init__(self, draws: PlainDraws) -> None:
        self.names = draws.names

    @contextmanager
    def around(self) -> Iterator[None]:
        """Around one forward."""
        self.names.begin()
        yield

    def before(self, op: Op) -> None:
        """Before an operation."""
        place_draws(self.names, op)


class Team:
    """A model, and its stages with a copy each."""

    def __init__(
        self,
        model: nn.Module,
        parts: list[StageProgram],
        captured: Captured,
        training: bool,
        size: int,
    ) -> None:
        assert captured.program is not None or not parts
        self.specs = list(captured.program.specs) if captured.program else []
        self.parts, self.training = parts, training
        self.dims = captured.random.dims
        copies = size * len(parts) <= MOST_COPIED
        self.model = with_noise(copied(model)) if size <= MOST_COPIED else model
        self.models = [copied(self.model) if copies else self.model for _ in parts]
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))

    @contextmanager
    def _open(self, model: nn.Module) -> Iterator[PlainDraws]:
        """Around all runs of a model, which is as before afterwards."""
        flags = [(module, module.training) for module in model.modules()]
        if not self.training or not model.training:
            for module, _ in flags:
                module.training = self.training
        draws = PlainDraws(model, self.dims, 0)
        draws.draws.lenient = True
        try:
            with undisturbed(model, torch.get_default_dtype()):
                yield draws
        finally:
            draws.close()
            for module, flag in flags:
                module.training = flag

    @contextmanager
    def _forward(self, draws: PlainDraws, micro_batch: int, rows: int) -> Iterator[None]:
        with (
            torch.set_grad_enabled(self.training),
            generators.seeded(micro_batch),
            draws.at(step=0, micro_batch=micro_batch, rows=rows),
        ):
            yield

    def alone(
        self,
        fed: list[Any],
        loss: batches.Loss | None,
        *,
        overlaps: bool = False,
        between: Callable[[], None] | None = None,
    ) -> Ran:
        """The model's own code, one micro-batch after the other.

        `overlaps`: all forwards run before the first backward. `between` is called after a
        micro-batch, before the next.
        """
        model, losses = self.model, []
        with _without_gradients([model]), self._open(model) as draws:
            before = _buffers(model)
            for number, batch in enumerate(fed):
                if number and between is not None:
                    between()
                with self._forward(draws, number, batches.num_rows(batch)):
                    value = batches.call_model(model, loss, batches.own(batch))["loss"]
                losses.append(value)
                if not overlaps:
                    self._back(value)
            for value in losses if overlaps else ():
                self._back(value)
            losses = [value.detach() for value in losses]
            return Ran(losses, _gradients([model]), _changed(before, _buffers(model)))

    def _back(self, value: Tensor) -> None:
        if self.training and value.requires_grad:
            torch.autograd.backward(value)

    def together(self, fed: list[Any], *, overlaps: bool) -> Ran:
        """The stages, one after the other; then their backwards, the last one first.

        `overlaps`: a micro-batch's forward runs before the backward of the one before it.
        """
        with _without_gradients(self.models), ExitStack() as stack:
            before = [_buffers(model) for model in self.models]
            every = [stack.enter_context(self._open(model)) for model in self.models]
            runners = [
                CutStage(
                    part,
                    model,
                    frozenset(),
                    _Beside(draws),
                    self.device,
                    LossParts(context=draws.names.context, weighing=None, whole=True),
                )
                for part, model, draws in zip(self.parts, self.models, every, strict=True)
            ]
            flights: list[_Flight] = []
            for number, batch in enumerate(fed):
                flights.append(self._forwards(runners, every, number, batch))
                if not overlaps:
                    self._backward(flights[-1])
            for flight in flights if overlaps else ():
                self._backward(flight)
            changed: dict[str, Tensor] = {}
            for model, old in zip(self.models, before, strict=True):
                changed.update(_changed(old, _buffers(model)))
            losses = [flight.loss.detach() for flight in flights]
            return Ran(losses, _gradients(self.models), changed)

    def _forwards(
        self, runners: list[CutStage], every: list[PlainDraws], number: int, batch: Any
    ) -> _Flight:
        sent: dict[int, Tensor] = {}
        stages = []
        loss: Tensor | None = None
        rows = batches.num_rows(batch)
        for stage, draws in zip(runners, every, strict=True):
            received = {v: self._arrived(v, sent[v]) for v in _values(stage.incoming)}
            with self._forward(draws, number, rows):
                outcome = stage.forward(batch, received, rows)
            sent.update(outcome.values)
            stages.append((outcome.values, received))
            loss = outcome.loss.total if outcome.loss is not None else loss
        assert loss is not None
        return _Flight(loss, stages)

    def _arrived(self, value: int, tensor: Tensor) -> Tensor:
        arrived = tensor.detach().clone()
        return arrived.requires_grad_() if self.training and self.specs[value].grad else arrived

    def _backward(self, flight: _Flight) -> None:
        """As the executor runs them."""
        came_back: dict[int, Tensor] = {}
        pairs = zip(reversed(self.parts), reversed(flight.stages), strict=True)
        for part, (made, received) in pairs if self.training else ():
            roots = [v for v in made if v in came_back and made[v].requires_grad]
            ends = [made[v] for v in roots]
            seeds: list[Tensor | None] = [came_back[v] for v in roots]
            if part.result is not None and flight.loss.requires_grad:
                ends.append(flight.loss)
                seeds.append(None)
            if ends:
                torch.autograd.backward(ends, seeds)
            for value, tensor in received.items():
                if tensor.grad is not None:
                    known = came_back.get(value)
                    came_back[value] = tensor.grad if known is None else known + tensor.grad


def _values(edges: Any) -> list[int]:
    return [value for values in edges.values() for value in values]


@contextmanager
def _without_gradients(models: list[nn.Module]) -> Iterator[None]:
    """Inside, parameters have no gradient yet; those they had are put back."""
    every = {id(p): p for model in models for p in model.parameters()}
    before = [(p, p.grad) for p in every.values()]
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in before:
            parameter.grad = grad


def _gradients(models: list[nn.Module]) -> dict[str, Tensor]:
    """The sum over the copies; none is zero: what gets none at all is looked for elsewhere."""
    found: dict[str, Tensor] = {}
    for model in {id(model): model for model in models}.values():
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                grad = parameter.grad.detach().to_dense()
                found[name] = found[name] + grad if name in found else grad
    return found


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def _changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: tensor
        for name, tensor in after.items()
        if name not in before or not close(before[name], tensor, 0.0)
    }


def difference(want: Ran, got: Ran) -> str:
    """What is not the same; "" if all is."""
    far = allowed(want.losses[0].dtype)
    for number, (a, b) in enumerate(zip(want.losses, got.losses, strict=True)):
        if not close(a, b, far):
            said = f"their loss is {float(b):.6g}, the model's {float(a):.6g}"
            return said + (" in the second forward" if number else "")
    largest = max((_size(g) for g in want.gradients.values()), default=0.0)
    for name in sorted(want.gradients.keys() | got.gradients.keys()):
        here = want.gradients.get(name, got.gradients.get(name))
        assert here is not None
        a = want.gradients.get(name, torch.zeros_like(here))
        b = got.gradients.get(name, torch.zeros_like(here))
        if not bool(a.isfinite().all()):
            continue
        apart, own = _size(a - b), max(far, allowed(a.dtype))
        if not apart <= GRADIENT * own * max(_size(a), _FLOOR * largest):
            return (
                f"the gradient of {name} is off by {apart:.2g}, with entries up to {_size(a):.2g}"
            )
    for name in sorted(want.buffers.keys() | got.buffers.keys()):
        if name not in got.buffers or name not in want.buffers:
            who = "the model" if name in want.buffers else "a stage"
            return f"the buffer {name} is changed by {who} alone"
        if not close(want.buffers[name], got.buffers[name], far):
            return (
                f"the buffer {name} differs afterwards (what a checkpoint runs again changes it in "
                "another order, where several micro-batches are under way)"
            )
    return ""


def _size(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0
