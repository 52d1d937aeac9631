"""Behaviour that begins in the middle of training, or with more rows than a trial has."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import whale as wh
from tests.ranks import run_ranks

STEPS, ROWS = 9, 20


class Counting(nn.Module):
    """Knows how often it was trained."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop = nn.Linear(6, 6), nn.Dropout(0.3)
        self.calls, self.mean, self.seen = 0, torch.zeros(6), list[float]()
        self.phase, self.last = "early", torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return self.late(self.up(x)) if self.calls > 2 else self.up(x)

    def late(self, h: Tensor) -> Tensor:
        raise NotImplementedError


class MixesRows(Counting):
    def late(self, h: Tensor) -> Tensor:
        return h - h.mean(0, keepdim=True)


class MixesAndDrops(Counting):
    def late(self, h: Tensor) -> Tensor:
        return self.drop(h) * (1 + h.std())


class MixesManyRows(Counting):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return h - h.mean(0, keepdim=True) if len(h) > 15 else h


class KeepsAMean(Counting):
    """Used in evaluation only: no training loss shows it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - (0 if self.training else self.mean)

    def late(self, h: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return h


class KeepsAList(Counting):
    def late(self, h: Tensor) -> Tensor:
        self.seen.append(float(h.detach().mean()))
        return h


class WarmsUp(Counting):
    """By the number of calls alone, which is the same everywhere."""

    def late(self, h: Tensor) -> Tensor:
        self.phase = "late"
        return h * min(2.0, self.calls / 3)


class ShowsTheLast(Counting):
    """Every forward overwrites it, none reads it."""

    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        return self.last

    def late(self, h: Tensor) -> Tensor:
        return torch.tanh(h)


REFUSED: tuple[Callable[[], Counting], ...] = (
    MixesRows, MixesAndDrops, MixesManyRows, KeepsAMean, KeepsAList,
)  # fmt: skip
EXACT: tuple[Callable[[], Counting], ...] = (WarmsUp, ShowsTheLast)


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1)


def on_rank() -> list[tuple[str, str | float]]:
    wh.init()
    torch.set_default_dtype(torch.float64)
    found: list[tuple[str, str | float]] = []
    for kind in (*REFUSED, *EXACT):
        torch.manual_seed(0)
        model = nn.Sequential(kind(), nn.Linear(6, 6))
        batch = (torch.randn(ROWS, 6), torch.randn(ROWS, 6))
        plain = copy.deepcopy(model)
        optimizer, losses = sgd(plain.parameters()), []
        for _ in range(STEPS):
            optimizer.zero_grad()
            value = F.mse_loss(plain(batch[0]), batch[1])
            value.backward()
            optimizer.step()
            losses.append(value.item())
        try:
            step = wh.parallelize(
                wh.annotate(model, {"": wh.replicate()}),
                optimizer=sgd,
                batch=batch,
                loss=F.mse_loss,
                config={"timeout_seconds": 20},
            )
            far = max(abs(float(step(batch)["loss"]) - want) for want in losses)
            step.close(forget=True)
            found.append((kind.__name__, far))
        except wh.WhaleError as error:
            found.append((kind.__name__, str(error)))
    return found


def test_what_begins_late_is_exact_or_refused() -> None:
    for found in run_ranks(2, on_rank, timeout=90.0):
        results = dict(found)
        for kind in REFUSED:
            assert isinstance(results[kind.__name__], str), (kind, results)
        for kind in EXACT:
            far = results[kind.__name__]
            assert isinstance(far, float) and far < 1e-12, (kind, far)
