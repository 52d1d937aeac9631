"""Plans that people edit: refused, or what they were."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import whale as wh
from tests.parity import zoo
from tests.parity.layouts import LAYOUTS, layer_paths
from tests.ranks import run_ranks
from whale.engine.capture.captured import capture
from whale.ir.model_graph import ModelGraph
from whale.ir.plan import Plan
from whale.planner.given import check_given

ROWS = 7
SGD = partial(torch.optim.SGD, lr=0.1)

# What is said of a plan, and does not decide what it computes.
SAID = frozenset(
    "prices devices strategy rejected fits step_seconds samples_per_second joules_per_step "
    "lower_bound_seconds batch_rows flops_share split_share whole name num_micro_batch".split()
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        inside = path == ("schedule",)
        if key in SAID and not inside:
            continue
        if isinstance(item, dict | list):
            yield from places(item, (*path, key))
        else:
            yield (*path, key)


def edited(data: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """One edit of a kind that hands make: a number, a word, an item twice, lost or moved."""
    data = copy.deepcopy(data)
    while True:
        *front, key = rng.choice([path for path in places(data) if path])
        inside: Any = data
        for step in front:
            inside = inside[step]
        value = inside[key]
        if isinstance(value, str):
            words = ["", f"{value}x", "row", "column", "zero-bubble", "gpipe", "stacked experts"]
            inside[key] = rng.choice(words)
        elif isinstance(value, int) and not isinstance(value, bool):
            inside[key] = rng.choice([value + 1, value - 1, value + 0.5, float("nan"), 0, 1, "1"])
        elif isinstance(value, dict) and value:
            value.pop(rng.choice(list(value)))
        elif isinstance(value, list) and value:
            at, other = rng.randrange(len(value)), rng.randrange(len(value))
            match rng.choice(("twice", "lost", "moved", "turned")):
                case "twice":
                    value.append(copy.deepcopy(value[at]))
                case "lost":
                    value.pop(at)
                case "moved":
                    value[at], value[other] = value[other], value[at]
                case _:
                    value.reverse()
        else:
            continue
        return data


def planned(case_name: str, layout_name: str) -> tuple[Plan, ModelGraph]:
    case, layout = zoo.case(case_name), LAYOUTS[layout_name]
    model, batch = case.build(), case.batch(0, ROWS)
    layout.annotate(model, layer_paths(model, batch, case.loss))
    plan = wh.plan(
        model, cluster=layout.cluster(), batch=batch, loss=case.loss, config=layout.config
    )
    return plan, capture(model, batch, case.loss).graph


def accepted(case_name: str, layout_name: str, tries: int) -> list[dict[str, Any]]:
    """Edited plans that were not refused, and are not what they were; all errors are Whale's."""
    plan, graph = planned(case_name, layout_name)
    assert check_given(plan, graph) is plan
    data = json.loads(json.dumps(plan.to_dict()))
    rng = random.Random(3)
    found = []
    for _ in range(tries):
        changed = edited(data, rng)
        try:
            other = check_given(Plan.from_dict(changed), graph)
        except wh.WhaleError:
            continue
        if other != plan:
            found.append(changed)
    return found


def train(case_name: str, layout_name: str, plans: list[dict[str, Any]]) -> list[Any]:
    """The loss and the weights after a step under each plan, by one set of ranks."""
    wh.init()
    case, layout = zoo.case(case_name), LAYOUTS[layout_name]
    batch = case.batch(0, ROWS)
    results = []
    for data in plans:
        model = case.build()
        layout.annotate(model, layer_paths(model, batch, case.loss))
        step = wh.parallelize(
            model,
            optimizer=SGD,
            batch=batch,
            loss=case.loss,
            config=layout.config,
            plan=Plan.from_dict(data),
        )
        losses = [float(step(batch)["loss"]) for _ in range(2)]
        results.append((losses, step.state_dict()))
        step.close()
    return results


@pytest.mark.parametrize(
    "layout_name",
    ["tensor-uneven", *(pytest.param(x, marks=pytest.mark.full) for x in ("data-uneven", "1f1b"))],
)
def test_an_edited_plan_is_refused_or_computes_the_same(layout_name: str) -> None:
    plan, _ = planned("gpt", layout_name)
    plans = [json.loads(json.dumps(plan.to_dict())), *accepted("gpt", layout_name, 350)[:3]]
    assert len(plans) > 1
    for results in run_ranks(plan.num_ranks, train, "gpt", layout_name, plans):
        losses, state = results[0]
        for other_losses, other in results[1:]:
            assert other_losses == pytest.approx(losses, rel=1e-9)
            for name, tensor in state.items():
                torch.testing.assert_close(other[name], tensor, rtol=1e-8, atol=1e-10)


@pytest.mark.full
@pytest.mark.parametrize("layout_name", ["3d-uneven", "interleaved", "data-tensor-uneven"])
def test_no_edit_breaks_the_checker(layout_name: str) -> None:
    accepted("gpt", layout_name, 1500)


def test_a_replica_listed_twice_is_refused_by_parallelize_and_verify() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    batch = (torch.randn(6, 4), torch.randn(6, 1))
    loss = nn.functional.mse_loss
    plan = wh.plan(model, cluster="1x2xCPU", batch=batch, loss=loss)
    data = json.loads(json.dumps(plan.to_dict()))
    for part in (*data["stages"], *data["taskgraphs"]):
        part["replicas"].append(part["replicas"][0])
    broken = Plan.from_dict(data)
    with pytest.raises(wh.PlanError, match="a rank twice"):
        wh.verify(model, broken, batch, loss=loss)
    with pytest.raises(wh.PlanError, match="a rank twice"):
        wh.parallelize(model, optimizer=SGD, batch=batch, loss=loss, plan=broken)
    homes = json.loads(json.dumps(plan.to_dict()))
    homes["homes"].pop()
    with pytest.raises(wh.PlanError, match="homes: the plan has"):
        wh.parallelize(model, optimizer=SGD, batch=batch, loss=loss, plan=Plan.from_dict(homes))


def test_an_alternative_that_matches_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    wh.annotate(model, {"1|2": wh.replicate()})
    assert "test_given.py" in caplog.text
    assert "'2' in the pattern '1|2' matches no module; nearest are:" in caplog.text
    caplog.clear()
    wh.annotate(model, {"0|1": wh.replicate()})
    assert not caplog.records
