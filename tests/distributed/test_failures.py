"""A rank that fails, dies or hangs is named by the others within the timeout."""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import whale as wh
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("untried")

SGD = partial(torch.optim.SGD, lr=0.1)


class Breaks(nn.Module):
    """A Linear that does something bad on rank 1 in its third forward of training."""

    training_began = False
    """Before, `parallelize` tries the model on a few rows."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.how, self.calls = how, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += Breaks.training_began
        if self.calls == 3 and os.environ["RANK"] == "1":
            if self.how == "dies":
                os._exit(7)
            if self.how == "hangs":
                time.sleep(60)
            raise ValueError("bad sample in shard 1")
        return self.linear(x)


def _train(how: str, staged: bool) -> str:
    wh.init()
    if staged:
        with wh.stage():
            first: nn.Module = nn.Linear(4, 4)
        with wh.stage():
            second: nn.Module = Breaks(how)
        model: nn.Module = nn.Sequential(first, second)
    else:
        model = wh.replicate()(Breaks(how))
    batch = (torch.randn(4, 4), torch.randn(4, 4))
    config = {"check_parts": False, "timeout_seconds": 3.0}
    step = wh.parallelize(
        model, optimizer=SGD, batch=batch, loss=nn.functional.mse_loss, config=config
    )
    began = time.monotonic()
    Breaks.training_began = True
    try:
        for _ in range(6):
            step(batch)
    except wh.RankError as error:
        took = time.monotonic() - began
        return f"{took:.1f} {error}" if took < 20 else f"only after {took:.1f} s"
    except ValueError:
        if how == "goes on":  # a script that catches it: its connections stay open
            time.sleep(30)
        raise
    return "trained"


@pytest.mark.covering(1)
@pytest.mark.parametrize("staged", [False, True], ids=["data", "pipeline"])
@pytest.mark.parametrize(
    ("how", "said"),
    [
        pytest.param("raises", "bad sample in shard 1", marks=pytest.mark.full),
        ("goes on", "bad sample in shard 1"),
        ("dies", "rank 1 died"),
        ("hangs", "rank 1 hangs"),
    ],
)
def test_rank_is_named(how: str, said: str, staged: bool) -> None:
    failure: Any = run_ranks(2, _survive, how, staged, timeout=40.0, expect_failure=True)
    text = str(failure.tracebacks.get(0, "")) + str(failure)
    assert said in text, text
    assert "rank 1" in text


def _survive(how: str, staged: bool) -> None:
    raise AssertionError(_train(how, staged))


def _build_again() -> str:
    """A build on connections that a step closed when it failed on one rank."""
    wh.init({"timeout_seconds": 5.0, "check_parts": False})
    torch.manual_seed(0)
    batch = (torch.randn(4, 4), torch.randn(4, 4))
    build = partial(wh.parallelize, optimizer=SGD, batch=batch, loss=nn.functional.mse_loss)
    step = build(wh.replicate()(Breaks("raises")))
    Breaks.training_began = True
    with pytest.raises((wh.RankError, ValueError)):
        for _ in range(4):
            step(batch)
    torch.manual_seed(0)
    with pytest.raises(wh.RankError) as lost:
        build(wh.replicate()(nn.Linear(4, 4)))
    return str(lost.value)


def test_a_build_after_a_failed_step_says_so() -> None:
    for said in run_ranks(2, _build_again, timeout=60.0):
        assert "lost the others while they build" in said
        assert "hint: the rank that failed says why" in said
