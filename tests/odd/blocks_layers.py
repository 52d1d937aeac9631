"""Layers and experts as papers and notebooks have them."""

from __future__ import annotations

import random
from collections import OrderedDict

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, weight_norm
from torch.utils.checkpoint import checkpoint

import whale as wh
from tests.odd.vocabulary import block


@block("b-glu-kinds")
class Glus(nn.Module):
    """GLUs of many kinds, fused, with the halves in either order or interleaved."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 20)
        self.down = nn.Linear(10, dim)
        self.act = pick.choice((torch.sigmoid, F.silu, F.relu, F.gelu, torch.tanh, F.softplus))
        self.way = pick.choice(("halves", "turned", "pairs", "glu"))

    def forward(self, h: Tensor) -> Tensor:
        x = self.up(h)
        if self.way == "glu":
            return h + self.down(F.glu(x))
        if self.way == "pairs":
            a, b = x[..., ::2], x[..., 1::2]
        else:
            a, b = x.chunk(2, -1)
        if self.way == "turned":
            a, b = b, a
        return h + self.down(self.act(a) * b)


@block("b-squared-relu")
class SquaredRelu(nn.Module):
    """A pair whose middle is normed, or whose features are squared, shifted or rolled."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 16), nn.Linear(16, dim)
        self.norm = nn.LayerNorm(16)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 16))
        self.way = pick.choice(("norm", "square", "roll", "gain", "max"))

    def forward(self, h: Tensor) -> Tensor:
        x = F.relu(self.up(h)).square()
        if self.way == "norm":
            x = self.norm(x)
        elif self.way == "roll":
            x = x + x.roll(1, -1)
        elif self.way == "gain":
            x = x * self.gain
        elif self.way == "max":
            x = x / (1 + x.amax(-1, keepdim=True))
        return h + self.down(x)


@block("b-squeeze-excite")
class Excite(nn.Module):
    """Squeeze and excite: the mean over time gates the features."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.AdaptiveAvgPool1d(1), nn.Flatten(1), nn.Linear(dim, 4), nn.ReLU(), nn.Linear(4, dim)
        )

    def forward(self, h: Tensor) -> Tensor:
        return h * (1 + self.net(h.transpose(1, 2)).sigmoid().unsqueeze(1))


@block("b-time-mixer")
class TimeMixer(nn.Module):
    """A mixer over time: a triangle of weights, cut to the length there is."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 16)
        self.up, self.down = nn.Linear(dim, 8), nn.Linear(8, dim)

    def forward(self, h: Tensor) -> Tensor:
        t = h.shape[1]
        mixed = F.linear(h.mT, self.mix.weight[:t, :t].tril(), self.mix.bias[:t]).mT
        return h + self.down(F.gelu(self.up(mixed)))


@block("b-gated-conv")
class GatedConv(nn.Module):
    """Depthwise and grouped convolutions with a gate between two pointwise ones (Conformer)."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.point = nn.Conv1d(dim, 2 * dim, 1)
        groups = pick.choice((dim, 4, 1))
        self.deep = nn.Conv1d(dim, dim, 3, padding="same", groups=groups)
        self.norm = nn.GroupNorm(3, dim)
        self.out = nn.Conv1d(dim, dim, 1)

    def forward(self, h: Tensor) -> Tensor:
        x = F.glu(self.point(h.mT), 1)
        return h + self.out(F.silu(self.norm(self.deep(x)))).mT


@block("b-hypernetwork")
class Hyper(nn.Module):
    """A Linear makes the weights that the row's tokens are multiplied by."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.make = nn.Linear(dim, 3 * dim)
        self.down = nn.Linear(dim, 3)

    def forward(self, h: Tensor) -> Tensor:
        weights = self.make(h.mean(1)).view(h.shape[0], -1, 3) * 0.3
        return h + torch.bmm(torch.tanh(self.down(h)), weights.mT)


