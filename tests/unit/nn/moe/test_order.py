"""Which replicas of experts with a capacity are refused: those that would queue out of order."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale as wh
from whale.engine.capture.captured import capture
from whale.engine.lower.lowered import lower
from whale.errors import PlanError
from whale.ir.plan import Plan


class Model(nn.Module):
    """Experts on [batch, time, dim], on [time, batch, dim], or on [time, dim] for all rows."""

    def __init__(self, batch_dim: int | None, **options: Any) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.moe = wh.nn.MoE(4, 6, 4, **options)
        self.batch_dim = batch_dim

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.batch_dim is None:
            return x + self.moe(self.first.weight)
        x = x.transpose(0, self.batch_dim)
        return (x + self.moe(x)).transpose(0, self.batch_dim)


BATCH = (torch.randn(4, 4, 4), torch.randn(4, 4, 4))
ORDERED = {"capacity_factor": 0.5}


def annotated(batch_dim: int | None, **options: Any) -> Model:
    model = Model(batch_dim, **options)
    wh.annotate(model, {"": wh.replicate()})
    return model


def plan(model: Model, num_devices: int = 2) -> Plan:
    return wh.plan(model, cluster=f"1x{num_devices}xCPU", batch=BATCH, loss=nn.functional.mse_loss)


@pytest.mark.parametrize("router", ["top-k", "prototype"])
def test_replicas_of_interleaved_tokens_are_refused(router: str) -> None:
    model = annotated(1, top_k=2, router=router, **ORDERED)
    message = r"moe has a capacity_factor.* dim 1, not 0: the 2 replicas of stage 0[\s\S]*hint:"
    with pytest.raises(PlanError, match=message):
        plan(model)


def test_so_are_replicas_that_have_the_same_tokens() -> None:
    with pytest.raises(PlanError, match="it sees no batch"):
        plan(annotated(None, **ORDERED))


def test_so_is_a_plan_made_for_another_order() -> None:
    made, model = plan(annotated(0, **ORDERED)), annotated(1, **ORDERED)
    captured = capture(model, BATCH, nn.functional.mse_loss)
    assert made.model_hash == captured.graph.hash
    with pytest.raises(PlanError, match="dim 1, not 0"):
        lower(
            model,
            made,
            captured,
            nn.functional.mse_loss,
            actions=[],
            rank=0,
            device=torch.device("cpu"),
            seed=0,
            timeout=timedelta(seconds=1),
        )


def test_the_planner_itself_avoids_them() -> None:
    made = wh.plan(
        Model(1, **ORDERED),
        cluster="1x4xCPU",
        batch=BATCH,
        loss=nn.functional.mse_loss,
        config={"auto.auto_parallel": True, "pipeline.num_stages": 2},
    )
    assert len(made.stages[-1].virtual_device.replicas) == 1
    assert any("dim 1, not 0" in line for line in made.rejected)


def test_whatever_has_no_order_or_no_replicas_is_planned() -> None:
    assert plan(annotated(0, **ORDERED))
    assert plan(annotated(1))
    assert plan(annotated(1, **ORDERED), num_devices=1)
    # Its experts take the best tokens, wherever they stand.
    assert plan(annotated(1, router="expert-choice", balance="none", **ORDERED))
    # Shards of one replica see the same rows.
    assert plan(wh.split()(Model(1, **ORDERED)))
