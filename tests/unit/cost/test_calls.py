"""A Layer that a model calls several times."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import whale as wh


class Repeated(nn.Module):
    def __init__(self, num_calls: int) -> None:
        super().__init__()
        self.num_calls = num_calls
        self.shared, self.head = nn.Linear(512, 512), nn.Linear(512, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.num_calls):
            x = self.shared(x)
        return self.head(x)


def price(num_calls: int, **annotations):
    model = Repeated(num_calls)
    wh.annotate(model, annotations)
    plan = wh.plan(
        model,
        cluster="1x2xV100-16GB",
        batch=(torch.randn(64, 512, 512), torch.randn(64, 512, 512)),
        loss=lambda out, target: (out - target).square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
    )
    return plan.prices.stages[0]


@pytest.mark.parametrize("rule", ["replicate", "split"])
def test_costs_that_many_times_one_call(rule):
    scope = wh.replicate() if rule == "replicate" else wh.split()
    found = {n: price(n, shared=scope, head=scope) for n in (1, 2, 5)}
    for name in ("forward_s", "backward_s", "kept_bytes", "collective_s"):
        one, two, five = (getattr(found[n], name) for n in (1, 2, 5))
        assert five - one == pytest.approx(4 * (two - one), rel=1e-6, abs=1e-9), name
    assert found[5].forward_s == pytest.approx(3 * found[1].forward_s, rel=0.25)
