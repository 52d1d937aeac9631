"""What forwards move is the script's own after the step, and what the script sets back is followed.

Counters, meters and lists, in attributes of modules and inside what they hold; and what a script
writes to so that nobody is told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import whale as wh
from tests.ranks import run_ranks


class Counting(nn.Module):
    """Counts its training forwards everywhere, and computes with one of the counts."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.linear, self.place, self.n = nn.Linear(5, 3), place, 0
        self.thing, self.named = SimpleNamespace(n=0), {"n": 0, "word": "none"}
        self.log: list[Any] = []
        self.array, self.recent, self.seen = np.zeros(2), deque([0], maxlen=3), set[int]()

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.n += 1
            self.thing.n += 1
            self.named["n"] = int(self.named["n"]) + 1
            self.log.append(self.n)
            self.array[0] += 1
            self.recent.append(self.recent[-1] + 1)
            self.seen.add(self.n)
        return self.linear(x) / (1 + 0.2 * COUNTS[self.place](self))


COUNTS: dict[str, Callable[[Counting], float]] = {
    "attribute": lambda m: m.n,
    "object": lambda m: m.thing.n,
    "dict": lambda m: m.named["n"],
    "list": lambda m: len(m.log),
    "array": lambda m: float(m.array[0]),
    "deque": lambda m: m.recent[-1],
    "set": lambda m: len(m.seen),
}


def reset(model: Counting) -> None:
    model.n = model.thing.n = model.named["n"] = 0
    model.log.clear()
    model.array[:] = 0
    model.recent.clear()
    model.recent.append(0)
    model.seen.clear()


def batch(index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    x, y = (torch.randn(6, n, generator=generator).double() for n in (5, 3))
    return x, y


def made(place: str) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 5), Counting(place)).double()


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1)


def counted(place: str, layout: str) -> list[tuple[float, float]]:
    wh.init()
    plain, model = made(place), made(place)
    optimizer = sgd(plain.parameters())
    scopes = {"data": {"": wh.replicate()}, "split": {"": wh.split()}}
    wh.annotate(model, scopes[layout])
    step = wh.parallelize(model, optimizer=sgd, batch=batch(0), loss=F.mse_loss)
    found = []
    for index in range(6):
        if index == 4:
            reset(plain[1])  # type: ignore[arg-type]
            reset(model[1])  # type: ignore[arg-type]
        if index == 3:
            for each in (plain, model):
                each.rate = 1 / (1 + COUNTS[place](each[1]))  # type: ignore[arg-type]
        optimizer.zero_grad()
        loss = F.mse_loss(plain(batch(index)[0]), batch(index)[1])
        loss.backward()
        optimizer.step()
        found.append((step(batch(index))["loss"].item(), loss.item()))
        found.append((COUNTS[place](model[1]), COUNTS[place](plain[1])))  # type: ignore[arg-type]
        step.evaluate(batch(index))
    found.append((model.rate, plain.rate))
    step.close(forget=True)
    return found


@pytest.mark.every(3)
@pytest.mark.parametrize("place", COUNTS)
def test_what_a_forward_counts_is_read_and_reset_by_the_script(place: str) -> None:
    for found in run_ranks(2, counted, place, "split" if place == "dict" else "data"):
        for got, want in found:
            assert got == pytest.approx(want, abs=1e-12), found


class Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.array = nn.Linear(5, 3), np.ones(3)
        self.table, self.shared = torch.ones(3).double(), torch.from_numpy(self.array)
        self.named = {"w": torch.ones(3).double()}

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.table * self.shared * self.named["w"]


class Merging(nn.Module):
    """Its own `train` does more than to turn a flag."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.linear, self.scale, self.writes = nn.Linear(5, 3), 1.0, writes

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        if self.writes:
            self.linear.weight.data *= 2.0 if mode else 0.5
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (1.0 if self.training or not self.writes else 2.0)


WRITES: dict[str, Callable[[Holding], Any]] = {
    "data": lambda m: m.table.data.fill_(0.5),
    "numpy": lambda m: m.array.fill(0.5),
    "in a dict": lambda m: m.named["w"].data.fill_(0.5),
}


def unannounced() -> dict[str, str]:
    wh.init()
    said = {}

    def tried(name: str, model: nn.Module, act: Callable[[nn.Module], Any]) -> None:
        wh.annotate(model, {"": wh.replicate()})
        step = wh.parallelize(model, optimizer=sgd, batch=batch(0), loss=F.mse_loss)
        said[name] = ""
        try:
            for index in range(3):
                step(batch(index))
            act(model)
            step(batch(3))
        except wh.WhaleError as error:
            said[name] = error.message
        step.close(forget=True)

    for name, write in WRITES.items():
        tried(name, Holding().double(), write)  # type: ignore[arg-type]
    for writes in (True, False):
        tried(f"mode {writes}", Merging(writes).double(), lambda m: m.eval().train())
    sparse = nn.Sequential(nn.Linear(5, 3)).double()
    sparse.register_buffer("near", torch.eye(3).to_sparse())
    try:
        wh.parallelize(sparse, optimizer=sgd, batch=batch(0), loss=F.mse_loss)
    except wh.WhaleError as error:
        said["sparse"] = error.message
    return said


def test_what_nothing_announces_is_refused() -> None:
    (said,) = run_ranks(1, unannounced)
    for name in WRITES:
        assert "was written to while a step is open" in said[name], name
    assert "Merging.train writes to its weights" in said["mode True"]
    assert said["mode False"] == ""
    assert "near of the model" in said["sparse"] and "sparse_coo" in said["sparse"]
