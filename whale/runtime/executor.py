"""The executor: runs one rank's actions, the very list the Schedule generates, checks and draws.

Place in the flow: built by `engine.lower`, called by Step. It knows stages, values and messages,
and nothing of planning. Compute waits only for what it needs; sends and receives are posted as the
schedule says.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from whale.errors import CaptureError, PlanError, WhaleError
from whale.ir.plan import Plan
from whale.ir.schedule import Action
from whale.ir.updates import Update, completed_by
from whale.ir.virtual_device import micro_batch_cuts
from whale.runtime import batch as batches
from whale.runtime import recompute, transfers
from whale.runtime.clock import StepClock
from whale.runtime.compat import is_fake
from whale.runtime.context import Place, StepContext, step_backward
from whale.runtime.empty_rows import EmptyRows
from whale.runtime.generators import untouched
from whale.runtime.grads import GradientBuckets
from whale.runtime.loss_scale import LossScale
from whale.runtime.outputs import Part
from whale.runtime.signature import Context
from whale.runtime.stage import (
    Border,
    DeferredWork,
    Outcome,
    StageModule,
    Stages,
    WeightGradient,
)
from whale.runtime.transfers import Channels
from whale.runtime.weighing import NUMBERS, gradient_factor


@dataclass(slots=True)
class _Flight:
    """One micro-batch between its forward and its backward on one stage."""

    place: Place
    received: dict[int, torch.Tensor]
    outcome: Outcome
    nested: bool = False
    """Whether its backward runs backwards inside, each of which adds to gradients by itself."""


@dataclass(slots=True)
class _Arrival:
    """A posted receive: the works to wait for, and how to put the value together."""

    works: list[Any]
    parts: list[torch.Tensor]
    join: Callable[[list[torch.Tensor]], torch.Tensor]

    def value(self) -> torch.Tensor:
        for work in self.works:
            work.wait()
        return self.join(self.parts)


@dataclass(slots=True)
class Totals:
    """A rank's contribution to the step's global numbers."""

    sums: torch.Tensor
    """[NUMBERS]: the sum of its parts' `Weighed.numbers`."""
    named: list[Part]

    @staticmethod
    def none(device: torch.device) -> Totals:
        """Of nothing."""
        return Totals(torch.zeros(NUMBERS, dtype=torch.float64, device=device), [])


