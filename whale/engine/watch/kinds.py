"""Kinds: a batch unlike those before it is looked at as the first one was.

Place in the flow: asked by Step before it runs a batch. Capture and the trials saw the code that
runs on one batch. Another Python value, a key more or less, another length, an attribute that the
script set or a part put into eval mode may lead to other code: rows that interact, weights that are
read, other operations inside a split. So the first batch of every kind is captured and tried too
(`engine.trials.look`), on the user's model. What turns on other code without any of these, a
counter in the model or a value of the batch, shows in the calls that a forward makes
(`engine.watch.footprints`): then the batch is looked at before anything is updated, as the model
was before that forward.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from whale.engine.capture.captured import capture
from whale.engine.state import counters
from whale.engine.state.boxes import Box, Values
from whale.engine.state.changes import exact_buffers
from whale.engine.state.copies import in_precision
from whale.engine.state.counters import Place
from whale.engine.state.outside import Watch, as_it_was
from whale.engine.state.rarely import rarely
from whale.engine.trials.held import MOST_COPIED
from whale.engine.trials.look import look
from whale.engine.watch.face import bare
from whale.engine.watch.footprints import Footprints
from whale.engine.watch.novelty import Novelty
from whale.engine.watch.variants import Flags, flags_in_training, flags_of, modes_of
from whale.errors import PlanError, WhaleError
from whale.ir.model_graph import ModelGraph
from whale.ir.plan import Plan
from whale.runtime import batch as batches
from whale.runtime import generators
from whale.runtime.batch import LocalBatch
from whale.runtime.compat import compiled_parts
from whale.runtime.outputs import Merge
from whale.runtime.signature import Context, Signature

Judge = Callable[[ModelGraph, frozenset[str], frozenset[str]], None]
"""Raises where the modules that were called no longer offer what the plan splits, or parameters
that are read are a rank's part."""

_FIRST = 4
"""Batches of which each is looked at where the model counts them; then the 8th, 16th, ..."""
_SIZES = 16
"""Kinds that differ in sizes alone, of which each is looked at; then the 32nd, 64th, ..."""
_AGAIN = (8, 64)
"""Batches of a known kind that are looked at too, where nothing else tries the rows of a step."""
_WATCHED = 4
"""Batches whose calls are noted where nothing counts; then every 16th."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What decides which code runs: the batch, what the script set, modules in eval mode."""

    signature: Signature
    settings: Hashable
    flags: Flags

    @property
    def key(self) -> Hashable:
        own = self.signature
        return own.leaves, own.constants, own.training, self.settings, self.flags

    @property
    def values(self) -> Hashable:
        """All of it but sizes."""
        own = self.signature
        leaves = tuple((x.name, x.dtype, x.batched, len(x.shape)) for x in own.leaves)
        return leaves, own.constants, own.training, self.settings, self.flags


@dataclass(frozen=True, slots=True)
class _Moment:
    """What counts before a forward: in the modules that train, and outside of modules."""

    numbers: Mapping[Place, Any]
    outside: tuple[tuple[Box, Values], ...]


