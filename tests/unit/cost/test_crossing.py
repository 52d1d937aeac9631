"""What is priced between stages is what the engine sends there."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import whale as wh
from whale.annotations import annotate
from whale.cost.crossing import Crossing, crossing_bytes, cut_bytes
from whale.engine.capture.captured import Captured, capture
from whale.engine.lower.stages import cut
from whale.errors import CaptureError
from whale.ir.model_graph import Linear, assign_stages
from whale.models.registry import preset

ROWS = 8


def mse(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (out - target).square().mean()


def sent(captured: Captured, values: list[int], rows: int, *, back: bool) -> float:
    specs = [captured.program.specs[value] for value in values]
    return sum(math.prod(s.at(rows)) * s.dtype.itemsize for s in specs if s.grad or not back)


def check_cuts(model: nn.Module, batch: Any, loss: Any) -> int:
    """Every place where the engine can cut the model; how many there are."""
    captured = capture(model, batch, loss)
    graph, done = captured.graph, 0
    for place, priced in enumerate(cut_bytes(graph)):
        stages, _ = assign_stages(graph.nodes, [int(i >= place) for i in range(len(graph.layers))])
        try:
            parts = cut(captured.program, stages, 2, captured.result)
        except CaptureError:
            continue  # refused there
        values = parts[1].incoming.get(0, [])
        assert priced.there.at(3) == sent(captured, values, 3, back=False), graph.layers[place].path
        assert priced.back.at(3) == sent(captured, values, 3, back=True), graph.layers[place].path
        done += 1
    return done


@pytest.mark.parametrize(
    "name", ["t5-tiny", "gnmt-tiny", "gpt-tiny", "m6-nano", "resnet-tiny", "lstm-tiny"]
)
def test_every_cut_of_a_preset(name):
    chosen = preset(name)
    assert check_cuts(chosen.build(), chosen.batch(ROWS, None), chosen.loss) > 3


class SharedEmbedding(nn.Module):
    """Called for a long source and a short target."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.encode, self.decode = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, source, target):
        memory = self.embedding(source)
        x = self.embedding(target)
        return self.decode(x + self.encode(memory).mean(1, keepdim=True))


class BiasInGlue(nn.Module):
    """Made of a bare parameter, by no Layer."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, 4))
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        bias = self.table.repeat(1, 2)[:, :4]
        return self.b(self.a(x) + bias) + bias


class Parts(nn.Module):
    """Of three parts two are read later, one of them cut down, and a mask has no gradient."""

    def __init__(self):
        super().__init__()
        self.split, self.a, self.b = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(16, 4)

    def forward(self, x):
        first, _, last = self.split(x).chunk(3, -1)
        keep = first > 0
        y = self.a(first[:, 0])
        return self.b(torch.cat([y, last[:, 1]], -1)) * keep[:, 0, :4]


class LastState(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 4)

    def forward(self, x):
        _, (state, _) = self.lstm(x)
        return self.head(state[0])


@pytest.mark.parametrize(
    ("model", "shapes"),
    [
        (SharedEmbedding, ((40,), (4,), (4, 16))),
        (BiasInGlue, ((9, 4), (9, 4))),
        (Parts, ((6, 8), (4,))),
        (LastState, ((11, 6), (4,))),
    ],
)
def test_every_cut_of_a_model_with_odd_borders(model, shapes):
    given = [torch.randn(ROWS, *shape) for shape in shapes]
    if model is SharedEmbedding:
        given[:2] = [torch.randint(50, (ROWS, *shape)) for shape in shapes[:2]]
    assert check_cuts(model(), tuple(given), mse) >= 2


class Again(nn.Module):
    """`a` is called in its own stage, and once more after the next."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        y = self.a(x)
        return self.c(self.a(self.b(y)) + y)


def test_a_layer_called_again_in_a_later_stage():
    model = Again()
    annotate(model, {name: wh.stage() for name in "abc"})
    batch = (torch.randn(ROWS, 10, 16), torch.randn(ROWS, 10, 16))
    captured = capture(model, batch, mse)
    plan = planned(model, batch, "3x1xV100-16GB")
    stages, _ = assign_stages(
        captured.graph.nodes, [plan.taskgraphs[x.taskgraph].stage for x in captured.graph.layers]
    )
    found = crossing_bytes(captured.graph, stages, plan.schedule.edges)
    assert found.keys() == set(plan.schedule.edges)
    for part in cut(captured.program, stages, 3, captured.result):
        for source, values in part.incoming.items():
            there = found[source, part.index].there.at(5)
            assert there == sent(captured, values, 5, back=False) > 0


def planned(model: nn.Module, batch: Any, cluster: str, micro_batches: int = 1, loss: Any = mse):
    return wh.plan(
        model,
        cluster=cluster,
        batch=batch,
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        config={"pipeline.num_micro_batch": micro_batches},
    )


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_a_bias_without_a_batch_dim_travels_whole_with_every_micro_batch(micro_batches):
    t5, seq = preset("t5-tiny"), 10
    batch = t5.batch(ROWS, seq)
    paths = [x.path for x in capture(t5.build(), batch, t5.loss).graph.layers]
    config = t5.build().config
    stream, bias = 4.0 * seq * config.dim, 4.0 * config.num_heads * seq * seq
    # Memory and target, and the bias where the decoder reads one that was made before the cut.
    for first, whole in (("decoder_bias", 0.0), ("decoder.0", bias)):
        model, place = t5.build(), paths.index(first)
        annotate(model, {"|".join(paths[:place]): wh.stage(), "|".join(paths[place:]): wh.stage()})
        plan = planned(model, batch, "2x1xV100-16GB", micro_batches, t5.loss)
        (message,) = plan.prices.messages
        assert message.nbytes == ROWS // micro_batches * 2 * stream + whole


class Bias(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(10, 16))

    def forward(self):
        return self.weight * 2


class Biased(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias, self.a, self.b = Bias(), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        bias = self.bias()
        return self.b(self.a(x) + bias) + bias


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 2)])
def test_a_replica_sends_and_hears_one_message_after_the_other(before, after):
    model = Biased()
    first = (wh.stage(), wh.replicate(before))
    annotate(model, {"bias|a": first, "b": (wh.stage(), wh.replicate(after))})
    batch = (torch.randn(12, 10, 16), torch.randn(12, 10, 16))
    plan = planned(model, batch, f"{before + after}x1xV100-16GB")
    (message,) = plan.prices.messages
    row = bias = 4 * 10 * 16
    # The sum of both in glue is made before the cut; the bias itself is read after it too.
    wanted = {(1, 3): 12 * row + 3 * bias, (3, 1): 12 * row + bias, (2, 2): 6 * row + bias}
    assert message.nbytes == wanted[before, after]


def test_nothing_crosses_before_the_first_layer():
    captured = capture(Again(), (torch.randn(4, 2, 16), torch.randn(4, 2, 16)), mse)
    cuts = cut_bytes(captured.graph)
    assert cuts[0] == Crossing()
    assert cuts[1].there == Linear(per_row=4 * 2 * 16)
