"""Attention as papers and notebooks have it: biases, rotations, caches, sinks, gates, latents."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tests.odd.vocabulary import block


def _cut(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _join(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


class _Projected(nn.Module):
    """Queries, keys, values and an output."""

    def __init__(self, dim: int, heads: int, kv_heads: int | None = None) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads or heads
        self.width = dim // heads
        self.wq = nn.Linear(dim, dim)
        self.wk = nn.Linear(dim, self.kv_heads * self.width)
        self.wv = nn.Linear(dim, self.kv_heads * self.width)
        self.wo = nn.Linear(dim, dim)

    def qkv(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        kv = self.kv_heads
        return _cut(self.wq(h), self.heads), _cut(self.wk(h), kv), _cut(self.wv(h), kv)


@block("b-window-bias")
class WindowBias(_Projected):
    """A sliding window whose mask is kept from call to call, by length."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(dim, pick.choice((2, 3, 4)))
        self.reach = pick.choice((1, 2))
        self.masks: dict[int, Tensor] = {}

    def forward(self, h: Tensor) -> Tensor:
        t = h.shape[1]
        if t not in self.masks:
            place = torch.arange(t)
            self.masks[t] = (place[:, None] - place[None]).abs() <= self.reach
        q, k, v = self.qkv(h)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.masks[t])
        return h + self.wo(_join(out))


