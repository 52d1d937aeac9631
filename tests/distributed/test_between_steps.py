"""What a script does to its model, its loss and its numbers while a step is open."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import whale as wh
from tests.covering import part
from tests.ranks import run_ranks

STEPS = 4
NUMBERS = {"weight": 1.0, "calls": 0}


@functools.lru_cache(None)
def places(size: int) -> Tensor:
    return torch.linspace(0.5, 1.5, size, dtype=torch.float64)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.warmth = nn.Linear(6, 12), nn.Linear(12, 6), 1.0
        self.register_buffer("mask", torch.ones(6))

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(torch.tanh(self.up(h))) * self.warmth * self.mask * places(6)


class Adapted(nn.Linear):
    """A low-rank adapter that is merged into the weight for evaluation."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.a = nn.Parameter(torch.randn(2, 6) * 0.3)
        self.b = nn.Parameter(torch.randn(6, 2) * 0.3)
        self.merged = False

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out if self.merged else out + x @ self.a.t() @ self.b.t()

    def train(self, mode: bool = True) -> Adapted:
        super().train(mode)
        if mode == self.merged:
            self.weight.data += (self.b @ self.a) * (-1 if mode else 1)
            self.merged = not mode
        return self


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.b0, self.b1, self.head = nn.Linear(6, 6), Block(), Block(), nn.Linear(6, 6)
        self.adapter, self.scale = Adapted(), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.adapter(self.b1(self.b0(self.stem(x))))) * self.scale


def loss(out: Tensor, target: Tensor) -> Tensor:
    NUMBERS["calls"] += 1
    return F.mse_loss(out, target) * NUMBERS["weight"]


def warmed_up(out: Tensor, target: Tensor) -> Tensor:
    NUMBERS["calls"] += 1
    return F.mse_loss(out, target) * min(1.0, NUMBERS["calls"] / 3)


def by_width(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [p], "lr": 1.0 / p.shape[-1]} for _, p in named])


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1, momentum=0.9)


def hooked(model: Net) -> None:
    model.b0.register_forward_hook(lambda m, a, o: o * 2)
    model.b1.register_forward_pre_hook(lambda m, a: (a[0] + 0.5,))


def weigh(model: Net, step: int) -> None:
    NUMBERS["weight"] = 1.0 + step


def mask(model: Net, step: int) -> None:
    model.b0.mask = torch.full((6,), 1 / (step + 1), dtype=torch.float64)


def halve(model: Net, step: int) -> None:
    if step == 1:
        model.head.weight.data.mul_(0.5)


Change = Callable[[Net, int], Any]
CASES: dict[str, dict[str, Any]] = {
    "a number of a block": {"change": lambda m, i: setattr(m.b0, "warmth", 1 / (i + 1))},
    "a number of the model": {"change": lambda m, i: setattr(m, "scale", 1 / (i + 1))},
    "a number of the loss": {"change": weigh},
    "a counter of the loss": {"loss": warmed_up},
    "rates by width": {"optimizer": by_width},
    "hooks of blocks": {"before": hooked},
    "another buffer": {"change": mask},
    "other data": {"change": halve},
    "a tensor": {"change": lambda m, i: setattr(m.b0, "warmth", torch.zeros(()))},
    "tensors": {"change": lambda m, i: setattr(m.b0, "warmth", torch.ones(6))},
    "a module": {
        "change": lambda m, i: i == 1 and setattr(m.b0, "down", nn.Linear(12, 6).double())
    },
    "a forward": {"change": lambda m, i: i == 1 and setattr(m.b0, "forward", lambda h: 2 * h)},
}
REFUSED = {"a tensor", "tensors", "another buffer", "other data", "a module", "a forward"}
# In a pipeline, code between Layers was traced: its numbers are constants.
REFUSED_IN_STAGES = REFUSED | {
    "a number of the model", "a number of the loss", "a counter of the loss",
}  # fmt: skip
LAYOUTS: dict[str, Callable[[], dict[str, Any]]] = {
    "data": lambda: {"": wh.replicate()},
    "split": lambda: {"": wh.split()},
    "stages": lambda: {"stem|b0": wh.stage(), "b1|adapter|head": wh.stage()},
}


def build(case: dict[str, Any]) -> Net:
    torch.manual_seed(0)
    NUMBERS.update(weight=1.0, calls=0)
    model = Net().double()
    case.get("before", lambda model: None)(model)
    return model


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(8, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


def plainly(case: dict[str, Any]) -> list[float]:
    model, (x, y) = build(case), data()
    optimizer = case.get("optimizer", sgd)(list(model.named_parameters()))
    losses = []
    for i in range(STEPS):
        case.get("change", lambda model, step: None)(model, i)
        optimizer.zero_grad()
        value = case.get("loss", loss)(model(x), y)
        value.backward()
        optimizer.step()
        losses.append(value.item())
        if i == 1:
            model.eval()
            model.train()
    return losses


def trained(case: dict[str, Any], layout: str) -> list[float]:
    model = wh.annotate(build(case), LAYOUTS[layout]())
    step = wh.parallelize(
        model,
        optimizer=case.get("optimizer", sgd),
        batch=data(),
        loss=case.get("loss", loss),
        config={"timeout_seconds": 20},
    )
    try:
        losses = []
        for i in range(STEPS):
            case.get("change", lambda model, step: None)(model, i)
            losses.append(float(step(data())["loss"]))
            if i == 1 and case.get("loss") is None:
                step.evaluate(data())
        return losses
    finally:
        step.close(forget=True)


def on_rank() -> dict[tuple[str, str], str | float]:
    torch.set_num_threads(1)
    wh.init()
    found: dict[tuple[str, str], str | float] = {}
    for name, layout in part(product(CASES, LAYOUTS)):
        case = CASES[name]
        want = plainly(case)
        try:
            got = trained(case, layout)
        except wh.WhaleError as error:
            found[name, layout] = str(error)
        else:
            found[name, layout] = max(abs(a - b) for a, b in zip(got, want, strict=True))
    return found


def test_what_changes_between_steps_is_followed_or_refused() -> None:
    for found in run_ranks(2, on_rank, timeout=110.0):
        for (name, layout), result in found.items():
            refused = name in (REFUSED_IN_STAGES if layout == "stages" else REFUSED)
            assert isinstance(result, str) == refused, (name, layout, result)
            assert isinstance(result, str) or result < 1e-9, (name, layout, result)


def test_a_step_without_gradients_is_refused() -> None:
    model = nn.Linear(6, 6).double()
    step = wh.parallelize(model, optimizer=sgd, batch=data(), loss=F.mse_loss)
    try:
        with torch.no_grad():
            step(data())
    except wh.WhaleError as error:
        assert "torch.no_grad" in str(error)
    else:
        raise AssertionError("it ran")
    finally:
        step.close()


class _Viewing(nn.Module):
    def __init__(self, *, view: bool) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6, dtype=torch.float64)
        self.row = self.up.weight.detach()[0] if view else self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x) * self.row.sum()


def test_a_view_of_a_weight_is_refused_and_the_weight_itself_is_not() -> None:
    batch = data()
    with pytest.raises(wh.WhaleError, match="view of up.weight"):
        wh.parallelize(_Viewing(view=True), optimizer=sgd, batch=batch, loss=F.mse_loss)
    step = wh.parallelize(_Viewing(view=False), optimizer=sgd, batch=batch, loss=F.mse_loss)
    step(batch)
    step.close(forget=True)
