"""Blocks whose code is odd: own autograd, in-place edits, views, branches, checkpoints, chance."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import whale as wh
from tests.odd.vocabulary import block


class Pair(nn.Module):
    """The base of many: a Linear up and a Linear down, with `act` between."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 18)
        self.down = nn.Linear(18, dim)

    def act(self, x: Tensor) -> Tensor:
        return torch.relu(x)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(self.act(self.up(h)))


class Swish(torch.autograd.Function):
    """An activation with its own backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad * (s + x * s * (1 - s))


class Rounded(torch.autograd.Function):
    """Rounding, straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(x * 8) / 8

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Signed(torch.autograd.Function):
    """Passes the sign of the gradient, scaled: not linear in it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.sign() * 1e-3


class Normed(torch.autograd.Function):
    """Normalises over the last dim: needs it whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.softmax(-1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return y * (grad - (grad * y).sum(-1, keepdim=True))


@block("own-function")
class OwnFunction(Pair):
    """torch.autograd.Function between the Linears of a pair."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(pick, dim)
        self.kind = pick.choice((Swish, Rounded, Normed))

    def act(self, x: Tensor) -> Tensor:
        return self.kind.apply(x)


@block("signed-gradient")
class SignedGradient(Pair):
    """A Function whose backward is not linear in the gradient."""

    def act(self, x: Tensor) -> Tensor:
        return Signed.apply(torch.tanh(x))


@block("straight-through", easy=True)
class StraightThrough(Pair):
    """x + (round(x) - x).detach()."""

    def act(self, x: Tensor) -> Tensor:
        return x + (torch.round(x * 4) / 4 - x).detach()


@block("in-place")
class InPlace(Pair):
    """In-place edits of activations."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(pick, dim)
        self.way = pick.choice(
            ("add", "relu", "index", "slice", "mask", "copy", "fill", "scatter", "mul-view", "out")
        )

    def act(self, x: Tensor) -> Tensor:
        if self.way == "add":
            x += 0.5
        elif self.way == "relu":
            F.relu_(x)
        elif self.way == "index":
            x[:, 0, 2] = -1.0
        elif self.way == "slice":
            x[..., :4] *= 2.0
        elif self.way == "mask":
            x.masked_fill_(x < 0, -0.1)
        elif self.way == "copy":
            x[..., 1].copy_(x[..., 3].clone())
        elif self.way == "fill":
            x[..., -1].fill_(0.3)
        elif self.way == "scatter":
            x.scatter_(-1, torch.zeros_like(x[..., :1], dtype=torch.long), 0.7)
        elif self.way == "mul-view":
            x.view(x.shape[0], -1).mul_(0.5)
        else:
            x = x.clone()
            torch.Tensor.__setitem__(x, (..., 0), 0.2)
        return torch.tanh(x)


@block("width-read")
class WidthRead(Pair):
    """Code that reads the width, the number of elements or the stride of an activation."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(pick, dim)
        self.way = pick.choice(
            ("shape", "size", "numel", "arange", "mean", "view", "half", "linspace", "len")
        )

    def act(self, x: Tensor) -> Tensor:
        if self.way == "shape":
            return torch.relu(x) / x.shape[-1] ** 0.5
        if self.way == "size":
            return torch.relu(x) * (x.size(-1) / 10)
        if self.way == "numel":
            return torch.relu(x) * (x[0].numel() / 100)
        if self.way == "arange":
            return x * torch.arange(x.shape[-1], dtype=x.dtype)
        if self.way == "mean":
            return x - x.mean(-1, keepdim=True)
        if self.way == "view":
            return x.view(*x.shape[:-1], 2, -1).flip(-2).flatten(-2)
        if self.way == "half":
            half = x.shape[-1] // 2
            return torch.cat([x[..., half:], x[..., :half].relu()], -1)
        if self.way == "linspace":
            return x * torch.linspace(0, 1, x.shape[2], dtype=x.dtype)
        return torch.relu(x) * len(x[0, 0])


@block("odd-ops")
class OddOps(Pair):
    """Operations along the width that need it whole, or not."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(pick, dim)
        self.way = pick.choice(
            (
                "softmax",
                "cumsum",
                "sort",
                "roll",
                "topk",
                "flip",
                "glu",
                "norm",
                "amax",
                "prod",
                "layer_norm",
                "einsum",
                "where",
                "gather",
                "std",
                "outer",
                "pad",
                "unfold",
            )
        )

    def act(self, x: Tensor) -> Tensor:  # noqa: C901 - one line for each way
        way = self.way
        if way == "softmax":
            return F.softmax(x, dim=2)
        if way == "cumsum":
            return torch.cumsum(x, -1) * 0.2
        if way == "sort":
            return x.sort(-1).values
        if way == "roll":
            return torch.relu(x.roll(1, -1))
        if way == "topk":
            values, places = x.topk(4, -1)
            return torch.zeros_like(x).scatter(-1, places, values)
        if way == "flip":
            return torch.relu(x.flip(2))
        if way == "glu":
            return F.glu(torch.cat([x, x], -1), -1)
        if way == "norm":
            return x / (x.norm(dim=-1, keepdim=True) + 1)
        if way == "amax":
            return x - x.amax(-1, keepdim=True)
        if way == "prod":
            return torch.tanh(x) * (1 + x[..., :2].prod(-1, keepdim=True))
        if way == "layer_norm":
            return F.layer_norm(x, x.shape[-1:])
        if way == "einsum":
            return torch.einsum("btd,bte->btd", x, torch.tanh(x)) * 0.1
        if way == "where":
            return torch.where(x > x.mean(), x, 0.1 * x) if not self.training else F.leaky_relu(x)
        if way == "gather":
            return x.gather(-1, torch.arange(x.shape[-1]).flip(0).expand_as(x))
        if way == "std":
            return x / (x.std(-1, keepdim=True) + 0.1)
        if way == "outer":
            return (x.unsqueeze(-1) * x.unsqueeze(-2)).sum(-1) * 0.1
        if way == "pad":
            return F.pad(x, (1, 0))[..., :-1].relu()
        return x.unfold(-1, 3, 1).mean(-1).repeat(1, 1, 2)[..., : x.shape[-1]]


@block("views")
class Views(Pair):
    """Rows are not in dim 0 inside: transposed, flattened into tokens, permuted."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(pick, dim)
        self.way = pick.choice(("time-first", "tokens", "moved", "stacked", "split"))

    def forward(self, h: Tensor) -> Tensor:
        b, t, d = h.shape
        if self.way == "time-first":
            return h + super().forward(h.transpose(0, 1)).transpose(0, 1)
        if self.way == "tokens":
            return h + super().forward(h.reshape(b * t, 1, d)).reshape(b, t, d)
        if self.way == "moved":
            return super().forward(h.movedim(0, 2).movedim(2, 0).contiguous())
        if self.way == "stacked":
            both = torch.cat([h, -h], 0)
            return super().forward(both)[:b] - super().forward(both)[b:] + h
        parts = [super(Views, self).forward(row.unsqueeze(0)) for row in h.unbind(0)]
        return torch.cat(parts, 0) if parts else super().forward(h)


@block("branches")
class Branches(Pair):
    """Control flow on shapes, on modes, on values."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(pick, dim)
        self.way = pick.choice(("mode", "length", "gradient", "value", "rows", "while", "item"))

    def forward(self, h: Tensor) -> Tensor:
        if self.way == "mode" and self.training:
            h = h * 1.1
        elif self.way == "length" and h.shape[1] > 3:
            h = h + h.flip(1)
        elif self.way == "gradient" and torch.is_grad_enabled():
            h = h * 1.2
        elif self.way == "value" and h.abs().mean() > 0.6:
            h = h * 0.5
        elif self.way == "rows" and h.shape[0] > 2:
            h = h * 0.7
        elif self.way == "item":
            h = h * (1 + 0.01 * round(h.detach().abs().max().item(), 3))
        steps = 0
        while steps < (h.shape[1] if self.way == "while" else 1):
            h = super().forward(h) * 0.9
            steps += 1
        return h


class Channels(nn.Module):
    """BatchNorm over the last dim."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(dim)

    def forward(self, h: Tensor) -> Tensor:
        return self.norm(h.transpose(1, 2)).transpose(1, 2)


@block("double-backward")
class Energy(nn.Module):
    """The gradient of an energy with respect to the states, inside forward."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 10)
        self.second = pick.random() < 0.6
        self.inner: nn.Module = nn.Identity()
        way = pick.choice(("plain", "norm", "experts", "pair"))
        if way == "norm":
            self.inner = Channels(dim)
        elif way == "experts":
            self.inner = wh.nn.MoE(dim, 8, 4, top_k=2, balance="none")
        elif way == "pair":
            self.inner = nn.Sequential(nn.Linear(dim, 18), nn.Tanh(), nn.Linear(18, dim))

    def forward(self, h: Tensor) -> Tensor:
        with torch.enable_grad():
            x = h if h.requires_grad else h.detach().requires_grad_()
            energy = F.softplus(self.up(self.inner(x))).sum()
            (force,) = torch.autograd.grad(
                energy, x, create_graph=self.second and self.training, retain_graph=True
            )
        return h - 0.5 * force


@block("func")
class Functional(Pair):
    """torch.func: vmap over rows, or functional_call with changed weights."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(pick, dim)
        self.mapped = pick.random() < 0.5

    def forward(self, h: Tensor) -> Tensor:
        if self.mapped:
            return h + torch.func.vmap(lambda x: torch.tanh(self.up(x)))(h)[..., : h.shape[-1]]
        weights = {"weight": self.up.weight * 0.5, "bias": self.up.bias}
        return h + self.down(torch.tanh(torch.func.functional_call(self.up, weights, (h,))))


@block("checkpoint")
class Checkpointed(Pair):
    """torch.utils.checkpoint, of either kind."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(pick, dim)
        self.reentrant = pick.random() < 0.4

    def forward(self, h: Tensor) -> Tensor:
        return checkpoint(super().forward, h, use_reentrant=self.reentrant)


@block("checkpoint-dropout", random=True)
class CheckpointedDropout(Pair):
    """Dropout under torch.utils.checkpoint: the recompute must draw the same mask."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(pick, dim)
        self.drop = nn.Dropout(0.3)
        self.reentrant = pick.random() < 0.3
        self.functional = pick.random() < 0.4

    def act(self, x: Tensor) -> Tensor:
        x = torch.relu(x)
        return F.dropout(x, 0.3, self.training) if self.functional else self.drop(x)

    def forward(self, h: Tensor) -> Tensor:
        return checkpoint(super().forward, h, use_reentrant=self.reentrant)


@block("autocast-inside")
class AutocastInside(Pair):
    """torch.autocast inside forward, off or on."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(pick, dim)
        self.enabled = pick.random() < 0.5

    def forward(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.enabled):
            y = super().forward(h)
        return y.to(h.dtype)


@block("outputs")
class Outputs(Pair):
    """Inner modules that return tuples, dicts and lists, with keywords and defaults."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(pick, dim)
        self.inner = Many(dim, pick.choice((tuple, dict, list)))

    def forward(self, h: Tensor, scale: float = 1.0, *, shift: Tensor | None = None) -> Tensor:
        out = self.inner(state=h)
        parts = list(out.values()) if isinstance(out, dict) else list(out)
        return super().forward(h) * scale + parts[0] * parts[1]


class Many(nn.Module):
    """Returns two tensors in some container."""

    def __init__(self, dim: int, kind: type) -> None:
        super().__init__()
        self.a, self.b, self.kind = nn.Linear(dim, dim), nn.Linear(dim, dim), kind

    def forward(self, state: Tensor, unused: object = None) -> Any:
        parts = (self.a(state), torch.sigmoid(self.b(state)))
        return dict(zip("ab", parts, strict=True)) if self.kind is dict else self.kind(parts)
