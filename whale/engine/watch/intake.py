"""Intake: the batch a Step was given, looked at before anything runs on it.

Place in the flow: first thing in `step(batch)` and `step.evaluate(batch)`. It settles which tensors
have rows (as in the batch the Step was built with), reads the batch's Signature, and has the ranks
compare what they got: kinds and sizes whenever they change, values on the first batches and ever
more rarely after. A batch that differs between ranks is refused before any rank computes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from whale.engine.state.rarely import rarely
from whale.errors import RankError, WhaleError
from whale.ir.plan import Plan
from whale.runtime import batch as batches
from whale.runtime.batch import LocalBatch, Reader
from whale.runtime.meeting import SAME_BATCH, Details
from whale.runtime.signature import (
    Signature,
    autocast_dtype,
    content,
    named_leaves,
    signature_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """A batch ready to run: its rows here, its signature, what ranks compare (None: nothing)."""

    batch: LocalBatch
    signature: Signature
    details: Details | None


class Intake:
    """Takes the batches of one Step."""

    def __init__(
        self, example: Any, plan: Plan, device: torch.device, loss: batches.Loss | None
    ) -> None:
        rows = batches.num_rows(example)
        self._batched = {
            name: batches.has_rows(value, rows)
            for name, value in named_leaves(example)
            if isinstance(value, torch.Tensor)
        }
        self._plan, self._device, self._loss = plan, device, loss
        low = plan.precision.autocast
        self._autocast: torch.dtype | None = getattr(torch, low) if low else None
        """Where the script has none of its own."""
        self._last: tuple[Signature, int, tuple[bool, ...]] | None = None
        self._seen: dict[bool, int] = {}

    def signature(self, given: Any) -> Signature:
        """Of a batch to train on in the plan's precision: what it is made for."""
        batch = self._with_flags(given)
        return signature_of(batch, device=self._device, training=True, autocast=self._autocast)

    def take(
        self, given: Any, reader: Reader, *, training: bool, modes: tuple[bool, ...] = ()
    ) -> Taken:
        """`given` as this rank runs it; `modes`: what the user's modules are in, to train."""
        batch = self._with_flags(batches.localize(given, reader))
        low = autocast_dtype(self._device) or self._autocast
        signature = signature_of(batch, device=self._device, training=training, autocast=low)
        number = self._seen[training] = self._seen.get(training, 0) + 1
        now = (signature, batch.total_rows, modes)
        new, self._last = now != self._last, now
        compares = rarely(number, 3)  # a loader that drifts apart is found too
        details: dict[str, str] | None = None
        if self._plan.num_ranks > 1 and (new or compares):
            details = {"rows": str(batch.total_rows), **signature.lines()}
            details["modes"] = "".join("et"[mode] for mode in modes)
            if compares and batch.content is not None:
                details["content"] = str(batch.content())
        return Taken(batch=batch, signature=signature, details=details)

    def _with_flags(self, given: Any) -> LocalBatch:
        """The batch with its rows where the first batch had them.

        A tensor without rows may have as many elements as a later batch has rows by chance.
        """
        local = isinstance(given, LocalBatch)
        data = given.data if local else given
        batches.refuse_layouts(data)
        rows = given.total_rows if local else batches.num_rows(given)
        held = sum(high - low for low, high in given.rows) if local else rows
        if not rows:
            raise WhaleError(
                "the batch has no rows", hint="leave empty batches out; dim 0 is the batch"
            )
        self._refuse_lists(data, rows)
        tensors = [(n, v) for n, v in named_leaves(data) if isinstance(v, torch.Tensor)]
        guessed = given.batched if local else [batches.has_rows(v, rows) for _, v in tensors]
        flags = []
        for (name, tensor), guess in zip(tensors, guessed, strict=True):
            flag = self._batched.get(name, guess)
            if flag and not batches.has_rows(tensor, held):
                raise WhaleError(
                    f"the batch has {held} rows, but {name or 'its tensor'} is "
                    f"{tuple(tensor.shape)}; in the first batch its dim 0 was the rows",
                    hint="dim 0 of every tensor that has rows must be the batch, in every batch",
                )
            flags.append(flag)
        cast = batches.in_precision(data, self._plan.precision, self._loss)
        if local:
            return replace(given, data=cast, batched=tuple(flags))
        return LocalBatch(
            data=cast,
            total_rows=rows,
            rows=((0, rows),),
            batched=tuple(flags),
            content=lambda: content(data),
        )

    def _refuse_lists(self, data: Any, rows: int) -> None:
        """A list with one entry per row would be given whole to every part of the rows."""
        if self._plan.num_ranks == 1 and self._plan.num_micro_batch == 1:
            return
        for name, value in _lists(data):
            whole = all(
                isinstance(v, torch.Tensor) and batches.has_rows(v, rows)
                for _, v in named_leaves(value)
            )
            if len(value) == rows > 1 and not whole:
                raise WhaleError(
                    f"the batch has {rows} rows and a list of as many entries at {name}: Whale "
                    "cuts tensors by rows, not lists",
                    hint="make it a tensor (pad it), or a tuple if its entries are no rows",
                )


def _lists(data: Any) -> list[tuple[str, list[Any]]]:
    """The lists inside a batch; its top is its arguments."""
    named = data.items() if hasattr(data, "items") else enumerate(data)
    if isinstance(data, torch.Tensor):
        return []
    return [(str(name), value) for name, value in named if isinstance(value, list)]


def differ(words: list[Details]) -> RankError | None:
    """What ranks got, compared: the error to raise where it is not one batch."""
    said = {
        "rows": "rows in their batch",
        "tensors": "tensors in their batch",
        "values": "values in their batch",
        "autocast": "autocast",
        "modes": "modules they have in training or eval mode",
        "content": "values in their batch",
    }
    for key, what in said.items():
        found = [word.get(key) for word in words]
        if len(set(found)) <= 1:
            continue
        if key in ("content", "modes"):
            others = [rank for rank, value in enumerate(found) if value != found[0]]
            shown = f"ranks {others} have other {what.partition(' ')[0]} than rank 0"
        else:
            shown = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(found))
        hint = "call train() and eval() on every rank alike" if key == "modes" else SAME_BATCH
        return RankError(f"the ranks differ in the {what} ({shown[:600]})", hint=hint)
    return None