class Executor:
    """Runs steps of one rank."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        channels: Channels,
        context: StepContext,
        device: torch.device,
        skips: frozenset[int],
        queue: DeferredWork | None = None,
    ) -> None:
        self.plan, self.rank = plan, rank
        self.channels, self.context = channels, context
        self.device = device
        self.queue = queue
        self._deferred: dict[tuple[int, int], tuple[Place, Sequence[WeightGradient]]] = {}
        self.skips = skips
        """Stages that may be left out where a replica has no rows.

        No collective in them waits for it.
        """
        self.divides_ahead = False
        """Whether a backward begins with the division by the count, which is complete by then."""
        self.loss_scale: LossScale | None = None
        self.around: Context = nullcontext
        """What every forward runs in: the caller's autocast."""
        self.on_action: Callable[[int, Action | Update], None] | None = None
        self.before_backward: Callable[[list[torch.Tensor], Iterable[torch.Tensor]], None] | None
        self.before_backward = None
        """Sees the roots of every backward, and what other stages sent for it."""
        self.used: dict[int, bool] = {}
        """By value that other stages sent, whether a gradient ever came back for it."""
        self.clock = StepClock(plan, rank, device)
        self.totals = Totals.none(device)
        """Of the run so far: complete once the last forward has run."""
        self._stages: Mapping[int, StageModule] = {}
        """Of the run; with them, what crosses between stages."""
        self._borders: Sequence[Border] = ()
        self._origins: Mapping[int, str] = {}
        self._completes: Sequence[int] = ()
        """The buckets that the compute at hand completes."""
        self._flights: dict[tuple[int, int], _Flight] = {}
        self._arrivals: dict[tuple[str, int, int, int, int], _Arrival] = {}
        self._local: dict[tuple[str, int, int, int, int], torch.Tensor] = {}
        self._handlers: dict[str, Callable[[Any], None]] = {
            "F": self._forward_of,
            "B": self._backward_of,
            "I": self._input_gradients,
            "W": self._weight_gradients,
            "SF": self._send,
            "SB": self._send,
            "RF": self._post,
            "RB": self._post,
        }

    # ---- one step -------------------------------------------------------------------------------

    def run(
        self,
        batch: Any,
        actions: Sequence[Action | Update],
        stages: Stages,
        grads: GradientBuckets | None = None,
        updates: Mapping[str, Callable[[Any], None]] | None = None,
    ) -> Totals:
        """Runs `actions` on a global batch; without `grads` only forwards are meant to be in them.

        `stages` are those for batches of this kind; `updates` do what is not a compute or a
        message, by kind.
        """
        self._stages, self._borders, self._origins = stages.modules, stages.borders, stages.origins
        handlers = {**self._handlers, **(updates or {})}
        total_rows = batches.num_rows(batch)
        self._cuts = micro_batch_cuts(total_rows, self.plan.num_micro_batch)
        self._batch, self._grads = batch, grads
        self.context.batch_rows = total_rows
        if self.loss_scale is not None:
            self.loss_scale.begin(total_rows)
        self.totals = Totals.none(self.device)
        for index, action in enumerate(actions):
            if self.on_action is not None:
                self.on_action(index, action)
            if action.kind == "A":  # what is on its way belongs to what is done by now
                self.channels.drain()
            elif grads is not None and action.kind in ("B", "W"):
                self._completes = completed_by(actions, index)
            handlers[action.kind](action)
        self.channels.drain()
        self._flights.clear()
        self._arrivals.clear()
        self._local.clear()
        return self.totals

    def _arm(self, stage: int, weights: Collection[int] | None = None) -> None:
        """Lets sums begin while the compute runs that completes their buckets.

        `weights` are ids of those whose gradients it makes, if not of all of the stage's.
        """
        if self._grads is not None and self._completes:
            self._grads.arm(stage, self._completes, weights)

    def _rows(self, stage: int, micro_batch: int) -> tuple[int, int, int]:
        """(micro-batch rows, first own row, end) of a stage on this rank."""
        low, high = self._cuts[micro_batch], self._cuts[micro_batch + 1]
        start, end = self.plan.stages[stage].virtual_device.rows(self.rank, high - low)
        return high - low, start, end

    def _enter(self, stage: int, micro_batch: int) -> tuple[int, Any]:
        size, start, end = self._rows(stage, micro_batch)
        first = self._cuts[micro_batch] + start
        context = self.context
        context.stage, context.micro_batch, context.micro_rows = stage, micro_batch, size
        context.first_row, context.rows = first, end - start
        part = batches.take_rows(self._batch, first, first + end - start, self.device)
        return end - start, part

    # ---- compute --------------------------------------------------------------------------------

    def _forward_of(self, action: Action) -> None:
        stage, micro_batch = action.stage, action.micro_batch
        module = self._stages[stage]
        rows, part = self._enter(stage, micro_batch)
        received = {}
        for source, values in module.incoming.items():
            for value in values:
                tensor = self._take("F", stage, micro_batch, source, value)
                if self._borders[value].grad and torch.is_grad_enabled():
                    tensor.requires_grad_()
                received[value] = tensor
        # A micro-batch without a row anywhere is none: one device has no such forward either.
        if rows == 0 and (stage in self.skips or self.context.micro_rows == 0):
            self._forward_nothing(stage, micro_batch, received)
            return
        begun, reentrant = self.clock.begin_compute(), recompute.num_reentrant()
        outcome = self._forward(module, part, received, rows)
        nested = recompute.num_reentrant() > reentrant
        self.clock.end_compute(begun, "F", stage, rows)
        made = [*outcome.values.values(), *([] if outcome.loss is None else [outcome.loss.total])]
        if any(is_fake(tensor) for tensor in made):
            raise WhaleError(
                f"stage {stage} computes with a tensor of the trace, which has shapes and no "
                "values: the model's code keeps it outside of its modules",
                hint="a global or a cache of tensors does not reach another stage: pass tensors on "
                "as arguments, keep them in buffers, or make them anew in every forward",
            )
        self._check_values(outcome, rows)
        if outcome.loss is not None:
            _, shard = self.plan.stages[stage].virtual_device.position(self.rank)
            if shard == 0:
                self.totals.sums += outcome.loss.numbers
                named = {name: _detached(value) for name, value in outcome.named.items()}
                self.totals.named.append((self.context.first_row, rows, named))
            outcome.named = {}
        if torch.is_grad_enabled():
            self._flights[stage, micro_batch] = _Flight(
                self.context.place, received, outcome, nested
            )
        self._hand_over(stage, micro_batch, outcome)

    def _forward(
        self, module: StageModule, part: Any, received: dict[int, torch.Tensor], rows: int
    ) -> Outcome:
        try:
            with self.around(), nullcontext() if rows else EmptyRows():
                return module.forward(part, received, rows)
        except (RuntimeError, IndexError, ZeroDivisionError) as error:
            if rows:
                raise
            raise PlanError(
                f"rank {self.rank} has no rows in micro-batch {self.context.micro_batch} of stage "
                f"{self.context.stage} ({self.context.micro_rows} rows over its replicas), must "
                "run all the same because "
                "replicas wait for each other there, and the model's code does not take an empty "
                f"batch: {error}",
                hint="use a larger batch or fewer micro-batches, so that every replica has a row",
            ) from error

    def _check_values(self, outcome: Outcome, rows: int) -> None:
        """Receivers make room for what the trace said; a value that is otherwise is not sent."""
        for value, tensor in outcome.values.items():
            border = self._borders[value]
            want = border.at(rows)
            if tensor.dtype == border.dtype and tuple(tensor.shape) == want:
                continue
            raise CaptureError(
                f"a value that crosses stages is {tensor.dtype} {tuple(tensor.shape)}, and was "
                f"{border.dtype} {want} when the model was traced on shapes alone",
                hint="its dtype and shape must follow from those of the batch; keep code that "
                "decides them by values inside one annotated module, away from the border",
                where=self._origins.get(value),
            )

    def _forward_nothing(
        self, stage: int, micro_batch: int, received: dict[int, torch.Tensor]
    ) -> None:
        """A replica without rows in this micro-batch: no code runs, its values are empty."""
        values = {
            value: torch.empty(
                self._borders[value].at(0), dtype=self._borders[value].dtype, device=self.device
            )
            for values in self._stages[stage].outgoing.values()
            for value in values
        }
        outcome = Outcome(values=values)
        if torch.is_grad_enabled():
            self._flights[stage, micro_batch] = _Flight(self.context.place, received, outcome)
        self._hand_over(stage, micro_batch, outcome)

    def _hand_over(self, stage: int, micro_batch: int, outcome: Outcome) -> None:
        """Values for a stage of the same device group stay here; the rest is kept for the sends.

        Those that stay are copies: the other stage may write to them, and this one's backward may
        still need what it made.
        """
        for target, values in self._stages[stage].outgoing.items():
            for value in values:
                made = outcome.values[value].detach()
                kept = made.clone() if target in self._stages else made
                self._local["F", target, micro_batch, stage, value] = kept

    def _backward_of(self, action: Action) -> None:
        stage, micro_batch = action.stage, action.micro_batch
        flight = self._flights.pop((stage, micro_batch))
        self.context.place = flight.place
        if action.kind == "B" and not flight.nested:
            self._arm(stage)
        module = self._stages[stage]
        roots: list[torch.Tensor] = []
        seeds: list[torch.Tensor] = []
        loss = flight.outcome.loss
        if loss is not None:
            if not loss.total.requires_grad:
                raise WhaleError(
                    f"the loss of micro-batch {micro_batch} needs no gradient: it would train "
                    "nothing",
                    hint="it must depend on a parameter that requires a gradient, and not through "
                    "`detach`, `torch.no_grad` or `.item()`",
                )
            roots.append(loss.total)
            seeds.append(self._seed(loss.total))
        totals: dict[int, torch.Tensor] = {}
        for target, values in module.outgoing.items():
            for value in values:
                if self._borders[value].grad:
                    grad = self._take("B", stage, micro_batch, target, value)
                    totals[value] = totals[value] + grad if value in totals else grad
        for value, grad in totals.items():
            tensor = flight.outcome.values[value]
            if tensor.requires_grad:
                roots.append(tensor)
                seeds.append(grad)
        if self.before_backward is not None:
            self.before_backward(roots, flight.received.values())
        if roots:
            begun = self.clock.begin_compute()
            with step_backward.run(), untouched(self.context.step, 1), _in_place_said(self.plan):
                torch.autograd.backward(roots, seeds)
            self.clock.end_compute(begun, action.kind, stage, 1)
        for source, values in module.incoming.items():
            for value in values:
                if not self._borders[value].grad:
                    continue
                tensor = flight.received[value]
                self.used[value] = self.used.get(value, False) or tensor.grad is not None
                grad = tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
                self._local["B", source, micro_batch, stage, value] = grad

    def _seed(self, total: torch.Tensor) -> torch.Tensor:
        seed = torch.ones_like(total)
        if self.divides_ahead:
            seed = gradient_factor(self.totals.sums).to(total.dtype).reshape(total.shape)
        return seed if self.loss_scale is None else seed * self.loss_scale.seed

    def _input_gradients(self, action: Action) -> None:
        self._backward_of(action)
        assert self.queue is not None
        works = self.queue.take()
        self._deferred[action.stage, action.micro_batch] = self.context.place, works

    def _weight_gradients(self, action: Action) -> None:
        begun = self.clock.begin_compute()
        self.context.place, works = self._deferred.pop((action.stage, action.micro_batch))
        last = {id(weight): index for index, work in enumerate(works) for weight in work.weights}
        self._arm(action.stage, last.keys())
        for index, work in enumerate(works):
            if self._grads is not None:  # of a module that was called again, more is to come
                more = [weight for weight in work.weights if last[id(weight)] > index]
                self._grads.unfinished = frozenset(map(id, more))
            work()
        self.clock.end_compute(begun, "W", action.stage, 1)

    # ---- messages -------------------------------------------------------------------------------

    def _edge(self, producer: int, consumer: int) -> list[int]:
        if producer in self._stages:
            return self._stages[producer].outgoing.get(consumer, [])
        return self._stages[consumer].incoming.get(producer, [])

    def _ends(self, action: Action) -> tuple[str, int, int]:
        """What a message carries (F: values, B: gradients), their producer and their consumer."""
        assert action.peer is not None
        kind = action.kind[1]
        ends = (action.stage, action.peer)
        producer, consumer = ends if action.kind in ("SF", "RB") else ends[::-1]
        return kind, producer, consumer

    def _send(self, action: Action) -> None:
        """Sends the values or gradients of one edge, value by value, peer by peer."""
        kind, producer, consumer = self._ends(action)
        micro_batch = action.micro_batch
        source = self.plan.stages[producer].virtual_device
        target = self.plan.stages[consumer].virtual_device
        own, other = (producer, consumer) if kind == "F" else (consumer, producer)
        pieces = transfers.outgoing if kind == "F" else transfers.gradient_outgoing
        rows, start, _ = self._rows(own, micro_batch)
        for value in self._edge(producer, consumer):
            border = self._borders[value]
            if kind == "B" and not border.grad:
                continue
            tensor = self._local.pop((kind, other, micro_batch, own, value))
            for piece in pieces(source, target, self.rank, rows, border.batch_dim is not None):
                part = tensor
                if piece.rows is not None and border.batch_dim is not None:
                    low, high = piece.rows
                    size = (high - low) * border.factor
                    part = tensor.narrow(border.batch_dim, (low - start) * border.factor, size)
                self.channels.send(part, piece.peer)

    def _post(self, action: Action) -> None:
        """Posts the receives of one edge."""
        kind, producer, consumer = self._ends(action)
        micro_batch = action.micro_batch
        source = self.plan.stages[producer].virtual_device
        target = self.plan.stages[consumer].virtual_device
        own, other = (consumer, producer) if kind == "F" else (producer, consumer)
        pieces = transfers.incoming if kind == "F" else transfers.gradient_incoming
        rows, start, end = self._rows(own, micro_batch)
        for value in self._edge(producer, consumer):
            border = self._borders[value]
            if kind == "B" and not border.grad:
                continue
            works, parts = [], []
            batched = border.batch_dim is not None
            for piece in pieces(source, target, self.rank, rows, batched):
                count = piece.rows[1] - piece.rows[0] if piece.rows is not None else 0
                buffer = torch.empty(border.at(count), dtype=border.dtype, device=self.device)
                works.append(self.channels.receive(buffer, piece.peer))
                parts.append(buffer)
            key = (kind, own, micro_batch, other, value)
            self._arrivals[key] = _Arrival(works, parts, self._join(kind, border, end - start))

    def _join(
        self, kind: str, border: Border, rows: int
    ) -> Callable[[list[torch.Tensor]], torch.Tensor]:
        def join(parts: list[torch.Tensor]) -> torch.Tensor:
            if not parts:
                return torch.zeros(border.at(rows), dtype=border.dtype, device=self.device)
            if border.batch_dim is None:
                return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
            return parts[0] if len(parts) == 1 else torch.cat(parts, border.batch_dim)

        return join

    def _take(
        self, kind: str, stage: int, micro_batch: int, other: int, value: int
    ) -> torch.Tensor:
        key = (kind, stage, micro_batch, other, value)
        arrival = self._arrivals.pop(key, None)
        if arrival is not None:
            return arrival.value()
        return self._local.pop(key)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


@contextmanager
def _in_place_said(plan: Plan) -> Iterator[None]:
    """Around a backward: what a later forward wrote to is named as what it is."""
    try:
        yield
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        if plan.early:
            raise WhaleError(
                "a backward needs a weight as it was in the forward, by a use that autograd does "
                "not count as its gradient (weight.detach(), a frozen view), when it is updated "
                f"already (optimizer.apply_in_backward): {error}",
                hint="leave optimizer.apply_in_backward out for this model",
            ) from error
        raise WhaleError(
            "a tensor that a backward needs was written to in place; where a forward writes to a "
            "weight or a buffer (a slow copy that follows, a moving average), the next "
            f"micro-batch's forward does so before this one's backward: {error}",
            hint="use one micro-batch, or compute with a copy (`weight.clone()`) of what the "
            "forward writes to",
        ) from error
