"""One device: the truth, one process that runs the same global micro-batches in order.

Place in the flow: first half of `wh.verify`. Plain torch throughout: the user's module, the user's
loss, `backward`, the user's optimizer. How much a micro-batch counts is found by trying (`shares`),
random masks are handed over (`masks`). What a step left behind is written to a file that the ranks
read.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from whale import parallel
from whale.annotations import TAG
from whale.config import Config
from whale.engine.capture import capture
from whale.engine.draw_recorder import Randomness
from whale.engine.weights import local_copy
from whale.errors import WhaleError
from whale.ir.cluster import Cluster
from whale.runtime import batch as batches
from whale.runtime.means import MeanTracker
from whale.verification.masks import Handed, Watch
from whale.verification.merging import merge_of, merged
from whale.verification.shares import Span, cut, shares
from whale.verification.task import Reference, Task, micro_batches
from whale.verification.verdict import Mismatch

PLAIN = "plain torch, one process, the same global micro-batches in order"
ALSO_WHOLE = "loss.backward() of the whole batch in plain torch, one process"
WEIGHED = ", weighed so that their derivatives add up to those of the whole batch's loss"
COUNTED = ", weighed as Whale counts them (not checked: the loss is no mean of its parts)"
HANDED = "; with Whale's masks handed to it"


def run_one_device(task: Task) -> Reference:
    """Trains on one device and writes the truth of every step."""
    reference = Reference()
    _Truth(task, reference).train()
    return reference


class Untrainable(Exception):  # noqa: N818 - caught here; a feed may be one that does not train
    """A loss that is not finite."""


class Plain:
    """A plain model and its random numbers."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        random: Randomness | None,
        watch: Watch | None = None,
        *,
        autocast: bool = False,
    ) -> None:
        self.model, self.task, self.autocast = model, task, autocast
        self.draws = None
        if random is not None:
            self.draws = Handed(model, random, task.config.seed, watch or Watch())

    def at(self, step: int, micro_batch: int, span: Span) -> AbstractContextManager[None]:
        """The random numbers of some rows."""
        return nullcontext() if self.draws is None else self.draws.at(step, micro_batch, *span)

    def run(self, step: int, micro_batch: int, batch: Any, span: Span) -> dict[str, Any]:
        """The named outputs of some rows of a global batch."""
        low = torch.autocast("cpu", torch.bfloat16, enabled=self.autocast)
        with self.at(step, micro_batch, span), low:
            return batches.call_model(self.model, self.task.loss, cut(batch, *span))

    def backward(
        self, step: int, batch: Any, spans: list[Span], weights: list[float]
    ) -> tuple[Tensor, torch.dtype, list[dict[str, Any]]]:
        """Leaves the gradient of the weighed mean; gives it, its dtype and all named outputs."""
        total = torch.zeros((), dtype=torch.float64)
        named = []
        dtype = torch.float64
        for number, (span, weight) in enumerate(zip(spans, weights, strict=True)):
            found = self.run(step, number, batch, span)
            value: Tensor = found["loss"]
            named.append({k: v.detach() for k, v in found.items() if isinstance(v, Tensor)})
            dtype = value.dtype
            if weight:
                torch.autograd.backward(value, torch.tensor(weight, dtype=value.dtype))
                total += weight * value.detach().double()
        if not torch.isfinite(total):
            raise Untrainable(f"the loss is {total.item()} on one device")
        return total, dtype, named


