"""Small models whose attention, or whose dropout, is hard to split right.

Place in the flow: beside the zoo, with the cases of one rule each. Most would still run if a rank
computed them wrongly on its part, so only the comparison with one device tells.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tests.parity.reference import split_batch
from whale.models.registry import IGNORED, preset
from whale.models.t5 import T5, presets

DIM, HEADS, TOKENS = 12, 6, 8  # 4:2 and 2:3:1 heads; TOKENS is even, so that they can be folded
WIDTH = DIM // HEADS
CLASSES = 5
ROWS, STEPS = 7, 2


class Attention(nn.Module):
    """Attention by heads, with one more thing to get right."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.kind = kind
        self.num_heads = self.h = HEADS
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(DIM, DIM) for _ in "qkvo")
        if kind == "own bias":
            self.bias = nn.Parameter(torch.randn(HEADS, TOKENS, TOKENS))
        if kind == "norm":
            self.norm = nn.RMSNorm(WIDTH)
        if kind == "scale":
            self.scale = nn.Parameter(torch.randn(WIDTH))
        if kind == "dropout module":
            self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        B, T, _ = x.shape  # noqa: N806
        if self.kind == "dropout function on the input":
            x = F.dropout(x, 0.5, self.training)
        rows = [p(x) for p in (self.q_proj, self.k_proj, self.v_proj)]
        if self.kind == "norm of all heads":
            rows = [F.layer_norm(y, y.shape[-1:]) for y in rows]
        if self.kind == "count under another name":
            q, k, v = (y.view(B, -1, self.h, WIDTH).transpose(1, 2) for y in rows)
        elif self.kind == "scale by the number of heads":
            q, k, v = (y.view(B, T, self.num_heads, -1).transpose(1, 2) for y in rows)
            q = q * (DIM / self.num_heads)
        elif self.kind == "width under another name":
            q, k, v = (y.view(B, T, self.h, -1).transpose(1, 2) for y in rows)
        else:
            q, k, v = (y.view(B, T, -1, WIDTH).transpose(1, 2) for y in rows)
        if self.kind == "norm":
            q = self.norm(q)
        if self.kind == "scale":
            q = q * self.scale
        if self.kind == "own bias":
            bias = self.bias
        if self.kind == "bias by the number of heads":
            slopes = 0.5 ** torch.arange(1, self.num_heads + 1, dtype=x.dtype)
            positions = torch.arange(T)
            bias = slopes.view(-1, 1, 1) * (positions[:, None] - positions).abs()
        if self.kind == "bias for each head":
            bias = x.mean(-1)[:, None, None].expand(B, self.num_heads, T, T)
        if self.kind == "scores shared by heads":
            y = (q @ k.transpose(-1, -2)).mean(1, keepdim=True).softmax(-1) @ v
        else:
            p = 0.3 if self.kind == "dropout in attention" and self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=p)
        if self.kind == "less their mean":
            y = y - y.mean(1, keepdim=True)
        y = y.transpose(1, 2).reshape(B, T, -1)
        if self.kind == "dropout module":
            y = self.dropout(y)
        if self.kind == "dropout function":
            y = F.dropout(y, 0.5, self.training)
        return self.out_proj(y)


class HandsOn(Attention):
    """It gives its bias, which has no rows, to whoever comes next."""

    def forward(self, x: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x, bias), self.bias.exp()


class Fused(nn.Module):
    """One Linear for query, key and value, head by head or one after the other."""

    def __init__(self, *, by_head: bool) -> None:
        super().__init__()
        self.by_head, self.num_heads = by_head, HEADS
        self.qkv, self.out_proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape  # noqa: N806
        if self.by_head:
            q, k, v = self.qkv(x).view(B, T, -1, 3 * WIDTH).transpose(1, 2).chunk(3, -1)
        else:
            q, k, v = self.qkv(x).view(B, T, 3, self.num_heads, WIDTH).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        return self.out_proj(y.transpose(1, 2).reshape(B, T, -1))