@block("b-film")
class Film(nn.Module):
    """Scale and shift of a norm without weights come from the first token (FiLM, adaLN-zero)."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.make = nn.Sequential(nn.SiLU(), nn.Linear(dim, 3 * dim))
        self.net = nn.Sequential(
            OrderedDict(
                up=nn.Linear(dim, 10), act=nn.GELU(approximate="tanh"), down=nn.Linear(10, dim)
            )
        )
        if pick.random() < 0.5:
            nn.init.zeros_(self.make[1].weight)

    def forward(self, h: Tensor) -> Tensor:
        shift, scale, gate = self.make(h[:, :1]).chunk(3, -1)
        return h + gate * self.net(self.norm(h) * (1 + scale) + shift)


@block("b-experts-einsum")
class ExpertsEinsum(nn.Module):
    """Switch by hand: one-hot dispatch and combine, einsums over stacked weights, a shared one."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, 4, bias=False)
        self.w1 = nn.Parameter(torch.randn(4, dim, 6) * dim**-0.5)
        self.b1 = nn.Parameter(torch.randn(4, 6) * 0.1)
        self.w2 = nn.Parameter(torch.randn(4, 6, dim) * 6**-0.5)
        self.shared = nn.Sequential(nn.Linear(dim, 6), nn.SiLU(), nn.Linear(6, dim))

    def forward(self, h: Tensor) -> Tensor:
        p = self.gate(h).softmax(-1)
        best = F.one_hot(p.argmax(-1), 4).to(h.dtype)
        inner = torch.einsum("btd,bte,edf->betf", h, best, self.w1) + self.b1[:, None]
        out = torch.einsum("betf,efd,bte->btd", F.silu(inner), self.w2, best * p)
        return h + out + self.shared(h)


class Stack(nn.Module):
    """Stacked experts with Hugging Face's arguments."""

    def __init__(self, dim: int, kind: str) -> None:
        super().__init__()
        self.num_experts, self.kind = 4, kind
        self.up_proj = nn.Parameter(torch.randn(4, dim, 6) * dim**-0.5)
        self.down_proj = nn.Parameter(torch.randn(4, 6, dim) * 6**-0.5)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for expert, (up, down) in enumerate(zip(self.up_proj, self.down_proj, strict=True)):
            token, slot = torch.where(top_k_index == expert)
            if not len(token):
                continue
            x = hidden_states[token]
            y = F.silu(x @ up) @ down
            if self.kind == "normed":
                y = F.layer_norm(y, y.shape[-1:])
            elif self.kind == "centred":
                y = y - 0.5 * y.mean(0)
            elif self.kind == "crowded":
                y = y / len(token) ** 0.5
            elif self.kind == "residual":
                y = y + x
            out.index_add_(0, token, y * top_k_weights[token, slot, None])
        return out


@block("b-stack-reads-crowd", mixes=True)
class StackMixes(nn.Module):
    """Stacked experts that look at how many tokens they have, or at their mean."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, 4)
        self.experts = Stack(dim, pick.choice(("centred", "crowded")))

    def forward(self, h: Tensor) -> Tensor:
        flat = h.reshape(-1, h.shape[-1])
        weights, ids = self.gate(flat).softmax(-1).topk(2, -1)
        return h + self.experts(flat, ids, weights).view_as(h)


@block("b-stack-norm")
class StackNorm(nn.Module):
    """Stacked experts with a norm or a residual inside; DeepSeek's groups choose first."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, 4)
        self.experts = Stack(dim, pick.choice(("normed", "residual", "plain")))
        self.register_buffer("correction", torch.linspace(-0.1, 0.1, 4))

    def forward(self, h: Tensor) -> Tensor:
        flat = h.reshape(-1, h.shape[-1])
        scores = self.gate(flat).sigmoid()
        biased = (scores + self.correction).view(-1, 2, 2)
        group = biased.sum(-1).argmax(-1, keepdim=True)
        closed = torch.ones(len(flat), 2, dtype=torch.bool).scatter(1, group, False)
        ids = biased.masked_fill(closed[..., None], 0.0).flatten(1).topk(2, -1).indices
        weights = scores.gather(1, ids)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-9) * 1.5
        return h + self.experts(flat, ids, weights).view_as(h)


