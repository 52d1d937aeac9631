"""Kinds: a batch unlike those before it is looked at as the first one was.

Place in the flow: asked by Step before it runs a batch. Capture and the trials saw the code that
runs on one batch. Another Python value, a key more or less, another length, an attribute that the
script set or a part put into eval mode may lead to other code: rows that interact, weights that are
read, other operations inside a split. So the first batch of every kind is captured and tried too
(`engine.look`), on the user's model.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from whale.engine.capture import capture
from whale.engine.changes import attributes, exact_buffers
from whale.engine.face import bare
from whale.engine.held import MOST_COPIED
from whale.engine.look import look
from whale.engine.novelty import Novelty
from whale.engine.outside import as_it_was
from whale.engine.rarely import rarely
from whale.engine.variants import Flags, flags_in_training, flags_of, modes_of
from whale.errors import WhaleError
from whale.ir.model_graph import ModelGraph
from whale.ir.plan import Plan
from whale.runtime import batch as batches
from whale.runtime.batch import LocalBatch
from whale.runtime.outputs import Merge
from whale.runtime.signature import Signature

Judge = Callable[[ModelGraph, frozenset[str]], None]
"""Raises where the modules that were called no longer offer what the plan splits."""

_FIRST = 4
"""Batches of which each is looked at where the model counts them; then the 8th, 16th, ..."""
_SIZES = 16
"""Kinds that differ in sizes alone, of which each is looked at; then the 32nd, 64th, ..."""
_AGAIN = (8, 64)
"""Batches of a known kind that are looked at too, where nothing else tries the rows of a step."""


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
        rechecked: Whether the rows of steps are tried anyway, as they train (`engine.recheck`).
        example: The batch that was tried at build.
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
    ) -> None:
        self.outputs = outputs
        self.model, self.running, self.loss, self.plan = model, running, loss, plan
        self.judge, self.check_parts = judge, check_parts
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
        self._joined = exact_buffers(model)
        self._start = _numbers(running, self._joined)

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
        late = rarely(self._uses, _FIRST) and bool(self._moved())
        late = late or (self.again and self._uses in _AGAIN)
        if self.again and self._novelty[signature.training].is_new(batch.data, _FIRST):
            late = True
        new = self._is_new(_Kind(signature, settings, flags_of(self.running)))
        if not new and not late:
            return
        try:
            # What evaluation of a known kind does to splits was looked at when it was built.
            self._look(batch, signature, judges=new or signature.training)
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
        moved = ", ".join(f"{name} = {value!r}" for _, name, value in self._moved()[:3])
        said = f" ({moved})" if moved else ""
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

    def _moved(self) -> list[tuple[nn.Module, str, Any]]:
        """Numbers and words that forwards have changed in the running copy: code may look at them.

        Buffers of one element are numbers too.

        As (the user's module, attribute, value in the copy).
        """
        modules = dict(self.model.named_modules(remove_duplicate=False))
        now = _numbers(self.running, self._joined)
        return [
            (modules[path], name, value)
            for (path, name), value in now.items()
            # A split sets some when it is installed; those are no news.
            if (path, name) in self._start and self._start[path, name] != value
        ]

    @contextmanager
    def _as_running(self) -> Iterator[None]:
        """The user's model with these numbers and words."""
        before = []
        for module, name, value in self._moved():
            held: dict[str, Any] = module.__dict__
            buffer = module._buffers.get(name)
            if buffer is not None:
                held, value = module._buffers, torch.full_like(buffer, value)
            before.append((held, name, held[name]))
            held[name] = value
        try:
            yield
        finally:
            for held, name, value in before:
                held[name] = value

    def _look(self, batch: LocalBatch, signature: Signature, *, judges: bool) -> None:
        grad = torch.is_grad_enabled()
        held = sum(high - low for low, high in batch.rows)
        whole = replace(batch, total_rows=held, rows=((0, held),))
        data = batches.take_clear_rows(whole, 0, held, None)
        with ExitStack() as stack:
            for around in (
                bare(self.model),
                as_it_was(self.model, self.loss),
                modes_of(self.model, self.running),
                self._as_running(),
                torch.inference_mode(False),
                torch.enable_grad(),
            ):
                stack.enter_context(around)
            captured = capture(
                self.model,
                batches.rebuild(batch.data, signature.example()),
                self.loss,
                training=False,
                grad=grad,
                layers=self.layers,
            )
            if self.splits and judges:
                self.judge(captured.graph, captured.called)
            look(
                self.model,
                data,
                self.loss,
                self.plan,
                captured,
                outputs=self.outputs,
                check=self.check_parts and batches.num_rows(data) > 1,
                training=signature.training,
            )


def _numbers(model: nn.Module, apart: frozenset[str]) -> dict[tuple[str, str], Any]:
    """Numbers and words that modules hold, by path and attribute; without the buffers `apart`."""
    found: dict[tuple[str, str], Any] = {}
    for path, module in model.named_modules():
        for name, value in attributes(module).items():
            if isinstance(value, bool | int | float | str):
                found[path, name] = value
        for name, buffer in module._buffers.items():
            full = f"{path}.{name}" if path else name
            number = buffer is not None and buffer.numel() == 1 and not buffer.is_meta
            if buffer is not None and number and full not in apart:
                found[path, name] = buffer.item()
    return found
