"""What capture offers to split where a model has code of its own, and what it says of the rest."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import whale as wh
from tests.parity import own_code
from whale.engine.capture.captured import capture
from whale.engine.lower.lowered import lower
from whale.errors import PlanError
from whale.ir.model_graph import Layer
from whale.nn.forwards import replace_base, runs


def layers(name: str) -> dict[str, Layer]:
    model = wh.split()(own_code.build(name))
    graph = capture(model, own_code.batch(0, 4), own_code.loss).graph
    return {layer.path: layer for layer in graph.layers}


def rules(layer: Layer) -> set[str]:
    return {option.rule for option in layer.splits}


READS = {
    "width-weight", "weight-norm-read", "bias-read", "gram", "all-parameters", "second-use",
    "data-read", "weight-function",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(own_code.INSIDE))
def test_a_pair_is_offered_only_where_its_inside_is_elementwise(name: str):
    block = layers(name)["blocks.0"]
    assert ("pair" in rules(block)) == (name in ("width-features", "in-place"))
    assert bool(block.whole) == (name in READS)
    if block.whole:
        assert "own_code.py:" in block.whole[0] and "not split" in block.whole[0]


@pytest.mark.parametrize("name", sorted(own_code.LOGITS))
def test_logits_stay_sharded_only_where_all_that_reads_them_works_on_shards(name: str):
    head = layers(name)["head"]
    stays = {option.joined for option in head.splits} == {"loss"}
    assert stays == (name in ("plain",))
    assert bool(head.whole) == (name == "penalty")


@pytest.mark.parametrize("name", ["forward-hook", "act-hook", "pre-hook", "backward-hook", "slope"])
def test_what_hooks_and_parameters_see_is_whole(name: str):
    assert "pair" not in rules(layers(name)["blocks.0"])


def test_a_hook_on_the_head_sees_it_whole():
    assert {o.joined for o in layers("head-hook")["head"].splits} == {"gather"}


@pytest.mark.parametrize(
    ("name", "found"),
    [("own-linear", False), ("named-linear", True), ("called-linear", False),
     ("weight-norm", False), ("given-forward", False)],
)  # fmt: skip
def test_a_linear_is_split_only_if_it_runs_torchs_code(name: str, found: bool):
    paths = {path for o in layers(name)["blocks.0"].splits for path in o.modules}
    assert ("blocks.0.up" in paths) == found


def test_attention_that_computes_with_its_width_is_not_cut_by_heads():
    assert "attention" in rules(layers("heads-")["blocks.1"])
    for how in own_code.HEADS[1:]:
        assert "attention" not in rules(layers(f"heads-{how}")["blocks.1"]), how


def test_attention_that_is_not_torchs_own_is_not_cut_by_heads():
    assert "multihead" in rules(layers("named-attention")["blocks.1"])
    own = layers("own-attention")["blocks.1"]
    assert not own.splits and "out_proj" in own.whole[0]


def test_a_plan_may_not_split_what_the_code_reads_whole():
    batch = own_code.batch(0, 4)
    plain = wh.split()(own_code.build("plain"))
    reading = wh.split()(own_code.build("penalty"))
    plan = wh.plan(plain, cluster="1x2xV100-32GB", batch=batch, loss=own_code.loss)
    captured = capture(reading, batch, own_code.loss)
    with pytest.raises(PlanError, match="head.*does not allow.*own_code.py"):
        lower(
            reading, plan, captured, own_code.loss, actions=[], rank=0, device=torch.device("cpu"),
            seed=0, timeout=None,  # type: ignore[arg-type]
        )  # fmt: skip


class _Twice(nn.BatchNorm1d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(super().forward(input))


def test_a_base_is_replaced_under_a_subclass():
    norm = _Twice(4)
    assert not runs(norm, nn.modules.batchnorm._BatchNorm)
    count = replace_base(norm, nn.modules.batchnorm._BatchNorm, lambda x: x + 1)
    assert torch.equal(norm(torch.zeros(2, 4)), torch.full((2, 4), 2.0)) and count.calls == 2
    assert isinstance(norm, _Twice) and norm.state_dict().keys() == _Twice(4).state_dict().keys()
