"""What is alike is priced and simulated once: the same figures as rank by rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import whale as wh
from whale.cli.shipped import load
from whale.config import Config
from whale.cost import price
from whale.cost.price import _Pricer
from whale.ir.cluster import Cluster
from whale.ir.plan import Plan
from whale.planner.make_plan import make_plan, orders_of
from whale.sim import simulate
from whale.sim.simulate import _Simulation

CASES = [
    ("bert-tiny", "2x2xV100-32GB+1x4xP100-16GB", {}),
    ("resnet-tiny", "2x3xV100-32GB", {}),
    ("resnet-tiny", "1x2xV100-32GB+1x2xP100-16GB", {"pipeline.num_stages": 2}),
    ("gpt-tiny", "2x4xT4", {"pipeline.num_stages": 2, "pipeline.num_micro_batch": 4}),
    ("gpt-tiny", "1x3xT4+1x2xA10", {"pipeline.num_stages": 2, "pipeline.num_micro_batch": 4}),
    # An embedding that the decoder's stage calls again.
    ("encdec-tiny", "1x4xT4", {"pipeline.num_stages": 2, "pipeline.num_micro_batch": 2}),
]


def planned(name: str, cluster: str, settings: dict[str, Any]) -> Plan:
    subject = load(name)
    assert subject is not None
    config = Config.from_dict({"auto.auto_parallel": True, **settings})
    return make_plan(subject.graph, Cluster.parse(cluster), config, batch_rows=24)


def split_in_replicas() -> Plan:
    """Two copies of a pair of shards, one inside a node and one across two."""
    with wh.replicate(), wh.split(2):
        model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8), nn.BatchNorm1d(8))
    batch = torch.randn(8, 8), torch.randn(8, 8)
    nodes = "1x3xV100-32GB+1x3xV100-32GB"
    return wh.plan(model, cluster=nodes, batch=batch, loss=nn.functional.mse_loss)


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def unique(plan: Plan) -> list[object]:
        return list(range(plan.num_ranks))

    monkeypatch.setattr(price, "roles", unique)
    monkeypatch.setattr(_Pricer, "_lane_role", lambda self, stage, ranks, groups: ranks)
    monkeypatch.setattr(_Simulation, "_alike", lambda self, count: [[i] for i in range(count)])


@pytest.mark.parametrize(("name", "cluster", "settings"), CASES)
def test_alike_is_priced_once(
    name: str, cluster: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folded = planned(name, cluster, settings)
    report = simulate.simulate(folded, orders_of(folded.schedule))
    one_by_one(monkeypatch)
    assert planned(name, cluster, settings) == folded
    assert simulate.simulate(folded, orders_of(folded.schedule)) == report
    assert sum(device.share for device in report.devices) == pytest.approx(1.0)


def test_alike_shards_are_priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    folded = split_in_replicas()
    one_by_one(monkeypatch)
    assert split_in_replicas() == folded
