"""Hugging Face's stacked experts, expert-parallel by pattern, models unedited: equal to one device.

In float32 (norms and the routers' softmax are, whatever the weights) gradients are scaled before
they are rounded, so that even one rank of Whale differs from plain torch in the last bit, and Adam
divides by gradients of any size: hence `COARSE`. `/wide` computes in float64 throughout.
"""

from __future__ import annotations

import pytest
import torch

import whale as wh
from tests.parity import hf_expert_zoo, zoo
from tests.parity.hf_expert_zoo import HF_EXPERT_LAYOUTS
from tests.parity.parity import compare_in_group, grouped
from whale.engine.split.stacked_experts import is_stacked
from whale.nn.moe.stacked import plain_activation

pytestmark = pytest.mark.usefixtures("untried")

EXACT = {"loss": 1e-9, "gradient": 1e-9, "weight": 1e-9}
COARSE = {"loss": 1e-6, "gradient": 1e-6, "weight": 1e-5}

CHOSEN = {
    ("hf_mixtral/wide", "hf-across-uneven"),
    ("hf_qwen_moe/wide", "hf-inside-uneven"),
    ("hf_toy", "hf-across"),
    ("hf_toy", "hf-inside-uneven"),
}
POINTS = [
    (case, layout)
    for case in ("hf_mixtral", "hf_mixtral/wide", "hf_qwen_moe", "hf_qwen_moe/wide", "hf_toy")
    for layout in HF_EXPERT_LAYOUTS
    if (case, layout) not in (("hf_toy", "hf-staged"), ("hf_toy", "hf-across-8"))
]


GROUPS = grouped(p for p in POINTS if p in CHOSEN)
GROUPS |= grouped(p for p in POINTS if p not in CHOSEN)


def _params() -> list[object]:
    found = []
    for point in POINTS:
        marks = [pytest.mark.xdist_group("-".join([point[1], *GROUPS[point]]))]
        marks += [] if point in CHOSEN else [pytest.mark.full]
        found.append(pytest.param(*point, id="-".join(point), marks=marks))
    return found


@pytest.mark.parametrize(("case", "layout"), _params())
def test_equal_to_one_device(case: str, layout: str) -> None:
    worst = compare_in_group(case, layout, GROUPS[case, layout])
    exact = "wide" in case or case == "hf_toy"
    for kind, tolerance in (EXACT if exact else COARSE).items():
        assert worst[kind] < tolerance, worst
    wanted = "stacked experts" if layout != "hf-across-8" else "stacked columns"
    split = {path for path, rule in worst["rules"].items() if rule == wanted}
    path = "blocks.{}.experts" if case == "hf_toy" else "model.layers.{}.mlp.experts"
    assert split == {path.format(i) for i in range(2)}
    if "inside" in layout and case != "hf_toy":
        assert {path for path, rule in worst["rules"].items() if rule == "attention"} == {
            f"model.layers.{i}.self_attn" for i in range(2)
        }


def test_two_lines_annotate_any_of_them() -> None:
    batch = zoo._gpt2_batch(0, 4)
    for make in (hf_expert_zoo.mixtral, hf_expert_zoo.qwen_moe):
        model = wh.annotate(
            make(), {"model.layers.*.mlp.experts": wh.split(), "...": wh.replicate()}
        )
        plan = wh.plan(model, cluster="1x2xCPU", batch=batch)
        trunk, experts = plan.taskgraphs
        assert (trunk.kind, experts.kind) == ("replicate", "split")
        assert experts.layers == tuple(f"model.layers.{i}.mlp.experts" for i in range(2))
        assert [split.cuts for split in experts.splits] == [((0, 3, 6),)] * 2
        assert {split.params[0][1].dim for split in experts.splits} == {0}


def test_experts_are_known_by_their_looks() -> None:
    toy = hf_expert_zoo.ToyExperts(3, 4, 5)
    assert is_stacked(toy) and plain_activation(toy) is None
    mixtral = hf_expert_zoo.mixtral().model.layers[0].mlp.experts
    assert is_stacked(mixtral) and plain_activation(mixtral) == "silu"
    assert not is_stacked(wh.nn.MoE(4, 5, 3, gated=True))
    other = hf_expert_zoo.ToyExperts(3, 4, 5)
    other.extra = torch.nn.Parameter(torch.ones(4))  # not by expert
    assert not is_stacked(other)
