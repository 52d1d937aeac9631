"""One rank's part of a verification: runs the plan as any job would, compares what it holds.

Place in the flow: second half of `wh.verify`, in each forked process. A rank compares its own
pieces, so that a copy that goes astray is named even where the gathered tensor comes from another
rank; the gathered ones are compared as well.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from whale import parallel
from whale.engine.state.copies import copied
from whale.engine.step import Step
from whale.engine.trials.differences import OutputsError
from whale.errors import RankError, WhaleError
from whale.runtime import outputs as merges
from whale.runtime.data import shard
from whale.verification import autocast
from whale.verification.comparison import Comparison, Report
from whale.verification.feeds import FRESH
from whale.verification.task import Reference, Task, read_truth


def run_on_rank(task: Task, reference: Reference, rank: int) -> Report:
    """Trains this rank's part; compares after every step."""
    parallel.init(device="cpu")
    run = _Run(task, reference, rank)
    try:
        run.first()
        if task.wanted & FRESH:
            run.fresh()
        if task.low is not None and "autocast" not in reference.skipped:
            run.autocast(task.low)
    except _Refused:
        pass
    return run.report


class _Refused(Exception):  # noqa: N818 - ends the checks of this rank; the report has the reason
    """Whale said no to something that one device can do."""


class _Run:
    def __init__(self, task: Task, reference: Reference, rank: int) -> None:
        self.task, self.reference, self.rank = task, reference, rank
        self.report = Report()
        self.number = 0
        self.last = 0
        """The feed after which the first Step ended."""

    @contextmanager
    def checking(self, check: str) -> Iterator[None]:
        """Names the check to the parent, should this rank not come back; notes a refusal."""
        at(self.task, self.rank).write_text(check)
        so_far(self.task, self.rank).write_bytes(pickle.dumps(self.report))
        try:
            yield
        except WhaleError as error:
            # A rank that is told of another's refusal has no reason of its own.
            echo = isinstance(error, RankError)
            self.report.refused = (check, "" if echo else str(error).splitlines()[0])
            raise _Refused from error
        self.report.made.append(check)

    def _step(self, outputs: Mapping[str, str]) -> Step:
        task = self.task
        return parallel.parallelize(
            # A copy: whether the user's module follows the trained one is not asked here.
            copied(task.model),
            optimizer=task.make_optimizer(self.reference.float32),
            batch=task.first,
            loss=task.loss,
            config=task.config,
            plan=task.plan,
            outputs={name: getattr(merges, how) for name, how in outputs.items()},
        )

    def _comparison(self, step: Step, check: str) -> Comparison:
        made = Comparison(self.task, self.reference, self.report, step, self.rank)
        made.check = check
        return made

    def first(self) -> None:
        """The first steps and the later ones; what they raise is the verdict's, not a refusal."""
        task = self.task
        at(task, self.rank).write_text("steps")
        step = self._step({})
        comparison = self._comparison(step, "steps")
        truth = read_truth(task, 0)
        comparison.state(0, truth)
        self._evaluate(step, comparison, truth, task.first)
        for index, feed in enumerate(task.feeds):
            if feed.fresh:
                break
            comparison.check, self.last = feed.check, index
            (batch,) = feed.batches
            truth = self._train(
                step, comparison, index, next(iter(shard([batch]))) if feed.sharded else batch
            )
            if self.number == sum(f.check == "steps" for f in task.feeds):
                comparison.gathered(self.number, truth)
                self._evaluate(step, comparison, truth, batch)
        if "optimizer state" in task.wanted:
            comparison.check = "optimizer state"
            comparison.optimizer(self.number, truth)
        self.report.made += ["steps", "optimizer state", "evaluate", "later steps"]
        if task.wanted & FRESH:
            with self.checking("checkpoint"):
                step.save(task.folder / "checkpoint")
        step.close(forget=True)

    def fresh(self) -> None:
        """A Step that begins where the first one ended."""
        task, reference = self.task, self.reference
        with self.checking("checkpoint"):
            asked = bool(reference.outputs)
            try:
                step = self._step(reference.outputs)
            except OutputsError:  # nobody asked for them but this check: they are left out
                step, asked = self._step({}), False
            step.load(task.folder / "checkpoint")
            comparison = self._comparison(step, "checkpoint")
            truth = read_truth(task, self.last + 1)
            comparison.state(self.number, truth)
            comparison.optimizer(self.number, truth)
        for index, feed in enumerate(task.feeds):
            if not feed.fresh or index not in reference.chosen:
                continue
            batch = feed.batches[reference.chosen[index]]
            with self.checking(feed.check):
                comparison.check = feed.check
                truth = self._train(step, comparison, index, batch)
                self._evaluate(step, comparison, truth, batch)
        if asked:
            self.report.made.append("outputs")
        step.close(forget=True)

    def autocast(self, low: Task) -> None:
        """A step in bfloat16."""
        with self.checking("autocast"):
            autocast.compare(low, self.report, self.rank)

    def _train(self, step: Step, comparison: Comparison, index: int, batch: Any) -> dict[str, Any]:
        metrics = step(batch)
        self.number += 1
        truth = read_truth(self.task, index + 1)
        comparison.loss(self.number, metrics, truth)
        comparison.gradients(self.number, truth)
        comparison.state(self.number, truth)
        comparison.outputs(self.number, metrics, truth["outputs"])
        return truth

    def _evaluate(
        self, step: Step, comparison: Comparison, truth: dict[str, Any], batch: Any
    ) -> None:
        if "evaluation" not in truth:
            return
        own = comparison.check
        comparison.check = "evaluate" if own == "steps" else own
        metrics = step.evaluate(batch)
        comparison.evaluation(self.number, metrics, truth)
        comparison.check = own


def at(task: Task, rank: int) -> Path:
    """The file in which a rank says what it is checking."""
    return task.folder / f"at{rank}"


def so_far(task: Task, rank: int) -> Path:
    """The file with what a rank has to report, should it wait for one that refused a check."""
    return task.folder / f"report{rank}"
