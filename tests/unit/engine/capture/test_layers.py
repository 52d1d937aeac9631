"""Layers of models whose containers are passed by, and what leaves a Layer by other ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import whale as wh
from whale.engine.capture.captured import capture
from whale.ir.model_graph import Layer

BATCH = (torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64))


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


class Dict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({"a": normed(), "b": normed()})

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks["b"](self.blocks["a"](x))


class ByMember(nn.Module):
    """Runs a Sequential member by member."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.out = normed(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for member in self.net:
            x = member(x)
        return self.out(x)


class Deep(nn.Module):
    """A container of containers, and a part that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"x": nn.ModuleDict({"y": normed()}), "unused": normed()})
        self.idle = normed()

    def forward(self, x: Tensor) -> Tensor:
        return self.parts["x"]["y"](x)


class Holder(nn.Module):
    """A module whose forward is passed by, for that of its child."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.net = normed()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner.net(x)


def layers(model: nn.Module) -> dict[str, Layer]:
    graph = capture(model.double(), BATCH, F.mse_loss).graph
    return {layer.path: layer for layer in graph.layers}


@pytest.mark.parametrize(
    ("build", "paths"),
    [
        (Dict, {"blocks.a", "blocks.b"}),
        (ByMember, {"net.1"}),
        (Deep, {"parts.x.y"}),
        (Holder, {"inner.net"}),
    ],
)
def test_what_runs_is_a_layer_and_its_norms_meet(
    build: Callable[[], nn.Module], paths: set[str]
) -> None:
    model = wh.replicate()(build())
    found = layers(model)
    assert {path for path, layer in found.items() if "norm" in layer.meets} >= paths
    plan = wh.plan(model, cluster="1x2xV100-32GB", batch=BATCH, loss=F.mse_loss)
    stage = {layer.path: layer.meets for layer in plan.stages[0].layers}
    assert all("norm" in stage[path] for path in paths)


class Keeps(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.up, self.down, self.where = nn.Linear(4, 12), nn.Linear(12, 4), where
        self.kept: Any = {"list": [], "dict": {}}.get(where)

    def forward(self, x: Tensor, given: Any = None) -> Tensor:
        h = self.up(x).relu()
        if self.where == "attribute":
            self.kept = h
        elif self.where == "list":
            self.kept[:] = [h]
        elif self.where == "dict":
            self.kept["h"] = (1, [h])
        elif self.where == "argument":
            given.append(h)
        return x + self.down(h)


class Reads(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.block, self.head = Keeps(where), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        given: list[Tensor] = []
        return self.head(self.block(x, given))


@pytest.mark.parametrize("where", ["", "attribute", "list", "dict", "argument"])
def test_columns_that_leave_their_layer_are_gathered(where: str) -> None:
    block = layers(wh.split()(Reads(where)))["block"]
    rules = {option.rule for option in block.splits}
    assert ("pair" in rules) == (where == "")
    assert bool(rules) == (where != "argument")
    if where == "argument":
        assert "changes a list" in dict(block.reasons)["block"]
