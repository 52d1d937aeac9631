"""One device: the truth, one process that runs the same global micro-batches in order.

Place in the flow: first half of `wh.verify`. The loop is plain torch and shares nothing with the
executor but what a row and a mean are. A model with dropout has no plain counterpart, because Whale
keys its masks by sample: its truth is the same Step on one rank. What a step left behind is written
to a file that the ranks read.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whale import parallel
from whale.annotations import TAG
from whale.config import Config
from whale.engine.step import OptimizerFactory
from whale.engine.weights import local_copy
from whale.errors import WhaleError
from whale.ir.cluster import Cluster
from whale.ir.plan import Plan
from whale.runtime import batch as batches
from whale.runtime.weighing import MeanTracker
from whale.verification.verdict import Mismatch

PLAIN = "plain torch, one process, the same global micro-batches in order"
ALSO_WHOLE = f"{PLAIN}; itself equal to loss.backward() of the whole batch"
ONE_RANK = "the same Step on one rank (the model has dropout, which Whale keys by sample)"

SMALL = 1e-3
"""An entry below this share of the greatest one of its kind is measured against that share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What both sides run: a float64 model and a global batch per step. Forked, never pickled."""

    model: nn.Module
    inputs: tuple[Any, ...]
    loss: batches.Loss | None
    optimizer: OptimizerFactory | None
    config: Config
    plan: Plan
    folder: Path
    tolerance: float | None

    def truth(self, step: int) -> Path:
        """The file of what one device had after `step`."""
        return self.folder / f"step{step}.pt"

    def make_optimizer(self, float32: bool) -> OptimizerFactory:
        """The user's optimizer, or AdamW.

        AdamW divides by the gradient's own size, so where a gradient is zero but for rounding (the
        bias of attention's keys), rounding decides the update unless `eps` is well above it.
        """
        if self.optimizer is not None:
            return self.optimizer
        return partial(torch.optim.AdamW, lr=1e-2, eps=1e-2 if float32 else 1e-5)

    def allowed(self, float32: bool) -> float:
        """The tolerance."""
        if self.tolerance is not None:
            return self.tolerance
        return 1e-6 if float32 else 1e-9


@dataclass(slots=True, kw_only=True)
class Reference:
    """What the one-device run was, and where it is at odds with plain torch."""

    text: str = PLAIN
    float32: bool = False
    worst: float = 0.0
    mismatches: list[Mismatch] = field(default_factory=list)


def run_one_device(task: Task) -> Reference:
    """Trains on one device and writes the truth of every step."""
    before = torch.get_rng_state()
    reference = Reference()
    _train_plainly(task, reference)
    if not torch.equal(before, torch.get_rng_state()):
        reference = Reference(text=ONE_RANK, float32=reference.float32)
        _train_one_rank(task, reference)
    return reference


# ---- plain torch ---------------------------------------------------------------------------------


def _train_plainly(task: Task, reference: Reference) -> None:
    model = _with_values(task).train()
    aliases = aliases_of(model)
    optimizer: torch.optim.Optimizer | None = None
    _write(task, 0, {"aliases": aliases, **_state(model)})
    for step, batch in enumerate(task.inputs, 1):
        twin = copy.deepcopy(model) if step == 1 and task.plan.num_micro_batch == 1 else None
        state = torch.get_rng_state()
        loss, dtype = _accumulate(task, model, batch)
        drew = not torch.equal(state, torch.get_rng_state())
        if optimizer is None:
            reference.float32 = dtype == torch.float32
            named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
            optimizer = task.make_optimizer(reference.float32)(named)
        norm = _clip(model, task.config.optimizer.max_grad_norm)
        gradients = {
            n: torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
            for n, p in model.named_parameters()
            if p.requires_grad
        }
        if twin is not None and not drew:
            _compare_with_whole(task, twin, batch, loss, gradients, reference)
        optimizer.step()
        data = {"aliases": aliases, "loss": loss, "gradients": gradients, "norm": norm}
        _write(task, step, {**data, **_state(model)})
        optimizer.zero_grad()


def _accumulate(task: Task, model: nn.Module, batch: Any) -> tuple[Tensor, torch.dtype]:
    """Leaves the gradient of the global mean in the model; returns it and the loss's dtype."""
    total = torch.zeros((), dtype=torch.float64)
    count = torch.zeros((), dtype=torch.float64)
    dtype = torch.float64
    for low, high in _micro_batches(batches.num_rows(batch), task.plan.num_micro_batch):
        part = batches.take_rows(batch, low, high)
        value, tracker = _tracked(model, task.loss, part, high - low)
        part_total, part_count = value, torch.ones((), dtype=torch.float64)
        summed = task.config.communication.gradients_reduce_method == "sum"
        if summed or task.plan.num_micro_batch > 1:
            weighed = tracker.weigh(value, (high - low) / batches.num_rows(batch))
            part_total, part_count = weighed.total, weighed.count
        torch.autograd.backward(part_total)
        total += part_total.detach().double()
        count += part_count.double()
        dtype = value.dtype
    mean = total / count
    if not torch.isfinite(mean):
        raise WhaleError(
            f"the loss is {mean.item()} on one device, so there is nothing to compare with",
            hint="pass a batch and an optimizer with which the model trains",
        )
    if task.config.communication.gradients_reduce_method != "sum":
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= count.to(parameter.grad.dtype)
    return mean, dtype


