"""What copies share out: the levels a parameter may have, and the memory that is left for it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest
import torch

import whale as wh
from tests.parity import zoo
from tests.parity.layouts import LAYOUTS, layer_paths
from tests.ranks import run_ranks
from whale.cli.shipped import load
from whale.config import Config
from whale.cost.compute import CostModel, Training
from whale.engine.capture.captured import capture
from whale.errors import PlanError
from whale.ir.cluster import Cluster, Device, Node
from whale.ir.model_graph import ModelGraph
from whale.ir.plan import Plan
from whale.planner.keep import Keeping, check_kept
from whale.planner.make_plan import make_plan

MB = 10**6
LEVELS = ("", "v0", "v1", "v2")


@cache
def captured(case_name: str, layout_name: str) -> ModelGraph:
    case = zoo.case(case_name)
    model, batch = case.build().float(), case.batch(0, 8)
    LAYOUTS[layout_name].annotate(model, layer_paths(model, batch, case.loss))
    return capture(model, batch, case.loss).graph


def cluster(*memory: int) -> Cluster:
    return Cluster(
        devices=tuple(
            Device(rank=r, node=0, type="V100-32GB", memory_bytes=size)
            for r, size in enumerate(memory)
        ),
        nodes=(Node(index=0),),
    )


def plan(level: str, *memory: int, layout: str = "data") -> Plan:
    config = Config.from_dict({"zero.level": level})
    return make_plan(captured("gpt", layout), cluster(*memory), config, batch_rows=8)


def test_each_level_leaves_more_room() -> None:
    subject = load("bert-base")
    assert subject is not None
    peaks = []
    for level in LEVELS:
        config = Config.from_dict({"zero.level": level})
        four = cluster(*[16_000 * MB] * 4)
        peaks.append(max(make_plan(subject.graph, four, config, batch_rows=8).peak_bytes))
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 4


WAYS = {
    **{f"zero {level}": {"zero.level": level} for level in LEVELS},
    **{f"offload {level}": {"offload.level": level} for level in ("state", "update", "v0")},
    **{
        f"masters {master}": {"amp.level": "O2", "amp.master": master, "zero.level": zero}
        for master, zero in (
            ("float32", ""),
            ("float32", "v2"),
            ("split", "v1"),
            ("stochastic", ""),
            ("none", "v2"),
        )
    },
    "masters on the host": {"amp.level": "O2", "offload.level": "update", "zero.level": "v0"},
}


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=pytest.mark.full if i % 2 else ()) for i, way in enumerate(WAYS)],
)
def test_the_bytes_of_a_plan_are_those_of_its_tensors(way: str) -> None:
    """What `cost` says is held all the time, beside what a Step of the plan has."""
    settings = {"zero.level": "", **WAYS[way]}
    found, device, host = run_ranks(4, _tensors, settings)[0]
    memory = found.prices.devices[0].memory
    # The first of ranks that are alike stands for them: it has what is left over.
    # What is cut along another dim than rows has a memory of its own, which is little.
    assert 0.99 * device <= memory.parameters <= 1.02 * device + 16, (way, memory, device)
    # On the host there is also what an update makes and frees: one tensor beside four or more.
    assert 0.999 * host <= memory.host <= 1.3 * host, (way, memory, host)


def _tensors(settings: dict[str, str]) -> tuple[Plan, int, int]:
    """A plan, and the bytes that a rank's store has on its device and on the host."""
    torch.set_num_threads(1)
    wh.init()
    case = zoo.case("gpt")
    model, batch = case.build().float(), case.batch(0, 8)
    LAYOUTS["data"].annotate(model, layer_paths(model, batch, case.loss))
    step = wh.parallelize(
        model,
        optimizer=partial(torch.optim.AdamW, lr=1e-3),
        batch=batch,
        loss=case.loss,
        config=settings,
    )
    step(batch)
    store = step._lowered.store
    hosted = {h.name for h in step.plan.homes if h.tier in ("host", "state")}
    below = {h.name for h in step.plan.homes if h.tier == "host"}
    here, there = {}, {}
    for name, p in store.params.items():
        if name not in store.absent:
            here[p.untyped_storage().data_ptr()] = p.untyped_storage().nbytes()
    for name, p in store.kept.items():
        place = there if name in below else here
        place[p.untyped_storage().data_ptr()] = p.untyped_storage().nbytes()
        if name in below and p.grad is not None:
            place[p.grad.untyped_storage().data_ptr()] = p.grad.untyped_storage().nbytes()
    for state in (store.updater.optimizer.state[store.kept[n]] for n in hosted if n in store.kept):
        there |= {id(v): v.numel() * v.element_size() for v in state.values() if v.dim()}
    for name, low in store.masters.lower.items():
        place = there if name in below else here
        place[low.untyped_storage().data_ptr()] = low.untyped_storage().nbytes()
    plan = step.plan
    step.close(forget=True)
    return plan, sum(here.values()), sum(there.values())


def test_unequal_memory_makes_unequal_shares() -> None:
    found = plan("v2", 2000 * MB, 730 * MB, 1000 * MB)
    weights = found.state_weights
    assert weights[0] == max(weights) > weights[2] > weights[1]
    assert plan("v2", *[1000 * MB] * 3).state_weights == ()
    assert plan("", 2000 * MB, 730 * MB).state_weights == ()


def test_levels_keep_to_what_code_reads_and_stages_share() -> None:
    sharing = Keeping(zero=3, own=frozenset({"own"}), trainable=frozenset({"own", "read"}))
    assert sharing.level("own", num_stages=1, copies=2) == 3
    assert sharing.level("own", num_stages=1, copies=1) == 0
    assert sharing.level("own", num_stages=2, copies=4) == 1
    assert sharing.level("read", num_stages=1, copies=2) == 2
    assert sharing.level("frozen", num_stages=1, copies=2) == 0
    assert replace(sharing, zero=1).level("own", num_stages=1, copies=2) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"zero": 2}, "shares out"),
        ({"weights": (1,)}, "state_weights"),
        ({"weights": (0, 0)}, "not 0 for all"),
        ({"weights": (1, -1)}, "from 0 on"),
    ],
)
def test_a_plan_that_shares_out_what_it_may_not_is_refused(
    change: dict[str, object], words: str
) -> None:
    found = plan("v0", 2000 * MB, 2000 * MB)
    graph = captured("gpt", "data")
    check_kept(found, graph)
    if "zero" in change:
        alone = plan("", 2000 * MB)
        homes = tuple(replace(h, zero=1) for h in alone.homes)
        found = replace(alone, homes=homes)
    else:
        found = replace(found, state_weights=change["weights"])
    with pytest.raises(PlanError, match=words):
        check_kept(found, graph)


def test_an_optimizer_without_state_leaves_little_to_share() -> None:
    graph = captured("gpt", "data")
    sgd = Training(optimizer="SGD", state_tensors=0.0, scratch_tensors=0.0)
    costs = CostModel(graph, cluster(2000 * MB, 2000 * MB), sgd)
    config = Config.from_dict({"zero.level": "v0"})
    found = make_plan(graph, costs.cluster, config, batch_rows=8, training=sgd)
    assert found.prices is not None and found.prices.devices[0].memory.optimizer == 0
