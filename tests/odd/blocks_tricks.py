"""Weight tricks and state as papers and notebooks have them."""

from __future__ import annotations

import copy
import random
from collections import deque
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint_sequential

from tests.odd.blocks_layers import LoraLinear, StandardConv
from tests.odd.vocabulary import block


@block("b-standardised")
class Standardised(nn.Module):
    """A convolution that standardises its weight."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.conv = StandardConv(dim, dim, 3, padding=1)
        self.out = nn.Linear(dim, dim)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.out(F.gelu(self.conv(h.mT)).mT)


class FakeQuant(nn.Linear):
    """Weights rounded to a grid of their largest value, gradients straight through."""

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight.detach().abs().amax(1, keepdim=True) / 7
        w = self.weight + (torch.round(self.weight / scale) * scale - self.weight).detach()
        return F.linear(x, w, self.bias)


@block("b-fake-quantised")
class Quantised(nn.Module):
    """Quantisation aware: weights, or activations by the largest of their row."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.up = FakeQuant(dim, 10)
        self.down = nn.Linear(10, dim)
        self.both = pick.random() < 0.5

    def forward(self, h: Tensor) -> Tensor:
        x = torch.tanh(self.up(h))
        if self.both:
            scale = x.detach().abs().amax(-1, keepdim=True) / 7 + 1e-9
            x = x + ((x / scale).round() * scale - x).detach()
        return h + self.down(x)