class _Truth:
    def __init__(self, task: Task, reference: Reference) -> None:
        self.task, self.reference = task, reference
        self.base = with_values(task)
        self.random = _randomness(task, copy.deepcopy(self.base))
        self.watch = Watch()
        self.trained = Plain(task, copy.deepcopy(self.base).train(), self.random, self.watch)
        self.still = Plain(task, copy.deepcopy(self.base), self.random)
        self.model = self.trained.model
        self.aliases = aliases_of(self.model)
        self.optimizer: torch.optim.Optimizer | None = None
        self.counted = False
        self.first_spans: list[Span] = []
        self.first_weights: list[float] = []

    def train(self) -> None:
        """Every feed that trains, in order."""
        task, reference = self.task, self.reference
        reference.outputs = self._outputs()
        rows = batches.num_rows(task.first)
        self.first_spans = micro_batches(rows, task.plan.num_micro_batch)
        self.first_weights = self.weights(0, task.first, self.first_spans)
        evaluation = self._evaluate(0, task.first, self.first_spans, self.first_weights)
        self._write(0, {**evaluation, **_state(self.model)})
        step = 0
        for index, feed in enumerate(task.feeds):
            reasons = []
            for choice, batch in enumerate(feed.batches):
                try:
                    data = self._step(step, batch)
                except Exception as error:
                    if not feed.optional:
                        raise _explained(error) from error
                    reasons.append(str(error).strip().splitlines()[0] if str(error) else "?")
                    continue
                step += 1
                reference.chosen[index] = choice
                self._write(index + 1, data)
                break
            else:
                why = f"one device cannot: {reasons[0]}" if reasons else "the batch has no such one"
                reference.skipped[feed.check] = why
        self._autocast()
        reference.text = self._text()
        for complaint in dict.fromkeys(self.watch.complaints):
            reference.mismatches.append(
                Mismatch(kind="mask", tensor=complaint, rank=-1, step=1, error=float("inf"))
            )

    def _autocast(self) -> None:
        """The first step once more, in float32 and in autocast, from the first weights."""
        low = self.task.low
        if low is None:
            return
        base = with_values(low)
        found = []
        try:
            for autocast in (False, True):
                model = copy.deepcopy(base).train()
                plain = Plain(low, model, self.random, autocast=autocast)
                loss, _, _ = plain.backward(0, low.first, self.first_spans, self.first_weights)
                clip(plain.model, low.config.optimizer.max_grad_norm)
                found.append({"loss": loss, "gradients": gradients_of(plain.model)})
        except Exception as error:
            self.reference.skipped["autocast"] = f"one device cannot: {error}".splitlines()[0]
            return
        torch.save({"float32": found[0], "autocast": found[1]}, low.truth("autocast"))

    def _text(self) -> str:
        several = self.task.plan.num_micro_batch > 1
        how = COUNTED if self.counted else WEIGHED
        return (PLAIN + how if several else ALSO_WHOLE) + (HANDED if self.random else "")

    def _step(self, step: int, batch: Any) -> dict[str, Any]:
        task, model = self.task, self.model
        spans = micro_batches(batches.num_rows(batch), task.plan.num_micro_batch)
        weights = self.weights(step, batch, spans)
        before = [b.detach().clone() for b in model.buffers()]
        generator = torch.get_rng_state()
        try:
            loss, dtype, named = self.trained.backward(step, batch, spans, weights)
        except Exception:
            for buffer, value in zip(model.buffers(), before, strict=True):
                buffer.copy_(value)
            model.zero_grad()
            raise
        if self.random is not None and not torch.equal(generator, torch.get_rng_state()):
            raise WhaleError(
                "the model draws random numbers that Whale does not key by sample (dropout as a "
                "function, or inside attention), so no two layouts agree on them",
                hint="verify it with that dropout set to 0, or use nn.Dropout modules",
            )
        if self.optimizer is None:
            self.reference.float32 = dtype == torch.float32
            named_params = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
            self.optimizer = task.make_optimizer(self.reference.float32)(named_params)
        if task.config.communication.gradients_reduce_method == "sum":
            self._multiply(batch, spans)
        norm = clip(model, task.config.optimizer.max_grad_norm)
        gradients = gradients_of(model)
        self.optimizer.step()
        data = {
            "loss": loss,
            "norm": norm,
            "gradients": gradients,
            "outputs": merged(self.reference.outputs, named, spans),
            "optimizer": _optimizer_state(model, self.optimizer),
            **self._evaluate(step, batch, spans, weights),
            **_state(model),
        }
        self.optimizer.zero_grad()
        return data

    def weights(self, step: int, batch: Any, spans: list[Span]) -> list[float]:
        """The share of each micro-batch in the loss."""
        twin = self._still()
        at = partial(twin.at, step)
        found = shares(twin.model, self.task.loss, batch, spans, at)
        if found is not None:
            return found
        counts = self._counts(batch, spans)
        self.counted = True
        return [count / sum(counts) for count in counts]

    def _counts(self, batch: Any, spans: list[Span]) -> list[float]:
        """What Whale counts in the loss of each micro-batch."""
        twin = self._still()
        counts = []
        for low, high in spans:
            tracker = MeanTracker()
            with torch.no_grad(), tracker:
                value = batches.call_model(twin.model, self.task.loss, cut(batch, low, high))
            counts.append(float(tracker.count(value["loss"], high - low)))
        return counts

    def _multiply(self, batch: Any, spans: list[Span]) -> None:
        """The sum that `gradients_reduce_method = "sum"` asks for: the mean times Whale's count."""
        count = sum(self._counts(batch, spans))
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad *= count

    def _still(self) -> Plain:
        """The twin for anything but training, with the weights and buffers of now."""
        with torch.no_grad():
            for mine, theirs in (
                (self.still.model.parameters(), self.model.parameters()),
                (self.still.model.buffers(), self.model.buffers()),
            ):
                for tensor, value in zip(mine, theirs, strict=True):
                    tensor.copy_(value)
        self.still.model.eval()
        return self.still

    def _evaluate(
        self, step: int, batch: Any, spans: list[Span], weights: list[float]
    ) -> dict[str, Any]:
        """The loss and the named outputs in eval mode, with the weights of now."""
        twin = self._still()
        try:
            with torch.no_grad():
                named = [twin.run(step, m, batch, span) for m, span in enumerate(spans)]
        except Exception as error:
            self.reference.skipped["evaluate"] = f"one device cannot: {error}".splitlines()[0]
            return {"evaluation": None}
        parts = [w * n["loss"].double() for w, n in zip(weights, named, strict=True) if w]
        return {
            "evaluation": torch.stack(parts).sum(),
            "evaluation outputs": merged(self.reference.outputs, named, spans),
        }

    def _outputs(self) -> dict[str, str]:
        """The named outputs whose parts, in eval mode, make the whole, and how."""
        if "outputs" not in self.task.wanted:
            return {}
        batch, rows = self.task.first, batches.num_rows(self.task.first)
        several = len(self.task.plan.stages) > 1
        low = rows // 2
        twin = self._still()
        try:
            with torch.no_grad():
                spans = [(0, rows), (0, low), (low, rows)]
                whole, first, rest = (twin.run(0, 0, batch, span) for span in spans)
        except Exception:
            return {}
        found = {}
        for name, value in whole.items():
            parts = [(low, first.get(name)), (rows - low, rest.get(name))]
            alone = name in ("loss", "0") or (several and name not in ("output", "logits"))
            how = None if alone or low == 0 else merge_of(value, parts)
            if how is not None:
                found[name] = how
        if not found:
            self.reference.skipped["outputs"] = "the model names no output whose parts make it up"
        return found

    def _write(self, name: int, data: dict[str, Any]) -> None:
        torch.save({"aliases": self.aliases, **data}, self.task.truth(name))


