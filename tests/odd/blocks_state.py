"""Blocks with state: buffers that move, weights read or tied by hand, hooks, parametrizations."""

from __future__ import annotations

import random
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from tests.odd.vocabulary import block


class Projected(nn.Module):
    """The base of many: one Linear."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, dim)


@block("ema-buffer")
class Ema(Projected):
    """A running mean of the states, updated in training, read always."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(pick, dim)
        self.register_buffer("average", torch.zeros(dim))
        self.assign = pick.random() < 0.5

    def forward(self, h: Tensor) -> Tensor:
        y = self.proj(h)
        if self.training:
            now = y.detach().mean((0, 1))
            if self.assign:
                self.average = 0.9 * self.average + 0.1 * now
            else:
                self.average.mul_(0.9).add_(now, alpha=0.1)
        return h + y - self.average


@block("counter-buffer")
class Counter(Projected):
    """Counts its calls in a buffer, by which it warms up."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(pick, dim)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, h: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return h + self.proj(h) * (1 + 0.1 * self.calls)


@block("rows-seen")
class RowsSeen(Projected):
    """Counts the rows it has seen; written only, never read."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(pick, dim)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("largest", torch.zeros(dim))

    def forward(self, h: Tensor) -> Tensor:
        if self.training:
            self.seen += h.shape[0]
            self.largest = torch.maximum(self.largest, h.detach().abs().amax((0, 1)))
        return h + self.proj(h)


@block("python-counter")
class PythonCounter(Projected):
    """Counts its training calls in a Python number, by which it warms up."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(pick, dim)
        self.calls = 0

    def forward(self, h: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return h + self.proj(h) * (1 + 0.1 * self.calls)


@block("odd-buffers")
class Buffers(Projected):
    """Masks of -inf and bool, complex and integer buffers, one not persistent, one None."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(pick, dim)
        self.register_buffer(
            "minus", torch.full((dim,), float("-inf")).masked_fill(torch.arange(dim) < 9, 0.0)
        )
        self.register_buffer("keep", torch.arange(dim) % 3 > 0)
        self.register_buffer("turn", torch.polar(torch.ones(dim), torch.linspace(0, 1, dim)))
        self.register_buffer("order", torch.randperm(dim), persistent=False)
        self.register_buffer("none", None)
        self.register_buffer("huge", torch.full((2,), torch.finfo(torch.float32).min))

    def forward(self, h: Tensor) -> Tensor:
        y = self.proj(h)[..., self.order]
        gates = (y + self.minus).softmax(-1)
        turned = (y * self.turn.to(torch.complex128)).real.to(y.dtype)
        return h + gates * turned + torch.where(self.keep, y, torch.zeros_like(y))


@block("own-batch-norm", mixes=True)
class OwnNorm(nn.Module):
    """F.batch_norm on buffers of its own: rows meet in training only."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("var", torch.ones(dim))
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, h: Tensor) -> Tensor:
        x = F.batch_norm(h.flatten(0, 1), self.mean, self.var, self.scale, training=self.training)
        return h + x.view_as(h)


@block("mixup", mixes=True)
class Mixup(Projected):
    """In training each row gets some of its neighbour's."""

    def forward(self, h: Tensor) -> Tensor:
        y = self.proj(h)
        return h + (0.9 * y + 0.1 * y.roll(1, 0) if self.training else y)


@block("centred", mixes=True)
class Centred(Projected):
    """Subtracts the mean over rows, in every mode."""

    def forward(self, h: Tensor) -> Tensor:
        y = self.proj(h)
        return h + y - y.mean(0, keepdim=True)


@block("row-index")
class RowIndex(Projected):
    """A row's place in the batch matters."""

    def forward(self, h: Tensor) -> Tensor:
        place = torch.arange(h.shape[0], dtype=h.dtype).view(-1, 1, 1)
        return h + self.proj(h) * (1 + 0.05 * place)


