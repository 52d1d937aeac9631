"""The training loop of a run, as every rank goes through it.

Place in the flow: `whale train` starts ranks that call `train`. It is the loop a user would write:
a model, `wh.parallelize`, batches of `wh.shard`, `step(batch)`; and beside it what rank 0 tells,
tries and keeps. The model is gathered and used on rank 0 alone, while the others wait.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from math import cos, pi
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from whale.annotations import replicate
from whale.config import Config
from whale.engine.calibrate.profile import calibrate
from whale.engine.step import Step
from whale.ir.profile import Profile
from whale.models.m6.annotate import expert_parallel
from whale.models.m6.config import M6Config
from whale.models.m6.model import M6
from whale.models.m6.objectives import example_batch
from whale.parallel import init, parallelize
from whale.runtime.data import shard
from whale.training.evaluate import Evaluator
from whale.training.folder import RunFolder, read_parts, write_model
from whale.training.material import (
    Material,
    build_codes,
    build_tokenizer,
    make_material,
    read_split,
    spread,
)
from whale.training.png import write_png
from whale.training.progress import Progress, Reading, clock
from whale.training.record import Recorder
from whale.training.run import Optimizer, Run
from whale.viz.html import html

NUM_LAST = 3
"""Held-out pictures captioned at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Steps with one model: pseudo-to-real has two of them."""

    start: int
    stop: int
    shared: bool


def phases(run: Run) -> list[Phase]:
    """The phases of a run, in order."""
    real = Phase(start=run.pseudo_steps, stop=run.steps, shared=False)
    if not run.pseudo_steps:
        return [real]
    return [Phase(start=0, stop=run.pseudo_steps, shared=True), real]


def rate(optimizer: Optimizer, step: int, phase: Phase, steps: int) -> float:
    """The learning rate of a step (from 0).

    The optimizer begins anew with a phase, and so does the warm-up; the cosine is of the whole run.
    """
    warm = min(1.0, (step - phase.start + 1) / (optimizer.warmup_steps + 1))
    swing = (1 + cos(pi * step / max(1, steps - 1))) / 2
    return optimizer.lr * warm * (optimizer.final_share + (1 - optimizer.final_share) * swing)


def make_optimizer(optimizer: Optimizer, named: Any) -> torch.optim.Optimizer:
    """Matrices are decayed, vectors are not."""
    groups: list[dict[str, Any]] = [
        {"params": [pair for pair in named if pair[1].ndim >= 2]},
        {"params": [pair for pair in named if pair[1].ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    decay = optimizer.weight_decay
    if optimizer.name == "sgd":
        return torch.optim.SGD(
            groups, lr=optimizer.lr, momentum=optimizer.beta1, weight_decay=decay
        )
    betas = (optimizer.beta1, optimizer.beta2)
    return torch.optim.AdamW(groups, lr=optimizer.lr, betas=betas, weight_decay=decay)


def train(run: Run, folder: RunFolder, *, resume: bool = False, until: int | None = None) -> None:
    """Trains a run; every rank calls it.

    Args:
        run: What to train.
        folder: Where its files go; `whale.training.folder` made it.
        resume: Go on from the checkpoint that is there.
        until: Leave off after this step, with a checkpoint, as if the time were up.
    """
    began = time.monotonic()
    if "RANK" in os.environ:
        init(settings(run))
    session = _Session(run, folder, resume=resume)
    try:
        session.go(until or run.steps)
        if session.done == run.steps:
            session.finish(began)
        session.step.close()
    finally:
        session.close()


def settings(run: Run, profile: str = "") -> Config:
    """Whale's own settings for a run; `profile` is a file of what was measured of the machine."""
    return Config.from_dict(
        {
            "seed": run.seed,
            "timeout_seconds": run.timeout_seconds,
            "optimizer.max_grad_norm": run.optimizer.max_grad_norm or None,
            "pipeline.num_micro_batch": run.parallel.num_micro_batch,
            # Ranks of one machine are equal, whatever else it happens to do while it is planned.
            "cluster.balance": "equal",
            "cluster.profile": profile,
        }
    )