def _explained(error: Exception) -> Exception:
    if not isinstance(error, Untrainable):
        return error
    return WhaleError(
        f"{error}, so there is nothing to compare with",
        hint="pass a batch and an optimizer with which the model trains",
    )


def _randomness(task: Task, model: nn.Module) -> Randomness | None:
    """What a training forward draws; None: nothing."""
    before = torch.get_rng_state()
    model.train()
    with torch.no_grad():
        batches.call_model(model, task.loss, task.first)
    random = capture(model, task.first, task.loss).random
    drew = not torch.equal(before, torch.get_rng_state())
    return random if drew or random.foreign else None


def clip(model: nn.Module, max_norm: float | None) -> Tensor | None:
    """Clips by the norm over all elements of all gradients; returns the norm before."""
    if max_norm is None:
        return None
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt()
    for grad in grads:
        grad *= (max_norm / (norm + 1e-6)).clamp(max=1.0).to(grad.dtype)
    return norm


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    """By trainable parameter, its gradient; None for one that has none."""
    return {
        n: None if p.grad is None else p.grad.detach().clone()
        for n, p in model.named_parameters()
        if p.requires_grad
    }


# ---- the model -----------------------------------------------------------------------------------


def with_values(task: Task) -> nn.Module:
    """The model with weights: its own, or for a model on the meta device those Whale draws."""
    if not any(t.is_meta for t in (*task.model.parameters(), *task.model.buffers())):
        return _bare(task.model)
    bare = _bare(task.model)
    plan = parallel.plan(
        bare,
        cluster=Cluster.uniform(1, type="CPU"),
        batch=task.first,
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


def _optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, dict[str, Tensor]]:
    """By parameter, what the optimizer keeps of it; a number as a tensor of one element."""
    return {
        name: slots_of(optimizer, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def slots_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """What the optimizer keeps of a parameter, by slot."""
    return {
        slot: value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))
        for slot, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, (Tensor, int, float))
    }
