"""Capture: what the ModelGraph knows of a model, without memory, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import whale as wh
from tests.parity import zoo
from whale.engine.capture.captured import capture
from whale.engine.trace.program import Rows, visit
from whale.ir.model_graph import ModelGraph
from whale.models.gpt import GPT, GPTConfig

CONFIG = GPTConfig(vocab_size=11, max_seq_len=6, dim=8, num_layers=2, num_heads=2)


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(4, 6, dtype=torch.long), torch.zeros(4, 6, dtype=torch.long)


def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def test_tied_weights_are_one_parameter_with_two_names() -> None:
    graph = capture(GPT(CONFIG), tokens(), loss).graph
    (tied,) = [p for p in graph.parameters if p.aliases]
    assert {tied.name, *tied.aliases} == {"token_embedding.weight", "lm_head.weight"}


def test_capture_needs_no_memory_for_the_weights() -> None:
    config = GPTConfig(vocab_size=50_000, max_seq_len=8, dim=8192, num_layers=64, num_heads=64)
    with torch.device("meta"):
        model = GPT(config)
    batch = (torch.zeros(2, 8, dtype=torch.long), torch.zeros(2, 8, dtype=torch.long))
    graph = capture(model, batch, loss).graph
    assert sum(p.numel for p in graph.parameters) > 50e9
    assert all(layer.flops_per_row > 0 for layer in graph.layers if layer.path.startswith("blocks"))


@pytest.mark.every(3)
@pytest.mark.parametrize("name", zoo.CASE_NAMES)
def test_model_graphs_round_trip(name: str) -> None:
    case = zoo.case(name)
    model = wh.split()(case.build())
    captured = capture(model, case.batch(0, 4), case.loss)
    graph = captured.graph
    assert captured.refusal is None and graph.nodes
    assert ModelGraph.from_dict(graph.to_dict()) == graph
    assert ModelGraph.from_dict(graph.to_dict()).hash == graph.hash


def test_skip_connections_become_edges() -> None:
    case = zoo.case("encdec")
    model = case.build()
    paths = [layer.path for layer in capture(model, case.batch(0, 4), case.loss).graph.layers]
    thirds = ["|".join(paths[:4]), "|".join(paths[4:8]), "|".join(paths[8:])]
    wh.annotate(model, {part: wh.stage() for part in thirds})
    plan = wh.plan(model, cluster="1x3xCPU", batch=case.batch(0, 4), loss=case.loss)
    assert len(plan.stages) == 3
    assert (0, 1) in plan.schedule.edges and (1, 2) in plan.schedule.edges


class Branches(nn.Module):
    """Glue that looks at the batch, or at a constant."""

    def __init__(self, on: str) -> None:
        super().__init__()
        self.first, self.second, self.on = nn.Linear(3, 3), nn.Linear(3, 3), on
        self.register_buffer("flag", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.on == "batch" and x.sum() > 0:
            x = x * 2
        if self.on == "constant" and bool(torch.arange(3).sum() == 3) and self.flag.item() > 0:
            x = x * 2
        if self.on == "rows":
            x = x + torch.arange(x.shape[0]).view(-1, 1)[: x.shape[0]]
        return self.second(x)


def staged(on: str) -> nn.Module:
    return wh.annotate(Branches(on), {"first": wh.stage(), "second": wh.stage()})


def plan_of(model: nn.Module) -> object:
    batch = (torch.zeros(4, 3), torch.zeros(4, 3))
    return wh.plan(model, cluster="1x2xCPU", batch=batch, loss=nn.functional.mse_loss)


def test_glue_that_reads_the_batch_is_refused_with_its_line() -> None:
    with pytest.raises(wh.CaptureError, match=r"test_capture\.py:\d+[\s\S]*hint:"):
        plan_of(staged("batch"))


@pytest.mark.parametrize("on", ["constant", "rows"])
def test_glue_on_constants_and_shapes_is_evaluated(on: str) -> None:
    assert plan_of(staged(on))


def test_sizes_of_the_batch_are_expressions_not_constants() -> None:
    batch = (torch.zeros(4, 3), torch.zeros(4, 3))
    captured = capture(staged("rows"), batch, nn.functional.mse_loss)
    assert captured.program is not None
    found: list[Rows] = []
    for op in captured.program.ops:
        visit((op.args, op.kwargs), found.append, Rows)
    assert Rows(1, 0) in found


def test_one_stage_may_read_values() -> None:
    model = wh.replicate()(Branches("batch"))
    batch = (torch.zeros(4, 3), torch.zeros(4, 3))
    assert wh.plan(model, cluster="1x2xCPU", batch=batch, loss=nn.functional.mse_loss)