@block("b-relative-table")
class RelativeTable(_Projected):
    """T5's relative positions: an embedding of distances with a column for each head."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(dim, pick.choice((2, 4)))
        self.table = nn.Embedding(9, self.heads)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(h)
        place = torch.arange(h.shape[1])
        bias = self.table((place[None] - place[:, None]).clamp(-4, 4) + 4).permute(2, 0, 1)
        p = (q @ k.mT + bias).softmax(-1)
        return h + self.wo(_join(p @ v))


@block("b-relative-shift")
class RelativeShift(_Projected):
    """Transformer-XL: content and position terms, the second shifted by a pad and a view."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(dim, 3)
        self.wr = nn.Linear(dim, dim, bias=False)
        self.u = nn.Parameter(torch.randn(3, 1, dim // 3) * 0.3)
        self.w = nn.Parameter(torch.randn(3, 1, dim // 3) * 0.3)

    def forward(self, h: Tensor) -> Tensor:
        b, t, d = h.shape
        place = torch.arange(t, dtype=h.dtype)[:, None] / torch.arange(1, d + 1)
        r = self.wr(torch.sin(place)).view(t, 3, d // 3).transpose(0, 1)
        q, k, v = self.qkv(h)
        moved = (q + self.w) @ r.mT
        moved = F.pad(moved, (1, 0)).view(b, 3, t + 1, t)[:, :, 1:]
        p = (((q + self.u) @ k.mT + moved) / math.sqrt(d)).softmax(-1)
        return h + self.wo(_join(p @ v))


@block("b-alibi-learned")
class LearnedSlopes(_Projected):
    """ALiBi whose slopes are learned, one for each head, as a parameter [heads, 1, 1]."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(dim, pick.choice((3, 4)))
        self.slopes = nn.Parameter(2.0 ** -torch.arange(1.0, self.heads + 1)[:, None, None])

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(h)
        place = torch.arange(h.shape[1])
        far = (place[None] - place[:, None]).abs()
        p = (q @ k.mT / self.width**0.5 - self.slopes * far).softmax(-1)
        return h + self.wo(_join(p @ v))


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


@block("b-rotary-complex")
class RotaryComplex(_Projected):
    """Rotary positions as complex numbers, the table grown when a longer batch comes."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(dim, pick.choice((2, 3)), None)
        self.register_buffer("table", torch.zeros(0, self.width // 2), persistent=False)

    def forward(self, h: Tensor) -> Tensor:
        t = h.shape[1]
        if self.table.shape[0] < t:
            speeds = 0.1 ** torch.arange(self.width // 2, dtype=h.dtype)
            self.table = torch.outer(torch.arange(t, dtype=h.dtype), speeds)
        q, k, v = self.qkv(h)
        q, k = _turned(q, self.table[:t]), _turned(k, self.table[:t])
        return h + self.wo(_join(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


@block("b-rotary-partial")
class RotaryPartial(_Projected):
    """Rotary on half of each head's width (GPT-J, NeoX), with learned frequencies."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(dim, 3, pick.choice((1, 3)))
        self.speeds = nn.Parameter(torch.tensor([1.0]))

    def _turn(self, x: Tensor) -> Tensor:
        turned, left = x.split((2, self.width - 2), -1)
        angles = torch.arange(x.shape[2])[:, None] * self.speeds
        first, second = turned.chunk(2, -1)
        c, s = angles.cos(), angles.sin()
        return torch.cat((first * c - second * s, first * s + second * c, left), -1)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(h)
        out = F.scaled_dot_product_attention(
            self._turn(q), self._turn(k), v, enable_gqa=self.kv_heads != self.heads
        )
        return h + self.wo(_join(out))


@block("b-multi-query")
class MultiQuery(nn.Module):
    """One head of keys and values for all queries, fused in one Linear with three sections."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.heads, self.width = pick.choice((3, 4)), dim
        self.each = dim // self.heads
        self.fused = nn.Linear(dim, dim + 2 * self.each)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self.fused(h).split((self.width, self.each, self.each), -1)
        q = _cut(q, self.heads)
        p = torch.einsum("bhqd,bkd->bhqk", q, k).mul(self.each**-0.5).softmax(-1)
        return h + self.out(_join(torch.einsum("bhqk,bkd->bhqd", p, v)))


@block("b-linear-causal")
class LinearCausal(_Projected):
    """Linear attention with elu + 1, causal by a cumulative sum of outer products."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(dim, pick.choice((2, 3)))

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(h)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = torch.einsum("bhtd,bhte->bhtde", k, v).cumsum(2)
        top = torch.einsum("bhtd,bhtde->bhte", q, state)
        return h + self.wo(_join(top / (q * k.cumsum(2)).sum(-1, keepdim=True)))


@block("b-perceiver")
class Perceiver(nn.Module):
    """Learned latents read the tokens, and the tokens read the latents back."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(3, dim))
        self.read = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.write = _Projected(dim, 3)

    def forward(self, h: Tensor) -> Tensor:
        z = self.latents.expand(h.shape[0], -1, -1)
        z = z + self.read(z, h, h, need_weights=False)[0]
        w = self.write
        q, k, v = _cut(w.wq(h), 3), _cut(w.wk(z), 3), _cut(w.wv(z), 3)
        return h + w.wo(_join(F.scaled_dot_product_attention(q, k, v)))


@block("b-cosine")
class Cosine(_Projected):
    """Swin v2: cosine scores with a learned temperature for each head, clamped."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(dim, pick.choice((2, 3, 4)))
        self.log_scale = nn.Parameter(torch.full((self.heads, 1, 1), 1.2))
        self.top = pick.choice((1.3, 5.0))

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(h)
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT
        scores = scores * self.log_scale.clamp(max=self.top).exp()
        return h + self.wo(_join(scores.softmax(-1) @ v))


@block("b-sinks")
class Sinks(_Projected):
    """Attention sinks: a learned logit for each head joins the softmax and is dropped after it."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(dim, 4, pick.choice((2, 4)))
        self.sinks = nn.Parameter(torch.randn(4))

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(h)
        k, v = (x.repeat_interleave(4 // self.kv_heads, 1) for x in (k, v))
        scores = q @ k.mT / self.width**0.5
        sink = self.sinks.view(1, -1, 1, 1).expand(h.shape[0], -1, h.shape[1], 1)
        p = torch.cat((scores, sink), -1)
        p = (p - p.amax(-1, keepdim=True)).softmax(-1)[..., :-1]
        return h + self.wo(_join(p @ v))


@dataclass
class Cache:
    """Keys and values of the tokens before."""

    k: Tensor
    v: Tensor

    def grown(self, k: Tensor, v: Tensor) -> Cache:
        """Itself with more tokens."""
        return Cache(torch.cat((self.k, k), 2), torch.cat((self.v, v), 2))


@block("b-cached-chunks")
class CachedChunks(_Projected):
    """Tokens come in two chunks; the second reads the first's keys from a cache object."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(dim, pick.choice((2, 3)))

    def forward(self, h: Tensor) -> Tensor:
        cache, made = None, []
        for part in h.tensor_split(2, 1):
            q, k, v = self.qkv(part)
            cache = Cache(k, v) if cache is None else cache.grown(k, v)
            made.append(self.wo(_join(F.scaled_dot_product_attention(q, cache.k, cache.v))))
        return h + torch.cat(made, 1)


@block("b-talking-heads")
class Talking(_Projected):
    """Heads are mixed by a small matrix before and after the softmax."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(dim, 4)
        self.before, self.after = (nn.Linear(4, 4, bias=False) for _ in range(2))
        self.way = pick.choice(("einsum", "module"))

    def _talk(self, x: Tensor, mix: nn.Linear) -> Tensor:
        if self.way == "module":
            return mix(x.movedim(1, -1)).movedim(-1, 1)
        return torch.einsum("bhqk,gh->bgqk", x, mix.weight)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(h)
        p = self._talk(q @ k.mT / 2, self.before).softmax(-1)
        return h + self.wo(_join(self._talk(p, self.after) @ v))


@block("b-gated-heads")
class GatedHeads(_Projected):
    """A gate for each head (or for all its features) multiplies what the heads made."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(dim, 3)
        self.wide = pick.random() < 0.5
        self.gate = nn.Linear(dim, dim if self.wide else 3)

    def forward(self, h: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(*self.qkv(h))
        gate = self.gate(h).sigmoid()
        if self.wide:
            return h + self.wo(_join(out) * gate)
        return h + self.wo(_join(out * gate.transpose(1, 2)[..., None]))


@block("b-head-norms")
class HeadNorms(_Projected):
    """Queries and keys normed by head (with one weight or one for each), outputs with GroupNorm."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(dim, 3)
        self.each = pick.random() < 0.5
        shape = (3, 1, dim // 3) if self.each else (dim // 3,)
        self.qw, self.kw = (nn.Parameter(1 + 0.2 * torch.randn(shape)) for _ in range(2))
        self.after = nn.GroupNorm(3, dim)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(h)
        q, k = (x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt() for x in (q, k))
        p = ((q * self.qw) @ (k * self.kw).mT / 2).softmax(-1)
        made = self.after(_join(p @ v).flatten(0, 1)).view_as(h)
        return h + self.wo(made)


@block("b-differential")
class Differential(nn.Module):
    """The difference of two softmaxes, its weight made of four learned vectors."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.heads = 2
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.lambdas = nn.Parameter(torch.randn(4, dim // 4) * 0.1)

    def forward(self, h: Tensor) -> Tensor:
        q, k = (_cut(m(h), 2 * self.heads) for m in (self.q, self.k))
        v = _cut(self.v(h), self.heads)
        p = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1).unflatten(1, (self.heads, 2))
        a, b, c, d = self.lambdas
        weight = (a * b).sum().exp() - (c * d).sum().exp() + 0.3
        made = (p[:, :, 0] - weight * p[:, :, 1]) @ v
        made = F.rms_norm(made, made.shape[-1:]) * 0.7
        return h + self.o(_join(made))


@block("b-low-rank-keys")
class LatentKeys(nn.Module):
    """Keys and values from a narrow latent (MLA), a rotary part shared by all heads beside it."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.heads = 3
        self.q = nn.Linear(dim, 3 * 6, bias=False)
        self.down = nn.Linear(dim, 6 + 2, bias=False)
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 3 * (4 + 4), bias=False)
        self.o = nn.Linear(3 * 4, dim, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        q = _cut(self.q(h), 3)
        latent, shared = self.down(h).split((6, 2), -1)
        k, v = _cut(self.up(self.norm(latent)), 3).chunk(2, -1)
        k = torch.cat((k, shared[:, None].expand(-1, 3, -1, -1)), -1)
        return h + self.o(_join(F.scaled_dot_product_attention(q, k, v)))


@block("b-heads-loop")
class HeadsLoop(nn.Module):
    """Each head is a module of its own, kept in a ModuleList; outputs are concatenated."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.qkvs = nn.ModuleList([nn.Linear(dim, 12) for _ in range(3)])
        self.out = nn.Linear(12, dim)
        self.backwards = pick.random() < 0.5

    def _each(self, h: Tensor) -> Iterator[Tensor]:
        for module in reversed(self.qkvs) if self.backwards else self.qkvs:
            q, k, v = module(h).chunk(3, -1)
            yield (q @ k.mT / 2).softmax(-1) @ v

    def forward(self, h: Tensor) -> Tensor:
        return h + self.out(torch.cat([*self._each(h)], -1))


@block("b-top-keys")
class TopKeys(_Projected):
    """Only the best keys of each query count: a top-k, a scatter of infinities, ties at zero."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(dim, pick.choice((2, 3)))

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(h)
        scores = q @ k.mT
        best = scores.topk(min(3, scores.shape[-1]), -1).indices
        kept = torch.full_like(scores, float("-inf")).scatter(-1, best, 0.0)
        return h + self.wo(_join((scores + kept).softmax(-1) @ v))


@block("b-key-mean")
class KeyMean(_Projected):
    """Heads centred on the mean of all heads, or keys on the mean over time."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(dim, 4)
        self.dim = pick.choice((1, 2))

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self.qkv(h)
        k = k - k.mean(self.dim, keepdim=True)
        return h + self.wo(_join(F.scaled_dot_product_attention(q, k, v)))


@block("b-head-scale-buffer")
class HeadBuffer(_Projected):
    """A buffer of a number for each head, which attention multiplies by and training moves."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(dim, 4)
        self.register_buffer("gains", torch.linspace(0.5, 1.5, 4)[:, None, None])

    def forward(self, h: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(*self.qkv(h)) * self.gains.clone()
        if self.training:
            self.gains.mul_(0.9).add_(0.1)
        return h + self.wo(_join(out))
