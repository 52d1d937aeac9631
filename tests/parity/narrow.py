"""A model whose Linears are split alone: some make less than they read, some more.

Place in the flow: beside the zoo, which finds it as the case `narrow`.
"""

from __future__ import annotations

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

WIDTH = 24


class Bottleneck(nn.Module):
    """The norm between the two Linears keeps them from being a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(WIDTH, 6)
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(self.norm(self.down(x)))


class Narrow(nn.Module):
    """Five Layers: by rows are best split `down` of each block, `squeeze` and `last`."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList([Bottleneck(), Bottleneck()])
        self.squeeze = nn.Linear(WIDTH, 9, bias=False)
        self.last = Conv1D(4, 9)

    def forward(self, x: Tensor) -> Tensor:
        x = self.widen(x).tanh()
        for block in self.blocks:
            x = block(x)
        return self.last(self.squeeze(x).tanh())
