"""Blocks that draw random numbers: dropout in its forms, and noise made by hand."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tests.odd.blocks_code import Pair
from tests.odd.vocabulary import block


@block("dropout", random=True)
class Dropouts(Pair):
    """Dropout in one of its forms."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(pick, dim)
        self.way = pick.choice(
            ("module", "functional", "alpha", "feature", "torch", "dropout1d", "in-place")
        )
        self.drop: nn.Module = nn.Dropout(0.3, inplace=self.way == "in-place")
        if self.way == "alpha":
            self.drop = nn.AlphaDropout(0.3)
        elif self.way == "dropout1d":
            self.drop = nn.Dropout1d(0.3)

    def act(self, x: Tensor) -> Tensor:
        x = F.gelu(x)
        if self.way == "functional":
            return F.dropout(x, 0.3, self.training)
        if self.way == "torch":
            return torch.dropout(x, 0.3, self.training)
        if self.way == "feature":
            return torch.feature_dropout(x, 0.3, self.training)
        return self.drop(x)


@block("attention-dropout", random=True)
class AttentionDropout(nn.Module):
    """Dropout inside attention: the fused kernel's, or the module's."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.module = pick.random() < 0.4
        self.attention = nn.MultiheadAttention(dim, 3, dropout=0.2, batch_first=True)
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, h: Tensor) -> Tensor:
        if self.module:
            return h + self.attention(h, h, h, need_weights=False)[0]
        q, k, v = (m(h).unflatten(-1, (3, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        p = 0.2 if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=p)
        return h + self.out(out.transpose(1, 2).flatten(2))


@block("noise", random=True)
class Noise(Pair):
    """Random numbers drawn by hand, in training only."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(pick, dim)
        self.way = pick.choice(
            (
                "randn",
                "randn_like",
                "rand_like",
                "uniform_",
                "bernoulli_",
                "normal_",
                "bernoulli",
                "drop-path",
                "gumbel",
                "rrelu",
                "randint",
                "randperm",
                "multinomial",
                "distribution",
            )
        )

    def act(self, x: Tensor) -> Tensor:  # noqa: C901 - one line for each way
        x, way = torch.tanh(x), self.way
        if not self.training:
            return x
        if way == "randn":
            return x + 0.1 * torch.randn(x.shape, dtype=x.dtype)
        if way == "randn_like":
            return x + 0.1 * torch.randn_like(x)
        if way == "rand_like":
            return x * (torch.rand_like(x) > 0.3)
        if way == "uniform_":
            return x * torch.empty_like(x).uniform_(0.9, 1.1)
        if way == "bernoulli_":
            return x * torch.empty_like(x[..., :1]).bernoulli_(0.7) / 0.7
        if way == "normal_":
            return x + torch.empty_like(x).normal_(0, 0.1)
        if way == "bernoulli":
            return x * torch.bernoulli(torch.full_like(x, 0.7))
        if way == "drop-path":
            keep = x.new_empty((x.shape[0],) + (1,) * (x.dim() - 1)).bernoulli_(0.6)
            return x * keep / 0.6
        if way == "gumbel":
            return x * F.gumbel_softmax(x, dim=-1)
        if way == "rrelu":
            return F.rrelu(x, training=True)
        if way == "randint":
            return x * torch.randint(0, 2, x.shape).to(x.dtype)
        if way == "randperm":
            return x[:, :, torch.randperm(x.shape[-1])]
        if way == "multinomial":
            chosen = torch.multinomial(x.detach().softmax(-1).flatten(0, 1), 3)
            return x + F.one_hot(chosen, x.shape[-1]).sum(1).view_as(x) * 0.1
        return x + torch.distributions.Normal(x, 0.1).rsample() * 0.1
