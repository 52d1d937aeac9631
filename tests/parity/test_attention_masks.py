"""Attention by heads and dropout inside a split: what each rank has is its part, not the whole.

Masks and biases, code that mixes heads, dropout on columns and on gathered rows, and T5, which has
biases of heads that learn.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import whale as wh
from tests.parity import attentions
from tests.parity.attentions import ROWS, STEPS, T5Case
from tests.parity.eager_attentions import EAGER
from tests.parity.layouts import LAYOUTS as MATRIX
from tests.parity.layouts import M2, M3, LayerPaths, Layout, pipeline, whole
from tests.parity.parity import ADAMW, worst_errors
from tests.parity.reference import Reference, train_reference
from tests.ranks import run_ranks
from whale.engine.capture.captured import capture
from whale.ir.virtual_device import micro_batch_cuts

TOLERANCE = 1e-9
CASES = {**attentions.CASES, **{f"eager: {name}": case for name, case in EAGER.items()}}


def _bridged(model: nn.Module, paths: list[str]) -> Any:
    """The middle sharded, the ends data parallel on the same devices."""
    return wh.annotate(model, {"first|last": wh.replicate(), "middle": wh.split()})


def _staged(model: nn.Module, paths: list[str]) -> Any:
    return wh.annotate(model, {"first|attention": wh.stage(), "middle|last": wh.stage()})


def _staged_split(model: nn.Module, paths: list[str]) -> Any:
    entries = {
        "first|attention": (wh.stage(), wh.split(2)),
        "middle|last": (wh.stage(), wh.replicate(1)),
    }
    return wh.annotate(model, entries)


LAYOUTS = {
    **MATRIX,
    **{
        layout.name: layout
        for layout in (
            Layout("split", 2, whole(wh.split)),
            Layout("split-uneven", 3, whole(wh.split), M2, (2.0, 3.0, 1.0)),
            Layout("bridged", 2, _bridged, M3),
            Layout("staged", 2, _staged, pipeline("1f1b", 2)),
            Layout("staged-split", 3, _staged_split, pipeline("1f1b", 2)),
            Layout("bridged-uneven", 3, _bridged, speeds=(2.0, 3.0, 1.0)),
        )
    },
}


def train(names: list[str], layout_name: str, config: dict[str, Any]) -> list[dict[str, Any]]:
    """One rank's part: trains each case, and returns what the whole model looks like."""
    torch.set_num_threads(1)
    wh.init()
    return [_train(name, LAYOUTS[layout_name], config) for name in names]


def _train(name: str, layout: Layout, config: dict[str, Any]) -> dict[str, Any]:
    case = CASES[name]
    model, batches = case.build(), case.batches()
    layout.annotate(model, LayerPaths(model, batches[0], case.loss))
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    step = wh.parallelize(
        model,
        optimizer=ADAMW,
        batch=batches[0],
        loss=case.loss,
        config={**layout.config, **config},
        cluster=layout.cluster(),
    )
    losses, gradients = [], {}
    for batch in batches:
        losses.append(float(step(batch)["loss"]))
        gradients = gradients or step.gradients()
    state = step.state_dict()
    whole = case.build().eval()
    whole.load_state_dict(state)
    with torch.no_grad():
        want = float(case.loss(whole(*batches[0][:-1]), batches[0][-1]))
    assert abs(float(step.evaluate(batches[0])["loss"]) / want - 1.0) < TOLERANCE
    result = {
        "losses": losses,
        "gradients": gradients,
        "state": state,
        "split_share": [t.split_share for t in step.plan.taskgraphs if t.kind == "split"],
        "rules": {s.rule for t in step.plan.taskgraphs for s in t.splits},
        "untouched": all(torch.equal(p, before[n]) for n, p in model.named_parameters()),
    }
    step.close()
    return result


