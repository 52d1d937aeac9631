"""Recheck: parts against whole once more, on rows that are being trained on.

Place in the flow: called by Step before the first steps, then before steps 16, 32, ... and before
those whose batch has something in it that none before had (`engine.watch.novelty`). The trial at
build knows one batch and what `engine.trials.holes` makes of it; later ones may have what neither
had. It costs a few forwards of a few rows without gradients and no communication, so it runs only
where a rank computes its rows alone: one stage, nothing split, nothing for which replicas meet.
What is new may show only beside the rows of others, so of such a batch all rows are tried where a
rank has them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from whale.engine.state.rarely import rarely
from whale.engine.trials.trial_rows import KeyedRuns, Rows
from whale.engine.watch.novelty import Novelty
from whale.errors import WhaleError
from whale.ir.plan import Plan
from whale.ir.virtual_device import micro_batch_cuts
from whale.runtime import batch as batches
from whale.runtime.batch import LocalBatch
from whale.runtime.weighing import Weighing

_ROWS = 4
_STEPS = 8
"""Steps before each of which rows are tried; then before the 16th, 32nd, ..."""
_FIRST = 16
"""Batches with something new of which each is tried; then the 32nd, 64th, ..."""
_MOST = 4
"""Times its own rows that a rank tries at once; a forward without gradients needs little room."""
_ALL_AT = frozenset({1, 8, 64})
"""Steps before which all rows of a rank's micro-batch are tried: code may look at their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recheck:
    """Compares the loss of a few of a rank's rows with that of the same rows in two parts."""

    model: nn.Module
    loss: batches.Loss | None
    plan: Plan
    rank: int
    weighing: Weighing
    device: torch.device
    keyed: KeyedRuns
    written: Collection[str]
    """What forwards write to."""
    novelty: Novelty
    in_evaluation: Novelty
    """The same of batches that are evaluated: code may be another there."""

    def before(self, step: int, batch: LocalBatch) -> None:
        """Raises where this step's rows show that the loss is not weighed as it should be."""
        if self.novelty.is_new(batch.data, _FIRST):
            for micro_batch in range(self.plan.num_micro_batch):
                self._try(step, self._rows_of_all(batch, micro_batch))
        elif rarely(step, _STEPS):
            self._try(step, self._rows(batch, 0, None if step in _ALL_AT else _ROWS))

    def before_evaluation(self, step: int, batch: LocalBatch) -> None:
        """The same of a batch that is evaluated, if something in it is new."""
        if self.in_evaluation.is_new(batch.data, _FIRST):
            for micro_batch in range(self.plan.num_micro_batch):
                self._try(step, self._rows_of_all(batch, micro_batch), training=False)

    def _try(self, step: int, few: Any | None, *, training: bool = True) -> None:
        if few is None:
            return
        kind = next((p.dtype for p in self.model.parameters()), torch.float32)
        rows = Rows(
            self.model,
            self.loss,
            few,
            kind,
            copied=False,
            keyed=self.keyed,
            written=self.written,
            training=training,
        )
        where = "in" if training else "evaluated after"
        try:
            rows.again(self.weighing)
        except WhaleError as error:
            raise WhaleError(
                f"{where} step {step} on rank {self.rank}, {error.message}",
                hint="give parallelize a batch like this one to see it at build",
            ) from error

    def _rows(self, batch: LocalBatch, micro_batch: int, most: int | None) -> Any | None:
        """The first of this rank's rows of a micro-batch, or all; None: it has too few."""
        low, high = self._cut(batch, micro_batch)
        start, end = self.plan.stages[0].virtual_device.rows(self.rank, high - low)
        if end - start < 2:
            return None
        end = end if most is None else min(end, start + most)
        return batches.take_clear_rows(batch, low + start, low + end, self.device)

    def _rows_of_all(self, batch: LocalBatch, micro_batch: int) -> Any | None:
        """The rows of all replicas, if this rank has them and they are few; else its own."""
        low, high = self._cut(batch, micro_batch)
        start, end = self.plan.stages[0].virtual_device.rows(self.rank, high - low)
        here = batch.rows == ((0, batch.total_rows),)
        if not here or not 2 <= high - low <= max(_ROWS, _MOST * (end - start)):
            return self._rows(batch, micro_batch, None)
        return batches.take_clear_rows(batch, low, high, self.device)

    def _cut(self, batch: LocalBatch, micro_batch: int) -> tuple[int, int]:
        points = micro_batch_cuts(batches.num_rows(batch), self.plan.num_micro_batch)
        return points[micro_batch], points[micro_batch + 1]


def recheck(
    model: nn.Module,
    loss: batches.Loss | None,
    plan: Plan,
    rank: int,
    weighing: Weighing | None,
    device: torch.device,
    keyed: KeyedRuns,
    written: Collection[str],
    example: Any,
) -> Recheck | None:
    """What Step calls; None where a rank cannot compute a loss by itself, or need not.

    `example`: the batch that was tried at build.
    """
    alone = len(plan.stages) == 1 and not any(t.splits for t in plan.taskgraphs)
    alone = alone and bool(plan.stages_apart())
    if weighing is None or weighing.joins or not alone or not plan.stages_of(rank):
        return None
    return Recheck(
        model=model,
        loss=loss,
        plan=plan,
        rank=rank,
        weighing=weighing,
        device=device,
        keyed=keyed,
        written=written,
        novelty=Novelty(example),
        in_evaluation=Novelty(example),
    )