class Kinds:
    """The kinds of batches that one Step has met.

    Args:
        model: The user's own, in its weights from before training.
        running: This rank's copy, whose modes it is looked at in.
        loss: As the user gave it.
        plan: What runs.
        judge: Whether the plan's splits are still offered.
        outputs: Named outputs, as they are merged.
        check_parts: Whether parts are tried against the whole.
        rechecked: Whether the rows of steps are tried anyway, as they train
        (`engine.watch.recheck`). example: The batch that was tried at build. watch: What the script
        and the code change outside of modules. defers: Whether weight gradients are put off.
    """

    def __init__(
        self,
        model: nn.Module,
        running: nn.Module,
        loss: batches.Loss | None,
        plan: Plan,
        judge: Judge,
        *,
        outputs: Mapping[str, Merge],
        check_parts: bool,
        rechecked: bool,
        example: Any,
        watch: Watch,
        defers: bool,
    ) -> None:
        self.outputs = outputs
        self.model, self.running, self.loss, self.plan = model, running, loss, plan
        self.judge, self.check_parts, self.defers = judge, check_parts, defers
        self.layers = [path for t in plan.taskgraphs for path in t.layers]
        self.splits = any(t.splits for t in plan.taskgraphs)
        replicas = max(len(stage.virtual_device.replicas) for stage in plan.stages)
        parts = replicas > 1 or plan.num_micro_batch > 1
        self.needed = self.splits or parts or len(plan.stages) > 1
        small = sum(p.numel() for p in model.parameters()) <= MOST_COPIED
        self.again = parts and check_parts and small and not rechecked
        # Of batches to train on and to evaluate: the code may be another.
        self._novelty = {t: Novelty(example) for t in (True, False) if self.again}
        self._seen: set[Hashable] = set()
        self._values: set[Hashable] = set()
        self._sizes = self._uses = 0
        self._rows = dict.fromkeys((True, False), batches.num_rows(example))
        """The most rows of a batch to train on, and to evaluate."""
        self._more = False
        self._joined = exact_buffers(model)
        self._start = counters.read(running, self._joined)
        self._counting: set[str] = set()
        """Paths of modules whose forwards count something."""
        self._watch = watch
        self._footprints = None if compiled_parts(running) else Footprints()
        self._news: list[tuple[_Moment, str]] = []
        """Of the forwards of one batch."""
        self._learnt = 0
        self._known: set[tuple[bool, int]] = set()
        """Modes and stages whose code was seen to be what was looked at."""

    def built(self, signature: Signature, settings: Hashable) -> None:
        """The kind that the Step was built with, to train on and to evaluate."""
        trains = flags_in_training(self.model, self.running)
        for training, flags in ((True, trains), (False, (False,) * len(trains))):
            kind = _Kind(replace(signature, training=training), settings, flags)
            self._seen.add(kind.key)
            self._values.add(kind.values)

    def look(self, batch: LocalBatch, signature: Signature, settings: Hashable) -> None:
        """Raises if the code that runs on this batch cannot run under the plan.

        `settings`: attributes of the model that the script has set since.
        """
        if not self.needed:
            return
        self._uses += 1
        moved_late = rarely(self._uses, _FIRST) and bool(self._moved())
        rows_differ = self.again and self._uses in _AGAIN
        if self.again and self._novelty[signature.training].is_new(batch.data, _FIRST):
            rows_differ = True
        new = self._is_new(_Kind(signature, settings, flags_of(self.running)))
        new_code = self._is_more(batch.total_rows, signature.training) or new or moved_late
        if not new_code and not rows_differ:
            return
        self._known = {(t, stage) for t, stage in self._known if t != signature.training}
        try:
            # What evaluation of a known kind does to splits was looked at when it was built.
            moved = counters.moved(self._start, counters.read(self.running, self._joined))
            judges = new or signature.training or self._more
            self._look(batch, signature, moved, judges=judges, briefly=not new_code)
        except WhaleError as error:
            hints = ["give wh.parallelize such a batch, to see it at build"] if new else []
            raise WhaleError(
                f"{self._about(signature, new)}, {error.message}",
                hint="; ".join([*hints, error.hint] if error.hint else hints) or None,
            ) from error

    def _about(self, signature: Signature, new: bool) -> str:
        if new:
            lines = signature.lines()
            said = "; ".join(text for text in (lines["tensors"], lines["values"]) if text)[:300]
            return f"on a batch of another kind than the first ({said})"
        said = _said(counters.moved(self._start, counters.read(self.running, self._joined)))
        if self._more:
            return f"on {self._rows[signature.training]} rows, more than in any batch before{said}"
        return f"on the rows of batch {self._uses}, with the weights from before training{said}"

    def _is_new(self, kind: _Kind) -> bool:
        if kind.key in self._seen:
            return False
        self._seen.add(kind.key)
        if kind.values in self._values:
            self._sizes += 1
            return rarely(self._sizes, _SIZES)
        self._values.add(kind.values)
        return True

    def _is_more(self, rows: int, training: bool) -> bool:
        """Whether a batch has more rows than any before: code inside a split may look at them."""
        known = self._rows.get(training, 0)
        self._rows[training] = max(rows, known)
        self._more = self.splits and rows > known
        return self._more

    def _moved(self) -> bool:
        """Whether forwards have changed numbers or words in the running copy."""
        return bool(counters.moved(self._start, counters.read(self.running, self._joined)))

    # ---- the calls of a forward ------------------------------------------------------------------

    def around(self, inner: Context, training: bool, stage: Callable[[], int]) -> Context:
        """`inner`, and whether the forward inside makes a call never made before.

        `stage`: of the forward that begins.
        """
        self._news.clear()
        prints = self._footprints
        counts = bool(self._counting or self._watch.moving)
        often = counts or self._uses <= _WATCHED or self._uses % 16 == 0
        if prints is None or not self.needed or not often:
            return inner

        @contextmanager
        def noted() -> Iterator[None]:
            before = self._moment()
            prints.start()
            with inner(), prints:
                yield
            key = training, stage()
            known = key in self._known
            if not known:
                self._learn(before.numbers, key)
            elif prints.news is not None and (self._counting or self._learnt != self._uses):
                self._news.append((before, prints.news))

        return noted

    def _moment(self) -> _Moment:
        """What counts now; all of it where it is not known yet who does."""
        paths = self._counting if self._known else None
        return _Moment(
            numbers=counters.read(self.running, self._joined, paths),
            outside=tuple((box, box.read()) for box in self._watch.moving),
        )

    def _learn(self, before: Mapping[Place, Any], key: tuple[bool, int]) -> None:
        """The first forward after a look shows who counts.

        Where nobody does, the rest of its batch runs the same code on other rows.
        """
        paths = None if not self._known else self._counting
        now = counters.read(self.running, self._joined, paths)
        moving = counters.moved(before, now)
        self._counting.update(place[0] for place in moving)
        self._known.add(key)
        self._learnt = self._uses

    @property
    def has_news(self) -> bool:
        """Whether a forward of this batch made calls never made before."""
        return bool(self._news)

    def after(self, batch: LocalBatch, signature: Signature) -> None:
        """After the run of a batch: looks at it where its forwards made calls never made before."""
        for before, news in self._news:
            self._look_at_code(batch, signature, before, news)
        self._news.clear()

    def _look_at_code(
        self, batch: LocalBatch, signature: Signature, before: _Moment, news: str
    ) -> None:
        now = counters.read(self.running, self._joined)
        moved = counters.moved(self._start, {**now, **before.numbers})
        after = [(box, box.read()) for box, _ in before.outside]
        try:
            for box, values in before.outside:
                box.write(values)
            with generators.kept():
                self._look(batch, signature, moved, judges=True)
        except WhaleError as error:
            raise WhaleError(
                f"in batch {self._uses}, which makes {news} that no batch before made, with the "
                f"weights from before training{_said(moved)}, {error.message}",
                hint=error.hint,
            ) from error
        finally:
            for box, values in after:
                box.write(values)

    def _look(
        self,
        batch: LocalBatch,
        signature: Signature,
        moved: Mapping[Place, Any],
        *,
        judges: bool,
        briefly: bool = False,
    ) -> None:
        grad = torch.is_grad_enabled()
        held = sum(high - low for low, high in batch.rows)
        whole = replace(batch, total_rows=held, rows=((0, held),))
        data = batches.take_clear_rows(whole, 0, held, None)
        with ExitStack() as stack:
            for around in (
                bare(self.model),
                as_it_was(self.model, self.loss),
                modes_of(self.model, self.running),
                counters.lent(self.model, moved),
                torch.inference_mode(False),
                torch.enable_grad(),
            ):
                stack.enter_context(around)
            model = in_precision(self.model, self.plan.precision)
            captured = capture(
                model,
                batches.rebuild(batch.data, signature.example()),
                self.loss,
                training=False,
                grad=grad,
                layers=self.layers,
                rows=batch.total_rows,
            )
            if captured.differentiates and self.defers:
                raise PlanError(
                    "a forward asks for gradients itself (torch.autograd.grad), which did not when "
                    "the plan was made: those of weights are put off by its schedule",
                    hint='set pipeline.schedule to "1f1b"',
                )
            if self.splits and judges:
                self.judge(captured.graph, captured.called, captured.read)
            look(
                model,
                data,
                self.loss,
                self.plan,
                captured,
                outputs=self.outputs,
                check=self.check_parts and batches.num_rows(data) > 1,
                training=signature.training,
                briefly=briefly,
            )


def _said(moved: Mapping[Place, Any]) -> str:
    """The first of what counts, for a message."""
    few = ((place, value) for place, value in moved.items() if place[-1] is not len)
    text = ", ".join(
        f"{counters.name_of(place)} = {getattr(value, 'items', value)!r}"[:80]
        for place, value in itertools.islice(few, 3)
    )
    return f" ({text})" if text else ""
