"""Modules whose sizes depend on values, in pipelines and beside splits: they run as they stand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import whale as wh
from tests.distributed.beside import sgd
from tests.ranks import run_ranks

WIDTH = 4


class Experts(nn.Module):
    """Each row goes to one of three; `kind` says how its rows are found."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.times = kind, 0
        self.gate = nn.Linear(WIDTH, 3)
        self.members = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 6), nn.ReLU(), nn.Linear(6, WIDTH)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        chances = self.gate(x).softmax(-1)
        choice, out = chances.argmax(-1), torch.zeros_like(x)
        for i, member in enumerate(self.members):
            mask = choice == i
            if self.kind == "mask":
                out[mask] = member(x[mask]) * chances[mask][:, i : i + 1]
            elif self.kind == "unused" and not mask.any():
                continue
            else:
                rows = mask.nonzero()[:, 0]
                out = out.index_add(0, rows, member(x[rows]) * chances[rows, i : i + 1])
        if self.kind == "drops":
            out = F.dropout(out, 0.5)
        if self.kind == "counts":
            self.times += 1
        return out


class Block(nn.Module):
    """A part that computes with values inside a part that does not."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.experts, self.down = (
            nn.Linear(WIDTH, WIDTH),
            Experts(kind),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.experts(self.up(x)))


EXACT = ("rows", "mask", "unused")
LAYOUTS = {
    "split": {"": wh.split()},
    "stages": {"0": wh.stage(), "1": wh.stage()},
    "behind": {"0": wh.stage(), "1": wh.stage(), "2": wh.stage()},
}


def model(kind: str, layout: str) -> nn.Module:
    inside = Block(kind) if layout == "behind" else Experts(kind)
    parts: list[nn.Module] = [nn.Linear(WIDTH, WIDTH), inside]
    return nn.Sequential(*parts, *([nn.Linear(WIDTH, WIDTH)] if layout != "stages" else []))


def trained(layout: str, kinds: tuple[str, ...], ranks: int) -> dict[str, Any]:
    wh.init()
    found: dict[str, Any] = {}
    for kind in kinds:
        torch.manual_seed(0)
        made = model(kind, layout).double()
        plain = copy.deepcopy(made)
        x, y = torch.randn(7, WIDTH).double(), torch.randn(7, WIDTH).double()
        try:
            step = wh.parallelize(
                wh.annotate(made, LAYOUTS[layout]),
                optimizer=sgd,
                batch=(x, y),
                loss=F.mse_loss,
                config={
                    "timeout_seconds": 20,
                    "pipeline.num_micro_batch": 1 if layout == "split" else 2,
                },
            )
        except wh.WhaleError as error:
            found[kind] = str(error)
            continue
        optimizer = sgd(plain.parameters())
        far = 0.0
        for seed in range(3):
            x = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(seed)).double()
            optimizer.zero_grad()
            loss = F.mse_loss(plain(x), y)
            loss.backward()
            optimizer.step()
            far = max(far, abs(float(step((x, y))["loss"]) - loss.item()))
            plain.eval()
            far = max(
                far, abs(float(step.evaluate((x, y))["loss"]) - F.mse_loss(plain(x), y).item())
            )
            plain.train()
        state = step.state_dict()
        far = max(far, *(float((state[n] - v).abs().max()) for n, v in plain.state_dict().items()))
        found[kind] = far
        step.close(forget=True)
    return found


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ("split", 2),
        ("stages", 2),
        pytest.param("stages", 4, marks=pytest.mark.full),
        ("behind", 3),
        pytest.param("behind", 6, marks=pytest.mark.full),
    ],
)
def test_code_that_needs_values_runs_inside_a_stage(layout: str, ranks: int) -> None:
    for found in run_ranks(ranks, trained, layout, EXACT, ranks, timeout=120.0):
        for kind, far in found.items():
            assert isinstance(far, float) and far < 1e-12, (kind, far)


def test_what_nobody_can_follow_is_refused() -> None:
    """Draws whose places are unknown, and state that moves."""
    for found in run_ranks(2, trained, "stages", ("drops", "counts"), 2, timeout=120.0):
        for kind, said in found.items():
            assert isinstance(said, str) and "fake tensors" in said and "hint:" in said, (
                kind,
                said,
            )
