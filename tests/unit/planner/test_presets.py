"""Presets on mixed clusters, as a user plans them: what must never happen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import whale as wh
from whale.ir.plan import Plan
from whale.models.registry import optimizer_factory, preset


def preset_plan(name: str, rows: int, devices: str, **config: Any) -> Plan:
    chosen = preset(name)
    with torch.device("meta"):
        model, batch = chosen.build(), chosen.batch(rows, None)
    if chosen.annotate is not None:
        chosen.annotate(model)
    return wh.plan(
        model,
        cluster=devices,
        batch=batch,
        loss=chosen.loss,
        optimizer=optimizer_factory(chosen.optimizer),
        config=config,
    )


@pytest.mark.parametrize(
    ("name", "devices", "rows"),
    [
        ("bert-large", "1x2xV100-16GB+1x2xP100-16GB", (106, 112)),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("m6-small", "1x2xV100-16GB+1x2xP100-16GB", (850, 994)),
                ("resnet-50-100k", "1x1xV100-32GB+1x2xA100-40GB", (1000, 1100)),
            )
        ),
    ],
)
def test_what_fits_in_equal_shares_fits_in_balanced_ones(name, devices, rows):
    for count in rows:
        equal = preset_plan(name, count, devices, **{"cluster.balance": "equal"})
        plan = preset_plan(name, count, devices)
        assert plan.predicted["fits"] or not equal.predicted["fits"], count
        if equal.predicted["fits"]:
            slowest = equal.predicted["step_seconds"]
            assert plan.predicted["step_seconds"] <= 1.01 * slowest, count


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("name", "rows", "fewer", "more"),
    [
        ("bert-large", 256, "1x2x4090", "1x2x4090+1x1xT4"),
        pytest.param("t5-large", 64, "1x4xT4", "1x4xT4+1x1xT4", marks=pytest.mark.full),
        ("gnmt", 512, "1x3xV100-16GB", "1x3xV100-16GB+1x1xA100-40GB"),
        ("t5-small", 4, "1x4xT4", "1x1xT4+1x4xT4"),
    ],
)
def test_more_devices_do_not_make_a_step_longer(name, rows, fewer, more):
    config = {"auto.auto_parallel": True}
    few = preset_plan(name, rows, fewer, **config).predicted["step_seconds"]
    assert preset_plan(name, rows, more, **config).predicted["step_seconds"] <= 1.001 * few


def test_three_devices_get_micro_batches_that_three_can_share():
    plan = preset_plan("gpt-small", 512, "3x1xV100-16GB", **{"auto.auto_parallel": True})
    assert plan.predicted["step_seconds"] <= 1.05 * plan.predicted["lower_bound_seconds"]
