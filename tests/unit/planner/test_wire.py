"""What travels in which dtype is in the plan: kept in JSON, priced, checked, and what runs."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import whale as wh
from whale.ir.plan import Plan
from whale.ir.wire import Wire
from whale.parallel import plan as make
from whale.planner.wire import wire_of

SGD = partial(torch.optim.SGD, lr=0.1)


def settings(**values: Any) -> wh.Config:
    return wh.Config(communication=values)


@pytest.mark.parametrize(
    ("given", "wire"),
    [
        ({}, Wire()),
        ({"fp16": True}, Wire(gradients="float16", room=128)),
        ({"fp16": True, "fp16_scale": 4}, Wire(gradients="float16", room=4)),
        ({"bf16": True}, Wire(gradients="bfloat16")),
        ({"token_dtype": "bf16"}, Wire(tokens="bfloat16")),
        ({"token_dtype": "fp16", "symmetric_memory": True}, Wire(tokens="float16", symmetric=True)),
        ({"gradients_reduce_method": "sum"}, Wire(divides=False)),
    ],
    ids=str,
)
def test_settings_are_in_the_plan(given: dict[str, Any], wire: Wire) -> None:
    assert wire_of(settings(**given)) == wire
    plan = planned(nn.Linear(4, 4), given)
    assert plan.wire == wire
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def planned(model: nn.Module, given: dict[str, Any], cluster: str = "2x2xA100-40GB") -> Plan:
    batch = torch.randn(64, 4), torch.randn(64, 4)
    return make(model, cluster=cluster, batch=batch, loss=F.mse_loss, config=settings(**given))


def test_a_plan_made_before_there_was_a_wire_is_read() -> None:
    data = planned(nn.Linear(4, 4), {}).to_dict()
    del data["wire"]
    assert Plan.from_dict(data).wire == Wire()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"gradients": "int8"}, "gradients = 'int8'; allowed: '' or bfloat16, float16"),
        ({"tokens": "fp16"}, "tokens = 'fp16'"),
        ({"room": 0}, "room = 0; allowed: from 1 on"),
    ],
)
def test_a_wire_that_means_nothing_is_refused(change: dict[str, Any], words: str) -> None:
    model, batch = nn.Linear(4, 4), (torch.randn(8, 4), torch.randn(8, 4))
    data = make(model, cluster="1x1xCPU", batch=batch, loss=F.mse_loss).to_dict()
    broken = Plan.from_dict({**data, "wire": {**data["wire"], **change}})
    with pytest.raises(wh.PlanError, match=words):
        wh.parallelize(model, optimizer=SGD, batch=batch, loss=F.mse_loss, plan=broken)


def test_sums_in_half_precision_are_half_the_bytes() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    plain, half = planned(model, {}), planned(model, {"bf16": True})
    assert plain.prices is not None
    assert half.prices is not None
    whole = [reduce.nbytes for reduce in plain.prices.reduces]
    assert whole
    assert [2 * reduce.nbytes for reduce in half.prices.reduces] == whole
    seconds = [sum(r.seconds for r in p.prices.reduces) for p in (plain, half) if p.prices]
    assert seconds[1] < seconds[0]


class Mixture(nn.Module):
    """Experts beside a replicated rest: tokens travel."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 256)
        self.moe = wh.nn.MoE(256, 256, num_experts=4, top_k=2, balance="none")
        self.outer = nn.Linear(256, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.moe(self.inner(x)))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_tokens_in_half_precision_travel_in_less_time(dtype: str) -> None:
    def collectives(given: dict[str, Any]) -> float:
        model = wh.annotate(Mixture(), {"moe": wh.split(), "...": wh.replicate()})
        plan = planned(model, given)
        assert any(s.rule == "experts" for t in plan.taskgraphs for s in t.splits)
        assert plan.prices is not None
        return plan.prices.stages[0].collective_s

    assert 0.3 < collectives({"token_dtype": dtype}) / collectives({}) < 0.999


def test_settings_that_say_otherwise_than_the_plan_are_refused() -> None:
    model, batch = nn.Linear(4, 4), (torch.randn(8, 4), torch.randn(8, 4))
    loss = F.mse_loss
    summed = make(
        model,
        cluster="1x1xCPU",
        batch=batch,
        loss=loss,
        config=settings(gradients_reduce_method="sum"),
    )
    train = partial(wh.parallelize, model, optimizer=SGD, batch=batch, loss=loss, plan=summed)
    with pytest.raises(wh.PlanError, match=r"communication\.\* mean Wire\(.*plan was made with"):
        train(config=settings(bf16=True))
    with pytest.raises(wh.PlanError, match=r"amp\.\* mean Precision\("):
        train(config=wh.Config(amp={"level": "O1"}))
    (mean,) = torch.autograd.grad(loss(model(batch[0]), batch[1]), model.weight)
    step = train()  # as the plan says
    step(batch)
    count = step.gradients()["weight"] / mean
    step.close(forget=True)
    assert torch.allclose(count, torch.full_like(count, float(batch[1].numel())))
