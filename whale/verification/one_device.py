"""One device: the truth, one process that runs the same global micro-batches in order.

Place in the flow: first half of `wh.verify`. Plain torch throughout: the user's module, the user's
loss, `backward`, the user's optimizer. How much a micro-batch counts is found by trying (`shares`),
random masks are handed over (`masks`). What a step left behind is written to a file that the ranks
read.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from whale import parallel
from whale.annotations import TAG
from whale.config import Config
from whale.engine.capture.captured import capture
from whale.engine.lower.weights import local_copy
from whale.engine.state.copies import copied
from whale.engine.trace.draw_recorder import Randomness
from whale.engine.updating import OptimizerFactory
from whale.errors import WhaleError
from whale.ir.cluster import Cluster
from whale.runtime import batch as batches
from whale.runtime.context import evaluation_step
from whale.verification.compare import dense, error_of
from whale.verification.masks import Watch
from whale.verification.merging import merge_of, merged
from whale.verification.plain import How, Part, Plain, Untrainable, loss_of, rows_meet
from whale.verification.shares import Span, shares
from whale.verification.task import Reference, Task, micro_batches
from whale.verification.verdict import Mismatch

HANDED = "; with Whale's masks handed to it"
TEXTS = {
    "one": "loss.backward() of the whole batch in plain torch, one process",
    "joined": "plain torch, one process: the model on each global micro-batch in order, the loss "
    "of all their outputs",
    "weighed": "plain torch, one process: each global micro-batch in order, weighed so that their "
    "gradients add up to that of the whole batch's loss",
    "whole": "plain torch, one process: all micro-batches at once, for no rows meet in the model",
    "rows": "not checked: how much a micro-batch counts (by rows here), for the loss is no mean of "
    "theirs and rows meet in the model",
    "sum": "not checked: by what count a sum of gradients is greater than their mean",
}
"""What one device was, by how the loss of its global batches was put together."""


def run_one_device(task: Task) -> Reference:
    """Trains on one device and writes the truth of every step."""
    reference = Reference()
    _Truth(task, reference).train()
    return reference


class _Truth:
    def __init__(self, task: Task, reference: Reference) -> None:
        self.task, self.reference = task, reference
        self.base = with_values(task)
        self.random, changes = _looked_at(task, copied(self.base))
        self.meet = rows_meet(self.base, changes)
        self.watch = Watch()
        self.trained = Plain(task, copied(self.base), self.random, self.watch)
        self.still = Plain(task, copied(self.base), self.random)
        self.model = self.trained.model
        self.aliases = aliases_of(self.model)
        self.optimizer: torch.optim.Optimizer | None = None
        self.kinds: set[str] = set()

    def train(self) -> None:
        """Every feed that trains, in order."""
        task, reference = self.task, self.reference
        reference.outputs = self._outputs()
        first = self._how(0, task.first)
        data = _state(self.model)
        if "evaluate" in task.wanted:
            data |= self._evaluate(0, task.first, first)
        self._write(0, data)
        step, last = 0, max(i for i, feed in enumerate(task.feeds) if feed.check == "steps")
        for index, feed in enumerate(task.feeds):
            reasons = []
            for choice, batch in enumerate(feed.batches):
                try:
                    data, how = self._step(step, batch)
                except Exception as error:
                    if isinstance(error, Untrainable) and not feed.optional:
                        raise _not_finite(error) from error
                    if not feed.optional:
                        raise
                    reasons.append(str(error).strip().splitlines()[0] if str(error) else "?")
                    continue
                step += 1
                if feed.fresh or (index == last and "evaluate" in task.wanted):
                    data |= self._evaluate(step, batch, how)
                reference.chosen[index] = choice
                self._write(index + 1, data)
                if how.kind == "rows" or not feed.optional:
                    self.kinds.add(how.kind)
                break
            else:
                why = f"one device cannot: {reasons[0]}" if reasons else "the batch has no such one"
                reference.skipped[feed.check] = why
        self._autocast(first)
        reference.text = self._text()
        for complaint in dict.fromkeys(self.watch.complaints):
            reference.mismatches.append(
                Mismatch(kind="mask", tensor=complaint, rank=-1, step=1, error=float("inf"))
            )

    def _autocast(self, how: How) -> None:
        """The first step once more, in float32 and in autocast, from the first weights."""
        low = self.task.low
        if low is None:
            return
        base = with_values(low)
        found = []
        try:
            for autocast in (False, True):
                plain = Plain(low, copied(base), self.random, autocast=autocast)
                loss, _, _ = plain.backward(0, low.first, how)
                clip(plain.model, low.config.optimizer.max_grad_norm)
                found.append({"loss": loss, "gradients": gradients_of(plain.model)})
        except Exception as error:
            self.reference.skipped["autocast"] = f"one device cannot: {error}".splitlines()[0]
            return
        torch.save({"float32": found[0], "autocast": found[1]}, low.truth("autocast"))

    def _text(self) -> str:
        said = [TEXTS[kind] for kind in TEXTS if kind in self.kinds]
        return "; ".join(said) + (HANDED if self.random else "")

    def _step(self, step: int, batch: Any) -> tuple[dict[str, Any], How]:
        task, model = self.task, self.model
        how = self._how(step, batch)
        before = [b.detach().clone() for b in model.buffers()]
        generator = torch.get_rng_state()
        try:
            loss, dtype, parts = self.trained.backward(step, batch, how)
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
            self.optimizer = _made(task.make_optimizer(self.reference.float32), model)
        if not task.plan.wire.divides:
            self._multiply(step, batch)
        norm = clip(model, task.config.optimizer.max_grad_norm)
        gradients = gradients_of(model)
        self.optimizer.step()
        data = {
            "loss": loss,
            "norm": norm,
            "gradients": gradients,
            "outputs": _merged(self.reference.outputs, parts),
            "optimizer": _optimizer_state(model, self.optimizer),
            **_state(model),
        }
        self.optimizer.zero_grad()
        return data, how

    def _how(self, step: int, batch: Any) -> How:
        """How the loss of a batch is put together; nothing of Whale's is asked."""
        spans = tuple(micro_batches(batches.num_rows(batch), self.task.plan.num_micro_batch))
        if len(spans) > 1:
            return self._of_several(step, batch, spans)
        return How(kind="one", spans=spans)

    def _of_several(self, step: int, batch: Any, spans: tuple[Span, ...]) -> How:
        twin = self._still()
        joined = How(kind="joined", spans=spans)
        if self.task.loss is not None:
            try:
                with torch.no_grad():
                    twin.parts(step, batch, joined)
                return joined
            except ValueError:
                pass  # an output without rows, such as a loss that the model adds
        at = partial(twin.at, step)
        found = shares(twin.model, self.task.loss, batch, spans, at)
        if found is not None:
            return How(kind="weighed", spans=spans, shares=tuple(found))
        if not self.meet:
            return How(kind="whole", spans=spans)
        rows = batches.num_rows(batch)
        by_rows = tuple((high - low) / rows for low, high in spans)
        return How(kind="rows", spans=spans, shares=by_rows)

    def _multiply(self, step: int, batch: Any) -> None:
        """The sum that `gradients_reduce_method = "sum"` asks for: the mean times Whale's count.

        What a sample or a label counts is Whale's to say; the same Step on one rank is asked.
        """
        self.kinds.add("sum")
        norms = []
        for method in ("sum", "mean"):
            twin = copied(self.base)
            twin.load_state_dict(self.model.state_dict())
            asked = parallel.parallelize(
                twin,
                optimizer=partial(torch.optim.SGD, lr=0.0),
                batch=batch,
                loss=self.task.loss,
                config=one_rank_config(self.task, reduce=method),
                cluster=Cluster.uniform(1, type="CPU"),
            )
            asked.num_steps = step
            asked(batch)
            norms.append(sum(float(g.square().sum()) for g in asked.gradients().values()) ** 0.5)
            asked.close()
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad *= norms[0] / norms[1]

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

    def _evaluate(self, num_steps: int, batch: Any, how: How) -> dict[str, Any]:
        """The loss and the named outputs in eval mode, with the weights after so many steps.

        Of the model that trains, as a script does it: a forward may count its calls.
        """
        flags = {module: module.training for module in self.model.modules()}
        self.model.eval()
        try:
            with torch.no_grad():
                parts = self.trained.parts(evaluation_step(num_steps), batch, how)
        except Exception as error:
            self.reference.skipped["evaluate"] = f"one device cannot: {error}".splitlines()[0]
            return {}
        finally:
            for module, flag in flags.items():
                module.training = flag
        return {
            "evaluation": loss_of(parts),
            "evaluation outputs": _merged(self.reference.outputs, parts),
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


def _not_finite(error: Exception) -> WhaleError:
    return WhaleError(
        f"{error}, so there is nothing to compare with",
        hint="pass a batch and an optimizer with which the model trains",
    )


def _looked_at(task: Task, model: nn.Module) -> tuple[Randomness | None, bool]:
    """What a training forward draws (None: nothing), and whether it changes buffers."""
    generator = torch.get_rng_state()
    buffers = [b.detach().clone() for b in model.buffers()]
    with torch.no_grad():
        batches.call_model(model, task.loss, task.first)
    pairs = zip(buffers, model.buffers(), strict=True)
    changes = any(error_of(now, before, 1.0)[0] > 0 for before, now in pairs)
    drew = not torch.equal(generator, torch.get_rng_state())
    random = capture(model, task.first, task.loss).random
    return (random if drew or random.foreign else None), changes


def _merged(wanted: dict[str, str], parts: list[Part]) -> dict[str, Tensor]:
    return merged(wanted, [p.named for p in parts], [p.span for p in parts])


def _made(factory: OptimizerFactory, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer; some factories want parameters without their names."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    try:
        return factory(named)
    except (TypeError, AttributeError):
        return factory([p for _, p in named])


def clip(model: nn.Module, max_norm: float | None) -> Tensor | None:
    """Clips by the norm over all elements of all gradients; returns the norm before."""
    if max_norm is None:
        return None
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.stack([dense(grad).abs().double().square().sum() for grad in grads]).sum().sqrt()
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
        config=one_rank_config(task),
    )
    model, _ = local_copy(bare, plan, 0, torch.device("cpu"), task.config.seed)
    return model


def _bare(model: nn.Module) -> nn.Module:
    """A copy without annotations."""
    bare = copied(model)
    for module in bare.modules():
        module.__dict__.pop(TAG, None)
    return bare


def one_rank_config(task: Task, *, reduce: str | None = None) -> Config:
    """The settings of the same training on one rank."""
    method = reduce or ("mean" if task.plan.wire.divides else "sum")
    return Config.from_dict(
        {
            **task.config.to_dict(),
            "optimizer.max_grad_norm": None,
            "communication.gradients_reduce_method": method,
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
        # A copy: an evaluation may change it before it is written.
        "buffers": {n: b.detach().clone() for n, b in model.named_buffers()},
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