class Grouped(nn.Module):
    """Fewer heads of keys and values: units of a split are groups of two heads, biases have all."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.out_proj = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.k_proj, self.v_proj = nn.Linear(DIM, DIM // 2), nn.Linear(DIM, DIM // 2)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        B, T, _ = x.shape  # noqa: N806
        rows = [p(x) for p in (self.q_proj, self.k_proj, self.v_proj)]
        q, k, v = (y.view(B, T, -1, WIDTH).transpose(1, 2) for y in rows)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)
        return self.out_proj(y.transpose(1, 2).reshape(B, T, -1))


class Two(nn.Module):
    """An attention that mixes heads beside one that does not, in one Layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attention(), Attention("scores shared by heads")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(x)
        return self.second(x)


class Multihead(nn.Module):
    """torch's own module with a mask that learns."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, HEADS, batch_first=True)
        self.bias = nn.Parameter(torch.randn(*shape))

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias if self.bias.dim() == 2 else self.bias.repeat(x.shape[0], 1, 1)
        made: Tensor = self.attention(x, x, x, attn_mask=bias, need_weights=False)[0]
        return made


class Dropped(nn.Dropout):
    """A dropout Whale does not know."""


class MLP(nn.Module):
    """Two Linears with something between them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.fc1, self.fc2 = nn.Linear(DIM, 14), nn.Linear(14, DIM)
        self.dropout = Dropped(0.5) if kind == "subclass" else nn.Dropout(0.5)
        self.scale = nn.Parameter(torch.tensor(0.3)) if kind == "scalar" else None

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.fc1(x))
        if self.scale is not None:
            return self.fc2(x * self.scale.exp())
        if self.kind == "function":
            return self.fc2(F.dropout(x, 0.5, self.training))
        x = self.fc2(self.dropout(x))
        return self.dropout(x) if self.kind == "twice" else x


class Model(nn.Module):
    """The Layer `middle` between two Linears; with a bias of that shape for it, if it takes one."""

    def __init__(
        self, middle: Callable[[], nn.Module], bias: tuple[int, ...] = (), *, by_row: bool = False
    ) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.middle = nn.ModuleList([middle()])
        self.last = nn.Linear(DIM, CLASSES)
        self.bias = nn.Parameter(torch.randn(bias)) if bias else None
        self.by_row = by_row

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.middle:
            y = layer(x) if self.bias is None else layer(x, self._bias(x))
            x = x + (y if isinstance(y, Tensor) else y[0] * y[1].mean().sigmoid())
        return self.last(x).mean(1)

    def _bias(self, x: Tensor) -> Tensor:
        assert self.bias is not None
        return self.bias * x.mean(-1)[:, None, :, None] if self.by_row else self.bias