class _Session:
    """What the loop carries from step to step."""

    step: Step

    def __init__(self, run: Run, folder: RunFolder, *, resume: bool) -> None:
        self.run, self.folder = run, folder
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.lead = self.rank == 0
        self.progress = Progress(run.steps, silent=not self.lead, every=run.watch.print_every)
        self.resume = folder.extra() if resume else None
        self.done: int = self.resume["done"] if self.resume else 0
        self.material = self._material()
        if self.resume:
            self.material.stream.resume(self.resume["data"])
        self.evaluator = Evaluator(run, self.material)
        self.recorder = Recorder(folder.metrics, done=self.done) if self.lead else None
        self._plain: M6 | None = None
        self._pending: list[tuple[int, Mapping[str, Tensor]]] = []
        self._since = time.monotonic()

    def _material(self) -> Material:
        """Rank 0 learns vocabulary and codebook and writes them; everyone reads them."""
        config = self.run.config()
        if self.lead and self.resume is None:
            self.progress.say("vocabulary and image codes ...")
            train = read_split(self.run, config, "train")
            tokenizer = build_tokenizer(config, train)
            write_model(self.folder, config, tokenizer, build_codes(self.run, config, train))
        self._meet()
        return make_material(self.run, *read_parts(self.folder))

    # ---- steps ----

    def go(self, until: int) -> None:
        """All phases that are left, up to step `until`."""
        state: dict[str, Tensor] | None = None
        for phase in phases(self.run):
            if phase.stop <= self.done:
                continue
            self._start(phase, state)
            self._train(phase, min(phase.stop, until))
            if self.done == until:
                return
            state = self.step.state_dict()
            self.step.close()
            self.progress.say(f"step {self.done}: every layer gets weights of its own")

    def _start(self, phase: Phase, state: Mapping[str, Tensor] | None) -> None:
        run, config = self.run, self.material.config
        model = make_model(config, shared=phase.shared, state=state)
        model = expert_parallel(model) if run.parallel.layout == "expert" else replicate()(model)
        batch = example_batch(config, run.batch_rows)
        self.step = parallelize(
            model,
            optimizer=lambda named: make_optimizer(run.optimizer, named),
            batch=batch,
            config=settings(run, self._measure(model, batch)),
        )
        self.step.num_steps = self.done
        if self.resume is not None:
            self.step.load(self.folder.checkpoint)
            self.resume = None
        size = sum(parameter.numel() for parameter in model.parameters())
        self.progress.say(
            f"{run.name}: {size:,} parameters, {self.step.plan.num_ranks} rank(s), "
            f"{self.step.plan.strategy}, {run.batch_rows} rows a step"
        )

    def _measure(self, model: M6, batch: Any) -> str:
        """The file of what the machine can do; empty where nobody asked."""
        parallel = self.run.parallel
        if not parallel.calibrate:
            return ""
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        if num_ranks != self._num_measured():
            self.progress.say("measuring this machine ...")
            rows = max(1, self.run.batch_rows // (num_ranks * parallel.num_micro_batch))
            with autocast(self.run):
                measured = calibrate(model, batch, None, (rows,))
            if self.lead:
                measured.write(self.folder.profile)
            self._meet()
        return str(self.folder.profile)

    def _num_measured(self) -> int:
        """Ranks of the profile that is there; 0 where there is none."""
        if not self.folder.profile.is_file():
            return 0
        return len(Profile.read(self.folder.profile).devices)

    def _train(self, phase: Phase, stop: int) -> None:
        run, watch = self.run, self.run.watch
        self._since = time.monotonic()
        for batch in shard(self.material.batches(run, self.done, stop), self.step):
            lr = rate(run.optimizer, self.done, phase, run.steps)
            for group in self.step.optimizer.param_groups:
                group["lr"] = lr
            with autocast(run):
                metrics = self.step(batch)
            self.done += 1
            self._pending.append((self.done, {"lr": torch.tensor(lr), **metrics}))
            last = self.done == run.steps
            if self.progress.wants(self.done) or self.done == stop:
                self._tell()
            before = time.monotonic()
            if not last:
                self._look(
                    evaluate=due(self.done, watch.evaluate_every),
                    sample=due(self.done, watch.sample_every),
                )
            # At the end of a shared phase the model is about to become another.
            if due(self.done, watch.save_every) and not last and self.done != phase.stop:
                self._save()
            self._since += time.monotonic() - before
        if stop != phase.stop or stop == run.steps:
            self._save()

    def _tell(self) -> None:
        """Reads what the steps since the last time came to; the device is waited for only here."""
        values = [(step, {k: float(v) for k, v in m.items()}) for step, m in self._pending]
        self._pending = []
        now = time.monotonic()
        seconds = (now - self._since) / max(1, len(values))
        self._since = now
        balance, dropped = expert_balance(self.step)
        if self.recorder is None:
            return
        for step, metrics in values:
            reading = Reading(
                step=step,
                loss=metrics["loss"],
                tokens_per_second=self.run.batch_rows * self.material.config.seq_len / seconds,
                step_seconds=seconds,
                lr=metrics["lr"],
                grad_norm=metrics.get("grad_norm"),
                balance=balance,
                dropped=dropped,
            )
            known = {k: v for k, v in asdict(reading).items() if v is not None and k != "step"}
            self.recorder.add("train", step, known)
        self.recorder.flush()
        self.progress.show(reading)

    # ---- beside training ----

    def _whole(self) -> M6 | None:
        """The plain model with the weights as they are, on rank 0; every rank takes part."""
        state = self.step.state_dict()
        if not self.lead:
            return None
        if self._plain is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
            self._plain = M6(self.material.config).to(device)
        self._plain.load_state_dict(state)
        return self._plain

    def _look(self, *, evaluate: bool, sample: bool) -> None:
        """How it is getting on; the others wait, so that it is not in their step times."""
        if not (evaluate or sample):
            return
        model = self._whole()
        if model is not None and self.recorder is not None:
            if evaluate:
                with autocast(self.run):
                    loss = self.evaluator.losses(model).loss
                self.recorder.add("held_out", self.done, asdict(loss))
                self.progress.say(
                    f"step {self.done}: held-out loss {loss.model:.3f} nats per character "
                    f"(unigram {loss.unigram:.3f})"
                )
            if sample and self.evaluator.pictures():
                self._caption(model, self.done)
        self._meet()

    def _caption(self, model: M6, number: int) -> None:
        assert self.recorder is not None
        with autocast(self.run):
            picture, lang, right, said = self.evaluator.sample(model, number)
        values = {"picture": picture.key, "language": lang, "right": right, "said": said}
        self.recorder.add("sample", self.done, values)
        where = "  " if self.done == self.run.steps else f"step {self.done}: picture "
        self.progress.say(f'{where}{picture.key}, "{right}": "{said}"')

    def _save(self) -> None:
        extra = {"done": self.done, "data": self.material.state(self.run, self.done)}
        self.step.save(self.folder.checkpoint, extra=extra)

    def finish(self, began: float) -> None:
        """The last word: how good, how fast against the prediction, and where everything is."""
        model = self._whole()
        report = self.step.report()
        if model is not None and self.recorder is not None:
            page = html(report)
            self.folder.report.write_text(page, encoding="utf-8")
            with autocast(self.run):
                scores, drawings = self.evaluator.everything(model)
            self.recorder.add("held_out", self.done, asdict(scores.loss))
            self.recorder.add("scores", self.done, asdict(scores))
            if drawings is not None:
                values = {"names": drawings.names, "right": drawings.right}
                self.recorder.add("drawings", self.done, values)
                write_png(str(self.folder.drawings), drawings.sheet(), scale=2)
            self.progress.say("\nheld-out data:")
            for text in scores.lines():
                self.progress.say(f"  {text}")
            self.progress.say(f"\n{report}")
            for text in caveats(self.run, self.step.plan.num_ranks):
                self.progress.say(text)
            if unseen := self.evaluator.pictures():
                self.progress.say("\npictures it has not seen, and what it calls them:")
                for number in spread(len(unseen), NUM_LAST):
                    self._caption(model, number)
            self._where(began)
        self._meet()

    def _where(self, began: float) -> None:
        assert self.recorder is not None
        out = self.folder.path
        self.progress.say(f"\ntrained in {clock(time.monotonic() - began)}")
        self.progress.say(f"run folder   {out}  (checkpoint/, model/, metrics.jsonl)")
        self.progress.say(f"report       {self.folder.report}")
        if self.folder.drawings.is_file():
            self.progress.say(f"drawings     {self.folder.drawings}  (drawn, and real below)")
        if self.recorder.note is not None:
            self.progress.say(f"note         {self.recorder.note}")
        self.progress.say(f"try          whale generate {out} --draw 'red heart' --out heart.png")

    def _meet(self) -> None:
        """All ranks are here; a rank that never comes is an error after `timeout_seconds`."""
        if dist.is_initialized():
            dist.barrier()

    def close(self) -> None:
        """Ends the files."""
        if self.recorder is not None:
            self.recorder.close()


def caveats(run: Run, num_ranks: int) -> list[str]:
    """What the prediction of a run does not know."""
    found = []
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else num_ranks
    if not torch.cuda.is_available() and cores < num_ranks:
        found.append(
            f"({num_ranks} ranks on {cores} core(s) wait for each other's turns, which no "
            "prediction counts)"
        )
    if run.precision != "float32" and not run.parallel.calibrate:
        found.append("(predicted for float32; parallel.calibrate measures first)")
    return found


def autocast(run: Run) -> AbstractContextManager[Any]:
    """Products in the precision of the run; weights, updates and norms stay in float32."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.autocast(kind, torch.bfloat16, enabled=run.precision == "bfloat16")


def make_model(config: M6Config, *, shared: bool, state: Mapping[str, Tensor] | None) -> M6:
    """A model with the weights of `state`; without any, for Whale to draw as it is cut."""
    config = replace(config, share_layers=shared)
    if state is None:
        with torch.device("meta"):
            return M6(config)
    model = M6(config)
    model.load_state_dict(state)
    return model


def due(step: int, every: int) -> bool:
    """Whether something that is done every so many steps is done after this one."""
    return every > 0 and step % every == 0


def expert_balance(step: Step) -> tuple[float | None, float | None]:
    """The busiest expert over the mean, and the share dropped, of the worst layer since last time.

    The counts are those of the global batch where Whale shares them between replicas.
    """
    found = list(step.expert_counters(reset=True).values())
    if not found:
        return None, None
    balances = [float(c["load"].max()) * len(c["load"]) for c in found]
    return max(balances), max(float(c["dropped"]) for c in found)
