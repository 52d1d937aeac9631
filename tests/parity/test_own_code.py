"""Own activations, losses, hooks, subclasses, weights read elsewhere: exact or refused."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch

import whale as wh
from tests.parity import own_code
from tests.parity.layouts import LayerPaths
from tests.parity.names import layout_named
from tests.ranks import run_ranks

ROWS, STEPS = 5, 2
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def _plain(name: str, loss: Any) -> dict[str, Any]:
    model = own_code.build(name)
    optimizer = SGD(model.parameters())
    losses = []
    for seed in range(STEPS):
        x, target = own_code.batch(seed, ROWS)
        optimizer.zero_grad()
        value = loss(model(x), target)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return {"losses": losses, "state": model.state_dict()}


def _error(name: str, layout_name: str, loss: Any) -> str | float:
    """How far a sample is from plain torch, or why it was refused."""
    layout = layout_named(layout_name)
    model, batch = own_code.build(name), own_code.batch(0, ROWS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            layout.annotate(model, LayerPaths(model, batch, loss))
            step = wh.parallelize(
                model,
                optimizer=SGD,
                batch=batch,
                loss=loss,
                config=layout.config,
                cluster=layout.cluster(),
            )
            losses = [float(step(own_code.batch(seed, ROWS))["loss"]) for seed in range(STEPS)]
        state = step.state_dict()
        step.close()
    except wh.errors.WhaleError as error:
        return str(error)
    truth = _plain(name, loss)
    pairs = [*zip(losses, truth["losses"], strict=True)]
    worst = max(abs(a - b) for a, b in pairs)
    for key, value in truth["state"].items():
        worst = max(worst, float((state[key].double() - value.double()).abs().max()))
    return worst


def _all(names: list[str], layout_name: str, loss: str) -> dict[str, str | float]:
    torch.set_num_threads(1)
    wh.init()
    return {name: _error(name, layout_name, getattr(own_code, loss)) for name in names}


# The network has three Layers; nothing of a batch norm is the same with several micro-batches.
FEW = [
    "function", "reversal", "width-shape", "hook", "set-item", "weight-norm-read", "second-use",
    "set-logits", "hook-logits", "function-logits", "plain", "own-linear", "weight-norm",
    "forward-hook", "given-forward", "shared-experts", "own-attention", "heads-width", "counting",
]  # fmt: skip
LAYOUTS = ("one", "tensor-uneven", "data-uneven", "head-uneven", "data-tensor", "pipeline-tensor")


def _check(found: list[dict[str, str | float]], refused: set[str] = frozenset()) -> None:
    for rank, results in enumerate(found):
        for name, result in results.items():
            if name in refused:
                assert isinstance(result, str), (rank, name, result)
            else:
                assert isinstance(result, float) and result < 1e-9, (rank, name, result)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_own_code_is_exact(layout: str):
    count = layout_named(layout).num_ranks
    _check(run_ranks(count, _all, FEW, layout, "loss", timeout=100.0))


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_own_code_is_exact(layout: str):
    count = layout_named(layout).num_ranks
    names = [n for n in own_code.SAMPLES if n != "own-batch-norm" or "num" not in layout]
    _check(run_ranks(count, _all, names, layout, "loss", timeout=300.0))


def test_an_own_cross_entropy_gets_whole_logits():
    for layout in ("tensor-uneven", "head-uneven"):
        count = layout_named(layout).num_ranks
        _check(run_ranks(count, _all, ["plain", "set-logits", "function"], layout, "own_loss"))
