"""Modules that share a weight or a bias, inside one Layer and across Layers, under splits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import whale as wh
from tests.distributed.beside import sgd
from tests.ranks import run_ranks

WIDTH = 6


class Chain(nn.Module):
    """Linears one after another; two of them share what `shared` names."""

    def __init__(self, first: int, second: int, *shared: str) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        for name in shared:
            setattr(self.parts[second], name, getattr(self.parts[first], name))

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = self.parts
        h = x + b(a(x).relu())
        return h + d(c(h).tanh())


def across() -> nn.Module:
    """Two Layers that share a bias."""
    first, second = Chain(0, 0), Chain(0, 0)
    second.parts[0].bias = first.parts[0].bias
    return nn.Sequential(first, second)


MODELS = {
    "columns": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Chain(0, 2, "bias")),
    "column and row": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Chain(0, 1, "bias")),
    "rows": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Chain(1, 3, "bias")),
    "row and column": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Chain(1, 2, "bias")),
    "weights": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Chain(0, 2, "weight")),
    "both": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Chain(0, 3, "weight", "bias")),
    "across": across,
}
LAYOUTS = {"split": {"": wh.split()}, "mix": {"1": wh.split(), "...": wh.replicate()}}


def trained(layout: str) -> dict[str, Any]:
    wh.init()
    found: dict[str, Any] = {}
    for kind, make in MODELS.items():
        torch.manual_seed(0)
        model = make().double()
        plain = copy.deepcopy(model)
        x, y = torch.randn(5, WIDTH).double(), torch.randn(5, WIDTH).double()
        step = wh.parallelize(
            wh.annotate(model, LAYOUTS[layout]),
            optimizer=sgd,
            batch=(x, y),
            loss=F.mse_loss,
            config={"timeout_seconds": 20},
        )
        optimizer = sgd(plain.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            F.mse_loss(plain(x), y).backward()
            optimizer.step()
            step((x, y))
        state = step.state_dict()
        far = [float((state[name] - v).abs().max()) for name, v in plain.state_dict().items()]
        found[kind] = max(far), sum(len(t.splits) for t in step.plan.taskgraphs)
        step.close(forget=True)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shared_tensors_are_exact(layout: str) -> None:
    for found in run_ranks(2, trained, layout, timeout=120.0):
        for kind, (far, splits) in found.items():
            assert far < 1e-12, (kind, far)
            assert splits, kind
