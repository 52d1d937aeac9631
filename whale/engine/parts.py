"""Parts against whole: can this model's loss be computed in parts, and how? Tried at build time.

Place in the flow: called by `wh.parallelize` before lowering, and by Step again on rows it trains
on. A loss that does not come out the same when the rows are computed apart is refused here, never
silently weighed (design, decision 5). What rows do to each other by design is held (`engine.held`);
batches with holes are tried beside the real one (`engine.holes`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from whale.engine import norm_calls
from whale.engine.held import MOST_COPIED, Quiet, held, noisy_copy, undisturbed
from whale.engine.holes import with_holes
from whale.engine.norm_calls import Calls, joins_norms
from whale.engine.stillness import function_as_before
from whale.engine.weights import copied
from whale.errors import WhaleError
from whale.ir.plan import Plan
from whale.nn.randomness import BatchDims, Draws, PlainDraws
from whale.nn.router_losses import computed_by, has_router_losses, leaves
from whale.runtime import batch as batches
from whale.runtime import generators
from whale.runtime.compat import about_fakes
from whale.runtime.weighing import MeanTracker, Trial, Weighed, Weighing

# Rows tried, spread over the batch: the first ones alone may look alike where others differ.
_ROWS, _FEW_ROWS = 6, 4
_LARGE = 1e9
"""Parameters times elements of a row, from which on fewer rows are tried, in fewer ways; times
elements of the batch, from which on not all of it is tried."""
_EXACT = 1e-9
_TOLERANCE = {torch.float64: 5e-6, torch.float32: 3e-5}
"""Of a loss, where something is computed in less than float64, whatever the weights are in."""
_COARSE = 2e-2
_GRADIENT = 20.0
"""Times as far may gradients be apart."""

_HINT = (
    "average with a torch loss (F.cross_entropy, F.mse_loss, Tensor.mean, ...) or a sum by a count "
    "((x * mask).sum() / mask.sum()), which Whale weighs by its count, or say both with "
    "wh.weighted_mean(total, count); set Config check_parts=False only if rows interact on purpose"
)


def check_parts(
    model: nn.Module,
    batch: Any,
    loss: batches.Loss | None,
    plan: Plan,
    dims: BatchDims | None = None,
) -> Trial:
    """Compares the loss and the gradients of a few rows with those of the same rows in two parts.

    What the model draws is the same for the same rows; `dims` say where they are in each draw.
    Without, draws are constants.
    Nothing is tried where one replica computes all rows of a step at once, nor on the meta device,
    where there are no values yet.
    """
    replicas = max(len(stage.virtual_device.replicas) for stage in plan.stages)
    total = batches.num_rows(batch)
    tensors = [*model.parameters(), *model.buffers(), *batches.leaves(batch)]
    size = sum(p.numel() for p in model.parameters())
    width = max(t.numel() // total for t in batches.leaves(batch) if batches.has_rows(t, total))
    large = size > MOST_COPIED or size * width > _LARGE
    rows = min(_FEW_ROWS if large else _ROWS, total)
    alone = replicas == 1 and plan.num_micro_batch == 1
    if alone or any(t.is_meta for t in tensors):
        return Trial(router_losses=has_router_losses(model))
    if rows < 2:
        raise WhaleError(
            f"the example batch has one row, and the plan computes batches in parts ({replicas} "
            f"replicas, {plan.num_micro_batch} micro-batches): whether that changes the loss "
            "cannot be tried",
            hint="give parallelize a batch of two rows or more",
        )
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    few = batches.spread_rows(batch, rows, device)
    own = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    copied = size <= MOST_COPIED
    dtypes = [torch.float64, torch.float32, own] if copied else [own]
    error: Exception | None = None
    for dtype in dict.fromkeys(dtypes):
        try:
            made = Rows(model, loss, few, dtype, copied=copied, dims=dims, joins=joins_norms(plan))
            trial = made.trial(large=large)
        except WhaleError:
            raise
        except Exception as found:  # noqa: BLE001 - a user's code in a dtype it was not made for
            error = error or found
            continue
        if trial.weighing is not None and trial.weighing.joins and plan.num_micro_batch > 1:
            raise WhaleError(
                "the loss adds means over different counts, which no single weight of a "
                f"micro-batch makes exact, and the plan has {plan.num_micro_batch} micro-batches",
                hint="plan one micro-batch (pipeline.num_micro_batch=1): replicas then tell each "
                "other their counts; or use one count for all terms: n = mask.sum(), "
                "wh.weighted_mean(a + b, n)",
            )
        if trial.weighing is not None and size * width * total <= _LARGE:
            every = batches.take_rows(batch, 0, total, device)  # code that looks at their number
            joins = joins_norms(plan)
            made = Rows(model, loss, every, dtype, copied=copied, dims=dims, joins=joins)
            made.again(trial.weighing)
        return trial
    assert error is not None
    if about_fakes(error):
        raise error
    raise WhaleError(
        f"the model does not run on {rows} of the batch's {total} rows: "
        f"{type(error).__name__}: {error}",
        hint="tensors of the batch whose first dim is the number of rows are taken to have one "
        "entry for each: give a tensor that has none another first dim (unsqueeze(0))",
    ) from error


Whole = tuple[Tensor, list[Tensor | None], Calls]
"""The loss of rows computed at once, its gradients, and what batch norms saw."""


@dataclass(slots=True)
class _Calls:
    """What router losses were called with, and what they gave on the whole."""

    given: list[list[Tensor]]
    values: list[Any]


class KeyedRuns(Protocol):
    """Draws by step and row, around one forward."""

    draws: Draws

    def at(
        self, *, step: int, first_row: int, rows: int, micro_rows: int
    ) -> AbstractContextManager[None]:
        """Around one forward, on `rows` rows that start at `first_row` of the global batch."""
        ...


class Rows:
    """Some rows, to be computed at once and in parts.

    Args:
        model: The user's, or what it was lowered to.
        loss: As the user gave it.
        few: The rows.
        dtype: To compute them in.
        copied: Whether on a copy of the model, in that dtype, with gradients.
        dims: Where draws have their rows, of a model that does not key them by itself.
        keyed: The runs of one that does. With neither, draws are constants.
        joins: Whether batch norms of replicas meet.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: batches.Loss | None,
        few: Any,
        dtype: torch.dtype,
        *,
        copied: bool,
        dims: BatchDims | None = None,
        keyed: KeyedRuns | None = None,
        joins: bool = False,
    ) -> None:
        self.dtype, self.joins = dtype, joins
        self.norms: list[Calls] = []
        self.original = model
        self.model = noisy_copy(model, dtype) if copied else model
        self.gradients = copied and dtype in _TOLERANCE
        self.loss = copy.deepcopy(loss).to(dtype) if isinstance(loss, nn.Module) else loss
        self.few = _cast(few, dtype)
        self.rows = batches.num_rows(few)
        # One row and the others; and halves, of which neither is easily without weight.
        self.cuts = tuple(dict.fromkeys((1, self.rows // 2)))
        self.held = _Calls([], [])
        self.dims = dims
        self.quiet = Quiet(draws=dims is None and keyed is None)
        self.draws = keyed
        self.unplaced = len(keyed.draws.unplaced) if keyed is not None else 0

    @contextmanager
    def _still(self) -> Iterator[None]:
        """Around all runs, and their backwards: parts of a forward may be recomputed there."""
        with (
            held(self.model),
            undisturbed(self.model, self.dtype),
            self.quiet,
            ExitStack() as stack,
        ):
            if self.dims is not None:
                plain = PlainDraws(self.model, self.dims, 0)
                plain.draws.lenient = True
                stack.callback(plain.close)
                self.draws, self.unplaced = plain, 0
            yield

    def trial(self, *, large: bool = False) -> Trial:
        """Tries the rows as they are, then with holes; `large`: not in all ways."""
        with self._still():
            whole = self._plain(self.few)
        if not bool(torch.isfinite(whole[0])) and self.model is not self.original:
            self.model = copied(self.original).to(self.dtype)  # as it is, without noise
            with self._still():
                whole = self._plain(self.few)
        # Draws of which it cannot be told whose row they are for: replicas are refused later.
        if not bool(torch.isfinite(whole[0])) or self._any_unplaced():
            return Trial(router_losses=bool(self.held.values))
        with self._still():
            return self._trial(whole, large=large)

    def _trial(self, whole: Whole, *, large: bool) -> Trial:
        try:
            weighing = self._classified()
            self._compare(self.few, weighing, "", self.cuts[-1:] if large else self.cuts, whole)
        except WhaleError:
            raise
        except Exception as error:
            raise WhaleError(
                f"the loss of {self.rows} rows can be computed at once, but not of some of them: "
                f"{type(error).__name__}: {error}",
                hint=_HINT,
            ) from error
        for number, (text, batch) in enumerate(with_holes(self.few, self.rows)):
            if large and number:
                break
            try:
                whole = self._plain(batch)
            except Exception:  # noqa: BLE001, S112 - a hole that the model does not take
                continue
            if bool(torch.isfinite(whole[0])):
                cuts = self.cuts[:1] if large else self.cuts
                self._compare(batch, weighing, text, cuts, whole)
        return Trial(weighing=weighing, router_losses=bool(self.held.values))

    def again(self, weighing: Weighing) -> None:
        """Tries the rows as they are, weighed as an earlier trial found."""
        with self._still():
            self._again(weighing)

    def _again(self, weighing: Weighing) -> None:
        try:
            whole = self._plain(self.few)
            rows = batches.num_rows(self.few)
            tracker, value = self._tracked(self.few, rows)
        except Exception:  # noqa: BLE001 - the step itself says what is wrong
            return
        if self._any_unplaced():
            return
        same = len(tracker.divisors(value) or ()) == len(weighing.divisors)
        if same and not self.held.values and bool(torch.isfinite(whole[0])):
            self._compare(self.few, weighing, "rows of this batch", self.cuts, whole)

    def _any_unplaced(self) -> bool:
        return self.draws is not None and len(self.draws.draws.unplaced) > self.unplaced

    def _classified(self) -> Weighing | None:
        """Numbers that the loss is divided by: the same for all parts, or counts?"""
        found = []
        for low, high in ((0, self.rows), (0, 1), (1, self.rows)):
            part = batches.take_rows(self.few, low, high)
            tracker, value = self._tracked(part, high - low, first=low)
            found.append((tracker, value, tracker.divisors(value)))
        whole, first, second = (divisors for _, _, divisors in found)
        if whole is None and first is None and second is None:
            return Weighing(divisors=(), means=())
        if whole is None or first is None or second is None:
            return None
        if not len(whole) == len(first) == len(second):
            raise WhaleError(
                f"the loss of {self.rows} rows is made of {len(whole)} sums or means, that of some "
                f"of them of {len(first)} and {len(second)}",
                hint=_HINT,
            )
        kinds = []
        for a, b, c in zip(whole, first, second, strict=True):
            if _close(a, b) and _close(a, c):
                kinds.append("same")
            elif _close(a, b + c):
                kinds.append("count")
            else:
                raise WhaleError(
                    f"the loss of {self.rows} rows is divided by {a:.6g}, in two parts by {b:.6g} "
                    f"and {c:.6g}: neither one number nor a count",
                    hint=_HINT,
                )
        tracker, value, _ = found[0]
        weighing = Weighing(divisors=tuple(kinds), means=tracker.means(value, tuple(kinds)))
        return replace(weighing, joins=tracker.num_counts(value, weighing) > 1)

    def _compare(
        self,
        batch: Any,
        weighing: Weighing | None,
        text: str,
        cuts: tuple[int, ...],
        whole: Whole,
    ) -> None:
        for cut in cuts:
            taken = [batches.take_rows(batch, *rows) for rows in ((0, cut), (cut, self.rows))]
            try:
                parts = self._parts(taken, weighing)
            except Exception:
                if text:  # loud in training too
                    return
                raise
            about = f" (tried with {text})" if text else ""
            if self.joins:
                norm_calls.compare(whole[2], self.norms[-2:], self._tolerance(), about)
            self._compare_parts(parts, whole[0], whole[1], about)

    def _compare_parts(
        self, parts: list[Weighed], value: Tensor, gradients: list[Tensor | None], about: str
    ) -> None:
        count = sum(float(part.count) for part in parts)
        count = max(count, sum(float(part.floor) for part in parts))
        total = parts[0].total + parts[1].total
        apart = float(total.detach()) / count if count else float("nan")
        tolerance = self._tolerance()
        scale = max(abs(float(value)), abs(apart), 1e-12)
        if not abs(float(value) - apart) <= tolerance * scale:
            raise WhaleError(
                f"the loss of {self.rows} rows is {float(value):.6g} computed at once and "
                f"{apart:.6g} in two parts{about}",
                hint=_HINT,
            )
        if not self.gradients or not total.requires_grad or not _finite(gradients):
            return
        error = _distance(gradients, self._gradients(total / count))
        if not error <= _GRADIENT * tolerance:
            raise WhaleError(
                f"the loss of {self.rows} rows is {float(value):.6g} at once and in two parts, but "
                f"its gradients differ by {error:.2g} of their size{about}",
                hint=_HINT,
            )

    def _tolerance(self) -> float:
        if self.quiet.half:
            return _COARSE
        return _TOLERANCE.get(self.dtype, _COARSE) if self.quiet.narrow else _EXACT

    def _parts(self, taken: list[Any], weighing: Weighing | None) -> list[Weighed]:
        """What the two parts add, each of which knows the counts of both."""
        counts: list[Tensor] = []

        def note(numbers: Tensor) -> Tensor:
            counts.append(numbers)
            return numbers

        def known(_: Tensor) -> Tensor:
            return counts[0] + counts[1]

        calls: list[_Calls] = []
        ran, first = [], 0
        for part in taken:
            rows = batches.num_rows(part)
            ran.append((*self._tracked(part, rows, calls, first=first), rows / self.rows))
            first += rows
        self._check_gathered(calls)
        if weighing is not None and weighing.joins:
            for tracker, value, share in ran:
                tracker.weigh(value, share, weighing, note)
        return [tracker.weigh(value, share, weighing, known) for tracker, value, share in ran]

    # ---- running the model -----------------------------------------------------------------------

    def _plain(self, batch: Any) -> Whole:
        """The loss of the rows at once and its gradients, by plain torch."""
        self.held = _Calls([], [])

        def hold(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            value = function(*args, **kwargs)
            value = value.detach() if isinstance(value, Tensor) else value
            self.held.given.append([t.detach() for t in leaves((args, kwargs)) if t.dim()])
            self.held.values.append(value)
            return value

        value = self._run(batch, None, hold, 0, self.rows)
        gradients: list[Tensor | None] = []
        if self.gradients and value.requires_grad:
            gradients = self._gradients(value)
        return value.detach(), gradients, self.norms[-1]

    def _tracked(
        self, batch: Any, rows: int, calls: list[_Calls] | None = None, *, first: int = 0
    ) -> tuple[MeanTracker, Tensor]:
        mine = _Calls([], [])

        def replay(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            mine.given.append([t.detach() for t in leaves((args, kwargs)) if t.dim()])
            place = len(mine.given) - 1
            if place < len(self.held.values):
                return self.held.values[place]
            value = function(*args, **kwargs)
            return value.detach() if isinstance(value, Tensor) else value

        tracker = MeanTracker(rows)
        value = self._run(batch, tracker, replay, first, rows)
        if calls is not None:
            calls.append(mine)
        return tracker, value

    def _run(
        self, batch: Any, tracker: MeanTracker | None, router: Any, first: int, rows: int
    ) -> Tensor:
        loss = self.loss
        mode = tracker or nullcontext()

        def watched(output: Any, target: Any) -> Any:
            assert loss is not None
            with mode:
                return loss(output, target)

        place: AbstractContextManager[None] = nullcontext()
        if self.draws is not None:
            place = self.draws.at(step=0, first_row=first, rows=rows, micro_rows=self.rows)
        with (
            undisturbed(self.model, self.dtype),
            function_as_before(loss),
            generators.seeded(0),
            torch.set_grad_enabled(self.gradients),
            computed_by(self.model, router),
            place,
            norm_calls.noted(self.model, self.joins) as norms,
        ):
            self.norms.append(norms)
            if loss is None:
                with mode:
                    value = batches.call_model(self.model, None, batch)["loss"]
            else:
                value = batches.call_model(self.model, watched, batch)["loss"]
        assert isinstance(value, Tensor)
        return value

    def _gradients(self, value: Tensor) -> list[Tensor | None]:
        # Not `autograd.grad`, which a reentrant checkpoint does not take part in.
        wanted = [p for p in self.model.parameters() if p.requires_grad]
        torch.autograd.backward(value)
        found = [p.grad for p in wanted]
        for parameter in wanted:
            parameter.grad = None
        return found

    def _check_gathered(self, calls: list[_Calls]) -> None:
        """Router losses: is what the parts are computed from, put together, that of the whole?"""
        whole = self.held.given
        same = all(len(part.given) == len(whole) for part in calls)
        for place, tensors in enumerate(whole if same else ()):
            given = [part.given[place] for part in calls]
            same = same and all(len(part) == len(tensors) for part in given)
            for index, tensor in enumerate(tensors if same else ()):
                same = same and all(p[index].shape[1:] == tensor.shape[1:] for p in given)
                joined = torch.cat([p[index] for p in given]) if same else tensor
                same = same and joined.shape == tensor.shape
                same = same and torch.allclose(joined.double(), tensor.double(), 1e-4, 1e-5)
        if not same:
            raise WhaleError(
                "the model's router loss is computed from tensors whose first dim is not the "
                "tokens in the order of rows, so replicas cannot put theirs together",
                hint="turn the router loss off (output_router_logits=False), or use wh.nn.MoE",
            )


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    tensors = [t.to(dtype) if t.is_floating_point() else t for t in batches.leaves(batch)]
    return batches.rebuild(batch, tensors)


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-6 * max(abs(a), abs(b), 1e-12)


def _finite(gradients: list[Tensor | None]) -> bool:
    return all(g is None or bool(g.isfinite().all()) for g in gradients)


def _distance(want: list[Tensor | None], got: list[Tensor | None]) -> float:
    apart = size = 0.0
    for a, b in zip(want, got, strict=True):
        if a is None and b is None:
            continue
        a = torch.zeros_like(b) if a is None and b is not None else a
        b = torch.zeros_like(a) if b is None and a is not None else b
        assert a is not None and b is not None
        apart += float((a - b).double().square().sum())
        size += float(a.double().square().sum())
    return float((apart / max(size, 1e-24)) ** 0.5)
