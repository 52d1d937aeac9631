"""What is offered by units, what instead of it, which classes are Linears, and why modules stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale as wh
from tests.parity.attentions import Case
from tests.parity.eager_attentions import EAGER, Own, Twice
from whale.engine.capture.captured import capture
from whale.ir.model_graph import ModelGraph
from whale.ir.plan import Plan
from whale.nn.sharded import is_linear
from whale.parallel import _warn_of_low_share


def _plan(case: Case, devices: int) -> Plan:
    model = wh.split()(case.build())
    return wh.plan(model, batch=case.batches()[0], loss=case.loss, cluster=f"1x{devices}xCPU")


def _rules(plan: Plan) -> dict[str, str]:
    return {s.path: s.rule for t in plan.taskgraphs for s in t.splits}


@pytest.mark.parametrize("name", EAGER)
def test_heads_are_offered_only_where_they_stay_apart(name: str) -> None:
    case = EAGER[name]
    graph = capture(wh.split()(case.build()), case.batches()[0], case.loss).graph
    rules = [option.rule for layer in graph.layers for option in layer.splits]
    assert ("attention" in rules) == case.by_heads, rules
    assert ModelGraph.from_dict(graph.to_dict()) == graph


def test_fewer_heads_than_devices_are_split_by_columns() -> None:
    case = EAGER["unequal sections, split"]  # three groups of heads
    assert _rules(_plan(case, 3))["middle.0"] == "attention"
    rules = _rules(_plan(case, 4))
    assert "middle.0" not in rules and {"middle.0.all", "middle.0.back"} <= rules.keys()


def test_adapters_make_pairs_with_two_rows() -> None:
    rules = _plan(EAGER["adapters"], 2).taskgraphs[0].splits
    (pair,) = [s for s in rules if s.rule == "pair"]
    assert [where for what, where in pair.marks if what == "row"] == [
        "middle.0.down.base",
        "middle.0.down.low",
    ]


class Same(nn.Linear):
    """Nothing of its own."""


class Scaled(nn.Linear):
    """It reads more than a Linear has."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__(into, out)
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


class Sharp(nn.Linear):
    """A Linear where nothing is large."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clamp(max=100.0))


def test_a_linear_is_what_computes_as_one() -> None:
    assert all(is_linear(kind(3, 4)) for kind in (nn.Linear, Same, Own))
    assert not any(is_linear(kind(3, 4)) for kind in (Twice, Scaled, Sharp))
    assert not is_linear(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)))


class Raw(nn.Module):
    """Most of it is a parameter that no rule knows."""

    def __init__(self, out: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 6))
        self.norm = nn.LayerNorm(6)
        self.out = nn.Linear(6, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x @ self.table))


def test_the_plan_says_why_modules_stay_whole_and_warns_of_a_low_share() -> None:
    model = wh.split()(nn.Sequential(Raw(6), Raw(2)))
    batch = torch.randn(4, 6), torch.randn(4, 2)

    def loss(made: Any, want: Any) -> Any:
        return nn.functional.mse_loss(made, want)

    plan = wh.plan(model, batch=batch, loss=loss, cluster="1x2xCPU")
    why = dict(plan.taskgraphs[0].reasons)
    assert why["0"] == "no rule for Raw" and why["1.norm"] == "norms are computed whole"
    assert "no rule for Raw: 0 and 1 more" in str(plan) and "LOW" in str(plan)
    assert Plan.from_dict(plan.to_dict()) == plan
    with pytest.warns(UserWarning, match="of the parameters of split0 are split"):
        _warn_of_low_share(plan)