class Again(nn.Module):
    """An attention with dropout that is used twice, in one stage and in the next."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(DIM, DIM) for _ in range(3))
        self.attention = nn.MultiheadAttention(DIM, HEADS, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.middle):
            x = layer(x)
            x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.last(x).mean(1)


class Glue(nn.Module):
    """Dropout between Layers, counted apart from the dropout in them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(DIM, DIM) for _ in range(3))
        self.attention = Attention("dropout in attention")

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.first(x), 0.5, self.training)
        x = F.dropout(self.attention(x), 0.5, self.training)
        x = F.dropout(self.middle(x), 0.5, self.training)
        return self.last(x).mean(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model with its data, as `train_reference` takes it."""

    make: Callable[[], nn.Module]
    drops: bool = False
    """Whether it has dropout: then Whale on one rank is the truth."""
    by_heads: bool = False
    """Whether its attention can be split by heads."""

    def build(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.make().double().train()

    def batches(self) -> Any:
        """One global batch per step."""
        generator = torch.Generator().manual_seed(1)
        rows = ROWS * STEPS
        x = torch.randn(rows, TOKENS, DIM, generator=generator, dtype=torch.float64)
        labels = torch.randint(0, CLASSES, (rows,), generator=generator)
        return split_batch((x, labels), [ROWS] * STEPS)

    @property
    def loss(self) -> Any:
        return F.cross_entropy

    def count(self, batch: tuple[Tensor, ...]) -> int:
        return len(batch[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class T5Case(Case):
    """The preset `t5-tiny`, with dropout or without."""

    def batches(self) -> Any:
        return split_batch(preset("t5-tiny").batch(ROWS * STEPS, None), [ROWS] * STEPS)

    @property
    def loss(self) -> Any:
        return preset("t5-tiny").loss

    def count(self, batch: tuple[Tensor, ...]) -> int:
        return int((batch[-1] != IGNORED).sum())


def _t5(dropout: float) -> nn.Module:
    return T5(replace(presets["t5-tiny"], dropout=dropout))


def _attention(kind: str, **more: Any) -> Case:
    return Case(make=partial(Model, partial(Attention, kind)), **more)


def _bias(*shape: int, kind: str = "plain", by_row: bool = False, **more: Any) -> Case:
    make = partial(Model, partial(Attention, kind), shape, by_row=by_row)
    return Case(make=make, by_heads=True, **more)


def _mlp(kind: str, *, drops: bool = True) -> Case:
    return Case(make=partial(Model, partial(MLP, kind)), drops=drops)


CASES: dict[str, Case] = {
    "bias of heads": _bias(1, HEADS, TOKENS, TOKENS),
    "bias of heads, no batch dim": _bias(HEADS, TOKENS, TOKENS),
    "bias of heads and rows": _bias(1, HEADS, TOKENS, TOKENS, by_row=True),
    "bias for all heads": _bias(1, 1, TOKENS, TOKENS),
    "bias of tokens": _bias(TOKENS, TOKENS),
    "bias of heads in groups": Case(
        make=partial(Model, Grouped, (1, HEADS, TOKENS, TOKENS)), by_heads=True
    ),
    "bias of heads, dropout in attention": _bias(
        *(1, HEADS, TOKENS, TOKENS), kind="dropout in attention", drops=True
    ),
    "own bias": _attention("own bias", by_heads=True),
    "own bias, handed on": Case(make=partial(Model, partial(HandsOn, "own bias")), by_heads=True),
    "bias by the number of heads": _attention("bias by the number of heads"),
    "bias for each head": _attention("bias for each head"),
    "two attentions": Case(make=partial(Model, Two)),
    "scores shared by heads": _attention("scores shared by heads"),
    "less their mean": _attention("less their mean"),
    "norm": _attention("norm", by_heads=True),
    "norm of all heads": _attention("norm of all heads"),
    "scale": _attention("scale", by_heads=True),
    "scale by the number of heads": _attention("scale by the number of heads"),
    "count under another name": _attention("count under another name", by_heads=True),
    "width under another name": _attention("width under another name", by_heads=True),
    "fused": Case(make=partial(Model, partial(Fused, by_head=False)), by_heads=True),
    "fused by head": Case(make=partial(Model, partial(Fused, by_head=True)), by_heads=True),
    "multihead, bias of tokens": Case(make=partial(Model, partial(Multihead, TOKENS, TOKENS))),
    "multihead, bias of heads": Case(
        make=partial(Model, partial(Multihead, HEADS, TOKENS, TOKENS))
    ),
    "dropout module": _attention("dropout module", by_heads=True, drops=True),
    "dropout function": _attention("dropout function", drops=True),
    "dropout function on the input": _attention(
        "dropout function on the input", by_heads=True, drops=True
    ),
    "mlp, dropout module": _mlp("module"),
    "mlp, dropout function": _mlp("function"),
    "mlp, dropout twice": _mlp("twice"),
    "mlp, dropout subclass": _mlp("subclass"),
    "mlp, scalar": _mlp("scalar", drops=False),
    "multihead again": Case(make=Again, drops=True),
    "glue": Case(make=Glue, drops=True, by_heads=True),
    "t5": T5Case(make=partial(_t5, 0.0), by_heads=True),
    "t5, dropout": T5Case(make=partial(_t5, 0.1), by_heads=True, drops=True),
}
