"""Evaluation runs other code than training: without gradients a checkpoint or a hook is no more.

At lengths that no batch before had, under a plan that was made for the code of training.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import whale as wh
from tests.distributed.beside import sgd
from tests.ranks import run_ranks

WIDTH = 4


class Block(nn.Module):
    """A pair of Linears; `kind` says what is done to them in training."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up, self.down = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)

    def both(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "checkpoint":
            return x + checkpoint(self.both, x, use_reentrant=True)
        if self.kind == "in training" and self.training:
            return x + checkpoint(self.both, x, use_reentrant=False)
        hidden = self.up(x).relu()
        if self.kind == "hook" and hidden.requires_grad:
            hidden.register_hook(lambda grad: grad * 2)
        out = self.down(hidden)
        if self.kind == "bias" and not torch.is_grad_enabled():
            out = out + self.down.bias.mean()
        return x + out


class Net(nn.Module):
    """A Linear, a block, a mean over the length; a checkpoint between them, if asked for."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(WIDTH, WIDTH), Block(kind)
        self.between = kind == "between"

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        h = checkpoint(self.block, h, use_reentrant=True) if self.between else self.block(h)
        return h.mean(1)


LAYOUTS = {
    "mix": {"block": wh.split(), "...": wh.replicate()},
    "split": {"": wh.split()},
    "stages": {"first": wh.stage(), "block": wh.stage()},
}
KINDS = ("checkpoint", "in training", "hook", "bias", "between")


def batch(seed: int, length: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    shape = (5, length, WIDTH)
    return torch.randn(shape, generator=drawn).double(), torch.randn(
        (5, WIDTH), generator=drawn
    ).double()


def evaluated(layout: str) -> dict[str, Any]:
    """By kind, how far losses of evaluations are from those of one device; or the refusal."""
    wh.init()
    found: dict[str, Any] = {}
    for kind in KINDS:
        torch.manual_seed(0)
        model = Net(kind).double()
        plain = copy.deepcopy(model)
        step = wh.parallelize(
            wh.annotate(model, LAYOUTS[layout]),
            optimizer=sgd,
            batch=batch(0, 3),
            loss=F.mse_loss,
            config={"timeout_seconds": 20},
        )
        optimizer, far = sgd(plain.parameters()), 0.0
        for seed, length in enumerate((3, 5, 3)):
            x, y = batch(seed, length)
            optimizer.zero_grad()
            loss = F.mse_loss(plain(x), y)
            loss.backward()
            optimizer.step()
            far = max(far, abs(float(step((x, y))["loss"]) - loss.item()))
            x, y = batch(seed + 9, length + 4)
            plain.eval()
            with torch.no_grad():
                wanted = F.mse_loss(plain(x), y).item()
            plain.train()
            try:
                far = max(far, abs(float(step.evaluate((x, y))["loss"]) - wanted))
            except wh.WhaleError as error:
                found[kind] = str(error)
                break
        found.setdefault(kind, far)
        step.close(forget=True)
    return found


@pytest.mark.every(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_evaluation_is_that_of_one_device(layout: str) -> None:
    for found in run_ranks(2, evaluated, layout, timeout=120.0):
        for kind, far in found.items():
            assert isinstance(far, float) and far < 1e-12, (kind, far)
