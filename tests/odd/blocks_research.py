"""Blocks of research code: weights bent on every use, statistics, codebooks."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tests.odd.vocabulary import block


class Based(nn.Module):
    """One Linear, to build on."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, dim)


@block("weight-standardised")
class Standardised(Based):
    """Weights are centred and scaled on every use."""

    def forward(self, h: Tensor) -> Tensor:
        w = self.proj.weight
        w = (w - w.mean(1, keepdim=True)) / (w.std(1, keepdim=True) + 1e-4)
        return h + F.linear(h, w, self.proj.bias) * 0.2


@block("sorted-features")
class SortedFeatures(Based):
    """Features are sorted, mixed, and put back where they came from."""

    def forward(self, h: Tensor) -> Tensor:
        values, order = h.sort(-1)
        mixed = self.proj(values).tanh()
        return h + torch.empty_like(mixed).scatter(-1, order, mixed)


@block("top-features")
class TopFeatures(Based):
    """Only the largest features of a token pass."""

    def forward(self, h: Tensor) -> Tensor:
        y = self.proj(h)
        top = y.abs().topk(5, dim=-1).indices
        keep = torch.zeros_like(y).scatter_(-1, top, 1.0)
        return h + y * keep


@block("running-token-mean")
class RunningTokenMean(Based):
    """A mean over the tokens so far, by cumsum."""

    def forward(self, h: Tensor) -> Tensor:
        so_far = h.cumsum(1) / torch.arange(1, h.shape[1] + 1, dtype=h.dtype)[:, None]
        return h + self.proj(so_far)


@block("complex-turn")
class ComplexTurn(nn.Module):
    """Pairs of features are turned by learned angles, as complex numbers."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.angle = nn.Parameter(torch.randn(dim // 2))
        self.size = nn.Parameter(torch.ones(dim // 2))

    def forward(self, h: Tensor) -> Tensor:
        z = torch.view_as_complex(h.reshape(*h.shape[:-1], -1, 2).contiguous())
        turned = z * torch.polar(self.size.abs() + 0.1, self.angle)
        return torch.view_as_real(turned).flatten(-2)


@block("sparse-neighbours")
class SparseNeighbours(Based):
    """Features are mixed by a sparse constant matrix."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(pick, dim)
        near = torch.eye(dim) + torch.eye(dim).roll(1, 0) * 0.5
        self.near = near.to_sparse()

    def forward(self, h: Tensor) -> Tensor:
        flat = h.reshape(-1, h.shape[-1])
        return self.proj(torch.sparse.mm(self.near, flat.T).T.reshape(h.shape))


