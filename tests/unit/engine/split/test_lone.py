"""Lone Linears in capture: by columns and by rows, or by columns alone, and the bytes they move."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import whale as wh
from tests.parity import zoo
from whale.engine.capture.captured import capture
from whale.engine.split.lone import allows_rows
from whale.ir.model_graph import Linear, SplitOption
from whale.ir.sharding import DimSharding


def options(model: nn.Module, batch: tuple[Tensor, Tensor], loss=F.mse_loss) -> list[SplitOption]:
    graph = capture(wh.split()(model), batch, loss).graph
    return [option for layer in graph.layers for option in layer.splits]


def test_both_ways_of_a_lone_linear_are_offered():
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 4))
    column, row = options(model, (torch.zeros(6, 3, 64), torch.zeros(6, 3, 4)))
    assert (column.rule, column.units, row.rule, row.units) == ("column", 4, "row", 64)
    assert dict(row.params) == {"1.weight": DimSharding(dim=1, sections=(64,), units=64)}
    assert (row.unit, row.entered, row.joined, row.dims) == ("rows", 1, "gather", ((0,), (0,)))
    for option in (column, row):
        assert option.read == Linear(per_row=3 * 64 * 4.0)
        assert option.made == Linear(per_row=3 * 4 * 4.0)


def test_a_conv1d_is_cut_along_its_first_dim():
    case = zoo.case("narrow")
    found = options(case.build(), case.batch(0, 4))
    rows = {o.path: o for o in found if o.rule == "row"}
    assert rows.keys() >= {"blocks.0.down", "blocks.0.up", "squeeze", "last"}
    assert dict(rows["last"].params)["last.weight"].dim == 0


class Classifier(nn.Module):
    """Its logits meet a loss, an argmax, or a loss in the same Layer."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.norm, self.head, self.how = nn.LayerNorm(8), nn.Linear(8, 4), how

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(self.norm(x))
        if self.how == "argmax":
            return x.sum() + logits.view(-1, 4).argmax(-1).sum()
        return logits.double().flatten(0, -2)


@pytest.mark.parametrize("how", ["loss", "argmax"])
@pytest.mark.parametrize("one_layer", [False, True])
def test_columns_that_something_works_on_are_not_offered_as_rows(how: str, one_layer: bool):
    def loss(out: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(out, target) if how == "loss" else out

    model: nn.Module = Classifier(how)
    if one_layer:
        model = nn.Sequential(nn.Identity(), nn.ModuleList([model])[0])
    batch = (torch.zeros(6, 8), torch.zeros(6, dtype=torch.long))
    assert [option.rule for option in options(model, batch, loss)] == ["column"]


def test_rows_are_not_offered_where_the_glue_is_unknown():
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 4))
    _, row = options(model, (torch.zeros(6, 64), torch.zeros(6, 4)))
    assert not allows_rows(replace(row, joined="returned"), "1", None, {}, 2)
