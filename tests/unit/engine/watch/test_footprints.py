"""Footprints: which calls of a forward are news."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import whale as wh
from whale.engine.watch.footprints import Footprints
from whale.runtime.hashing import position_hash


def news(prints: Footprints, call: Callable[..., Any], *args: Any) -> str:
    prints.start()
    with prints:
        call(*args)
    return prints.news or ""


class Chosen(nn.Module):
    """Runs one of its parts, at one line."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts, self.which, self.power = nn.ModuleList(parts), 0, 1.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.parts[self.which](x)
        return h if self.power == 1.0 else h**self.power


def rows(seed: int, count: int = 12) -> Tensor:
    return torch.randn(1, count, 4, generator=torch.Generator().manual_seed(seed))


def test_a_forward_that_was_run_is_no_news_and_another_is() -> None:
    prints, model = Footprints(), Chosen(nn.Linear(4, 3), nn.Linear(4, 3))
    assert news(prints, model, rows(0))
    assert not news(prints, model, rows(1))
    assert "other sizes" in news(prints, model, rows(1, 5))
    model.which = 1
    assert "weights" in news(prints, model, rows(1))
    model.power = 2.0
    assert "a call of `pow`" in news(prints, model, rows(1))
    model.power = 3.0
    assert "another number" in news(prints, model, rows(1))


def test_where_tokens_go_is_no_news_and_other_experts_are() -> None:
    torch.manual_seed(0)
    experts = [wh.nn.MoE(4, 6, num_experts=4, top_k=2, balance="bias") for _ in range(2)]
    prints, model = Footprints(), Chosen(*experts)
    assert news(prints, model, rows(0))
    counts = set()
    for seed in range(1, 9):
        assert not news(prints, model, rows(seed))
        with torch.no_grad():
            scores = rows(seed) @ experts[0].router.weight.T
        counts.add(tuple(torch.bincount(scores.topk(2).indices.flatten(), minlength=4).tolist()))
    assert len(counts) > 1, "every batch was routed alike: nothing was tried"
    model.which = 1
    assert "weights of `wh.nn.MoE`" in news(prints, model, rows(0))


def test_numbers_of_the_step_are_no_news() -> None:
    prints, device, x = Footprints(), torch.device("cpu"), rows(0)

    def drawn(key: int) -> Tensor:
        return x * position_hash(x.shape, key, [0, 0, 0], 0, device)

    assert news(prints, drawn, 1)
    assert not any(news(prints, drawn, key) for key in range(2, 20))
    assert news(prints, lambda: F.relu(drawn(3)))