@block("batch-scale")
class BatchScale(Projected):
    """Divides by the number of rows, in training only."""

    def forward(self, h: Tensor) -> Tensor:
        y = self.proj(h)
        return h + (y / h.shape[0] if self.training else y)


@block("weights-read")
class WeightsRead(nn.Module):
    """Weights used beside their module: norms, transposes, products."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 18)
        self.down = nn.Linear(18, dim)
        self.way = pick.choice(("norm", "bias", "transpose", "gram", "rows", "functional"))

    def forward(self, h: Tensor) -> Tensor:
        y = self.up(h)
        if self.way == "norm":
            y = y / self.up.weight.norm()
        elif self.way == "bias":
            y = y + self.up.bias.mean()
        elif self.way == "transpose":
            return h + y @ self.up.weight + self.down.bias
        elif self.way == "gram":
            return h + self.down(torch.relu(y)) + h @ (self.up.weight.t() @ self.up.weight) * 0.05
        elif self.way == "rows":
            y = y + (self.up.weight * self.up.weight).sum(-1)
        elif self.way == "functional":
            y = F.linear(h, self.up.weight * 2, self.up.bias)
        return h + self.down(torch.relu(y))


@block("hand-tied")
class HandTied(nn.Module):
    """Two Linears of one weight, a third that uses it transposed."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.b.weight = self.a.weight

    def forward(self, h: Tensor) -> Tensor:
        return h + F.linear(torch.tanh(self.b(torch.tanh(self.a(h)))), self.a.weight.t())


@block("called-twice")
class Twice(nn.Module):
    """One Linear called twice in a block, once on other shapes."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, h: Tensor) -> Tensor:
        pooled = self.proj(h.mean(1))
        return h + self.out(torch.tanh(self.proj(h))) + pooled[:, None]


class Scaled(nn.Linear):
    """A Linear with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return super().forward(input) * 0.5 + 0.25


class Biased(nn.Linear):
    """A Linear that normalises its weight, as weight standardisation does."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        weight = self.weight - self.weight.mean(1, keepdim=True)
        return F.linear(input, weight / (weight.std() + 1e-3), self.bias)


@block("linear-subclass")
class Subclass(nn.Module):
    """Linear subclasses with a forward of their own, in a pair."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        kind = pick.choice((Scaled, Biased))
        self.up = kind(dim, 18)
        self.down = pick.choice((kind, nn.Linear))(18, dim)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(F.gelu(self.up(h)))


@block("class-forward")
class ClassForward(nn.Module):
    """Calls `nn.Linear.forward(module, x)` and `module.forward(x)`, passing by `__call__`."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 18), nn.Linear(18, dim)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down.forward(torch.relu(nn.Linear.forward(self.up, h)))


@block("parametrized")
class Parametrized(nn.Module):
    """Weight norm, spectral norm, orthogonal or an own parametrization."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 18), nn.Linear(18, dim)
        way = pick.choice(("weight", "spectral", "own"))
        if way == "weight":
            parametrizations.weight_norm(self.up)
        elif way == "spectral":
            parametrizations.spectral_norm(self.down)
        else:
            parametrize.register_parametrization(self.up, "weight", Squared())
        self.way = way

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(torch.tanh(self.up(h)))


class Squared(nn.Module):
    """A weight that is the square of its original, signed."""

    def forward(self, w: Tensor) -> Tensor:
        return w * w.abs() + 0.01


@block("hooks")
class Hooks(nn.Module):
    """Forward hooks and pre-hooks that change what they see."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 18), nn.Linear(18, dim)
        self.up.register_forward_pre_hook(_halve)
        self.up.register_forward_hook(_shift)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(torch.relu(self.up(h)))


def _halve(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (args[0] * 0.5,)


def _shift(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
    return out + 0.1 * torch.arange(out.shape[-1], dtype=out.dtype)


@block("hook-closure")
class HookClosure(Projected):
    """A hook that closes over the block and uses a parameter of it."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(pick, dim)
        self.scale = nn.Parameter(torch.rand(dim) + 0.5)
        self.proj.register_forward_hook(lambda module, args, out: out * self.scale)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.proj(h)


