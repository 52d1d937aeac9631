"""More models whose attention is hard to split right: products written out, under names of no sort.

Place in the flow: as `attentions`, whose `Case` they are. Each kind is something that models of
Hugging Face do, in code of our own; the traps look like them and mix heads, or read a part where
the whole is meant.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tests.parity.attentions import DIM, HEADS, TOKENS, WIDTH, Case, Model


class Scale(nn.Module):
    """A norm over a head's width, with a weight that is 1 when it is 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        normed = x * torch.rsqrt(x.to(self.weight.dtype).pow(2).mean(-1, keepdim=True) + 1e-5)
        return normed * (1.0 + self.weight)


class Eager(nn.Module):
    """Attention with its product written out, and one more thing to get right."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.parts = kind, HEADS
        self.a, self.b, self.c, self.d = (nn.Linear(DIM, DIM, bias=i % 2 == 0) for i in range(4))
        self.drop = nn.Dropout(0.4)
        self.of_head = Scale(WIDTH) if "norm" in kind else None
        self.of_all = Scale(DIM) if kind == "wide scale" else nn.Identity()
        if kind == "sinks":
            self.sinks = nn.Parameter(torch.randn(HEADS))
        if "slopes" in kind:
            self.register_buffer("slopes", 0.5 ** torch.arange(1.0, HEADS + 1))
        if kind == "learned slopes":
            self.slopes = nn.Parameter(torch.randn(HEADS))
        if kind == "talking heads":
            self.mix = nn.Parameter(torch.randn(HEADS, HEADS))

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Any:
        B, T, _ = x.shape  # noqa: N806
        rows = self.of_all(self.a(x)), self.of_all(self.b(x)), self.c(x)
        q, k, v = (t.view(B, T, self.parts, -1).transpose(1, 2) for t in rows)
        if self.of_head is not None:
            q, k = self.of_head(q), self.of_head(k)
        if self.kind == "norm used on whole values too":
            assert self.of_head is not None
            x = self.of_head(x.view(B, T, -1, WIDTH)).flatten(2)
        scores = torch.matmul(q, k.transpose(2, 3)) / WIDTH**0.5
        if self.kind == "merged":
            flat = [t.reshape(B * self.parts, T, -1) for t in (q, k)]
            assert bias is not None
            whole = bias.expand(B, HEADS, T, T).reshape(B * HEADS, T, T)
            scores = torch.baddbmm(whole, flat[0], flat[1].mT, alpha=0.4).view(B, self.parts, T, T)
        elif bias is not None:
            scores = scores + bias
        if "slopes" in self.kind:
            far = (torch.arange(T)[:, None] - torch.arange(T)).abs().to(x.dtype)
            scores = scores - self.slopes.view(-1, 1, 1) * far
        if self.kind == "soft cap":
            scores = torch.tanh(scores / 3.0) * 3.0
        if self.kind == "causal":
            hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden, torch.finfo(x.dtype).min)
        if self.kind == "sinks":
            sinks = self.sinks.reshape(1, -1, 1, 1).expand(B, -1, T, -1)
            scores = torch.cat([scores, sinks], dim=-1)
            scores = scores - scores.max(dim=-1, keepdim=True).values
        if self.kind == "talking heads":
            scores = torch.einsum("bhts,hg->bgts", scores, self.mix)
        chances = F.softmax(scores, dim=-1)
        if self.kind == "sinks":
            chances = chances[..., :-1]
        if self.kind == "dropout module on chances":
            chances = self.drop(chances)
        if self.kind == "dropout function on chances":
            chances = F.dropout(chances, 0.4, self.training)
        y = torch.matmul(chances, v).transpose(1, 2).reshape(B, T, -1)
        y = self.d(y)
        if self.kind == "norm used on whole values too":
            y = y + x
        return (y, chances) if self.kind == "chances returned" else y


class Sections(nn.Module):
    """Queries, keys and values of unequal width in one Linear, clamped before they are apart."""

    def __init__(self, *, repeats: bool) -> None:
        super().__init__()
        self.repeats, self.groups = repeats, HEADS // 2
        self.all, self.back = nn.Linear(DIM, DIM + 2 * DIM // 2), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape  # noqa: N806
        made = self.all(x).clamp(min=-2.0, max=2.0)
        low, width = self.groups * 2 * WIDTH, self.groups * WIDTH
        q, k, v = made[..., :low], made[..., low : low + width], made[..., low + width :]
        if self.repeats:
            q, k, v = made.split([low, width, width], dim=-1)
        q, k, v = (t.reshape(B, T, -1, WIDTH).transpose(1, 2) for t in (q, k, v))
        k, v = (t[:, :, None].expand(-1, -1, 2, -1, -1).reshape(B, -1, T, WIDTH) for t in (k, v))
        chances = (q @ k.mT).softmax(-1)
        return self.back((chances @ v).transpose(1, 2).flatten(2))


class Latent(nn.Module):
    """Keys and values out of a narrow Linear, of which a part is a key that all heads share."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.norm = nn.Linear(DIM, 5 + 2), nn.LayerNorm(5)
        self.up, self.ask = nn.Linear(5, 2 * DIM), nn.Linear(DIM, HEADS * (WIDTH + 2))
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape  # noqa: N806
        narrow, shared = self.down(x).split([5, 2], dim=-1)
        k, v = self.up(self.norm(narrow)).view(B, T, -1, 2 * WIDTH).transpose(1, 2).chunk(2, -1)
        q = self.ask(x).view(B, T, -1, WIDTH + 2).transpose(1, 2)
        shared = (shared * 0.5).unsqueeze(1).expand(-1, k.shape[1], -1, -1)
        y = F.scaled_dot_product_attention(q, torch.cat([k, shared], -1), v)
        return self.out(y.transpose(1, 2).reshape(B, T, -1))


