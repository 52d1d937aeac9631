"""Models that draw, and models that recompute: any layout against plain torch with the same draws.

The truth is a plain loop over the user's own model, nothing of it replaced; the mode around it
gives it the numbers that Whale's ranks key.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale as wh
from tests.distributed.random_zoo import MODELS, WIDTH, loss
from tests.parity.layouts import LAYOUTS, LayerPaths
from tests.ranks import run_ranks
from whale.config import Config
from whale.engine.capture.captured import capture
from whale.nn.randomness import PlainDraws
from whale.runtime import generators
from whale.runtime.hashing import key_of

SEED = 5
ROWS = (7, 7, 5)


def batches_of() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(rows, 4, WIDTH, generator=generator, dtype=torch.float64),
            torch.randint(3, (rows, 4), generator=generator),
        )
        for rows in ROWS
    ]


def model_of(name: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[name]().double()


Result = tuple[list[float], dict[str, Tensor]]


def truth(name: str, micro: int) -> Result:
    """Plain torch in one process."""
    model, batches = model_of(name), batches_of()
    draws = PlainDraws(model, capture(model, batches[0], loss).random.dims, SEED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses = []
    for step, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        total, first = 0.0, 0
        for m, part in enumerate(torch.arange(len(x)).tensor_split(micro)):
            at = draws.at(step=step, micro_batch=m, first_row=first, rows=len(part))
            with at, _seeded(step, m):
                value = loss(model(x[part]), y[part])
            (value * len(part) / len(x)).backward()
            total += float(value.detach()) * len(part) / len(x)
            first += len(part)
        optimizer.step()
        losses.append(total)
    return losses, model.state_dict()


def _seeded(step: int, micro_batch: int) -> Any:
    return generators.seeded(key_of(SEED, step, "Python", micro_batch))


def trained(name: str, layout_name: str) -> Result:
    """One rank of a layout."""
    layout = LAYOUTS[layout_name]
    model, batches = model_of(name), batches_of()
    wh.init(device="cpu")
    step = wh.parallelize(
        layout.annotate(model, LayerPaths(model, batches[0], loss)),
        optimizer=partial(torch.optim.SGD, lr=0.2),
        batch=batches[0],
        loss=loss,
        config=Config.from_dict({"seed": SEED, **layout.config}),
        cluster=layout.cluster(),
    )
    state = torch.get_rng_state()
    losses = [float(step(batch)["loss"]) for batch in batches]
    assert torch.equal(state, torch.get_rng_state())
    found = step.state_dict()
    step.close()
    return losses, found


def on_rank(cases: list[tuple[str, str]]) -> list[Result | str]:
    found: list[Result | str] = []
    for name, layout in cases:
        try:
            found.append(trained(name, layout))
        except Exception as error:
            raise AssertionError(f"{name} under {layout}") from error
    return found


def worst(got: Result, want: Result) -> float:
    apart = [abs(a - b) for a, b in zip(got[0], want[0], strict=True)]
    assert got[1].keys() == want[1].keys()
    apart += [
        float((a - want[1][name]).abs().max())
        for name, a in got[1].items()
        if a.is_floating_point() and a.numel()
    ]
    return max(apart)


def check(num_ranks: int, cases: list[tuple[str, str]]) -> None:
    results = run_ranks(num_ranks, on_rank, cases)
    truths: dict[tuple[str, int], Result] = {}
    for index, (name, layout) in enumerate(cases):
        micro = LAYOUTS[layout].config.get("pipeline.num_micro_batch", 1)
        if (name, micro) not in truths:
            truths[name, micro] = truth(name, micro)
        for rank in results:
            assert worst(rank[index], truths[name, micro]) < 1e-9, (name, layout)


def under(layout: str, names: str) -> list[tuple[str, str]]:
    return [(name, layout) for name in names.split()]


WHOLE = " ".join(name for name in MODELS if name != "python")
CUT = " ".join(name for name in WHOLE.split() if name not in ("layerdrop", "norms"))


@pytest.mark.parametrize("name", list(MODELS))
def test_one_process(name: str) -> None:
    assert worst(trained(name, "one"), truth(name, 1)) < 1e-9


def test_two_ranks() -> None:
    check(
        2,
        under("accumulate-uneven", "sampled vae experts")
        + under("gpipe", "glue-reentrant")
        + under("tensor", "attention"),
    )


@pytest.mark.full
def test_more_on_two_ranks() -> None:
    check(
        2,
        under("accumulate-uneven", "factories layerdrop")
        + under("gpipe", "vae layerdrop-0 sequenced")
        + under("tensor", "selective dropouts"),
    )


@pytest.mark.full
def test_three_ranks() -> None:
    check(
        3,
        under("data-uneven", "paths attention")
        + under("1f1b", "twice glue experts")
        + under("zero-bubble", "inside"),
    )


@pytest.mark.full
def test_nested() -> None:
    check(
        4,
        under("data-tensor-uneven", "inside") + under("pipeline-tensor", "glue paths"),
    )


@pytest.mark.full
def test_every_model_on_two_ranks() -> None:
    names = WHOLE.replace("norms", "")
    check(2, under("accumulate-uneven", " ".join(MODELS)) + under("gpipe", CUT))
    check(2, under("tensor", names) + under("interleaved", CUT))


@pytest.mark.full
def test_every_model_in_nested_layouts() -> None:
    for layout in ("1f1b", "zero-bubble", "data-uneven"):
        check(3, under(layout, CUT))
    for layout in ("data-tensor-uneven", "pipeline-tensor", "data-pipeline-uneven"):
        check(4, under(layout, CUT))


def on_rank_alone(name: str, layout: str) -> None:
    trained(name, layout)


def test_a_norm_that_is_recomputed_in_a_pipeline_is_refused() -> None:
    failure = run_ranks(2, on_rank_alone, "norms", "gpipe", expect_failure=True)
    assert "in another order" in str(failure)