@block("lambda-attribute")
class LambdaAttribute(Projected):
    """A lambda attribute that closes over a submodule, a partial over another."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(pick, dim)
        self.other = nn.Linear(dim, dim)
        self.fn = lambda x: torch.tanh(self.proj(x))
        self.part = partial(_with, self.other)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.fn(h) + self.part(h)


def _with(module: nn.Module, x: Tensor) -> Tensor:
    return torch.relu(module(x))


@block("backward-hooks")
class BackwardHooks(Projected):
    """Full backward hooks that scale gradients."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(pick, dim)
        self.proj.register_full_backward_hook(_scale_gradient)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.proj(torch.tanh(h))


def _scale_gradient(module: nn.Module, before: tuple[Tensor | None, ...], after: object) -> object:
    return tuple(None if g is None else g * 0.5 for g in before)


@block("tensor-hook")
class TensorHook(Projected):
    """A hook on an activation that scales its gradient."""

    def forward(self, h: Tensor) -> Tensor:
        y = self.proj(h)
        if y.requires_grad:
            y.register_hook(lambda g: g * 0.5)
        return h + y


@block("clamped-gradient")
class ClampedGradient(Projected):
    """A hook on an activation that clamps its gradient: not linear in it."""

    def forward(self, h: Tensor) -> Tensor:
        y = self.proj(h)
        if y.requires_grad:
            y.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
        return h + y


@block("parameter-hook")
class ParameterHook(Projected):
    """A hook on a parameter: halves its gradient, or clamps it."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(pick, dim)
        self.proj.weight.register_hook(_half if pick.random() < 0.5 else _clamp)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.proj(h)


def _half(g: Tensor) -> Tensor:
    return g * 0.5


def _clamp(g: Tensor) -> Tensor:
    return g.clamp(-1e-3, 1e-3)


@block("unused")
class Unused(Projected):
    """Parameters nobody uses, and a frozen one."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(pick, dim)
        self.spare = nn.Linear(dim, dim)
        self.frozen = nn.Parameter(torch.randn(dim), requires_grad=False)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.proj(h) * self.frozen


@block("sometimes")
class Sometimes(Projected):
    """A branch used in eval mode or for long inputs only."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(pick, dim)
        self.spare = nn.Linear(dim, dim)
        self.by_length = pick.random() < 0.5

    def forward(self, h: Tensor) -> Tensor:
        use = h.shape[1] > 5 if self.by_length else not self.training
        return h + (self.spare(h) if use else self.proj(h))


@block("teacher")
class Teacher(Projected):
    """A frozen copy under no_grad that the states are pulled towards."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(pick, dim)
        self.teacher = nn.Linear(dim, dim).requires_grad_(False)

    def forward(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(h)
        return h + self.proj(h) * torch.sigmoid(target)


@block("moved-teacher")
class MovedTeacher(Teacher):
    """A frozen copy that follows the weights by itself in training (EMA of parameters)."""

    def forward(self, h: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                self.teacher.weight.lerp_(self.proj.weight, 0.1)
        return super().forward(h)


@block("side-channel", aux=True)
class SideChannel(Projected):
    """Keeps a loss in an attribute in forward, read by the block's own caller after."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(pick, dim)
        self.inner = Keeper(dim)

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        y = self.proj(self.inner(h))
        return h + y, self.inner.kept


class Keeper(nn.Module):
    """Stores the mean square of its output."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.lin = nn.Linear(dim, dim)
        self.kept: Tensor | None = None

    def forward(self, h: Tensor) -> Tensor:
        y = self.lin(h)
        self.kept = 0.1 * y.pow(2).mean()
        return y


@block("penalty", aux=True)
class Penalty(Projected):
    """An auxiliary loss of the weights: no rows in it."""

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        return h + self.proj(h), 0.05 * self.proj.weight.pow(2).sum()
