"""Layers of one class: which of them run the same code."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import whale as wh
from whale.engine.capture.captured import capture


class Block(nn.Module):
    """Knows its number, and may leave its first Linear out of training."""

    def __init__(self, number: int, trains: bool) -> None:
        super().__init__()
        self.number, self.trains = number, trains
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.trains):
            h = self.up(x) * 0.5**self.number
        return self.down(torch.relu(h))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([Block(i, trains=i != 2) for i in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return x


def test_blocks_that_branch_on_an_attribute_differ_and_numbers_alone_do_not() -> None:
    model = wh.annotate(Net(), {"": wh.split()})
    traces = capture(model, (torch.randn(4, 4), torch.randn(4, 4)), nn.functional.mse_loss).traces
    first, second, frozen, last = (traces[f"blocks.{i}"] for i in range(4))
    assert first == second == last
    assert frozen != first
