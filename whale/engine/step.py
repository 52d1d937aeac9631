"""Step: a model that trains as its plan says.

`step(batch)` is one optimizer step on a global batch.

Place in the flow: what `wh.parallelize` returns; built on a Lowered program and the plan's action
lists.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from whale.config import Config
from whale.engine.checkpoint import checkpoint
from whale.engine.checkpoint.gather import Gatherer
from whale.engine.lower.lowered import Lowered, norms_of_own_rows
from whale.engine.state.changes import Changes
from whale.engine.state.outside import Watch
from whale.engine.state.stillness import in_eval_mode
from whale.engine.updating import OptimizerFactory, prepare_updates
from whale.engine.watch.away import Away
from whale.engine.watch.branches import Branches
from whale.engine.watch.drift import Drift
from whale.engine.watch.face import Face, bare
from whale.engine.watch.intake import Intake, Taken, differ
from whale.engine.watch.kinds import Judge, Kinds
from whale.engine.watch.outsiders import Outsiders
from whale.engine.watch.recheck import recheck
from whale.engine.watch.sharers import held_tensors
from whale.engine.watch.standing import load_into, runnable, write_back
from whale.engine.watch.variants import Variants
from whale.errors import WhaleError
from whale.ir.measured import Measured
from whale.ir.plan import Plan
from whale.ir.schedule import Action
from whale.ir.updates import Update
from whale.nn.moe.layer import expert_counters
from whale.runtime import batch as batches
from whale.runtime.compat import in_backward
from whale.runtime.context import evaluation_step
from whale.runtime.executor import Totals
from whale.runtime.guard import Guard
from whale.runtime.heartbeat import is_communication_error
from whale.runtime.heartbeat import start as start_heartbeat
from whale.runtime.meeting import Details, ElsewhereError, Meetings, wake_others
from whale.runtime.outputs import Merge, merge
from whale.runtime.signature import autocast, no_autocast
from whale.runtime.stage import Stages
from whale.runtime.sums import GlobalSums, SameSizes
from whale.runtime.weighing import gradient_factor, mean_loss

_LOG = logging.getLogger("whale")


_SETTINGS = ((), ())
"""What the script has changed in the model and around it, at the start."""
Predict = Callable[[Measured | None], Any]
"""Makes a `sim.Report` of the plan, with what was measured beside it."""


class Step:
    """Runs the plan on this rank.

    Attributes:
        plan: The Plan that runs.
        optimizer: This rank's optimizer, over its own pieces; schedulers take it as usual.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        lowered: Lowered,
        *,
        loss: batches.Loss | None,
        optimizer: OptimizerFactory,
        config: Config,
        forward_actions: Sequence[Action],
        outputs: Mapping[str, Merge],
        batch: Any,
        rank: int,
        predict: Predict,
        changes: Changes,
        judge: Judge,
    ) -> None:
        self._predict = predict
        self.plan = plan
        self.rank = rank
        self._model, self._lowered, self._loss, self._config = model, lowered, loss, config
        self.planned = lowered.planned
        self._forward_actions = forward_actions
        self._outputs = dict(outputs)
        self._intake = Intake(batch, plan, lowered.device, loss)
        names = frozenset(outputs)
        self._variants = Variants(model, plan, lowered, loss, names, rank, batch)
        self._variants.built(self._intake.signature(batch), _SETTINGS)
        self._gatherer = Gatherer(model, plan, lowered, rank)
        weighing = next((p.weighing for p in lowered.parts.values() if not p.whole), None)
        self._recheck = recheck(
            lowered.model,
            loss,
            plan,
            rank,
            weighing,
            lowered.device,
            lowered.surroundings,
            changes.names,
            batch,
        )
        self._watch = Watch(model, loss)
        self._kinds = Kinds(
            model,
            lowered.model,
            loss,
            plan,
            judge,
            outputs=outputs,
            check_parts=config.check_parts,
            rechecked=self._recheck is not None,
            example=batch,
            watch=self._watch,
            defers=lowered.defers,
        )
        self._kinds.built(self._intake.signature(batch), _SETTINGS)
        apart = frozenset(norms_of_own_rows(plan, model))
        held = held_tensors(plan, lowered.model, apart)
        self._guard = Guard(held, rank, plan.num_ranks, lowered.device)
        watches = config.check_parts and Branches.needed(plan, lowered)
        self._branches = Branches(plan, lowered, rank) if watches else None
        self._store = lowered.store
        self._divides = plan.wire.divides
        self.optimizer = prepare_updates(model, plan, lowered, optimizer, config)
        self._away = Away(lowered.store, early=plan.early)
        self._outsiders = Outsiders(model, lowered.params, len(plan.stages))
        self._drift = Drift(model, plan, lowered, rank, changes)
        self._same_sizes = SameSizes(
            waits=any(p.in_turn and p.weighing.joins for p in lowered.parts.values() if p.weighing)
        )
        self._read_at = 0
        self.num_steps = 0
        self._heartbeat = start_heartbeat(
            rank, plan.num_ranks, timedelta(seconds=config.timeout_seconds)
        )
        self._meetings = Meetings(self._heartbeat) if self._heartbeat is not None else None
        lowered.executor.on_action = self._on_action
        layers = [path for t in plan.taskgraphs for path in t.layers]
        self._face = Face(model, lowered.model, self, layers if len(plan.stages) > 1 else None)

    @property
    def config(self) -> Config:
        """The settings it was made with."""
        return self._config

    def _on_action(self, index: int, action: Action | Update) -> None:
        if self._heartbeat is not None:
            self._heartbeat.at(self.num_steps, index, str(action))

    @contextmanager
    def _together(self, doing: str, details: Details | None = None) -> Iterator[None]:
        """Around every call that all ranks make together.

        With `details` they first make sure of that. A failure of communication names the rank that
        caused it; one of ours is told to the others.
        """
        beat = self._heartbeat
        if beat is None or self._meetings is None:
            yield
            return
        beat.enter(doing, meets=details is not None)
        try:
            if details is not None:
                self._meetings.meet(details, differ)
            yield
        except BaseException as error:
            blamed = beat.explain(error) if is_communication_error(error) else None
            beat.fail(blamed or error)
            if isinstance(error, ElsewhereError):
                self._store.forget()
                self._lowered.groups.close()
                wake_others()
            if blamed is None:
                raise
            raise blamed from error
        finally:
            beat.leave()

    def _prepare(self, taken: Taken) -> Stages:
        """The stages that were traced for batches of this kind."""
        settings = (self._face.settings(), self._watch.settings())
        self._kinds.look(taken.batch, taken.signature, settings)
        variant = self._variants.of(taken.batch, taken.signature, settings)
        return self._lowered.stages if variant is None else variant.stages

    def _run(
        self, taken: Taken, actions: Sequence[Action | Update], stages: Stages, *args: Any
    ) -> Totals:
        """The actions on a batch."""
        lowered, executor = self._lowered, self._lowered.executor
        around = autocast(lowered.device, taken.signature.autocast)
        around = self._away.around(around)
        around = around if self._branches is None else self._branches.around(around)
        stage = lambda: lowered.context.stage  # noqa: E731
        executor.around = self._kinds.around(around, taken.signature.training, stage)
        with self._face.in_step():
            return executor.run(taken.batch, actions, stages, *args)

    def _compare_branches(self, taken: Taken) -> None:
        """After a run, and after the sums that a rank without work begins late; all call it."""
        if self._branches is not None:
            around = autocast(self._lowered.device, taken.signature.autocast)
            self._branches.compare(taken.batch, around)

    # ---- training -------------------------------------------------------------------------------

    def __call__(self, batch: Any) -> dict[str, Any]:
        """One step on a global batch.

        Forward, backward, sum, divide by the global count, clip, update.

        Returns the global mean loss as `loss`, the gradient norm as `grad_norm` when clipping, and
        the named outputs asked for; values are tensors, read them when you need them.
        """
        if not torch.is_grad_enabled():
            raise WhaleError(
                "a step is called under torch.no_grad, where nothing can be trained",
                hint="call step.evaluate(batch) for the loss without gradients",
            )
        taken = self._intake.take(batch, self, training=True, modes=self._face.flags())
        with self._together("step", taken.details), no_autocast(self._lowered.device):
            return self._train(taken)

    def _train(self, taken: Taken) -> dict[str, Any]:
        lowered = self._lowered
        self._face.follow()
        self._face.say_mode()
        lowered.context.step = self.num_steps
        if self._recheck is not None:
            self._recheck.before(self.num_steps, taken.batch)
        clock = lowered.executor.clock
        clock.begin_step()
        stages = self._prepare(taken)
        sums = GlobalSums(self.plan.num_ranks, lowered.device)
        metrics: dict[str, Any] = {}
        with self._outsiders.watching(lowered.executor) as watched:

            def before() -> torch.Tensor:
                if not in_backward():  # function modes belong to the thread they began in
                    watched.close()
                return self._before_update(taken, sums, metrics)

            self._store.begin(before, self._may_begin_early, self.num_steps)

            def begin_sums(_: Update) -> None:
                sums.start(lowered.executor.totals)

            def apply(update: Update) -> None:
                watched.close()
                metrics.update(self._store.apply(update, self._sum))

            updates = {"L": begin_sums, "G": self._store.reduce, "A": apply}
            totals = self._run(taken, self.planned.actions, stages, self._store.grads, updates)
        clock.end_step()
        self._face.following.give_back()
        self.num_steps += 1
        if self._config.guard:
            self._drift.check(self.num_steps)
        if self._config.guard and self.num_steps % self._config.guard == 0:
            buffers = dict(lowered.model.named_buffers())
            self._guard.check({**buffers, **lowered.store.present()}, self.num_steps)
        metrics.update(merge(totals.named, self._outputs, self.plan.num_ranks))
        return metrics

    def _may_begin_early(self) -> bool:
        """Whether nothing that looks at a step needs its backward, or code of the user's."""
        return self._branches is None and not self._outsiders.due and not self._kinds.has_news

    def _before_update(
        self, taken: Taken, sums: GlobalSums, metrics: dict[str, Any]
    ) -> torch.Tensor:
        """All that could refuse this step looks at it; gives what its gradients are divided by."""
        self._kinds.after(taken.batch, taken.signature)
        numbers = sums.wait()
        self._same_sizes.note(numbers)
        self._outsiders.after(self._lowered.executor)
        self._compare_branches(taken)
        metrics["loss"] = mean_loss(numbers)
        return gradient_factor(numbers) if self._divides else torch.ones_like(numbers[1])

    def _sum(self, numbers: torch.Tensor) -> torch.Tensor:
        if self.plan.num_ranks > 1:
            dist.all_reduce(numbers)
        return numbers

    def evaluate(self, batch: Any) -> dict[str, Any]:
        """The global mean loss and the named outputs of a batch, in eval mode."""
        taken = self._intake.take(batch, self, training=False)
        with self._together("evaluate", taken.details), no_autocast(self._lowered.device):
            return self._evaluate(taken)

    def _settle(self) -> None:
        """Before anyone reads the buffers: what replicas tracked apart becomes one."""
        for norm in self._lowered.own_norms:
            norm.settle()

    def _evaluate(self, taken: Taken) -> dict[str, Any]:
        self._face.following.follow()
        self._settle()
        self._store.refuse_writes()
        lowered = self._lowered
        lowered.context.step = evaluation_step(self.num_steps)
        with in_eval_mode(lowered.model):
            with torch.no_grad():
                if self._recheck is not None:
                    self._recheck.before_evaluation(self.num_steps, taken.batch)
                totals = self._run(taken, self._forward_actions, self._prepare(taken))
                self._kinds.after(taken.batch, taken.signature)
            self._compare_branches(taken)
        self._face.following.give_back()
        numbers = self._sum(totals.sums)
        self._same_sizes.note(numbers)
        metrics: dict[str, Any] = {"loss": mean_loss(numbers)}
        metrics.update(merge(totals.named, self._outputs, self.plan.num_ranks))
        return metrics

    # ---- the whole model's tensors -----------------------------------------------------------

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model's state on every rank's CPU, with exactly the original model's keys."""
        with self._together("state_dict", {}), bare(self._model):
            self._settle()
            self._read_at = self.num_steps
            return self._gatherer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> Any:
        """Loads weights and buffers by the original names; the optimizer's state stays.

        Strict as torch's; returns its missing and unexpected keys. All ranks call it, with the same
        values.
        """
        return self.load_into("", state, strict)

    def load_into(self, path: str, state: Any, strict: bool) -> Any:
        """The same for the part of the model at `path`."""
        with self._together("load_state_dict", {}), bare(self._model):
            own, trained = (self._model, self._lowered), self._gatherer.state_dict()
            ranks = (self.rank, self.plan.num_ranks)
            result = load_into(*own, path, state, strict, *ranks, trained)
        self._outsiders.again()
        return result

    def write_back(self) -> None:
        """Copies the trained weights and buffers into the user's own module; all ranks call it.

        Until then its tensors are those from before training.
        """
        state = self.state_dict()
        with bare(self._model):
            write_back(self._model, state)
        self._face.note()

    def runnable(self, path: str) -> nn.Module:
        """The trained part of the model at `path`, where calling it here is exact; else an error.

        `model(x)` asks this while the step is open.
        """
        self._face.unchanged.refuse_exchanged()
        self._face.follow()
        return runnable(self.plan, self._lowered, self.rank, path)

    def gradients(self) -> dict[str, torch.Tensor]:
        """The whole model's gradients of the last step (divided, clipped) on every rank's CPU.

        Zeros where no rank had a gradient; such a parameter was not updated.
        """
        if self.plan.early:
            raise WhaleError(
                "step.gradients() is called, but gradients are let go as soon as they are used "
                "(optimizer.apply_in_backward)",
                hint="leave optimizer.apply_in_backward out to look at gradients",
            )
        with self._together("gradients", {}), bare(self._model):
            return self._gatherer.gradients()

    def expert_counters(self, *, reset: bool = False) -> dict[str, dict[str, torch.Tensor]]:
        """What `wh.nn.MoE.counters` says of each mixture of experts that this rank runs, by path.

        Loads are those of the global batch where a stage has several replicas.

        Args:
            reset: Count anew from here.
        """
        return expert_counters(self._lowered.model, reset=reset)

    # ---- predicted against measured -------------------------------------------------------------

    @property
    def predicted(self) -> Any:
        """The Report of a step as it was predicted: see `wh.simulate`."""
        return self._predict(None)

    def report(self) -> Any:
        """The Report of a step, predicted against measured; every rank calls it and gets it.

        `print(step.report())` is two lines; `whale.viz` draws it.
        """
        return self._predict(self.measured())

    def measured(self) -> Measured | None:
        """What the steps so far took, on all ranks; None before there are enough. All call it."""
        clock = self._lowered.executor.clock
        steps = clock.step_seconds()
        mine = (steps, clock.peak_bytes(), clock.compute_seconds())
        everyone: list[Any] = [mine]
        with self._together("report", {}):
            if self.plan.num_ranks > 1:
                everyone = [None] * self.plan.num_ranks
                dist.all_gather_object(everyone, mine)
        return Measured.of(everyone)

    # ---- checkpoints -----------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], *, extra: Mapping[str, Any] | None = None) -> None:
        """Writes a checkpoint that any plan of the same model can load; all ranks call it.

        Returns when it is durable. A checkpoint already at `path` is replaced once the new one is
        complete. `extra` is JSON of the user's own, given back by `load`; rank 0's is kept.
        """
        with self._together("save", {}), bare(self._model):
            self._settle()
            self._store.updater.settle()
            self._read_at = self.num_steps
            checkpoint.save(self._parts(), path, num_steps=self.num_steps, extra=extra)

    def load(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Restores weights, buffers, optimizer and step count, saved under any plan; gives `extra`.

        All ranks call it. When anything is missing or does not fit, every rank raises a
        CheckpointError and nothing is changed.
        """
        with self._together("load", {}), bare(self._model):
            self.num_steps, extra = checkpoint.load(self._parts(), path)
        self._read_at = self.num_steps
        self._outsiders.again()
        return extra

    def _parts(self) -> checkpoint.Parts:
        return checkpoint.Parts(
            model=self._model,
            plan=self.plan,
            lowered=self._lowered,
            optimizer=self.optimizer,
            loss_scale=self._lowered.executor.loss_scale,
            rank=self.rank,
        )

    def close(self, *, forget: bool = False) -> None:
        """Frees process groups and memory; the user's model can be parallelized again.

        The user's module is plain again, with the weights from before training unless
        `write_back` was called.

        Args:
            forget: What was trained is not wanted: no warning that nobody has read it.
        """
        if self._read_at < self.num_steps and not forget:
            _LOG.warning(
                "the step is closed and its %d steps are forgotten: call step.save, "
                "step.state_dict or step.write_back first to keep what it trained",
                self.num_steps - self._read_at,
            )
        self._face.take_off()
        if self._heartbeat is not None:
            self._heartbeat.close()
        self._lowered.groups.close()
        self._store.close()