def _tracked(
    model: nn.Module, loss: batches.Loss | None, part: Any, rows: int
) -> tuple[Tensor, MeanTracker]:
    """The loss of some rows, and what it is a mean over."""
    tracker = MeanTracker(rows)
    if loss is None:
        with tracker:
            return batches.call_model(model, None, part)["loss"], tracker

    def tracked(output: Any, target: Any) -> Any:
        with tracker:
            return loss(output, target)

    return batches.call_model(model, tracked, part)["loss"], tracker


def _micro_batches(rows: int, number: int) -> Iterator[tuple[int, int]]:
    """Consecutive rows, sizes that differ by at most one, larger first; no empty ones."""
    low = 0
    for index in range(number):
        high = low + rows // number + (index < rows % number)
        if high > low:
            yield low, high
        low = high


def _clip(model: nn.Module, max_norm: float | None) -> Tensor | None:
    """Clips by the norm over all elements of all gradients; returns the norm before."""
    if max_norm is None:
        return None
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt()
    for grad in grads:
        grad *= (max_norm / (norm + 1e-6)).clamp(max=1.0).to(grad.dtype)
    return norm


def _compare_with_whole(
    task: Task,
    model: nn.Module,
    batch: Any,
    loss: Tensor,
    gradients: dict[str, Tensor],
    reference: Reference,
) -> None:
    """With one micro-batch the mean is the model's own: no counting, no weights, just backward."""
    value: Tensor = batches.call_model(model, task.loss, batch)["loss"]
    torch.autograd.backward(value)
    if task.config.communication.gradients_reduce_method == "sum":
        return
    _clip(model, task.config.optimizer.max_grad_norm)
    largest = max((greatest(g) for g in gradients.values()), default=0.0)
    pairs = [("loss", "loss", loss, value.detach())]
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            pairs.append(("gradient", name, gradients[name], parameter.grad))
    for kind, name, got, want in pairs:
        scale = max(greatest(want), SMALL * largest if kind == "gradient" else 0.0)
        error, location = error_of(got, want, scale)
        reference.worst = max(reference.worst, error)
        if not error <= task.allowed(reference.float32):
            reference.mismatches.append(
                Mismatch(kind=kind, tensor=name, rank=-1, step=1, error=error, location=location)
            )
    reference.text = ALSO_WHOLE


# ---- one rank of Whale ---------------------------------------------------------------------------


