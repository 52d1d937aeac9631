"""What a rank has of experts: the rows that travel to it, not all rows."""

from __future__ import annotations

import pytest

from whale.cli.shipped import load
from whale.config import Config
from whale.cost.parts import parts_of
from whale.ir.cluster import Cluster
from whale.ir.plan import Plan
from whale.planner.make_plan import make_plan


def planned(cluster: str, rows: int) -> Plan:
    subject = load("m6-base")
    assert subject is not None
    return make_plan(subject.graph, Cluster.parse(cluster), Config(), batch_rows=rows)


@pytest.mark.parametrize(("num_nodes", "num_gpus"), [(1, 2), (1, 8), (4, 8)])
def test_a_device_keeps_what_one_with_its_rows_keeps(num_nodes: int, num_gpus: int) -> None:
    """Experts are spread, tokens are not repeated: activations are those of the own rows."""
    alone = planned("1x1xV100-32GB", 8).prices
    plan = planned(f"{num_nodes}x{num_gpus}xV100-32GB", 8 * num_nodes * num_gpus)
    assert alone is not None and plan.prices is not None
    assert len(plan.prices.stages) == num_nodes * num_gpus
    for stage in plan.prices.stages:
        assert stage.kept_bytes == pytest.approx(alone.stages[0].kept_bytes, rel=1e-6)
        assert stage.forward_s >= alone.stages[0].forward_s
    # A rank holds its experts only.
    assert plan.prices.devices[0].memory.parameters < alone.devices[0].memory.parameters
    assert plan.prices.devices[0].memory.workspace <= alone.devices[0].memory.workspace


def test_only_experts_get_fewer_rows() -> None:
    plan, subject = planned("1x8xV100-32GB", 64), load("m6-base")
    assert subject is not None
    layers = {layer.path: layer for layer in subject.graph.layers}
    experts, attention = layers["blocks.1.ffn"], layers["blocks.1.attention"]
    for rank in range(8):
        spread = parts_of(plan, experts.taskgraph, 64)[rank]
        assert (spread.rows, spread.width) == (64.0, 0.125)
        assert spread.share(experts) == (8.0, 1.0)
        assert parts_of(plan, attention.taskgraph, 64)[rank].share(attention) == (8.0, 1.0)


def test_unequal_devices_are_not_asked_to_hold_all_experts() -> None:
    plan = planned("1x4xV100-32GB+1x4xP100-16GB", 64)
    assert plan.predicted["fits"]
    assert not [line for line in plan.rejected if "cannot be placed" in line]