@block("b-binary-gate")
class BinaryGate(nn.Module):
    """A hard gate with a straight-through estimate between two Linears."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(dim, 8), nn.Linear(dim, 8), nn.Linear(8, dim)

    def forward(self, h: Tensor) -> Tensor:
        soft = self.gate(h).sigmoid()
        hard = (soft > 0.5).to(h.dtype) + soft - soft.detach()
        return h + self.down(hard * self.up(h))


@block("b-warm-up")
class WarmUp(nn.Module):
    """A residual that fades in over calls in training, counted in a buffer or a number."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, 9), nn.GELU(), nn.Linear(9, dim))
        self.buffer = pick.random() < 0.5
        self.steps: Any = 0
        if self.buffer:
            del self.steps
            self.register_buffer("steps", torch.zeros(()))

    def forward(self, h: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        share = (self.steps / 4).clamp(max=1) if self.buffer else min(1.0, self.steps / 4)
        return h + share * self.net(h)


@block("b-weight-ema")
class WeightEma(nn.Module):
    """A slow copy of a Linear that follows it in every training forward, and predicts in eval."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.fast = nn.Linear(dim, dim)
        self.slow = copy.deepcopy(self.fast).requires_grad_(False)

    def forward(self, h: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for s, f in zip(self.slow.parameters(), self.fast.parameters(), strict=True):
                    s.lerp_(f, 0.2)
            return h + torch.tanh(self.fast(h))
        return h + torch.tanh(self.slow(h))


@block("b-recent", mixes=True)
class Recent(nn.Module):
    """A queue of the last batches' means, read by the next one."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.net = nn.Linear(dim, dim)
        self.seen: deque[Tensor] = deque(maxlen=2)

    def forward(self, h: Tensor) -> Tensor:
        out = h + torch.tanh(self.net(h))
        if self.seen:
            out = out + 0.2 * self.seen[0]
        if self.training:
            self.seen.append(h.detach().mean((0, 1)))
        return out


@block("b-memo")
class Memo(nn.Module):
    """A product of weights kept for evaluation, thrown away by `train()`."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(dim, 5, bias=False), nn.Linear(5, dim, bias=False)
        self.kept: Tensor | None = None

    def train(self, mode: bool = True) -> Memo:
        """Forgets."""
        self.kept = None
        return super().train(mode)

    def forward(self, h: Tensor) -> Tensor:
        if self.training:
            return h + self.b(self.a(h))
        if self.kept is None:
            self.kept = (self.b.weight @ self.a.weight).detach()
        return h + F.linear(h, self.kept)


@block("b-functional-weights")
class Functional(nn.Module):
    """functional_call with weights that another module has, or with a mixture of two."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.mix = nn.Parameter(torch.zeros(()))

    def forward(self, h: Tensor) -> Tensor:
        share = self.mix.sigmoid()
        pairs = zip(self.one.named_parameters(), self.two.parameters(), strict=True)
        mixed = {name: a * share + b * (1 - share) for (name, a), b in pairs}
        return h + torch.tanh(functional_call(self.one, mixed, (h,)))


@block("b-borrowed")
class Borrowed(nn.Module):
    """A partial of a static method holds one of the block's own modules."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 8), nn.Linear(8, dim)
        self.held = pick.random() < 0.5
        self.apply_up = partial(type(self)._lift, self.up)

    @staticmethod
    def _lift(up: nn.Linear, x: Tensor) -> Tensor:
        return F.relu(up(x))

    def forward(self, h: Tensor) -> Tensor:
        lift = self.apply_up if self.held else partial(self._lift, self.up)
        return h + self.down(lift(h))


class Scaled(nn.Embedding):
    """An embedding that scales what it gives."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.embedding_dim**0.5 * 0.2


class PlusOne(nn.LayerNorm):
    """A norm whose weight is an offset from one (Gemma)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, 1 + 0.1 * self.weight, self.bias, self.eps)


@block("b-subclasses")
class Subclasses(nn.Module):
    """Subclasses of Linear, Embedding and LayerNorm with forwards of their own."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.buckets = Scaled(6, dim)
        self.norm = PlusOne(dim)
        self.net = nn.Sequential(nn.Linear(dim, 8), nn.SiLU(), LoraLinear(8, dim, False))

    def forward(self, h: Tensor) -> Tensor:
        ids = (h.detach().sum(-1) * 2).floor().long() % 6
        return h + self.net(self.norm(h) + self.buckets(ids))


class Both(NamedTuple):
    """What a norm and its statistics make."""

    x: Tensor
    size: Tensor
    extra: dict[str, Tensor | None]


class Front(nn.Module):
    """Makes a tuple with a dict in it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 10)

    def forward(self, h: Tensor, *, keep: bool = True) -> Both:
        x = self.up(h)
        return Both(x, h.norm(dim=-1, keepdim=True), {"kept": h if keep else None, "none": None})


@block("b-named-tuple")
class Passes(nn.Module):
    """A named tuple with a dict and None between two modules, by keyword."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.front = Front(dim)
        self.back = nn.Linear(10, dim)
        self.keep = pick.random() < 0.5

    def forward(self, h: Tensor) -> Tensor:
        made = self.front(h, keep=self.keep)
        out = self.back(F.silu(made.x)) / (1 + made.size)
        kept = made.extra["kept"]
        return h + out if kept is None else kept + out


@block("b-checkpoint-sequential")
class CheckpointSequential(nn.Module):
    """checkpoint_sequential over three Linears, or a checkpoint that keeps the products."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(dim, 10), nn.GELU(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, dim)
        )
        self.segments = pick.choice((1, 2, 3))

    def forward(self, h: Tensor) -> Tensor:
        if not self.training:
            return h + self.net(h)
        return h + checkpoint_sequential(self.net, self.segments, h, use_reentrant=False)


@block("b-autocast-off")
class AutocastOff(nn.Module):
    """A router that leaves autocast and computes in float64, whatever is around it."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(dim, 3), nn.Linear(dim, 3 * dim)

    def forward(self, h: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            weight = self.gate.weight.double()
            p = F.linear(h.double(), weight, self.gate.bias.double()).softmax(-1).to(h.dtype)
        return h + (torch.tanh(self.up(h)).unflatten(-1, (3, -1)) * p[..., None]).sum(-2)


@block("b-hooked-output")
class HookedOutput(nn.Module):
    """Forward hooks that replace an input, an output, and keep a feature for later."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 8), nn.Linear(8, dim)
        self.up.register_forward_pre_hook(lambda module, args: (args[0] * 1.1,))
        if pick.random() < 0.5:
            self.up.register_forward_hook(self._keep)
        self.down.register_forward_hook(
            lambda module, args, out: out + 0.1 * args[0].mean(-1, keepdim=True)
        )
        self.kept: Tensor | None = None

    def _keep(self, module: nn.Module, args: Any, out: Tensor) -> None:
        self.kept = out

    def forward(self, h: Tensor) -> Tensor:
        out = self.down(torch.tanh(self.up(h)))
        return h + out if self.kept is None else h + out + self.kept.mean(-1, keepdim=True)


@block("b-edited-view")
class EditedView(nn.Module):
    """What one Linear made is edited in place through a view before another reads the whole."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 8), nn.Linear(8, dim)
        self.way = pick.choice(("time", "features", "relu"))

    def forward(self, h: Tensor) -> Tensor:
        x = self.up(h)
        if self.way == "time":
            x[:, -1].mul_(0.5)
        elif self.way == "features":
            x[..., :3].zero_()
        else:
            x = F.relu_(x.view(-1, 8)).view_as(x)
        return h + self.down(x)


@block("b-loop-until")
class LoopUntil(nn.Module):
    """A weight-shared loop whose depth depends on length and mode (universal transformers)."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.cell = nn.Sequential(nn.Linear(dim, 8), nn.Tanh(), nn.Linear(8, dim))
        self.times = nn.Embedding(12, dim)

    def forward(self, h: Tensor) -> Tensor:
        for turn in range(min(h.shape[1], 4) + (not self.training)):
            h = h + 0.3 * self.cell(h + self.times.weight[turn])
        return h


@block("b-skip-norm-gate")
class DeepScale(nn.Module):
    """Layer scale, drop of a residual by index parity, and a weight that is a view of another."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((dim,), 0.1))
        self.both = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(dim, dim)

    def forward(self, h: Tensor) -> Tensor:
        first, second = self.both.weight.split(h.shape[-1])
        gate, bias = F.linear(h, first).sigmoid(), self.both.bias[: h.shape[-1]]
        return h + self.scale * self.down(gate * F.linear(h, second) + bias)
