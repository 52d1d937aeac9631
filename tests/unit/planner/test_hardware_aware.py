"""make_plan on unequal devices: shares by time and memory, stages by cost, order as a result."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.sim.timeline import timeline
from whale.config import Config
from whale.errors import PlanError
from whale.ir.cluster import Cluster, Device, Node
from whale.ir.model_graph import (
    Layer,
    Linear,
    ModelGraph,
    Parameter,
    SplitOption,
    TaskGraph,
    Value,
    Work,
)
from whale.ir.model_graph import Node as Step
from whale.ir.plan import Plan
from whale.ir.schedule import Action
from whale.ir.sharding import DimSharding
from whale.ir.strategy import Scope, Tag
from whale.planner.make_plan import make_plan, orders_of
from whale.sim.simulate import simulate

GB = 10**9


def cluster(*paces: float, memory: tuple[int, ...] | None = None) -> Cluster:
    sizes = memory or (8 * GB,) * len(paces)
    return Cluster(
        devices=tuple(
            Device(rank=r, node=0, type="CPU", memory_bytes=size, pace_flops=pace)
            for r, (pace, size) in enumerate(zip(paces, sizes, strict=True))
        ),
        nodes=(Node(index=0),),
    )


def chain(
    flops: list[float], *, kept: float = 0.0, numel: int = 1000, tags: list[Tag] | None = None
) -> ModelGraph:
    """Layers in a row; `flops` and `kept` per row."""
    tags = tags or [()] * len(flops)
    groups = list(dict.fromkeys(tags))
    layers = tuple(
        Layer(
            path=f"layers.{i}",
            kind="Block",
            taskgraph=groups.index(tags[i]),
            params=(f"layers.{i}.weight",),
            flops_per_row=f,
            work=(Work(kind="matmul", calls=1, flops=Linear(per_row=f)),),
            kept=Linear(per_row=kept),
            splits=(
                SplitOption(
                    rule="pair",
                    path=f"layers.{i}",
                    modules=(f"layers.{i}",),
                    units=12,
                    unit="head",
                    params=((f"layers.{i}.weight", DimSharding(dim=0, sections=(12,), units=12)),),
                ),
            ),
        )
        for i, f in enumerate(flops)
    )
    return ModelGraph(
        layers=layers,
        parameters=tuple(
            Parameter(name=f"layers.{i}.weight", shape=(12, numel // 12), dtype="float32")
            for i in range(len(flops))
        ),
        taskgraphs=tuple(
            TaskGraph(index=g, tag=tag, layers=tuple(i for i, t in enumerate(tags) if t == tag))
            for g, tag in enumerate(groups)
        ),
        nodes=tuple(
            Step(
                name=f"layers.{i}",
                layer=i,
                reads=((i - 1, 0),) if i else (),
                made=(Value(nbytes=layers[i].made),),
            )
            for i in range(len(flops))
        ),
    )


def make(graph: ModelGraph, devices: Cluster, rows: int = 24, **settings: object) -> Plan:
    config = Config.from_dict({k.replace("__", "."): v for k, v in settings.items()})
    return make_plan(graph, devices, config, batch_rows=rows)


def stages(count: int) -> list[Tag]:
    return [(Scope(kind="stage", uid=i, where="here"),) for i in range(count)]


def test_rows_end_together():
    plan = make(chain([1e9, 1e9]), cluster(4e9, 2e9, 2e9))
    assert plan.stages[0].virtual_device.weights == (12, 6, 6)
    assert [d.binds for d in plan.prices.devices] == ["time"] * 3
    assert plan.predicted["step_seconds"] == pytest.approx(3 * 2e9 * 12 / 4e9, rel=0.01)


def test_equal_and_speed_are_the_comparisons():
    graph, devices = chain([1e9]), cluster(4e9, 2e9)
    assert make(graph, devices, cluster__balance="equal").stages[0].virtual_device.weights == (1, 1)
    assert make(graph, devices, cluster__balance="speed").stages[0].virtual_device.weights == (2, 1)


def test_memory_caps_a_fast_device():
    graph = chain([1e9], kept=1e8)
    plan = make(graph, cluster(4e9, 4e9, memory=(8 * GB, GB)))
    first, second = plan.stages[0].virtual_device.weights
    assert first > second
    assert [d.binds for d in plan.prices.devices] == ["time", "memory"]
    assert plan.predicted["fits"]


def test_what_does_not_fit_is_said_with_the_shortage():
    plan = make(chain([1e9], kept=1e9), cluster(4e9, 2e9, memory=(GB, GB)))
    assert plan.predicted["fits"] is False
    assert any("rows" in text and "GB" in text for text in plan.rejected), plan.rejected


def test_a_device_that_only_slows_the_others_down_stays_idle():
    plan = make(chain([1e9]), cluster(4e9, 1e3))
    assert plan.stages[0].virtual_device.weights == (24, 0)


def test_shards_are_cut_in_their_own_units():
    graph = chain([1e9, 1e9], tags=[(Scope(kind="split", uid=1, where="here"),)] * 2)
    plan = make(graph, cluster(3e9, 1e9))
    assert {split.cuts for split in plan.taskgraphs[0].splits} == {((0, 9, 12),)}


def test_the_heavy_stage_gets_the_fast_device():
    graph = chain([1e9, 4e9, 2e9], tags=stages(3))
    plan = make(graph, cluster(4e9, 1e9, 2e9), pipeline__num_micro_batch=4)
    assert [s.virtual_device.ranks for s in plan.stages] == [(1,), (0,), (2,)]
    assert any("slower" in text for text in plan.rejected)


def test_early_stages_want_memory():
    """Equal speed, equal work: the stage that holds most activations takes the large device."""
    graph = chain([1e9, 1e9], kept=1e8, tags=stages(2))
    devices = cluster(1e9, 1e9, memory=(GB, 3 * GB))
    plan = make(graph, devices, rows=32, pipeline__num_micro_batch=4)
    assert [s.virtual_device.ranks for s in plan.stages] == [(1,), (0,)]
    assert plan.predicted["fits"]


def test_auto_cuts_by_cost_and_leaves_a_useless_device_out():
    graph = chain([1e9] * 9)
    plan = make(
        graph,
        cluster(2e9, 1e9, 1e3),
        auto__auto_parallel=True,
        pipeline__num_stages=2,
        pipeline__num_micro_batch=6,
    )
    layers = {s.virtual_device.ranks: len(s.layers) for s in plan.stages}
    assert layers == {(0,): 6, (1,): 3}
    assert plan.stages_of(2) == ()


def test_auto_chooses_between_data_and_pipeline():
    """Large weights over slow links: a pipeline sends activations, data parallel all gradients."""
    small = make(chain([1e9] * 4), cluster(1e9, 1e9), auto__auto_parallel=True)
    assert len(small.stages) == 1
    large = chain([1e9] * 4, numel=480_000_000)
    plan = make(large, cluster(1e11, 1e11, memory=(64 * GB,) * 2), auto__auto_parallel=True)
    assert len(plan.stages) == 2
    assert any(text.startswith("data parallel") for text in plan.rejected)


def test_more_stages_than_layers_is_refused():
    with pytest.raises(PlanError, match=r"pipeline.num_stages = 4 .* 2 Layers"):
        make(
            chain([1e9, 1e9]),
            cluster(*[1e9] * 4),
            auto__auto_parallel=True,
            pipeline__num_stages=4,
        )


def test_a_plan_with_prices_survives_json_and_text():
    plan = make(chain([1e9] * 4, tags=stages(4)), cluster(*[1e9] * 4), pipeline__num_micro_batch=4)
    assert Plan.from_dict(plan.to_dict()) == plan
    assert Plan.from_text(plan.to_text()) == plan


@pytest.mark.parametrize("num_micro_batch", [1, 4, 9])
def test_the_simulator_knows_the_bubble(num_micro_batch: int):
    """Equal stages, nothing sent: (m + p - 1) (F + B)."""
    graph = chain([1e9] * 3, tags=stages(3))
    plan = make(
        graph,
        cluster(*[1e9] * 3),
        rows=2 * num_micro_batch,
        pipeline__num_micro_batch=num_micro_batch,
    )
    free = replace(
        plan.prices,
        messages=(),
        devices=tuple(replace(d, apply_s=0.0) for d in plan.prices.devices),
    )
    report = simulate(replace(plan, prices=free), orders_of(plan.schedule))
    assert report.step_seconds == pytest.approx((num_micro_batch + 2) * 3 * 2.0)
    assert report.bubble == pytest.approx(2 / (num_micro_batch + 2))


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "zero-bubble"])
@pytest.mark.parametrize("message_s", [0.0, 0.7, 40.0])
def test_the_simulator_agrees_with_a_plainer_clock(kind: str, message_s: float):
    """Unequal stages: two models of the clock, one answer."""
    work = [1e9, 3e9, 2e9]
    graph = chain(work, tags=stages(3))
    plan = make(
        graph,
        cluster(*[1e9] * 3),
        rows=10,
        pipeline__num_micro_batch=5,
        pipeline__schedule=kind,
    )
    free = replace(
        plan.prices,
        messages=tuple(
            replace(m, seconds=message_s, back_s=message_s) for m in plan.prices.messages
        ),
        devices=tuple(replace(d, apply_s=0.0) for d in plan.prices.devices),
    )
    orders = orders_of(plan.schedule)
    prices = {price.stage: price for price in plan.prices.stages}

    def cost(action: Action) -> float:
        price = prices[action.stage]
        if action.kind == "F":
            return price.forward_s
        if action.kind == "W":
            return price.weight_s
        return price.backward_s - (price.weight_s if action.kind == "I" else 0.0)

    report = simulate(replace(plan, prices=free), orders)
    assert len(free.messages) == 2
    line = timeline(plan.schedule, orders, cost, message_s)
    assert report.step_seconds == pytest.approx(line.step_s)
    assert report.bubble == pytest.approx(line.bubble)


def test_a_lane_is_faster_while_its_neighbour_on_the_card_waits():
    """One micro-batch: each of two equal stages rests half of the step, whatever its pace."""
    graph = chain([1e9] * 2, tags=stages(2))
    plan = make(graph, cluster(1e9, 1e9), rows=2, pipeline__num_micro_batch=1)
    apart = replace(
        plan.prices,
        messages=(),
        devices=tuple(replace(d, apply_s=0.0) for d in plan.prices.devices),
        stages=tuple(replace(p, alone=0.6) for p in plan.prices.stages),
    )
    shared = replace(apart, devices=tuple(replace(d, card="one") for d in apart.devices))
    nominal, faster = (
        simulate(replace(plan, prices=prices), orders_of(plan.schedule))
        for prices in (apart, shared)
    )
    assert nominal.step_seconds == pytest.approx(2 * 3 * 2.0)
    assert faster.step_seconds == pytest.approx(0.8 * nominal.step_seconds)
    assert faster.bubble == pytest.approx(0.5)
    assert len(faster.events) == len(nominal.events)


def test_activations_follow_the_schedule():
    graph = chain([1e9] * 3, kept=1e6, tags=stages(3))
    devices = cluster(*[1e9] * 3)
    peaks = {}
    for schedule in ("1f1b", "gpipe"):
        plan = make(
            graph, devices, rows=10, pipeline__num_micro_batch=5, pipeline__schedule=schedule
        )
        report = simulate(plan, orders_of(plan.schedule))
        peaks[schedule] = [d.memory.activations / 2e6 for d in report.devices]
    assert peaks == {"1f1b": [3, 2, 1], "gpipe": [5, 5, 5]}