@block("lora-merges")
class LoraMerges(nn.Module):
    """A frozen weight with an adapter that eval() merges and train() takes out again."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim, dim) * 0.3, requires_grad=False)
        self.a = nn.Parameter(torch.randn(3, dim) * 0.3)
        self.b = nn.Parameter(torch.randn(dim, 3) * 0.3)
        self.merged = False

    def train(self, mode: bool = True) -> LoraMerges:
        super().train(mode)
        if mode == self.merged:
            self.weight.data += (-1.0 if mode else 1.0) * 0.5 * (self.b @ self.a).data
            self.merged = not mode
        return self

    def forward(self, h: Tensor) -> Tensor:
        y = F.linear(h, self.weight)
        return y if self.merged else y + 0.5 * (h @ self.a.T) @ self.b.T


@block("lora-plain")
class LoraPlain(Based):
    """A frozen Linear with an adapter beside it."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(pick, dim)
        self.proj.requires_grad_(False)
        self.down = nn.Linear(dim, 2, bias=False)
        self.up = nn.Linear(2, dim, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        return self.proj(h) + self.up(self.down(h)) * 2.0


@block("spectral-by-hand")
class SpectralByHand(Based):
    """A power iteration a forward, in a buffer, in training."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(pick, dim)
        self.register_buffer("u", F.normalize(torch.randn(dim), dim=0), persistent=False)

    def forward(self, h: Tensor) -> Tensor:
        w = self.proj.weight
        with torch.no_grad():
            v = F.normalize(w.T @ self.u, dim=0)
            u = F.normalize(w @ v, dim=0)
            if self.training:
                self.u.copy_(u)
        return h + F.linear(h, w / (u @ w @ v), self.proj.bias)


@block("codebook")
class Codebook(Based):
    """Vector quantisation with straight-through, and a loss towards the codes."""

    def forward(self, h: Tensor) -> Tensor:
        codes = self.proj.weight
        near = torch.cdist(h.flatten(0, 1), codes).argmin(-1)
        chosen = F.embedding(near, codes).view_as(h)
        return h + (chosen - h).detach() + 0.1 * chosen


@block("codebook-follows")
class CodebookFollows(nn.Module):
    """A codebook in buffers that follows the rows by an average."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(4, dim))
        self.register_buffer("sizes", torch.ones(4))
        self.proj = nn.Linear(dim, dim)

    def forward(self, h: Tensor) -> Tensor:
        y = self.proj(h)
        flat = y.detach().flatten(0, 1)
        hot = F.one_hot(torch.cdist(flat, self.codes).argmin(-1), 4).to(h.dtype)
        if self.training:
            self.sizes.mul_(0.9).add_(hot.sum(0), alpha=0.1)
            sums = self.codes * 0.9 + 0.1 * (hot.T @ flat)
            self.codes.copy_(sums / self.sizes[:, None])
        return y + 0.1 * (hot @ self.codes).view_as(h)


@block("range-observer")
class RangeObserver(Based):
    """Fake quantisation by the largest value seen so far."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(pick, dim)
        self.register_buffer("largest", torch.tensor(0.5))

    def forward(self, h: Tensor) -> Tensor:
        y = self.proj(h)
        if self.training:
            self.largest = torch.maximum(self.largest, y.detach().abs().max())
        step = self.largest / 50
        return y + ((y / step).round() * step - y).detach()


class Reversed(torch.autograd.Function):
    """The identity with a gradient turned round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * grad, None


@block("reversal-grows")
class ReversalGrows(Based):
    """A reversed gradient whose strength grows with a counter."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(pick, dim)
        self.calls = 0

    def forward(self, h: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return h + self.proj(Reversed.apply(h, min(1.0, 0.2 * self.calls)))


class GradientByRow(torch.autograd.Function):
    """The identity; gradients get unit length per token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / (grad.norm(dim=-1, keepdim=True) + 1e-3)


@block("gradient-normed")
class GradientNormed(Based):
    """A backward that is not linear in its gradient."""

    def forward(self, h: Tensor) -> Tensor:
        return h + 0.1 * GradientByRow.apply(self.proj(h))


class GradientByCount(torch.autograd.Function):
    """The identity; the gradient is divided by the rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (6.0 / grad.shape[0])


@block("gradient-by-rows")
class GradientByRows(Based):
    """A backward that looks at the number of rows."""

    def forward(self, h: Tensor) -> Tensor:
        return h + GradientByCount.apply(self.proj(h))


@block("gradient-penalty", aux=True)
class GradientPenalty(Based):
    """A penalty on the norm of a gradient, as in a critic."""

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        y = self.proj(h).tanh()
        if not torch.is_grad_enabled():
            return y, y.new_zeros(())
        (g,) = torch.autograd.grad(y.pow(2).sum(), h, create_graph=True)
        return y, 0.1 * (g.norm(dim=-1) - 1).pow(2).mean()


@dataclass
class Carried:
    """What a part hands on."""

    hidden: Tensor
    gate: Tensor | None = None


class Pair(NamedTuple):
    """Two tensors by name."""

    value: Tensor
    extra: dict[str, Tensor]


class Inner(Based):
    """Gives a dataclass."""

    def forward(self, h: Tensor, *, gate: Tensor | None = None) -> Carried:
        y = self.proj(h)
        return Carried(hidden=y if gate is None else y * gate, gate=y.sigmoid())


class Outer(Based):
    """Takes a dataclass and gives a named tuple with a dict in it."""

    def forward(self, carried: Carried, scale: float = 1.0) -> Pair:
        return Pair(self.proj(carried.hidden) * scale, {"gate": carried.gate})


@block("dataclass-chain")
class DataclassChain(nn.Module):
    """Dataclasses, named tuples and keyword arguments between parts."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.first, self.second = Inner(pick, dim), Outer(pick, dim)

    def forward(self, h: Tensor) -> Tensor:
        pair = self.second(self.first(h, gate=h.sigmoid()), scale=0.5)
        return h + pair.value * pair.extra["gate"]


@block("row-chunks")
class RowChunks(Based):
    """Many rows are computed in chunks; the result is the same."""

    def forward(self, h: Tensor) -> Tensor:
        if h.shape[0] > 3:
            return torch.cat([self.proj(c).tanh() for c in h.split(2)])
        return self.proj(h).tanh()


@block("row-threshold")
class RowThreshold(Based):
    """Many rows are computed otherwise."""

    def forward(self, h: Tensor) -> Tensor:
        y = self.proj(h)
        return y.tanh() if h.shape[0] >= 5 else y * 0.9