@block("b-moe-capacity-hand", mixes=True)
class HandCapacity(nn.Module):
    """Capacity by hand: a cumulative count of tokens, those past the room are dropped."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, 3)
        self.experts = nn.ModuleList([nn.Linear(dim, dim) for _ in range(3)])

    def forward(self, h: Tensor) -> Tensor:
        flat = h.flatten(0, 1)
        p = self.gate(flat).softmax(-1)
        hot = F.one_hot(p.argmax(-1), 3)
        room = len(flat) // 3 + 1
        hot = hot * ((hot.cumsum(0) <= room) & (hot > 0))
        made = torch.stack([e(flat) for e in self.experts], 1)
        return h + (made * (hot * p)[..., None]).sum(1).view_as(h)


@block("b-soft-moe")
class SoftMoe(nn.Module):
    """Soft MoE: slots are mixtures of a row's tokens, experts a stack or modules."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.phi = nn.Parameter(torch.randn(dim, 4) * 0.5)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(dim, 6), nn.GELU(), nn.Linear(6, dim)) for _ in range(2)]
        )

    def forward(self, h: Tensor) -> Tensor:
        logits = h @ self.phi
        slots = logits.softmax(1).mT @ h
        parts = slots.chunk(2, 1)
        made = torch.cat([e(s) for e, s in zip(self.experts, parts, strict=True)], 1)
        return h + logits.softmax(-1) @ made


@block("b-moe-called-twice")
class MoeTwice(nn.Module):
    """One wh.nn.MoE is called twice, and once with tokens turned around; its gate is scaled."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.moe = wh.nn.MoE(
            dim, 6, 4, top_k=pick.choice((1, 2)), balance=pick.choice(("none", "bias"))
        )
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.moe(h) * self.gain
        return h + self.moe(h.flip(1)).flip(1)


@block("b-moe-checkpointed")
class MoeCheckpointed(nn.Module):
    """wh.nn.MoE of experts by columns inside a checkpoint, next to a Linear pair."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        by = pick.choice(("columns", "experts"))
        self.moe = wh.nn.MoE(dim, 8, 4, top_k=2, split_by=by, gated=pick.random() < 0.5)
        self.up, self.down = nn.Linear(dim, 8), nn.Linear(8, dim)

    def _both(self, h: Tensor) -> Tensor:
        return self.moe(h) + self.down(F.silu(self.up(h)))

    def forward(self, h: Tensor) -> Tensor:
        return h + checkpoint(self._both, h, use_reentrant=False)


@block("b-weight-normed")
class WeightNormed(nn.Module):
    """weight_norm or orthogonal on one Linear of a pair, plain on the other."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.up = weight_norm(nn.Linear(dim, dim))
        self.mid = orthogonal(nn.Linear(dim, dim)) if pick.random() < 0.3 else nn.Linear(dim, dim)
        self.down = nn.Linear(dim, dim)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(torch.tanh(self.mid(torch.tanh(self.up(h)))))


class LoraLinear(nn.Linear):
    """A subclass of Linear with an adapter beside it."""

    def __init__(self, wide: int, out: int, merged: bool) -> None:
        super().__init__(wide, out)
        self.weight.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, wide) * 0.3)
        self.b = nn.Parameter(torch.randn(out, 2) * 0.3)
        self.merged = merged

    def forward(self, x: Tensor) -> Tensor:
        if self.merged:
            return F.linear(x, self.weight + self.b @ self.a, self.bias)
        return super().forward(x) + x @ self.a.T @ self.b.T * 0.5


@block("b-lora")
class Lora(nn.Module):
    """LoRA by hand on the Linears of an MLP, merged or beside; the base is frozen."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.up = LoraLinear(dim, 10, pick.random() < 0.5)
        self.down = LoraLinear(10, dim, pick.random() < 0.5)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(F.gelu(self.up(h)))


@block("b-tied-transpose")
class TiedTranspose(nn.Module):
    """An autoencoder: the decoder is the encoder's weight transposed, with a bias of its own."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.encode = nn.Linear(dim, 7)
        self.bias = nn.Parameter(torch.zeros(dim))

    def forward(self, h: Tensor) -> Tensor:
        return h + F.linear(torch.relu(self.encode(h)), self.encode.weight.T, self.bias)


class StandardConv(nn.Conv1d):
    """Weight standardisation."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        w = (w - w.mean((1, 2), keepdim=True)) / (w.std((1, 2), keepdim=True) + 1e-5)
        return self._conv_forward(x, w, self.bias)