def _train_one_rank(task: Task, reference: Reference) -> None:
    bare = _bare(task.model)
    parallel.init(device="cpu")
    step = parallel.parallelize(
        bare,
        optimizer=task.make_optimizer(reference.float32),
        batch=task.inputs[0],
        loss=task.loss,
        config=_one_rank_config(task),
        cluster=_one_cpu(),
    )
    aliases = aliases_of(bare)
    _write(task, 0, {"aliases": aliases, **_state(step._lowered.model)})
    for number, batch in enumerate(task.inputs, 1):
        before = torch.get_rng_state()
        metrics = step(batch)
        if not torch.equal(before, torch.get_rng_state()):
            raise WhaleError(
                "the model draws random numbers that Whale does not key by sample (dropout as a "
                "function, or inside attention), so no two layouts agree on them",
                hint="verify it with that dropout set to 0, or use nn.Dropout modules",
            )
        data = {
            "aliases": aliases,
            "loss": metrics["loss"],
            "norm": metrics.get("grad_norm"),
            "gradients": step.gradients(),
        }
        _write(task, number, {**data, **_state(step._lowered.model)})


def _with_values(task: Task) -> nn.Module:
    """The model with weights: its own, or for a model on the meta device those Whale draws."""
    if not any(t.is_meta for t in (*task.model.parameters(), *task.model.buffers())):
        return copy.deepcopy(task.model)
    bare = _bare(task.model)
    plan = parallel.plan(
        bare,
        cluster=_one_cpu(),
        batch=task.inputs[0],
        loss=task.loss,
        config=_one_rank_config(task),
    )
    model, _, _ = local_copy(bare, plan, 0, torch.device("cpu"), task.config.seed)
    return model


def _bare(model: nn.Module) -> nn.Module:
    """A copy without annotations."""
    bare = copy.deepcopy(model)
    for module in bare.modules():
        module.__dict__.pop(TAG, None)
    return bare


def _one_rank_config(task: Task) -> Config:
    return Config.from_dict(
        {
            **task.config.to_dict(),
            "auto.auto_parallel": False,
            "pipeline.num_stages": None,
            "pipeline.num_chunks": None,
            "pipeline.num_micro_batch": task.plan.num_micro_batch,
        }
    )


def _one_cpu() -> Cluster:
    return Cluster.uniform(1, type="CPU")


# ---- what a step left behind ---------------------------------------------------------------------


def aliases_of(model: nn.Module) -> dict[str, str]:
    """Every key of the state dict, with the first name of the tensor it means."""
    first = {id(t): name for name, t in (*model.named_parameters(), *model.named_buffers())}
    return {
        key: first[id(t)] for key, t in model.state_dict(keep_vars=True).items() if id(t) in first
    }


def _state(model: nn.Module) -> dict[str, Any]:
    return {
        "weights": {n: p.detach() for n, p in model.named_parameters()},
        "buffers": {n: b.detach() for n, b in model.named_buffers()},
    }


def _write(task: Task, step: int, data: dict[str, Any]) -> None:
    torch.save(data, task.truth(step))


def read_truth(task: Task, step: int) -> dict[str, Any]:
    """What one device had after `step`; pages are shared by all ranks that read it."""
    data: dict[str, Any] = torch.load(task.truth(step), mmap=True, weights_only=True)
    return data


def greatest(tensor: Tensor) -> float:
    """The greatest entry by size."""
    return float(tensor.detach().abs().max()) if tensor.numel() else 0.0


def error_of(got: Tensor, want: Tensor, scale: float) -> tuple[float, tuple[int, ...]]:
    """The greatest difference relative to `scale`, and where it is; a nan is infinitely wrong."""
    if got.shape != want.shape:
        return float("inf"), ()
    if not got.numel():
        return 0.0, ()
    apart = (got.detach().double() - want.detach().double()).abs()
    apart = torch.where(apart.isnan(), torch.inf, apart)
    worst = int(apart.argmax())
    location = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), apart.shape))
    difference = float(apart.flatten()[worst])
    return (difference / scale if scale else difference), location