class Adapted(nn.Module):
    """A Linear and a low-rank one beside it, as adapters do."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.base, self.low, self.high = nn.Linear(into, out), nn.Linear(into, 3), nn.Linear(3, out)
        self.base.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.high(self.low(x)) * 0.7


class Adapters(nn.Module):
    """Attention and a gated pair with adapters everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (Adapted(DIM, DIM) for _ in range(4))
        self.both, self.down = Adapted(DIM, 28), Adapted(14, DIM)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape  # noqa: N806
        q, k, v = (p(x).view(B, T, -1, WIDTH).transpose(1, 2) for p in (self.a, self.b, self.c))
        x = x + self.d(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        gate, up = self.both(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Own(nn.Linear):
    """A Linear that writes itself out."""

    def forward(self, x: Tensor) -> Tensor:
        made = x @ self.weight.T
        return made if self.bias is None else made + self.bias


class Twice(nn.Linear):
    """A Linear that is none."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2.0


class Pair(nn.Module):
    """Two Linears of a class of their own."""

    def __init__(self, kind: type[nn.Linear]) -> None:
        super().__init__()
        self.up, self.down = kind(DIM, 14), kind(14, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.erf(self.up(x)))


def _eager(kind: str, **more: Any) -> Case:
    return Case(make=partial(Model, partial(Eager, kind)), **{"by_heads": True, **more})


EAGER: dict[str, Case] = {
    **{
        kind: _eager(kind)
        for kind in (
            "plain", "norm of a head", "sinks", "slopes", "learned slopes", "soft cap", "causal",
            "chances returned", "wide scale",
        )
    },
    **{
        kind: _eager(kind, drops=True)
        for kind in ("dropout module on chances", "dropout function on chances")
    },
    "bias of heads": Case(
        make=partial(Model, partial(Eager, "plain"), (1, HEADS, TOKENS, TOKENS)), by_heads=True
    ),
    "merged": Case(
        make=partial(Model, partial(Eager, "merged"), (1, HEADS, TOKENS, TOKENS)), by_heads=True
    ),
    "unequal sections, sliced": Case(
        make=partial(Model, partial(Sections, repeats=False)), by_heads=True
    ),
    "unequal sections, split": Case(
        make=partial(Model, partial(Sections, repeats=True)), by_heads=True
    ),
    "latent": Case(make=partial(Model, Latent), by_heads=True),
    "adapters": Case(make=partial(Model, Adapters), by_heads=True),
    "own Linears": Case(make=partial(Model, partial(Pair, Own))),
    "no Linears": Case(make=partial(Model, partial(Pair, Twice))),
    # Traps.
    "talking heads": _eager("talking heads", by_heads=False),
    "norm used on whole values too": _eager("norm used on whole values too", by_heads=False),
}  # fmt: skip
