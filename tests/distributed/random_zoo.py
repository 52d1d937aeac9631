"""Models that draw random numbers in every way we know, and models with checkpoints in them."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Gamma, Normal
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import whale as wh

WIDTH = 8


class Block(nn.Module):
    """A pair of Linears around what `noise` does to the middle."""

    def __init__(self, noise: Callable[[nn.Module, Tensor], Tensor], drop: float = 0.2) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.drop = nn.Dropout(drop)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.noise = noise

    def forward(self, x: Tensor) -> Tensor:
        return x + self.noise(self, self.down(self.drop(F.gelu(self.up(self.norm(x))))))


class Stack(nn.Module):
    """Blocks and a head."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def quiet(block: nn.Module, x: Tensor) -> Tensor:
    return x


def dropouts(block: nn.Module, x: Tensor) -> Tensor:
    x = F.dropout(x, 0.1, block.training)
    x = F.alpha_dropout(x, 0.1, block.training) + F.dropout1d(x, 0.3, block.training)
    if block.training:
        x = F.rrelu(x, training=True) + F.dropout2d(x.unsqueeze(-1), 0.2).squeeze(-1)
    return F.normalize(x, dim=-1)


def paths_dropped(block: nn.Module, x: Tensor) -> Tensor:
    keep = x.new_empty(x.shape[0], 1, 1).bernoulli_(0.6)
    jitter = torch.empty_like(x).uniform_(0.9, 1.1)
    return x * keep * jitter


def factories(block: nn.Module, x: Tensor) -> Tensor:
    rows, length, width = x.shape
    noise = torch.randn(rows, length, width, dtype=x.dtype) * torch.rand(width, dtype=x.dtype)
    steps = torch.randint(1, 5, (rows,)).to(x.dtype)[:, None, None]
    order = torch.randperm(width)
    picked = torch.multinomial(x.softmax(-1).flatten(0, 1), 2).view(rows, length, 2)
    return x[..., order] * 0.5 + 0.1 * noise / steps + x.gather(-1, picked).sum(-1, keepdim=True)


def sampled(block: nn.Module, x: Tensor) -> Tensor:
    z = Normal(x, F.softplus(x) + 0.1).rsample() + 0.1 * Gamma(F.softplus(x) + 0.5, 1.0).rsample()
    gate = Bernoulli(torch.sigmoid(x)).sample()
    which = Categorical(logits=x).sample().unsqueeze(-1).to(x.dtype)
    hard = F.gumbel_softmax(x, tau=0.7) + torch.poisson(F.softplus(x.detach()))
    return z * gate + 0.1 * which + 0.1 * hard + torch.normal(0.0, 0.1, x.shape, dtype=x.dtype)


def filled(block: nn.Module, x: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    for fill in (
        lambda t: t.normal_(0, 0.3),
        lambda t: t.exponential_(3.0),
        lambda t: t.cauchy_().clamp_(-1, 1),
        lambda t: t.geometric_(0.5),
        lambda t: t.log_normal_(0.0, 0.2),
        lambda t: t.random_(0, 4),
    ):
        total = total + 0.1 * fill(torch.empty_like(x))
    return x + total


class Attention(nn.Module):
    """Attention with dropout inside, as function or as torch's module."""

    def __init__(self, module: bool, weights: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.need_weights = weights
        self.drops = nn.Dropout1d(0.2)
        if module:
            self.attn = nn.MultiheadAttention(WIDTH, 2, dropout=0.3, batch_first=True)
        else:
            self.attn = None
            self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
                nn.Linear(WIDTH, WIDTH) for _ in range(4)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.attn is not None:
            return x + self.drops(self.attn(y, y, y, need_weights=self.need_weights)[0])
        q, k, v = (
            p(y).unflatten(-1, (-1, 4)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        p = 0.3 if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=p).transpose(1, 2).flatten(2)
        return x + self.drops(self.o_proj(mixed))


class Vae(nn.Module):
    """Its noise is between two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh())
        self.split = nn.Linear(12, 2 * WIDTH)
        self.decode = nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Dropout(0.1))
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        mean, log = self.split(self.encode(x)).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * log).exp()
        return self.head(self.decode(z))


class LayerDrop(Stack):
    """Blocks skipped by chance, as OPT and BART do."""

    def __init__(self, p: float) -> None:
        super().__init__(*(Block(quiet) for _ in range(3)))
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            if self.training and torch.rand([]) < self.p:
                continue
            x = block(F.dropout(x, 0.1, self.training))
        return self.head(x)


class PythonDrop(Stack):
    """The same with Python's generator."""

    def __init__(self) -> None:
        super().__init__(Block(quiet), Block(quiet))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) * (2.0 if random.random() < 0.5 else 1.0)
        return self.head(x)


class Twice(nn.Module):
    """One block used twice, by turns with another."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(dropouts), Block(paths_dropped)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for i in (0, 1, 0, 1):
            x = self.blocks[i](x)
        return self.head(F.dropout(x, 0.1, self.training))


class Inside(nn.Module):
    """A block that checkpoints its own inside."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(
            self.inner, x, use_reentrant=self.reentrant, preserve_rng_state=not self.reentrant
        )


class InGlue(Stack):
    """A model that checkpoints its blocks."""

    def __init__(self, *blocks: nn.Module, reentrant: bool) -> None:
        super().__init__(*blocks)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def _keeps_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class Selective(Stack):
    """Checkpoints that save the matrix products."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            contexts = partial(create_selective_checkpoint_contexts, _keeps_products)
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return self.head(x)


class Sequenced(Stack):
    """checkpoint_sequential, and a checkpoint in a checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint_sequential(list(self.blocks), 2, self.first(x), use_reentrant=False)
        return self.head(checkpoint(self.again, x, use_reentrant=False))

    def again(self, x: Tensor) -> Tensor:
        return checkpoint(self.blocks[0], F.dropout(x, 0.2, self.training), use_reentrant=False)


class Experts(nn.Module):
    """A mixture that balances by its bias, and drops."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = wh.nn.MoE(WIDTH, 12, 4, top_k=2, balance="bias", balance_rate=0.3)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.moe(x))


class Normed(nn.Module):
    """Batch norm, which a checkpoint makes torch track twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "dropouts": lambda: Stack(Block(dropouts), Block(dropouts)),
    "paths": lambda: Stack(Block(paths_dropped), Block(filled)),
    "factories": lambda: Stack(Block(factories), Block(quiet)),
    "sampled": lambda: Stack(Block(sampled), Block(quiet)),
    "attention": lambda: Stack(Attention(False), Attention(True), Attention(True, True)),
    "vae": Vae,
    "layerdrop-0": lambda: LayerDrop(0.0),
    "layerdrop": lambda: LayerDrop(0.4),
    "python": PythonDrop,
    "twice": Twice,
    "inside": lambda: Stack(
        Inside(Block(dropouts), False), Inside(Block(quiet), True), Inside(Attention(False), False)
    ),
    "glue": lambda: InGlue(Block(dropouts), Block(paths_dropped), Attention(True), reentrant=False),
    "glue-reentrant": lambda: InGlue(Block(quiet), Block(sampled), reentrant=True),
    "selective": lambda: Selective(Block(dropouts), Block(quiet), Inside(Attention(True), True)),
    "sequenced": lambda: Sequenced(Block(paths_dropped), Block(quiet), Block(dropouts)),
    "experts": lambda: Stack(Inside(Experts(), False), Inside(Experts(), True)),
    "norms": lambda: Stack(Inside(Normed(), False), Inside(Normed(), True)),
}


def loss(output: Any, target: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())
