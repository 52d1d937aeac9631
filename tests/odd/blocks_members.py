"""Blocks whose members are odd: tiny, strided or mixed parameters, patched methods, dead code."""

from __future__ import annotations

import random
import types
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tests.odd.vocabulary import block


@block("tiny-parameters")
class Tiny(nn.Module):
    """A scalar parameter, an empty one, one of integers, one that is None."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.zeros(0, dim))
        self.order = nn.Parameter(torch.arange(dim).flip(0), requires_grad=False)
        self.register_parameter("nothing", None)
        self.proj = nn.Linear(dim, dim, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.scale * self.proj(h)[..., self.order] + self.empty.sum()


@block("strided-parameters")
class Strided(nn.Module):
    """Parameters that are not contiguous, and a pair of Linears made of them."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 18), nn.Linear(18, dim)
        self.up.weight = nn.Parameter(torch.randn(dim, 18).t() * 0.3)
        self.mix = nn.Parameter(torch.randn(dim, 2, dim)[:, 0] * 0.2)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(torch.tanh(self.up(h))) + h @ self.mix


@block("mixed-dtypes")
class MixedDtypes(nn.Module):
    """A part of the model in float32, the rest in the model's own dtype."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, dim)
        self.gain = nn.Parameter(torch.ones(dim, dtype=torch.float64))
        self.small = nn.Linear(dim, dim, dtype=torch.float64)

    def forward(self, h: Tensor) -> Tensor:
        wide = self.small(h.double()) * self.gain
        return h + torch.tanh(self.proj(h)) + wide.to(h.dtype)


@block("patched-forward")
class Patched(nn.Module):
    """A Linear whose `forward` was replaced on the instance, as adapters do."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 18), nn.Linear(18, dim)
        self.up.forward = types.MethodType(_doubled, self.up)  # type: ignore[method-assign]

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(torch.relu(self.up(h)))


def _doubled(self: Any, x: Tensor) -> Tensor:
    return F.linear(x, self.weight, self.bias) * 2 + 0.1


@block("dead-code")
class Dead(nn.Module):
    """Modules that run, and whose results nobody uses."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.proj, self.dead = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.norm = nn.BatchNorm1d(dim)

    def forward(self, h: Tensor) -> Tensor:
        self.norm(self.dead(h).flatten(0, 1).detach())
        return h + self.proj(h) + 0 * self.dead(h)


@block("frozen-in-train")
class FrozenInTrain(nn.Module):
    """Overrides `train` to keep its norm in eval mode."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(dim)
        self.proj = nn.Linear(dim, dim)
        self.train()

    def train(self, mode: bool = True) -> FrozenInTrain:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, h: Tensor) -> Tensor:
        return h + self.proj(self.norm(h.transpose(1, 2)).transpose(1, 2))


@block("tied-buffers")
class TiedBuffers(nn.Module):
    """One buffer in two modules, counted in one and read in the other."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.a.register_buffer("seen", torch.zeros(()))
        self.b.register_buffer("seen", self.a.seen)

    def forward(self, h: Tensor) -> Tensor:
        if self.training:
            self.a.seen += 1
        return h + self.a(h) + self.b(h) * (1 + 0.1 * self.b.seen)


@block("set-attribute")
class SetAttribute(nn.Module):
    """Sets attributes of tensors: `requires_grad`, `data`."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, dim)
        self.way = pick.choice(("data", "requires_grad"))

    def forward(self, h: Tensor) -> Tensor:
        y = self.proj(h)
        if self.way == "data":
            y.data = y.data.clamp(-1, 1)
            return h + y
        frozen = y.detach()
        frozen.requires_grad = True
        return h + y * torch.sigmoid(frozen).detach()


@block("sparse-lookup")
class SparseLookup(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.table = nn.Embedding(dim, dim, sparse=True)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.table(h.detach().argmax(-1))


@block("batch-gradient", mixes=True)
class BatchGradient(nn.Module):
    """A hook that centres gradients over the rows: rows meet in the backward only."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, dim)

    def forward(self, h: Tensor) -> Tensor:
        y = self.proj(h)
        if y.requires_grad:
            y.register_hook(lambda g: g - g.mean(0, keepdim=True))
        return h + torch.tanh(y)
