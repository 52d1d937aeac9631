"""Behaviour that begins in the middle of training, or with more rows than a trial has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale as wh
from tests.distributed.beside import beside
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


class MixesLargeNumbers(Counting):
    """By what the rows are, which no attribute tells."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return h / x.abs().max().clamp(min=10.0) * 10.0


REFUSED: tuple[Callable[[], Counting], ...] = (
    MixesRows, MixesAndDrops, MixesManyRows, MixesLargeNumbers, KeepsAMean, KeepsAList,
)  # fmt: skip
EXACT: tuple[Callable[[], Counting], ...] = (WarmsUp, ShowsTheLast)
LAYOUTS: dict[str, Callable[[], dict[str, Any]]] = {
    "data": lambda: {"": wh.replicate()},
    "stages": lambda: {"0": wh.stage(), "1": wh.stage()},
}


def on_rank(layout: str, number: int) -> str | float:
    wh.init()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    kind = (*REFUSED, *EXACT)[number]
    x, y = torch.randn(ROWS, 6), torch.randn(ROWS, 6)
    large = x * torch.linspace(1.0, 20.0, ROWS)[:, None] if kind is MixesLargeNumbers else x
    batches = [(x, y)] * 3 + [(large, y)] * (STEPS - 3)
    return beside(nn.Sequential(kind(), nn.Linear(6, 6)), batches, LAYOUTS[layout]())


def check(layout: str, num_ranks: int, kinds: Sequence[Callable[[], Counting]]) -> None:
    for kind in kinds:
        # In stages of their own ranks are told by the one that refuses, and end.
        number = (*REFUSED, *EXACT).index(kind)
        for result in run_ranks(num_ranks, on_rank, layout, number, timeout=60.0):
            assert isinstance(result, str) == (kind in REFUSED), (kind, result)
            assert isinstance(result, str) or result < 1e-12, (kind, result)


def test_what_begins_late_is_exact_or_refused() -> None:
    check("data", 2, (*REFUSED, *EXACT))


def test_what_begins_late_in_stages() -> None:
    check("stages", 4, (MixesLargeNumbers,))


@pytest.mark.full
def test_all_that_begins_late_in_stages() -> None:
    check("stages", 4, (*REFUSED, *EXACT))
