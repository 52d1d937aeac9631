"""A loss computed in parts is that of the whole, or is refused: never another."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tests.unit.runtime.random_losses import ROWS, Model, batch, expression
from whale.engine.trials.trial_rows import Rows
from whale.errors import WhaleError
from whale.runtime import batch as batches
from whale.runtime.sums import refuse_other_sizes
from whale.runtime.weighing import MeanTracker, Weighed, Weighing

LIMIT = 1e-9


def gradients(model: Model, value: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(value, list(model.parameters()), allow_unused=True)
    return [
        torch.zeros_like(p) if g is None else g
        for p, g in zip(model.parameters(), found, strict=True)
    ]


def in_parts(
    model: Model, loss, data, cuts: list[int], weighing: Weighing | None, in_turn: bool
) -> Tensor:
    """What training makes of the parts between `cuts`, side by side or in turn."""
    ran = []
    for low, high in zip(cuts, cuts[1:], strict=False):
        inputs, target = batches.split_target(batches.take_rows(data, low, high))
        out = model(*inputs)
        tracker = MeanTracker(high - low)
        with tracker:
            value = loss(out, target)
        ran.append((tracker, value, (high - low) / ROWS))
    told: list[Tensor] = []

    def tell(numbers: Tensor) -> Tensor:
        told.append(numbers)
        return numbers

    def hear(numbers: Tensor) -> Tensor:
        return torch.stack(told).sum(0)

    if weighing is not None and weighing.joins and not in_turn:
        for tracker, value, share in ran:
            tracker.weigh(value, share, weighing, tell)
    meet = None if in_turn else hear
    parts: list[Weighed] = [t.weigh(value, share, weighing, meet) for t, value, share in ran]
    refuse_other_sizes(torch.stack([part.numbers for part in parts]).sum(0).tolist())
    count = torch.stack([p.count.double() for p in parts]).sum()
    floor = torch.stack([torch.as_tensor(p.floor).double() for p in parts]).sum()
    return torch.stack([p.total.double() for p in parts]).sum() / torch.maximum(count, floor)


def outcome(seed: int, in_turn: bool) -> str:
    """`exact`, `refused` at build, `loud` in training, or what is wrong."""
    loss, text = expression(seed)
    torch.manual_seed(seed)
    model = Model().double()
    rng = random.Random(seed)
    example = batch(seed, holes=rng.random() < 0.5)
    if not bool(loss(model(example[0]), example[1]).isfinite()):
        return "none"
    try:
        rows = Rows(model, loss, example, torch.float64, copied=True, in_turn=in_turn)
        trial = rows.trial()
    except WhaleError:
        return "refused"
    kinds = set()
    for step in range(3):
        data = batch(1000 + seed + step, holes=step < 2)
        cuts = sorted({0, ROWS, *rng.sample(range(1, ROWS), rng.choice((1, 2, 3)))})
        whole = loss(model(data[0]), data[1])
        try:
            value = in_parts(model, loss, data, cuts, trial.weighing, in_turn)
        except (WhaleError, ZeroDivisionError):  # the latter from code like 1 / n.item()
            kinds.add("loud")
            continue
        if not bool(whole.isfinite()) and not bool(value.isfinite()):
            continue
        want, got = gradients(model, whole), gradients(model, value)
        whole, value = whole.detach(), value.detach()
        size = max(float(g.abs().max()) for g in want) or 1.0
        apart = max(float((a - b).abs().max()) for a, b in zip(want, got, strict=True)) / size
        error = abs(float(whole) - float(value)) / max(abs(float(whole)), 1e-3)
        if not (error < LIMIT and apart < LIMIT):
            return f"WRONG by {error:.2g}, gradients {apart:.2g}: {seed}: {text}, cuts {cuts}"
        kinds.add("exact")
    return "exact" if kinds == {"exact"} else "loud" if "loud" in kinds else "none"


@pytest.mark.covering(1)
@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("first", [0, 40])
def test_random_losses_are_exact_or_refused(first: int, in_turn: bool) -> None:
    found = [outcome(seed, in_turn) for seed in range(first, first + 40)]
    assert not [text for text in found if text.startswith("WRONG")]
    assert found.count("exact") >= 15


@pytest.mark.full
@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("first", range(1000, 5000, 500))
def test_many_random_losses_are_exact_or_refused(first: int, in_turn: bool) -> None:
    found = [outcome(seed, in_turn) for seed in range(first, first + 500)]
    assert not [text for text in found if text.startswith("WRONG")]


BENT = {
    "clamp": lambda x, m: x.mean().clamp(max=1.0),
    "flooding": lambda x, m: (x.mean() - 0.1).abs() + 0.1,
    "where": lambda x, m: torch.where(x.mean() > 0, x.mean(), 2 * x.mean()),
    "relu of columns": lambda x, m: x.mean(0).relu().sum(),
    "maximum": lambda x, m: 3 * torch.maximum(x.sum() / 6, x.new_zeros(())) + 1,
    "both": lambda x, m: torch.where((x.mean() > 0) & (m.sum() > 2), x.mean(), x.sum()),
}
STRAIGHT = {
    "each row": lambda x, m: x.clamp(min=0).abs().mean(),
    "a count": lambda x, m: (x.sum(1) * m).sum() / m.sum().clamp(min=1),
    "some or none": lambda x, m: torch.where(
        m.sum() > 0, (x.sum(1) * m).sum() / m.sum(), x.new_zeros(())
    ),
}


@pytest.mark.parametrize("name", [*BENT, *STRAIGHT])
def test_what_bends_after_the_sum_is_refused(name: str) -> None:
    x, mask = torch.randn(6, 3, requires_grad=True), torch.tensor([1, 0, 1, 1, 0, 1])
    tracker = MeanTracker(6)
    with tracker:
        value = {**BENT, **STRAIGHT}[name](x, mask)
    if name in STRAIGHT:
        assert tracker.weigh(value, 1.0).total.requires_grad
        return
    with pytest.raises(WhaleError, match="of a sum or mean over rows, which may bend"):
        tracker.weigh(value, 1.0)
