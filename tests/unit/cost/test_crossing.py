"""What is priced between stages is what travels there."""

from __future__ import annotations

import pytest
import torch

import whale as wh
from whale.annotations import annotate
from whale.cost.crossing import cut_bytes
from whale.engine.capture import capture
from whale.ir.model_graph import Linear
from whale.models.registry import preset

ROWS, SEQ = 8, 10
T5 = preset("t5-tiny")


def layers() -> list[str]:
    batch = T5.batch(ROWS, SEQ)
    return [x.path for x in capture(T5.build(), batch, T5.loss).graph.layers]


def sizes() -> tuple[float, float]:
    """Bytes of a row of the residual stream, and of a position bias, which has no batch dim."""
    config = T5.build().config
    return 4.0 * SEQ * config.dim, 4.0 * config.num_heads * SEQ * SEQ


def message(first_of_second: str, micro_batches: int) -> float:
    model = T5.build()
    paths = layers()
    cut = paths.index(first_of_second)
    annotate(model, {"|".join(paths[:cut]): wh.stage(), "|".join(paths[cut:]): wh.stage()})
    plan = wh.plan(
        model,
        cluster="2x1xV100-16GB",
        batch=T5.batch(ROWS, SEQ),
        loss=T5.loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        config={"pipeline.num_micro_batch": micro_batches},
    )
    (found,) = plan.prices.messages
    return found.nbytes


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_a_bias_without_a_batch_dim_travels_whole_with_every_micro_batch(micro_batches):
    stream, bias = sizes()
    rows = ROWS // micro_batches
    # Inside the encoder: its residual stream, its bias and, from the shared embedding, the target.
    assert message("encoder.1", micro_batches) == rows * 2 * stream + bias
    # Before the decoder's first block: memory, target and the decoder's bias.
    assert message("decoder.0", micro_batches) == rows * 2 * stream + bias
    # Before the decoder's bias is made, where it is not needed on the other side.
    assert message("decoder_bias", micro_batches) == rows * 2 * stream


def test_a_cut_costs_all_that_crosses_it():
    stream, bias = sizes()
    batch = T5.batch(ROWS, SEQ)
    graph = capture(T5.build(), batch, T5.loss).graph
    cuts = dict(zip(layers(), cut_bytes(graph), strict=True))
    assert cuts["encoder.1"] == Linear(fixed=bias, per_row=2 * stream)
    assert cuts["decoder_bias"] == Linear(per_row=2 * stream)
    assert cut_bytes(graph)[0] == Linear()
