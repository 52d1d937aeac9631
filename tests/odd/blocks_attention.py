"""Attention in the many ways people write it."""

from __future__ import annotations

import math
import random

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tests.odd.vocabulary import block


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.view(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)


def _joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


@block("attention", easy=True)
class Attention(nn.Module):
    """Separate q, k, v and the fused kernel, causal or not."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.heads = pick.choice((2, 3, 4, 6))
        self.causal = pick.random() < 0.5
        self.norm = nn.LayerNorm(dim)
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))
        self.out = nn.Linear(dim, dim)

    def forward(self, h: Tensor) -> Tensor:
        n = self.norm(h)
        q, k, v = (_heads(m(n), self.heads) for m in (self.q, self.k, self.v))
        return h + self.out(_joined(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)))


@block("attention-fused", easy=True)
class Fused(nn.Module):
    """One qkv Linear, chunked, with softmax by hand."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.heads = pick.choice((2, 3, 4))
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = (_heads(x, self.heads) for x in self.qkv(h).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        mask = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool).tril()
        scores = scores.masked_fill(~mask, float("-inf"))
        return h + self.out(_joined(scores.softmax(-1) @ v))


@block("attention-interleaved")
class Interleaved(nn.Module):
    """One qkv Linear laid out [heads, 3, width], as BLOOM and Falcon have it."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.heads = pick.choice((2, 3))
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, h: Tensor) -> Tensor:
        b, t, d = h.shape
        qkv = self.qkv(h).view(b, t, self.heads, 3, d // self.heads)
        q, k, v = (qkv[..., i, :].transpose(1, 2) for i in range(3))
        out = F.scaled_dot_product_attention(q, k, v)
        return h + self.out(out.transpose(1, 2).reshape(b, t, d))


@block("attention-grouped")
class Grouped(nn.Module):
    """Grouped queries: fewer keys and values, repeated."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, dim // 2, bias=False)
        self.v = nn.Linear(dim, dim // 2, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.way = pick.choice(("repeat", "expand", "enable_gqa"))

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = _heads(self.q(h), 4), _heads(self.k(h), 2), _heads(self.v(h), 2)
        if self.way == "repeat":
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        elif self.way == "expand":
            k, v = (x[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for x in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=self.way == "enable_gqa")
        return h + self.out(_joined(out))


@block("attention-einsum")
class Einsum(nn.Module):
    """Weights as [dim, heads, width] parameters, all products as einsums."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, dim, 3, dim // 3) * dim**-0.5)
        self.o = nn.Parameter(torch.randn(3, dim // 3, dim) * dim**-0.5)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = torch.einsum("btd,cdhe->cbthe", h, self.w).unbind(0)
        p = torch.einsum("bqhe,bkhe->bhqk", q, k).div(q.size(-1) ** 0.5).softmax(-1)
        return h + torch.einsum("bhqk,bkhe,hed->bqd", p, v, self.o)


@block("attention-module")
class Module(nn.Module):
    """nn.MultiheadAttention, batch first or not, with or without weights."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.first = pick.random() < 0.6
        self.weights = pick.random() < 0.3
        self.attention = nn.MultiheadAttention(
            dim, 3, batch_first=self.first, add_bias_kv=pick.random() < 0.2
        )

    def forward(self, h: Tensor) -> Tensor:
        x = h if self.first else h.transpose(0, 1)
        out, _ = self.attention(x, x, x, need_weights=self.weights)
        return h + (out if self.first else out.transpose(0, 1))


class Doubled(nn.MultiheadAttention):
    """A subclass whose forward changes what super gives."""

    def forward(self, query: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, None]:
        out, _ = super().forward(query, query, query, need_weights=False)
        return out * 2, None


@block("attention-subclass")
class Subclassed(nn.Module):
    """A MultiheadAttention subclass with another forward."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.attention = Doubled(dim, 2, batch_first=True)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.attention(h)[0]


@block("encoder-layer")
class Encoder(nn.Module):
    """nn.TransformerEncoderLayer, without dropout."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            dim, 2, 20, dropout=0.0, batch_first=True, norm_first=pick.random() < 0.5
        )

    def forward(self, h: Tensor) -> Tensor:
        return self.layer(h)


@block("attention-rotary")
class Rotary(nn.Module):
    """Rotary positions from a buffer, and norms of queries and keys."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(dim // 3), nn.RMSNorm(dim // 3)
        self.register_buffer("freqs", 100.0 ** -torch.linspace(0, 1, dim // 6), persistent=False)

    def _turn(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[2], dtype=x.dtype)[:, None] * self.freqs.to(x.dtype)
        cos, sin = angles.cos(), angles.sin()
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = (_heads(x, 3) for x in self.qkv(h).split(h.shape[-1], -1))
        q, k = self._turn(self.q_norm(q)), self._turn(self.k_norm(k))
        return h + self.out(_joined(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


@block("attention-alibi")
class Alibi(nn.Module):
    """Slopes per head from a buffer, written into the scores in place."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.register_buffer("slopes", torch.tensor([0.5, 0.25, 0.125]))

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = (_heads(m(h), 3) for m in (self.q, self.k, self.v))
        scores = torch.matmul(q, k.mT) * (q.shape[-1] ** -0.5)
        place = torch.arange(h.shape[1])
        distance = (place[:, None] - place).abs().to(h.dtype)
        scores -= self.slopes.to(h.dtype)[:, None, None] * distance
        return h + self.out(_joined(torch.softmax(scores, -1).matmul(v)))


@block("attention-masked", masked=True)
class Masked(nn.Module):
    """Padding masks turned into an additive bias of finfo.min, or a bool mask."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.additive = pick.random() < 0.5
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (_heads(m(h), 2) for m in (self.q, self.k, self.v))
        keep = mask[:, None, None, :]
        bias: Tensor = keep
        if self.additive:
            bias = (1.0 - keep.to(h.dtype)) * torch.finfo(h.dtype).min
        return h + self.out(_joined(F.scaled_dot_product_attention(q, k, v, attn_mask=bias)))


@block("attention-key-padding", masked=True)
class KeyPadding(nn.Module):
    """nn.MultiheadAttention with a key padding mask."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, 2, batch_first=True)

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        return h + self.attention(h, h, h, key_padding_mask=~mask, need_weights=False)[0]


@block("attention-cross")
class Cross(nn.Module):
    """Learned latents attend to the tokens, and the tokens to the latents."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(3, dim))
        self.read = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.write = nn.MultiheadAttention(dim, 3, batch_first=True, kdim=dim, vdim=dim)

    def forward(self, h: Tensor) -> Tensor:
        latents = self.latents.expand(h.shape[0], -1, -1)
        latents, _ = self.read(latents, h, h)
        return h + self.write(h, latents, latents)[0]


@block("attention-linear")
class LinearAttention(nn.Module):
    """Kernel attention: an outer product state, gated per head by a fixed view."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.gate = nn.Linear(dim, 3)

    def forward(self, h: Tensor) -> Tensor:
        b, t, _ = h.shape
        q, k = (F.elu(m(h)).add(1).view(b, t, 3, self.dim // 3) for m in (self.q, self.k))
        v = self.v(h).view(b, t, 3, self.dim // 3)
        state = torch.einsum("bthe,bthf->bhef", k, v) / t
        out = torch.einsum("bthe,bhef->bthf", q, state) * self.gate(h).sigmoid().unsqueeze(-1)
        return h + self.out(out.reshape(b, t, self.dim))


@block("attention-window")
class Window(nn.Module):
    """Windows folded into the batch dim, as Swin does; padded to whole windows."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, h: Tensor) -> Tensor:
        b, t, d = h.shape
        pad = -t % 2
        x = F.pad(h, (0, 0, 0, pad)).reshape(b * ((t + pad) // 2), 2, d)
        q, k, v = (_heads(y, 2) for y in self.qkv(x).chunk(3, -1))
        x = self.out(_joined(F.scaled_dot_product_attention(q, k, v)))
        return h + x.reshape(b, t + pad, d)[:, :t]
