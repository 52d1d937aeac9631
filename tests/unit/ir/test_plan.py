"""Plans: JSON round trips, the law they must satisfy, and who sums which gradient."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

import whale as wh
from tests.parity import zoo
from tests.parity.layouts import LAYOUTS, layer_paths
from tests.parity.matrix import REFUSED
from whale.ir.check import check_plan
from whale.ir.homes import rank_buckets, syncs
from whale.ir.plan import Plan
from whale.ir.sharding import apportion, cuts


def make(case_name: str, layout_name: str) -> Plan:
    case, layout = zoo.case(case_name), LAYOUTS[layout_name]
    model, batch = case.build(), case.batch(0, 7)
    layout.annotate(model, layer_paths(model, batch, case.loss))
    return wh.plan(
        model, cluster=layout.cluster(), batch=batch, loss=case.loss, config=layout.config
    )


@pytest.mark.every(3)
@pytest.mark.parametrize("layout", [n for n in LAYOUTS if ("gpt", n) not in REFUSED])
def test_plans_round_trip_and_obey_the_law(layout: str) -> None:
    plan = make("gpt", layout)
    text = json.dumps(plan.to_dict())
    assert Plan.from_dict(json.loads(text)) == plan
    assert check_plan(plan) is plan
    assert sum(d["share"] for d in plan.to_dict()["devices"]) == pytest.approx(1.0)
    assert str(plan).startswith("Plan for model")


@pytest.mark.parametrize("layout", ["data-uneven", "3d-uneven", "widths-tensor", "head"])
def test_every_rank_of_a_group_cuts_the_same_buckets(layout: str) -> None:
    plan = replace(make("resnet", layout), bucket_bytes=500)
    names = frozenset(home.name for home in plan.homes)
    seen: dict[tuple[object, ...], list[int]] = {}
    for rank in range(plan.num_ranks):
        for bucket in rank_buckets(plan, rank, names):
            total = sum(s.numel for s in bucket.slices)
            seen.setdefault((bucket.sync.ranks, bucket.position), []).append(total)
    for (ranks, _), totals in seen.items():
        assert len(totals) == len(ranks) and len(set(totals)) == 1, (ranks, totals)


def test_every_element_is_owned_and_summed_once_per_contribution() -> None:
    plan = make("gpt", "data-tensor-uneven")
    for home in plan.homes:
        for _, span, groups in syncs(plan, home):
            ranks = [rank for sync in groups for rank in sync.ranks]
            assert len(ranks) == len(set(ranks)), (home.name, span, groups)


def test_another_schema_and_a_broken_plan_are_refused() -> None:
    plan = make("gpt", "tensor-uneven")
    with pytest.raises(wh.PlanError, match="schema 99"):
        Plan.from_dict({**plan.to_dict(), "schema": 99})
    taskgraph = plan.taskgraphs[0]
    split = replace(taskgraph.splits[0], cuts=((0, 5, 4),))
    broken = replace(plan, taskgraphs=(replace(taskgraph, splits=(split,)),))
    with pytest.raises(wh.PlanError, match=r"cuts \(0, 5, 4\)[\s\S]*hint:"):
        check_plan(broken)
    with pytest.raises(wh.PlanError, match="no such group"):
        check_plan(replace(make("gpt", "data"), groups=()))


def test_too_few_devices_say_how_many_are_needed() -> None:
    case = zoo.case("gpt")
    model, batch = case.build(), case.batch(0, 7)
    first, second = "token_embedding|blocks.[01]", "blocks.[23]|norm|lm_head"
    wh.annotate(model, {first: wh.replicate(2), second: wh.replicate(4)})
    with pytest.raises(wh.PlanError, match=r"take 6 devices \(2 \+ 4\), the cluster has 4"):
        wh.plan(model, cluster="1x4xCPU", batch=batch, loss=case.loss)


def test_max_splits_makes_buckets_larger() -> None:
    case = zoo.case("gpt")
    model, batch = case.build(), case.batch(0, 7)

    def buckets(config: dict[str, int]) -> int:
        plan = wh.plan(model, cluster="1x2xCPU", batch=batch, loss=case.loss, config=config)
        return len(rank_buckets(plan, 0, frozenset(home.name for home in plan.homes)))

    many = {"communication.bucket_bytes": 4000}
    assert buckets(many) > 6
    assert buckets({**many, "communication.max_splits": 3}) <= 4


def test_apportion() -> None:
    assert apportion(7, (1, 1, 1)) == (3, 2, 2)
    assert apportion(10, (3, 1, 0)) == (8, 2, 0)
    assert cuts((3, 0, 2)) == (0, 3, 3, 5)


def test_auto_stages_balance_by_cost_and_train() -> None:
    case = zoo.case("gpt")
    batch = case.batch(0, 7)
    config = {"auto.auto_parallel": True, "pipeline.num_stages": 2, "pipeline.num_micro_batch": 2}
    plan = wh.plan(case.build(), cluster="1x2xCPU", batch=batch, loss=case.loss, config=config)
    shares = [t.flops_share for t in plan.taskgraphs]
    assert len(shares) == 2 and max(shares) < 0.65
