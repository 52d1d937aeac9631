"""The text form: what JSON can hold comes back exactly, and a malformed text names its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import whale as wh
from tests.covering import some
from tests.parity import zoo
from tests.parity.layouts import LAYOUTS
from tests.unit.ir.test_plan import make
from whale.engine.capture.captured import capture
from whale.ir.cluster import Cluster
from whale.ir.model_graph import ModelGraph
from whale.ir.plan import Plan
from whale.ir.schedule import Schedule
from whale.ir.text import LIST_WIDTH, PAIRS_WIDTH, dumps, loads
from whale.ir.virtual_device import VirtualDevice

GOLDEN = Path(__file__).parents[2] / "goldens" / "text-form.txt"

# A plan in small. It is not a real one, so that new fields of a plan do not change the golden text.
SMALL: dict[str, Any] = {
    "schema": 1,
    "model_hash": "3700188386910612",
    "fits": True,
    "step_seconds": 0.1,
    "lower_bound_seconds": None,
    "num_ranks": 3,
    "strategy": "stage 0: replicate on 3; 2 micro-batches, 1f1b",
    "rejected": [],
    "predicted": {},
    "devices": [
        {"rank": 0, "type": "V100-32GB", "share": 0.5, "stage": 0},
        {"rank": 1, "type": "4090", "share": 1 / 3, "stage": [0, 1]},
        {"rank": 2, "type": "CPU", "share": 1e-07, "stage": None},
    ],
    "taskgraphs": [
        {
            "index": 0,
            "where": "examples/train.py:12",
            "layers": ["embedding", "blocks.0", "blocks.1"],
            "whole": [f"blocks.{i}.attention.out_proj" for i in range(4)],
            "replicas": [{"ranks": [0, 1], "weight": 3}, {"ranks": [2], "weight": 1}],
            "cuts": [[0, 25, 37], [0, 9, 37]],
            "params": {"blocks.0.weight": {"dim": 0, "sections": [8, 8], "units": 4}},
        }
    ],
    "schedule": {"kind": "1f1b", "edges": [[0, 1]], "orders": [["0F0", "0B0"], ["1F0", "1B0"]]},
}


def same(left: Any, right: Any) -> bool:
    """Equal in type and in the order of keys too: 1, 1.0 and True are three values."""
    return json.dumps(left) == json.dumps(right)


def again(data: dict[str, Any]) -> dict[str, Any]:
    text = dumps(data, title="test")
    assert not any(line != line.rstrip() or "\t" in line for line in text.split("\n"))
    found = loads(text, title="test")
    assert dumps(found, title="test") == text
    return found


WORDS = st.text(alphabet='ab01-+.e_/:=,[]{}"# \n\\', max_size=6)
NAMES = st.sampled_from(
    "null none True false inf nan -inf 1 -0 1.0 1e5 1_0 .5 - a: {} [] 0x1".split()
)
STRINGS = WORDS | NAMES | st.text(max_size=4) | st.just("long " * 50)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | STRINGS
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(STRINGS, inner, max_size=4),
    max_leaves=20,
)
DATA = st.dictionaries(STRINGS, VALUES, max_size=5)


@given(DATA)
@settings(max_examples=some(400), deadline=None)
def test_every_json_value_comes_back(data: dict[str, Any]) -> None:
    assert same(again(data), data)


@given(DATA, st.data())
@settings(max_examples=some(200), deadline=None)
def test_a_damaged_text_is_read_or_refused(data: dict[str, Any], draw: st.DataObject) -> None:
    """Nothing but a PlanError that names a line, whatever was cut out or put in."""
    text = dumps(data, title="test")
    start = draw.draw(st.integers(0, len(text)))
    end = draw.draw(st.integers(start, min(start + 4, len(text))))
    damaged = text[:start] + draw.draw(st.just("") | WORDS) + text[end:]
    try:
        found = loads(damaged, title="test")
    except wh.PlanError as error:
        assert str(error).startswith("line ") and "expected" in str(error) and error.hint
    else:
        assert same(again(found), found)


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, False, 0, 1, 1.0, -0.0, 10**30, 1e30, 5e-324, 0.1 + 0.2, float("inf")),
        *(
            "",
            " ",
            "1",
            "1.0",
            "null",
            "True",
            "a b",
            "a:",
            "-",
            "- a",
            "é",
            "\ud800",
            "\u2028",
            "\r",
        ),
        *([], {}, [[]], [{}], [[[]], {}], {"": {}}, [[{}, []], [[{"a": []}]]]),
        *(
            [1, [2, [3, [4]]]],
            [[{"a": 1}, {"b": {"c": 1}}], 3, "x"],
            {"a b": {"c:d": [{"=": "="}]}},
        ),
        *([{"a": {"b": [{"c": {}}]}}], [list(range(200))] * 2, [["word"] * 60] * 2),
        [{f"key{i}": "word" for i in range(40)}],
    ],
    ids=lambda value: json.dumps(value)[:30],
)
def test_corners(value: Any) -> None:
    assert same(again({"key": value, "last": 0}), {"key": value, "last": 0})


def test_golden() -> None:
    assert dumps(SMALL, title="plan") == GOLDEN.read_text(encoding="utf-8")
    assert same(loads(GOLDEN.read_text(encoding="utf-8"), title="plan"), SMALL)


def test_what_is_long_takes_a_line_each() -> None:
    lines = dumps({"a": ["x" * 10] * 20, "b": [{"c": "x" * 99, "d": "y" * 99}]}, title="t").split()
    assert lines.count("-") == 21 and max(map(len, lines)) < LIST_WIDTH
    ranks = dumps({"ranks": list(range(1000))}, title="t").splitlines()
    assert len(ranks) == 2 and len(ranks[1]) > PAIRS_WIDTH


def test_a_change_is_one_line() -> None:
    changed = json.loads(json.dumps(SMALL))
    changed["taskgraphs"][0]["replicas"][1]["weight"] = 2
    pairs = zip(
        dumps(SMALL, title="plan").splitlines(),
        dumps(changed, title="plan").splitlines(),
        strict=True,
    )
    assert [(a.strip(), b.strip()) for a, b in pairs if a != b] == [
        ("- ranks=[2] weight=1", "- ranks=[2] weight=2")
    ]


def test_spaces_and_line_ends_of_an_editor_do_no_harm() -> None:
    text = dumps(SMALL, title="plan")
    assert same(loads(text.replace("\n", "  \r\n\r\n"), title="plan"), SMALL)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("a", r"line 2, column 1: found 'a', expected `key: value`"),
        ("a:", r"line 2, column 1: found 'a:', expected a value, or lines below it indented by 2"),
        ("a:\nb: 1", r"line 2, .*indented by 2"),
        ("a:\n   b: 1", r"line 2, .*indented by 2"),
        ("a: 1\n  b: 1", r"line 3, column 3: .*expected an indentation of 0 spaces"),
        ("a:\n  b: 1\n c: 1", r"line 4, column 2: .*expected an indentation of 0 spaces"),
        ("a:\n\tb: 1", r"line 2, .*indented by 2"),
        ("a: 1\n\na: 2", r"line 4, column 1: found 'a: 2', expected .*each key once"),
        ("- 1", r"line 2, column 1: found '- 1', expected `key: value`"),
        ("a:\n  - 1\n  b: 2", r"line 4, column 3: found 'b: 2', expected `- item`"),
        ("a:\n  b: 2\n  - 1", r"line 4, column 3: found '- 1', expected `key: value`"),
        ("a:\n  -", r"line 3, column 3: found '-', expected `key: value`"),
        ("a:\n  - b=1 c", r"line 3, column 9: found 'c', expected `key=value`"),
        ("a:\n  - b=1 b=2", r"line 3, column 9: .*each key once"),
        ("a:\n  - b=1,c=2", r"line 3, column 8: .*expected a space or the end of the line"),
        ("a:\n  - b=", r"line 3, column 7: found the end of the line, expected a number"),
        ("a: two words", r"line 2, column 7: found ' words', expected the end of the line"),
        ("a:  1", r"line 2, column 4: found ' 1', expected a number"),
        ("a: None", r"line 2, column 4: found 'None', expected a number"),
        ("a: 007", r"line 2, column 4: found '007', expected a number"),
        ("a: 1_000", r"line 2, column 4: found '1_000', expected a number"),
        ("a: [1, 2", r"line 2, column 9: found the end of the line, expected ', ' or '\]'"),
        ("a: [1,2]", r"line 2, column 6: found ',2\]', expected ', ' or '\]'"),
        ("a: [, 1]", r"line 2, column 5: .*expected a number"),
        ("a: {b}", r"line 2, column 4: .*expected a number"),
        ('a: "b', r"line 2, column 4: .*expected a quoted string as in JSON"),
        ('"a: 1', r"line 2, column 1: .*expected a quoted string as in JSON"),
    ],
)
def test_malformed_texts_name_the_line(body: str, message: str) -> None:
    with pytest.raises(wh.PlanError, match=rf"{message}[\s\S]*hint: "):
        loads(f"whale test 1\n{body}\n", title="test")


@pytest.mark.parametrize(
    "text", ["", "\n", "{}", "whale cluster 1\n", "whale plan 2\n", " whale plan 1"]
)
def test_another_first_line_is_refused(text: str) -> None:
    with pytest.raises(wh.PlanError, match=r"line 1 is .*expected 'whale plan 1'[\s\S]*hint:"):
        loads(text, title="plan")


@pytest.mark.parametrize(
    "layout", ["one", "1f1b", "interleaved", "data-tensor-uneven", "3d-uneven"]
)
def test_plans_and_what_they_hold_come_back(layout: str) -> None:
    plan, cluster = make("gpt", layout), LAYOUTS[layout].cluster()
    assert Plan.from_text(plan.to_text()) == plan
    assert Schedule.from_text(plan.schedule.to_text()) == plan.schedule
    assert Cluster.from_text(cluster.to_text()) == cluster
    device = plan.stages[-1].virtual_device
    assert VirtualDevice.from_text(device.to_text()) == device
    with pytest.raises(wh.PlanError, match="line 1 is 'whale schedule 1'"):
        Plan.from_text(plan.schedule.to_text())


@pytest.mark.parametrize("name", ["gpt", "encdec"])
def test_model_graphs_come_back(name: str) -> None:
    case = zoo.case(name)
    graph = capture(wh.split()(case.build()), case.batch(0, 4), case.loss).graph
    found = ModelGraph.from_text(graph.to_text())
    assert graph.nodes and found == graph and found.hash == graph.hash


def test_values_made_by_hand_come_back() -> None:
    orders = (("0F0", "0B0"), ("1F0", "1B0"))
    schedule = Schedule(
        kind="mine", num_micro_batch=1, groups=((0,), (1,)), edges=((0, 1),), orders=orders
    )
    assert "orders: [[0F0, 0B0], [1F0, 1B0]]" in schedule.to_text().splitlines()
    assert Schedule.from_text(schedule.to_text()) == schedule
    cluster = Cluster.parse("2x2x4090+1x2xV100-32GB")
    assert Cluster.from_text(cluster.to_text()) == cluster
    device = VirtualDevice.of([(0, 1), (2,)], (3, 0))
    assert device.to_text() == (
        "whale virtual-device 1\nreplicas:\n  - ranks=[0, 1] weight=3\n  - ranks=[2] weight=0\n"
    )
    assert VirtualDevice.from_text(device.to_text()) == device
