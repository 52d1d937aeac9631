"""Columns or rows of a lone Linear, by what their collectives cost on the group's links."""

from __future__ import annotations

from dataclasses import replace

import pytest

from whale.config import Config
from whale.cost.comm import Fabric
from whale.ir.check import check_plan
from whale.ir.cluster import Cluster
from whale.ir.model_graph import (
    Layer,
    Linear,
    ModelGraph,
    Node,
    Parameter,
    SplitOption,
    TaskGraph,
    Value,
)
from whale.ir.plan import Plan
from whale.ir.sharding import DimSharding
from whale.ir.strategy import Scope
from whale.planner.make_plan import make_plan
from whale.verification.fold import fold

SPLIT = (Scope(kind="split", uid=1, where="here"),)
CLUSTER = "1x2xA100-80GB"


def lone(path: str, num_in: int, num_out: int, **more: object) -> Layer:
    column = SplitOption(
        rule="column",
        path=path,
        modules=(path,),
        units=num_out,
        unit="columns",
        params=((f"{path}.weight", DimSharding(dim=0, sections=(num_out,), units=num_out)),),
        read=Linear(per_row=4e3 * num_in),
        made=Linear(per_row=4e3 * num_out),
    )
    column = replace(column, **more)
    row = replace(
        column,
        rule="row",
        units=num_in,
        unit="rows",
        params=((f"{path}.weight", DimSharding(dim=1, sections=(num_in,), units=num_in)),),
    )
    return Layer(
        path=path,
        kind="Linear",
        taskgraph=0,
        params=(f"{path}.weight", f"{path}.bias"),
        splits=(column, row),
        read=column.read,
        made=column.made,
    )


def model(*layers: Layer, aliases: tuple[str, ...] = ()) -> ModelGraph:
    parameters = []
    for layer in layers:
        sizes = {o.rule: o.units for o in layer.splits}
        shape = (sizes.get("column", 1), sizes.get("row", 1))
        name = f"{layer.path}.weight"
        parameters += [
            Parameter(name=name, shape=shape, dtype="float32", aliases=aliases),
            Parameter(name=f"{layer.path}.bias", shape=shape[:1], dtype="float32"),
        ]
    return ModelGraph(
        layers=layers,
        parameters=tuple(parameters),
        taskgraphs=(TaskGraph(index=0, tag=SPLIT, layers=tuple(range(len(layers)))),),
        nodes=tuple(
            Node(
                name=layer.path,
                layer=i,
                reads=((i - 1, 0),) if i else (),
                made=(Value(nbytes=layer.made),),
            )
            for i, layer in enumerate(layers)
        ),
    )


def planned(graph: ModelGraph, cluster: str = CLUSTER) -> Plan:
    return make_plan(graph, Cluster.parse(cluster), Config(), batch_rows=16)


def rules(plan: Plan) -> dict[str, str]:
    return {split.path: split.rule for t in plan.taskgraphs for split in t.splits}


@pytest.mark.parametrize(
    ("num_in", "num_out", "more", "rule"),
    [
        (64, 4, {}, "row"),
        (4, 64, {}, "column"),
        (64, 64, {}, "column"),
        (64, 4, {"entered": 0}, "column"),
        (64, 4, {"joined": "loss"}, "column"),
        (64, 4, {"read": Linear(), "made": Linear()}, "column"),
        (64, 1, {}, "row"),
    ],
    ids=["in", "out", "tie", "no gradient", "loss", "unknown", "no other"],
)
def test_the_cheaper_rule_is_taken(
    num_in: int, num_out: int, more: dict[str, object], rule: str
) -> None:
    plan = check_plan(planned(model(lone("head", num_in, num_out, **more))))
    assert rules(plan) == {"head": rule}
    assert plan.taskgraphs[0].splits[0].cuts[0][-1] == (num_in if rule == "row" else num_out)
    assert Plan.from_dict(plan.to_dict()) == plan


def test_the_price_is_that_of_the_rule_taken() -> None:
    graph = model(lone("head", 64, 4))
    fabric = Fabric.of(Cluster.parse(CLUSTER))
    read, made = 16 * 4e3 * 64, 16 * 4e3 * 4
    by_rows = fabric.all_reduce(range(2), made) + fabric.all_gather(range(2), read)
    by_columns = fabric.all_gather(range(2), made) + fabric.all_reduce(range(2), read)
    (lane,) = planned(graph).prices.stages
    assert lane.collective_s == pytest.approx(by_rows)
    layer = graph.layers[0]
    columns = replace(graph, layers=(replace(layer, splits=layer.splits[:1]),))
    (lane,) = planned(columns).prices.stages
    assert lane.collective_s == pytest.approx(by_columns)
    assert by_rows < by_columns


def test_what_lost_is_said_once_per_decision() -> None:
    plan = planned(model(*(lone(f"layers.{i}", 64, 4) for i in range(3)), lone("out", 4, 64)))
    assert set(rules(plan).values()) == {"row", "column"}
    first, second = [text for text in plan.rejected if text.startswith("Linear")]
    assert first.startswith("Linear 64 -> 4 split by columns: ") and "by rows" in first
    assert second.startswith("Linear 4 -> 64 split by rows: ") and "by columns" in second


def test_a_tied_weight_is_cut_by_columns() -> None:
    graph = model(lone("head", 64, 4), aliases=("embedding.weight",))
    assert rules(planned(graph)) == {"head": "column"}


def test_the_bias_of_a_row_split_is_whole_and_its_module_is_not() -> None:
    plan = planned(model(lone("head", 64, 4)))
    weight, bias = plan.homes
    assert weight.splits and not bias.splits
    assert plan.taskgraphs[0].whole == ()
    assert plan.piece(weight, 1).shape(weight.shape) == (4, 32)


def test_a_folded_plan_keeps_its_rules() -> None:
    graph = model(lone("head", 64, 4))
    plan = planned(graph, "4x8xA100-80GB")
    assert rules(plan) == {"head": "row"}
    other = model(lone("head", 64, 4, entered=0))
    small = fold(plan, other, None, Config(), refusal=None)
    assert rules(small.plan) == {"head": "row"} and small.plan.num_ranks <= 8
