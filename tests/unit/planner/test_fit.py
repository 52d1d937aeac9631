"""Plans that do not fit as they are: what runs again, is shared out or waits until they do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.covering import some
from whale.config import Config
from whale.ir.cluster import Cluster, Device, Node
from whale.ir.model_graph import (
    Layer,
    Linear,
    ModelGraph,
    Parameter,
    TaskGraph,
    Value,
    Work,
)
from whale.ir.model_graph import (
    Node as Step,
)
from whale.ir.plan import Plan
from whale.ir.strategy import Scope
from whale.planner.fit import overflow
from whale.planner.make_plan import make_plan

MB = 1_000_000


def chain(num_layers: int, *, once: Sequence[int] = (), staged: int = 0) -> ModelGraph:
    """Layers of 10 MB of weights, which keep 20 MB a row and are given 1 MB a row."""
    size = 2_500_000

    def layer(i: int) -> Layer:
        return Layer(
            path=f"block{i}",
            kind="Block",
            taskgraph=i * staged // num_layers if staged else 0,
            params=(f"block{i}.weight",),
            own=(f"block{i}.weight",),
            flops_per_row=2e9,
            work=(
                Work(
                    kind="matmul",
                    calls=1,
                    flops=Linear(per_row=2e9),
                    moved=Linear(fixed=4.0 * size, per_row=2.0 * MB),
                ),
            ),
            kept=Linear(per_row=20.0 * MB),
            entered=Linear(per_row=1.0 * MB),
            products=Linear(per_row=5.0 * MB),
            read=Linear(per_row=1.0 * MB),
            made=Linear(per_row=1.0 * MB),
            largest=Linear(per_row=2.0 * MB),
            once="it is told to" if i in once else "",
        )

    layers = [layer(i) for i in range(num_layers)]
    made = (Value(nbytes=Linear(per_row=1.0 * MB)),)
    nodes = [
        Step(name=x.path, layer=i, reads=((i - 1, 0),) if i else (), made=made)
        for i, x in enumerate(layers)
    ]
    groups = [
        TaskGraph(
            index=g,
            tag=(Scope(kind="stage", uid=g, where="test"),) if staged else (),
            layers=tuple(i for i, x in enumerate(layers) if x.taskgraph == g),
        )
        for g in range(max(1, staged))
    ]
    return ModelGraph(
        layers=tuple(layers),
        parameters=tuple(
            Parameter(name=x.params[0], shape=(size,), dtype="float32") for x in layers
        ),
        taskgraphs=tuple(groups),
        nodes=tuple(nodes),
    )


def cluster(*memory: int, host: float = 100e9) -> Cluster:
    return Cluster(
        devices=tuple(
            Device(rank=r, node=0, type="V100-16GB", memory_bytes=size)
            for r, size in enumerate(memory)
        ),
        nodes=(Node(index=0, host_memory_bytes=int(host)),),
    )


def plan(graph: ModelGraph, devices: Cluster, rows: int = 16, **more: Any) -> Plan:
    return make_plan(graph, devices, Config.from_dict(more), batch_rows=rows)


def again(found: Plan) -> list[str]:
    return [x.path for s in found.stages for x in s.layers if x.recompute]


def test_what_fits_is_left_alone() -> None:
    found = plan(chain(6), cluster(16_000 * MB))
    assert found.predicted["fits"]
    assert not again(found) and not found.kept
    assert all(h.tier == "device" and not h.zero for h in found.homes)


def test_only_as_many_layers_as_are_needed_run_again() -> None:
    need = plan(chain(6), cluster(16_000 * MB)).peak_bytes[0]
    few = plan(chain(6), cluster(need - 100 * MB))
    many = plan(chain(6), cluster(need - 900 * MB))
    assert few.predicted["fits"] and many.predicted["fits"]
    assert 1 <= len(again(few)) < len(again(many))
    assert any("recomputed: " in line and "saves" in line for line in few.kept)
    # Its backward takes longer, by about what was left out of memory.
    assert few.predicted["step_seconds"] < many.predicted["step_seconds"]


def test_settings_are_constraints() -> None:
    need = plan(chain(6), cluster(16_000 * MB)).peak_bytes[0]
    tight = cluster(need - 500 * MB)
    assert not plan(chain(6), tight, **{"auto.fit": False}).predicted["fits"]
    only = plan(chain(6), tight, **{"auto.fit": False, "gradient_checkpoint.type": "auto"})
    assert only.predicted["fits"] and again(only)
    assert all(h.tier == "device" for h in only.homes)
    named = plan(
        chain(6),
        cluster(16_000 * MB),
        **{"gradient_checkpoint.type": "collection", "gradient_checkpoint.layers": "block[13]"},
    )
    assert again(named) == ["block1", "block3"]
    products = plan(
        chain(6),
        cluster(16_000 * MB),
        **{"gradient_checkpoint.type": "collection", "gradient_checkpoint.keep": "products"},
    )
    inputs = plan(chain(6), cluster(16_000 * MB), **{"gradient_checkpoint.type": "collection"})
    assert inputs.peak_bytes[0] < products.peak_bytes[0] < need
    assert products.predicted["step_seconds"] < inputs.predicted["step_seconds"]


def test_what_cannot_run_again_does_not() -> None:
    graph = chain(6, once=(0, 1, 2))
    need = plan(graph, cluster(16_000 * MB)).peak_bytes[0]
    found = plan(graph, cluster(need - 800 * MB))
    assert found.predicted["fits"]
    assert not {"block0", "block1", "block2"} & set(again(found))


def test_early_stages_recompute_more() -> None:
    graph = chain(8, staged=2)
    more = {"pipeline.num_micro_batch": 4}
    need = plan(graph, cluster(16_000 * MB, 16_000 * MB), **more).peak_bytes
    assert need[0] > need[1]
    tight = cluster(*[need[1] + 10 * MB] * 2)
    found = plan(graph, tight, **more, **{"offload.activations": False})
    assert found.predicted["fits"]
    first, second = ([x.path for x in s.layers if x.recompute] for s in found.stages)
    assert len(first) > len(second)


def test_weights_and_state_go_where_there_is_room() -> None:
    graph = chain(6)
    tight = 900 * MB  # 700 of them are the driver's; weights, gradients and state take 240
    found = plan(graph, cluster(tight), rows=1)
    assert found.predicted["fits"], found.peak_bytes
    assert any(h.tier != "device" for h in found.homes)
    none = plan(graph, cluster(tight, host=1e6), rows=1)
    assert not none.predicted["fits"]


def test_copies_share_out_before_that_costs_more() -> None:
    graph = chain(6)
    need = plan(graph, cluster(16_000 * MB, 16_000 * MB), rows=2).peak_bytes[0]
    tight = cluster(*[need - 60 * MB] * 2, host=1e6)  # no room on the host
    found = plan(graph, tight, rows=2)
    assert found.predicted["fits"]
    assert any(h.zero for h in found.homes) or again(found)


@settings(max_examples=some(40), deadline=None)
@given(
    num_layers=st.integers(1, 7),
    sizes=st.lists(st.integers(750, 3000), min_size=1, max_size=3),
    rows=st.integers(3, 24),
    staged=st.booleans(),
    micro=st.integers(1, 3),
)
def test_less_is_kept_only_where_nothing_else_fits(
    num_layers: int, sizes: list[int], rows: int, staged: bool, micro: int
) -> None:
    stages = len(sizes) if staged and num_layers >= len(sizes) > 1 else 0
    graph = chain(num_layers, staged=stages)
    devices = cluster(*(size * MB for size in sizes))
    more = {"pipeline.num_micro_batch": micro}
    plain = plan(graph, devices, rows, **more, **{"auto.fit": False})
    found = plan(graph, devices, rows, **more)
    if plain.predicted["fits"]:
        assert replace(found, rejected=()) == replace(plain, rejected=())
    else:
        assert overflow(found) <= overflow(plain)
        assert found.predicted["fits"] == (overflow(found) == 0)
        if found.predicted["fits"]:
            assert found.kept or any(h.zero for h in found.homes)
    assert Plan.from_dict(found.to_dict()) == found


def test_a_pattern_that_names_nothing_is_refused() -> None:
    with pytest.raises(Exception, match="gradient_checkpoint.layers = 'blok' matches none"):
        plan(
            chain(2),
            cluster(16_000 * MB),
            **{"gradient_checkpoint.type": "collection", "gradient_checkpoint.layers": "blok"},
        )
