"""A Layer that a model calls several times."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import whale as wh


class Calls(nn.Module):
    """One Linear called again and again, or as many of them."""

    def __init__(self, num_calls: int, *, shared: bool) -> None:
        super().__init__()
        self.num_calls = num_calls
        count = 1 if shared else num_calls
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(count))
        self.head = nn.Linear(512, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(self.num_calls):
            x = self.layers[i % len(self.layers)](x)
        return self.head(x)


def price(num_calls: int, scope, *, shared: bool):
    model = Calls(num_calls, shared=shared)
    wh.annotate(model, {"layers\\.[0-9]+|head": scope})
    plan = wh.plan(
        model,
        cluster="1x2xV100-16GB",
        batch=(torch.randn(64, 512, 512), torch.randn(64, 512, 512)),
        loss=lambda out, target: (out - target).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
    )
    return plan.prices.stages[0]


@pytest.mark.parametrize("rule", ["replicate", "split"])
@pytest.mark.parametrize("num_calls", [2, 5])
def test_costs_as_much_as_so_many_layers(rule, num_calls):
    scope = wh.replicate() if rule == "replicate" else wh.split()
    again, apart = (price(num_calls, scope, shared=shared) for shared in (True, False))
    for name in ("forward_s", "backward_s", "kept_bytes", "collective_s"):
        assert getattr(again, name) == pytest.approx(getattr(apart, name), rel=1e-6), name