def truths(names: list[str], layout_name: str) -> list[Reference]:
    """Plain torch; where there is dropout, Whale on one rank."""
    micro = LAYOUTS[layout_name].config.get("pipeline.num_micro_batch", 1)
    points = micro_batch_cuts(ROWS, micro)
    sizes = [b - a for a, b in zip(points, points[1:], strict=False)]
    dropped = [name for name in names if CASES[name].drops]
    found: dict[str, Reference] = {}
    if dropped:
        config = {"pipeline.num_micro_batch": micro}
        (one,) = run_ranks(1, train, dropped, "one", config, timeout=110.0)
        for name, result in zip(dropped, one, strict=True):
            found[name] = Reference(
                losses=result["losses"],
                gradients=result["gradients"],
                gradient_norms=[],
                state_dict=result["state"],
            )
    for name in names:
        if name not in found:
            case = CASES[name]
            found[name] = train_reference(case, case.batches(), [sizes] * STEPS, ADAMW)
    return [found[name] for name in names]


def compare(names: list[str], layout_name: str) -> dict[str, dict[str, Any]]:
    """The largest errors of each case."""
    ranks = run_ranks(LAYOUTS[layout_name].num_ranks, train, names, layout_name, {}, timeout=110.0)
    return {
        name: {
            **worst_errors([rank[i] for rank in ranks], truth, with_gradients=True),
            "rules": ranks[0][i]["rules"],
        }
        for i, (name, truth) in enumerate(zip(names, truths(names, layout_name), strict=True))
    }


def check(names: list[str], layout_name: str) -> None:
    found = compare(names, layout_name)
    wrong = {
        name: worst
        for name, worst in found.items()
        if max(worst["loss"], worst["gradient"], worst["weight"]) >= TOLERANCE
    }
    assert not wrong, wrong
    for name in names:
        # Else the case would be equal for another reason than the one it is here for.
        assert "attention" in found[name]["rules"] or not CASES[name].by_heads, name


STAGED = ["multihead again", "glue"]
SMALL = [n for n, case in CASES.items() if not isinstance(case, T5Case) and n not in STAGED]
# A bias with rows, or one tensor given three times, is left whole where rows have to be gathered.
WHOLE = ["bias of heads and rows", *(name for name in SMALL if name.startswith("multihead"))]
WHOLE.append("eager: no Linears")  # nothing of it can be split


def test_a_part_of_the_heads_or_columns() -> None:
    check(SMALL[::16], "split-uneven")


@pytest.mark.full
@pytest.mark.parametrize(("names", "layout"), [(SMALL, "split"), (SMALL, "split-uneven")])
def test_all_parts_of_the_heads_or_columns(names: list[str], layout: str) -> None:
    check(names, layout)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["bridged", "bridged-uneven"])
def test_a_part_of_the_heads_or_columns_of_all_rows(layout: str) -> None:
    check([name for name in SMALL if name not in WHOLE], layout)


def test_dropout_is_named_alike_in_stages() -> None:
    for names, layout in ((STAGED, "staged"), (["glue"], "staged-split")):
        found = compare(names, layout)
        for name, worst in found.items():
            assert max(worst["loss"], worst["gradient"], worst["weight"]) < TOLERANCE, (name, worst)
    assert "attention" in found["glue"]["rules"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full if number % 3 else ())
        for number, name in enumerate(CASES)
    ],
)
def test_attention_is_split_by_heads_only_where_they_stay_apart(name: str) -> None:
    case = CASES[name]
    graph = capture(wh.split()(case.build()), case.batches()[0], case.loss).graph
    rules = [option.rule for layer in graph.layers for option in layer.splits]
    # Of two attentions in a Layer one may be.
    assert ("attention" in rules) == (case.by_heads or name == "two attentions")
    if isinstance(case, T5Case):
        assert rules.count("attention") == 6 and "column" in rules


T5_LAYOUTS = [
    f"{kind}{uneven}"
    for kind in ("tensor", "data-tensor", "pipeline-tensor", "colocated")
    for uneven in ("", "-uneven")
]
QUICK = [("t5", "tensor-uneven")]


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(n, x, marks=() if (n, x) in QUICK else pytest.mark.full, id=f"{n}-{x}")
        for n in ("t5", "t5, dropout")
        for x in T5_LAYOUTS
    ],
)
def test_t5_equals_one_device(name: str, layout: str) -> None:
    found = compare([name], layout)[name]
    assert max(found["loss"], found["gradient"], found["weight"]) < TOLERANCE, found
    if not layout.startswith("colocated"):
        assert "attention" in found["rules"]
