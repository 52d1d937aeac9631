"""Trial rows: a few rows computed at once and in parts, and the two compared.

Place in the flow: `engine.trials.parts` tries them at build, `engine.watch.recheck` while training.
What rows do to each other by design is held (`engine.trials.held`); batches with holes are tried
beside the real one (`engine.trials.holes`). Every run has rows and buffers of its own, and weights
where a forward writes to them: code that changes them in place changes nothing for the next run.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from whale.engine.state.copies import copied, in_dtype, module_in
from whale.engine.state.outside import Outside
from whale.engine.trials import norm_calls
from whale.engine.trials.differences import (
    GRADIENT,
    detached,
    distance,
    finite,
    gradients_of,
    one_number,
    refuse_other_outputs,
)
from whale.engine.trials.held import Quiet, held, noisy_copy, undisturbed
from whale.engine.trials.holes import with_holes
from whale.engine.trials.router_calls import RouterCalls
from whale.errors import WhaleError
from whale.nn.randomness import BatchDims, Draws, PlainDraws
from whale.nn.router_losses import computed_by
from whale.runtime import batch as batches
from whale.runtime import generators
from whale.runtime.outputs import Merge, Part
from whale.runtime.sums import refuse_other_sizes
from whale.runtime.weighing import MeanTracker, Trial, Weighed, Weighing

_EXACT = 1e-9
_TOLERANCE = {torch.float64: 5e-6, torch.float32: 3e-5}
"""Of a loss, where something is computed in less than float64, whatever the weights are in."""
_COARSE = 2e-2

_HINT = (
    "average with a torch loss (F.cross_entropy, F.mse_loss, Tensor.mean, ...) or a sum by a count "
    "((x * mask).sum() / mask.sum()), which Whale weighs by its count, or say both with "
    "wh.weighted_mean(total, count); set Config check_parts=False only if rows interact on purpose"
)

_IN_EVALUATION = "in eval mode too, let rows have nothing to do with each other: "


@dataclass(frozen=True, slots=True)
class _Whole:
    """What the rows give at once, by plain torch."""

    value: Tensor
    gradients: list[Tensor | None]
    named: dict[str, Any]
    norms: norm_calls.Calls

    @property
    def finite(self) -> bool:
        return bool(torch.isfinite(self.value))


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
        outputs: Named outputs to compare, as they are merged.
        written: Parameters that a forward writes to; None: found in the first run.
        joins: Whether batch norms of replicas meet.
        in_turn: Whether parts run one after another, and do not know each other's counts.
        training: Whether in training mode, with gradients.
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
        outputs: Mapping[str, Merge] | None = None,
        written: Collection[str] | None = None,
        joins: bool = False,
        in_turn: bool = False,
        training: bool = True,
    ) -> None:
        self.dtype, self.joins, self.in_turn = dtype, joins, in_turn
        self.norms: list[norm_calls.Calls] = []
        self.training = training
        self.outputs = dict(outputs or {})
        self.written = written
        self.named: dict[str, Any] = {}
        self.stand_ins: dict[int, list[nn.Parameter]] = {}
        self.original = model
        self.model = noisy_copy(model, dtype) if copied else model
        self.gradients = training and copied and dtype in _TOLERANCE
        self.loss = module_in(copy.deepcopy(loss), dtype) if isinstance(loss, nn.Module) else loss
        self._take(few)
        self.held = RouterCalls()
        self._around: tuple[nn.Module, Outside] | None = None
        self.dims = dims
        self.quiet = Quiet(draws=dims is None and keyed is None)
        self.draws = keyed
        self.unplaced = len(keyed.draws.unplaced) if keyed is not None else 0

    def _take(self, few: Any) -> None:
        self.few = batches.rebuild(few, [in_dtype(t, self.dtype) for t in batches.leaves(few)])
        self.rows = batches.num_rows(few)
        # One row and the others; and halves, of which neither is easily without weight.
        self.cuts = tuple(dict.fromkeys((1, self.rows // 2)))

    def on(self, few: Any) -> Rows:
        """The same model and loss on other rows."""
        made = copy.copy(self)
        made._take(few)
        return made

    @contextmanager
    def _still(self) -> Iterator[None]:
        """Around all runs, and their backwards: parts of a forward may be recomputed there."""
        with (
            held(self.model, training=self.training),
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
        if not whole.finite and self.model is not self.original:
            self.model = module_in(copied(self.original), self.dtype)  # as it is, without noise
            with self._still():
                whole = self._plain(self.few)
        # Draws of which it cannot be told whose row they are for: replicas are refused later.
        if not whole.finite or self._any_unplaced():
            return Trial(router_losses=bool(self.held.values))
        with self._still():
            return self._trial(whole, large=large)

    def _trial(self, whole: _Whole, *, large: bool) -> Trial:
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
        self._with_holes(weighing, large=large)
        return Trial(
            weighing=weighing,
            router_losses=bool(self.held.values),
            written=frozenset(self.written or ()),
        )

    def _with_holes(self, weighing: Weighing | None, *, large: bool) -> None:
        # What is out of range raises on a CPU, and ends the process's use of a GPU.
        gpu = any(t.is_cuda for t in batches.leaves(self.few))
        if gpu and self.model is not self.original:
            with (tried := self._on_cpu())._still():
                tried._with_holes(weighing, large=large)
            return
        ignored = not (gpu or self.quiet.unchecked)
        changed = with_holes(self.few, self.rows, ignored=ignored)
        for number, (text, batch) in enumerate(changed):
            if large and number:
                break
            try:
                whole = self._plain(batch)
            except Exception:  # noqa: BLE001, S112 - a hole that the model does not take
                continue
            if whole.finite:
                cuts = self.cuts[:1] if large else self.cuts
                self._compare(batch, weighing, text, cuts, whole)

    def _on_cpu(self) -> Rows:
        """The same rows of a copy of the model there."""
        made = self.on(batches.rebuild(self.few, [t.cpu() for t in batches.leaves(self.few)]))
        made.model = copied(self.model).cpu()
        if isinstance(self.loss, nn.Module):
            made.loss = copied(self.loss).cpu()
        return made

    def evaluate(self, weighing: Weighing, *, large: bool = False) -> None:
        """Tries the rows in evaluation, whose code may be another, weighed as in training.

        What does not run there is for `step.evaluate` to say.
        """
        tried = copy.copy(self)
        tried.training, tried.gradients = False, False
        with tried._still(), torch.no_grad():
            try:
                whole = tried._plain(tried.few)
            except Exception:  # noqa: BLE001 - a model that gives no loss in evaluation, say
                return
            if not whole.finite or tried._any_unplaced():
                return
            tried._compare(tried.few, weighing, "", tried.cuts, whole)
            if not large:
                tried._with_holes(weighing, large=False)

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
        if same and not self.held.values and whole.finite:
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
            if one_number(a, b) and one_number(a, c):
                kinds.append("same")
            elif one_number(a, b + c):
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
        whole: _Whole,
    ) -> None:
        for cut in cuts:
            taken = [batches.take_rows(batch, *rows) for rows in ((0, cut), (cut, self.rows))]
            try:
                parts, named = self._parts(taken, weighing)
            except Exception:
                if text or not self.training:  # loud in the step too
                    return
                raise
            said = [] if self.training else ["in evaluation"]
            said += [f"tried with {text}"] if text else []
            about = f" ({', '.join(said)})" if said else ""
            if self.training:
                norm_calls.compare(whole.norms, self.norms[-2:], self._tolerance(), about)
            self._compare_parts(parts, whole, about)
            everything = (0, self.rows, whole.named)
            refuse_other_outputs(
                self.outputs, everything, named, GRADIENT * self._tolerance(), about
            )

    def _compare_parts(self, parts: list[Weighed], whole: _Whole, about: str) -> None:
        value, gradients = whole.value, whole.gradients
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
                hint=_HINT if self.training else f"{_IN_EVALUATION}{_HINT}",
            )
        if not self.gradients or not total.requires_grad or not finite(gradients):
            return
        error = distance(gradients, self._gradients(total / count))
        if not error <= GRADIENT * tolerance:
            raise WhaleError(
                f"the loss of {self.rows} rows is {float(value):.6g} at once and in two parts, but "
                f"its gradients differ by {error:.2g} of their size{about}",
                hint=_HINT,
            )

    def _tolerance(self) -> float:
        if self.quiet.half:
            return _COARSE
        return _TOLERANCE.get(self.dtype, _COARSE) if self.quiet.narrow else _EXACT

    def _parts(
        self, taken: list[Any], weighing: Weighing | None
    ) -> tuple[list[Weighed], list[Part]]:
        """What the two parts add, each of which knows the counts of both; and named outputs."""
        self.stand_ins = {}
        named: list[Part] = []
        counts: list[Tensor] = []

        def note(numbers: Tensor) -> Tensor:
            counts.append(numbers)
            return numbers

        def known(_: Tensor) -> Tensor:
            return counts[0] + counts[1]

        calls: list[RouterCalls] = []
        ran, first = [], 0
        for part in taken:
            rows = batches.num_rows(part)
            ran.append((*self._tracked(part, rows, calls, first=first), rows / self.rows))
            named.append((first, rows, self.named))
            first += rows
        self.held.refuse_other_parts(calls)
        meet = None if self.in_turn else known
        if weighing is not None and weighing.joins and not self.in_turn:
            for tracker, value, share in ran:
                tracker.weigh(value, share, weighing, note)
        found = [tracker.weigh(value, share, weighing, meet) for tracker, value, share in ran]
        refuse_other_sizes(torch.stack([part.numbers for part in found]).sum(0).tolist())
        return found, named

    # ---- running the model -----------------------------------------------------------------------

    def _plain(self, batch: Any) -> _Whole:
        """The loss of the rows at once and its gradients, by plain torch."""
        if self.written is not None:
            return self._at_once(batch)
        try:
            return self._at_once(batch)
        except WhaleError:
            raise
        except Exception:
            if self.written is None:
                raise
        # By now it is known who is written to: code that runs a module in its backward wants the
        # weights that its forward had, which all others keep.
        return self._at_once(batch)

    def _at_once(self, batch: Any) -> _Whole:
        self.held, self.stand_ins = RouterCalls(), {}
        value = self._run(batch, None, self.held.compute, 0, self.rows)
        gradients: list[Tensor | None] = []
        if self.gradients and value.requires_grad:
            gradients = self._gradients(value)
        return _Whole(value.detach(), gradients, self.named, self.norms[-1])

    def _tracked(
        self, batch: Any, rows: int, calls: list[RouterCalls] | None = None, *, first: int = 0
    ) -> tuple[MeanTracker, Tensor]:
        mine = RouterCalls(whole=self.held)
        tracker = MeanTracker(rows)
        value = self._run(batch, tracker, mine.compute, first, rows)
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
        batch = batches.own(batch)
        with (
            self._outside().kept(),
            undisturbed(self.model, self.dtype, self.written) as stand_ins,
            generators.seeded(0),
            torch.set_grad_enabled(self.gradients),
            computed_by(self.model, router),
            place,
            norm_calls.noted(self.model, self.joins) as norms,
        ):
            self.norms.append(norms)
            if loss is None:
                with mode:
                    named = batches.call_model(self.model, None, batch)
            else:
                named = batches.call_model(self.model, watched, batch)
        self.written = stand_ins.written()
        for parameter, own in stand_ins.pairs:
            self.stand_ins.setdefault(id(parameter), []).append(own)
        self.named = {name: detached(named.get(name)) for name in self.outputs}
        value = named["loss"]
        assert isinstance(value, Tensor)
        return value

    def _outside(self) -> Outside:
        """What the code of this model and this loss changes beside modules; found once."""
        if self._around is None or self._around[0] is not self.model:
            self._around = self.model, Outside(self.model, self.loss)
        return self._around[1]

    def _gradients(self, value: Tensor) -> list[Tensor | None]:
        wanted = [p for p in self.model.parameters() if p.requires_grad]
        every = [(p, *self.stand_ins.get(id(p), ())) for p in wanted]
        gradients = iter(gradients_of(value, [p for each in every for p in each]))
        found: list[Tensor | None] = []
        for each in every:
            own = [g for g in (next(gradients) for _ in each) if g is not None]
            found.append(torch.stack(own).sum(0) if len(own) > 1 else next(iter(own), None))
        return found
