"""Losses in parts on real ranks: uneven shares, micro-batches, parts of padding alone, stages."""

from __future__ import annotations

import math
import os
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import whale as wh
from tests.covering import FULL
from tests.distributed.loss_zoo import ALL, CASES, HF, WIDE, Case, Masked, masked_batch, two_counts
from tests.ranks import run_ranks
from whale.errors import WhaleError
from whale.runtime import batch as batches

STEPS = 2


def train(names: list[str], on: Any = None) -> dict[str, Any]:
    """On a rank: the losses, gradients and evaluations of some steps of each case."""
    found: dict[str, Any] = {}
    for name in names:
        case = ALL[name]
        model = case.model()
        case.layout.annotate(model, None)
        wh.init(device="cpu")
        step = wh.parallelize(
            model,
            optimizer=partial(torch.optim.SGD, lr=0.1),
            batch=case.make(0),
            loss=case.loss,
            config=case.layout.config,
            cluster=case.layout.cluster(),
        )
        evaluated = float(step.evaluate(case.make(1))["loss"])
        losses = []
        for number in range(STEPS):
            losses.append(float(step(case.make(1 + number))["loss"]))
        found[name] = (evaluated, losses, step.gradients())
        step.close()
    return found


def alone(case: Case) -> tuple[float, list[float], dict[str, torch.Tensor]]:
    """The same by plain torch, all rows at once."""
    model = case.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for number in range(STEPS):
        optimizer.zero_grad()
        value = batches.call_model(model, case.loss, case.make(1 + number))["loss"]
        value.backward()
        losses.append(float(value.detach()))
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return losses[0], losses, grads


def compare(names: list[str], results: list[dict[str, Any]]) -> None:
    wrong = []
    for name in names:
        case = ALL[name]
        first, losses, grads = alone(case)
        assert all(map(math.isfinite, losses)), name
        size = max(float(g.abs().max()) for g in grads.values())
        for rank, found in enumerate(results):
            evaluated, got, gradients = found[name]
            error = max(
                abs(a - b) / abs(b)
                for a, b in zip([evaluated, *got], [first, *losses], strict=True)
            )
            apart = max(float((gradients[n] - g).abs().max()) for n, g in grads.items()) / size
            if not (error < case.tolerance and apart < case.tolerance * 10):
                wrong.append(f"{name}, rank {rank}: loss {error:.2g}, gradient {apart:.2g}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("ranks", [2, 3])
def test_losses_are_those_of_one_device(ranks: int) -> None:
    names = [name for name, case in CASES.items() if case.layout.num_ranks == ranks]
    names = names if os.environ.get(FULL) else names[::2]
    compare(names, run_ranks(ranks, train, names, timeout=90.0))


@pytest.mark.full
def test_losses_of_stages_of_replicas() -> None:
    compare(list(WIDE), run_ranks(4, train, list(WIDE)))


def test_router_losses_are_of_all_tokens() -> None:
    names = list(HF) if os.environ.get(FULL) else ["mixtral, experts"]
    compare(names, run_ranks(3, train, names, timeout=90.0))


def narrow() -> tuple[float, float]:
    """A bfloat16 model with a masked mean, whose first batch is full."""
    torch.manual_seed(4)
    model = Masked(lambda losses, mask: (losses * mask).sum() / mask.sum()).bfloat16()
    wh.init(device="cpu")
    step = wh.parallelize(
        wh.annotate(model, {"": wh.replicate()}),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        batch=masked_batch(0, full=True),
    )
    data = masked_batch(1)
    loss = float(step(data)["loss"])
    step.close()
    torch.manual_seed(4)
    plain = Masked(lambda losses, mask: (losses * mask).sum() / mask.sum()).bfloat16()
    return loss, float(plain(**data)["loss"].detach())


def test_a_narrow_model_with_a_full_first_batch() -> None:
    for loss, want in run_ranks(2, narrow):
        assert loss == pytest.approx(want, rel=1e-2)


def refusals() -> list[str]:
    """What must not be trained: the texts of the errors."""
    wh.init(device="cpu")
    found = []
    batch = masked_batch(0, full=True)

    def rooted(losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (losses * mask).mean().sqrt()

    def learned(losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        weights = losses.sigmoid() * mask
        return (losses * weights).sum() / weights.sum()

    def hidden(losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (losses * mask).sum() / max(mask.sum().item(), 1)

    def unreduced(losses: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return losses.mean(1)

    padded, two = masked_batch(0), {"pipeline.num_micro_batch": 2}
    cases: list[tuple[Any, dict[str, Any], Any]] = [
        (rooted, {}, batch),
        (learned, {}, batch),
        (hidden, {}, batch),
        (two_counts, two, padded),
        (unreduced, {}, batch),
    ]
    for mean, config, batch in cases:
        model: nn.Module = wh.annotate(Masked(mean).double(), {"": wh.replicate()})
        try:
            wh.parallelize(model, optimizer=torch.optim.SGD, batch=batch, config=config)
            found.append("")
        except WhaleError as error:
            found.append(str(error))
    return found


def test_what_no_part_can_tell_is_refused() -> None:
    for rooted, learned, hidden, counts, unreduced in run_ranks(2, refusals):
        assert "computed at once and" in rooted and "wh.weighted_mean" in rooted
        assert "has a gradient itself" in learned
        assert "tried with a first row without labels" in hidden
        assert "different counts" in counts and "num_micro_batch=1" in counts
        assert "shape (2,), not one number" in unreduced
