"""Kinds: a batch unlike those before it is looked at as the first one was.

Place in the flow: asked by Step before it runs a batch. Capture and the trials saw the code that
runs on one batch. Another Python value, a key more or less, another length or an attribute that
the script set may lead to other code: rows that interact, weights that are read, other operations
inside a split. So the first batch of every kind is captured and tried too, on the user's model.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from whale.engine.capture import capture
from whale.engine.changes import find_changes, refuse_by_rows
from whale.engine.face import bare
from whale.engine.parts import check_parts
from whale.engine.stillness import function_as_before
from whale.engine.variants import modes_of
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
"""Kinds that differ in sizes alone, of which each is looked at; then the 8th, 16th, ...; the same
of batches, where the model counts them.
"""


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
    ) -> None:
        self.outputs = outputs
        self.model, self.running, self.loss, self.plan = model, running, loss, plan
        self.judge, self.check_parts = judge, check_parts
        self.layers = [path for t in plan.taskgraphs for path in t.layers]
        self.splits = any(t.splits for t in plan.taskgraphs)
        replicas = max(len(stage.virtual_device.replicas) for stage in plan.stages)
        self.parts = replicas > 1 or plan.num_micro_batch > 1
        self._seen: set[Hashable] = set()
        self._values: set[Hashable] = set()
        self._sizes = self._uses = 0
        self._start = _numbers(running)

    def built(self, signature: Signature, settings: Hashable) -> None:
        """The kind that the Step was built with, to train on and to evaluate."""
        for training in (True, False):
            self._seen.add(_key(signature, training, settings))
            self._values.add(_values(signature, training, settings))

    def look(self, batch: LocalBatch, signature: Signature, settings: Hashable) -> None:
        """Raises if the code that runs on this batch cannot run under the plan.

        `settings`: attributes of the model that the script has set since.
        """
        if not (self.splits or self.parts):
            return
        self._uses += 1
        late = _rarely(self._uses) and self._moved()
        new = self._is_new(signature, settings)
        if not new and not late:
            return
        try:
            self._look(batch, signature)
        except WhaleError as error:
            raise WhaleError(
                f"{self._about(signature, new)}, {error.message}",
                hint="give wh.parallelize such a batch, to see it at build; " + (error.hint or "")
                if new
                else error.hint,
            ) from error

    def _about(self, signature: Signature, new: bool) -> str:
        if new:
            lines = signature.lines()
            said = "; ".join(text for text in (lines["tensors"], lines["values"]) if text)[:300]
            return f"on a batch of another kind than the first ({said})"
        moved = ", ".join(f"{name} = {value!r}" for _, name, value in self._moved()[:3])
        return f"as the model's code runs after {self._uses - 1} batches ({moved})"

    def _is_new(self, signature: Signature, settings: Hashable) -> bool:
        key = _key(signature, signature.training, settings)
        if key in self._seen:
            return False
        self._seen.add(key)
        values = _values(signature, signature.training, settings)
        if values in self._values:
            self._sizes += 1
            return _rarely(self._sizes)
        self._values.add(values)
        return True

    def _moved(self) -> list[tuple[nn.Module, str, Any]]:
        """Numbers and words that forwards have changed in the running copy: code may look at them.

        As (the user's module, attribute, value in the copy).
        """
        modules = dict(self.model.named_modules(remove_duplicate=False))
        now = _numbers(self.running)
        return [
            (modules[path], name, value)
            for (path, name), value in now.items()
            # A split sets some when it is installed; those are no news.
            if (path, name) in self._start and self._start[path, name] != value
        ]

    @contextmanager
    def _as_running(self) -> Iterator[None]:
        """The user's model with these numbers and words."""
        before = [(module, name, vars(module)[name]) for module, name, _ in self._moved()]
        for module, name, value in self._moved():
            vars(module)[name] = value
        try:
            yield
        finally:
            for module, name, value in before:
                vars(module)[name] = value

    def _look(self, batch: LocalBatch, signature: Signature) -> None:
        grad = torch.is_grad_enabled()
        with ExitStack() as stack:
            for around in (
                bare(self.model),
                function_as_before(self.loss),
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
            if self.splits:
                self.judge(captured.graph, captured.called)
            if not self.parts:
                return
            data = batch.data
            if signature.training:
                changes = find_changes(self.model, data, self.loss, captured.changes, self.plan)
                refuse_by_rows(self.plan, changes)
            if self.check_parts and batches.num_rows(data) > 1:
                check_parts(
                    self.model,
                    data,
                    self.loss,
                    self.plan,
                    captured.random.dims,
                    self.outputs,
                    captured.changes or (),
                    training=signature.training,
                )


def _numbers(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Numbers and words that modules hold, by path and attribute."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str) and name != "training"
    }


def _rarely(number: int) -> bool:
    return number <= _FIRST or number & (number - 1) == 0


def _key(signature: Signature, training: bool, settings: Hashable) -> Hashable:
    return signature.leaves, signature.constants, training, settings


def _values(signature: Signature, training: bool, settings: Hashable) -> Hashable:
    """All of a kind but sizes."""
    leaves = tuple((x.name, x.dtype, x.batched, len(x.shape)) for x in signature.leaves)
    return leaves, signature.constants, training, settings
