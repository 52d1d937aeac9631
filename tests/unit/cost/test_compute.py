"""CostModel: seconds of Layers and updates, against formulas worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from whale.cost.compute import CostModel, Training
from whale.ir.cluster import Cluster
from whale.ir.model_graph import (
    Layer,
    Linear,
    ModelGraph,
    Parameter,
    SplitOption,
    TaskGraph,
    Work,
)
from whale.ir.profile import Curve, DeviceProfile, LayerTime, Profile, Rate

GIGA = 1e9


def graph(*work: Work) -> ModelGraph:
    weight = Parameter(name="w", shape=(1000,), dtype="float32", trainable=True)
    layer = Layer(
        path="a", kind="Linear", taskgraph=0, params=("w",), work=work, signature="Linear-1"
    )
    return ModelGraph(
        layers=(layer,),
        taskgraphs=(TaskGraph(index=0, tag=(), layers=(0,)),),
        parameters=(weight,),
        nodes=(),
    )


def profile(**more: object) -> Profile:
    rate = Rate(flops_per_s=10 * GIGA, bytes_per_s=GIGA, overhead_s=1e-3)
    rates = {kind: {"float32": rate} for kind in ("matmul", "memory")}
    device = DeviceProfile(
        type="A100-80GB", memory_bytes=10**10, apply_bytes_per_s=GIGA, rates=rates
    )
    return Profile(devices=(replace(device, **more),))


def model(*work: Work, cluster: str = "1x1xA100-80GB", **more: object) -> CostModel:
    return CostModel(graph(*work), Cluster.parse(cluster), Training(), profile(**more))


def test_products_and_movement_overlap_and_calls_cost() -> None:
    work = Work(kind="matmul", calls=2, flops=Linear(per_row=GIGA), moved=Linear(fixed=0.5 * GIGA))
    costs = model(work)
    # 10 rows: a second of FLOPs over half a second of bytes; 1 row: the bytes.
    assert costs.forward_s(0, 0, 10) == pytest.approx(2e-3 + 1.0)
    assert costs.forward_s(0, 0, 1) == pytest.approx(2e-3 + 0.5)
    assert costs.backward_s(0, 0, 10) == pytest.approx(4e-3 + 2.0)
    assert costs.forward_s(0, 0, 0) == 0.0


def test_the_host_is_a_floor() -> None:
    work = Work(kind="memory", calls=10, moved=Linear(per_row=1.0))
    assert model(work, launch_s=0.1).forward_s(0, 0, 1) == pytest.approx(1.0)


def test_dropout_goes_by_memory_and_takes_longer_on_a_cpu() -> None:
    work = Work(kind="dropout", calls=1, moved=Linear(per_row=GIGA))
    costs = model(work)
    assert costs.forward_s(0, 0, 2) == pytest.approx(1e-3 + 2.0)
    # Its backward makes the mask once more, and no more than that.
    assert costs.backward_s(0, 0, 2) == pytest.approx(1e-3 + 2.0)
    on_cpu = model(work, cluster="1x1xCPU", type="CPU")
    assert on_cpu.forward_s(0, 0, 2) > 10 * costs.forward_s(0, 0, 2)


def test_of_a_split_block_norms_and_residuals_stay_whole() -> None:
    """Scores of attention are split by heads, however large they are."""
    work = Work(kind="memory", calls=1, moved=Linear(per_row=100.0))
    option = SplitOption(
        rule="attention", path="a", modules=("a",), units=8, unit="head", params=()
    )
    layer = replace(
        graph(work).layers[0],
        splits=(option, replace(option, rule="pair")),
        made=Linear(per_row=1.0),
        kept=Linear(per_row=50.0),
    )
    costs = CostModel(
        replace(graph(work), layers=(layer,)), Cluster.parse("1x1xA100-80GB"), Training(), profile()
    )
    rate = 1e-3, 1.0 / GIGA
    # Two sublayers of 5 passes over what the block gives; the rest is a quarter.
    assert costs.forward_s(0, 0, 8, 0.25) == pytest.approx(rate[0] + 8 * (10 + 90 / 4) * rate[1])
    assert costs.forward_s(0, 0, 8) == pytest.approx(rate[0] + 8 * 100 * rate[1])
    assert costs.kept_bytes(0, 0, 8, 0.25) == pytest.approx(8 * (5 + 45 / 4))


@pytest.mark.parametrize(
    ("training", "tensors"),
    [
        (Training(), 7.0),
        (Training(optimizer="SGD", state_tensors=1.0), 7.0 * 11 / 24),
        (Training(optimizer="SGD", state_tensors=0.0), 7.0 * 6 / 24),
        (Training(optimizer="RMSprop", state_tensors=1.0), 7.0 * 15 / 24),
    ],
)
def test_an_update_goes_by_its_passes(training: Training, tensors: float) -> None:
    costs = CostModel(graph(), Cluster.parse("1x1xA100-80GB"), training, profile())
    assert costs.apply_s(0, GIGA) == pytest.approx(tensors)


def test_measured_layers_replace_the_estimate() -> None:
    time = LayerTime(forward=Curve.of({1: 1.0, 3: 2.0}), backward=Curve.of({1: 3.0}), alone=0.8)
    work = Work(kind="matmul", calls=1, flops=Linear(per_row=GIGA))
    costs = model(work, layers={"Linear-1": time})
    assert costs.forward_s(0, 0, 2) == pytest.approx(1.5)
    assert costs.backward_s(0, 0, 2) == pytest.approx(6.0)
    assert costs.alone(0, 0) == 0.8
    assert model(work).alone(0, 0) == 1.0
