"""The truth of an odd case: plain torch in one process, whole global micro-batches in order.

Place in the flow: rank 0 runs it beside Whale. Nothing here is Whale's. Where a model draws random
numbers plain torch gives no values to compare, only what they are near to: see `sanity`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tests.odd import batches
from tests.odd.losses import LOSSES
from tests.odd.model import OPTIMIZERS, build, loss_of
from tests.odd.spec import Spec

STEPS = 3


def forward(spec: Spec, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
    """(loss, output) of the user's model and loss on a whole batch."""
    if spec.inside:
        out = model(**batch) if isinstance(batch, Mapping) else model(*batch)
        if spec.returns == "tensor":
            return out, None
        if spec.returns == "tuple":
            return out[0], out[1]
        named = out if isinstance(out, dict) else vars(out)
        return named["loss"], named["logits"]
    loss = loss_of(spec, model)
    assert loss is not None
    if isinstance(batch, Mapping):
        out = model(**{k: v for k, v in batch.items() if k != "labels"})
        return loss(out, batch["labels"]), out
    out = model(*batch[:-1])
    return loss(out, batch[-1]), out


def around(spec: Spec) -> Any:
    """What the user's code has around every step."""
    if spec.autocast:
        return torch.autocast("cpu", torch.bfloat16)
    return contextlib.nullcontext()


def train_batches(spec: Spec) -> list[Any]:
    """The global batch of every step."""
    return [batches.make(spec, i, rows, spec.length) for i, rows in enumerate(spec.rows)]


def eval_batch(spec: Spec) -> Any:
    """The global batch that is evaluated."""
    return batches.make(spec, 50, spec.eval_rows, spec.eval_length)


def variants(spec: Spec) -> int:
    """In how many ways its micro-batches may be weighed."""
    return len(LOSSES[spec.loss].weights)


def train(spec: Spec, variant: int) -> dict[str, Any]:
    """Trains the case; see `judge` for what is compared."""
    model = build(spec)
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    optimizer = OPTIMIZERS[spec.optimizer](trained)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    result: dict[str, Any] = {"losses": [], "gradients": {}, "norms": []}
    for index, batch in enumerate(train_batches(spec)):
        if index == spec.evaluate_at:
            result["evaluated"] = evaluate(spec, model, variant)
        optimizer.zero_grad()
        with around(spec):
            result["losses"].append(_accumulate(spec, model, batch, variant))
        if spec.max_norm is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), spec.max_norm)
            result["norms"].append(float(norm))
        if index == 0:
            result["gradients"] = {
                n: p.grad.detach().to_dense().clone() for n, p in trained if p.grad is not None
            }
        optimizer.step()
        if spec.optimizer == "scheduled":
            scheduler.step()
    if spec.evaluate_at >= STEPS:
        result["evaluated"] = evaluate(spec, model, variant)
    result["state"] = {n: t.detach().clone() for n, t in model.state_dict().items()}
    return result


def _weights(spec: Spec, parts: list[Any], variant: int) -> list[float]:
    if LOSSES[spec.loss].adds:
        return [1.0] * len(parts)
    weigh = LOSSES[spec.loss].weights[variant]
    counts = []
    for part in parts:
        target, mask, rows = batches.parts(part)
        counts.append(weigh(rows, target, mask))
    return [c / sum(counts) for c in counts]


def _accumulate(spec: Spec, model: nn.Module, batch: Any, variant: int) -> float:
    rows = batches.parts(batch)[2]
    parts = batches.micro_batches(batch, rows, spec.micro)
    total = 0.0
    for part, weight in zip(parts, _weights(spec, parts, variant), strict=True):
        loss, _ = forward(spec, model, part)
        if weight:
            (loss * weight).backward()
            total += float(loss.detach()) * weight
    return total


def evaluate(spec: Spec, model: nn.Module, variant: int) -> dict[str, Any]:
    """The loss and the outputs of the evaluation batch; modes are put back as they were."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    batch = eval_batch(spec)
    parts = batches.micro_batches(batch, spec.eval_rows, spec.micro)
    loss, outputs = 0.0, []
    with torch.no_grad(), around(spec):
        for part, weight in zip(parts, _weights(spec, parts, variant), strict=True):
            value, out = forward(spec, model, part)
            loss += float(value) * weight if weight else 0.0
            outputs.append(out)
    if modes[model]:
        model.train()  # modules may do more then than to turn a flag
    for module, mode in modes.items():
        module.training = mode
    found: dict[str, Any] = {"loss": loss}
    if spec.concat:
        found["output"] = torch.cat(outputs)
    return found


DRAWS = 12


def sanity(spec: Spec, got: dict[str, Any]) -> str:
    """Whether a random case's first step could have been drawn by plain torch; "" if so.

    Its loss must lie in the range of some draws, widened, and every gradient must have about the
    size that gradients have there: none lost, none doubled.
    """
    plain = spec.but(rows=spec.rows[:1], evaluate_at=9, max_norm=None, micro=1)
    losses: list[float] = []
    sizes: dict[str, list[float]] = {}
    for draw in range(DRAWS):
        model = build(plain)
        torch.manual_seed(1000 + draw)
        with around(spec):
            loss = _accumulate(plain, model, train_batches(plain)[0], 0)
        losses.append(loss)
        for name, p in model.named_parameters():
            if p.grad is not None:
                sizes.setdefault(name, []).append(float(p.grad.norm()))
    low, high = min(losses), max(losses)
    slack = 2 * (high - low) + 0.05 * abs(high)
    if not low - slack <= got["losses"][0] <= high + slack:
        return f"loss {got['losses'][0]:.6g}, plain torch draws {low:.6g} to {high:.6g}"
    if spec.max_norm is not None or "gradients" not in got:
        return ""
    largest = max((max(s) for s in sizes.values()), default=0.0)
    for name, found in sizes.items():
        size = float(got["gradients"][name].norm()) if name in got["gradients"] else 0.0
        floor = 1e-6 * largest
        if size < 0.15 * min(found) - floor or size > 6 * max(found) + floor:
            return f"gradient of {name} has norm {size:.3g}, plain torch {min(found):.3g} to " + (
                f"{max(found):.3g}"
            )
    return ""
