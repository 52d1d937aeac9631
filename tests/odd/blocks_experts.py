"""Experts: `wh.nn.MoE` with every router and balance, subclasses of it, and stacks by hand."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import whale as wh
from tests.odd.vocabulary import block


@block("moe", easy=True)
class Experts(nn.Module):
    """wh.nn.MoE that drops nothing, balanced by its bias or not at all."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.moe = wh.nn.MoE(
            dim,
            10,
            pick.choice((4, 6)),
            top_k=pick.choice((1, 2)),
            router=pick.choice(("top-k", "prototype")),
            balance=pick.choice(("bias", "none")),
            gated=pick.random() < 0.5,
        )

    def forward(self, h: Tensor) -> Tensor:
        return h + self.moe(h)


@block("moe-loss", aux=True, mixes=True)
class Balanced(nn.Module):
    """wh.nn.MoE with an auxiliary or a z-loss, perhaps with limited room."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.moe = wh.nn.MoE(
            dim,
            8,
            4,
            top_k=pick.choice((1, 2)),
            router=pick.choice(("top-k", "prototype")),
            balance="loss",
            z_loss=pick.choice((0.0, 0.1)),
            loss_weight=0.3,
            capacity_factor=pick.choice((None, 1.0, 0.7)),
        )

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        y, loss = self.moe(h)
        return h + y, loss


@block("moe-choice", mixes=True)
class Choice(nn.Module):
    """Expert choice: every expert looks at all tokens."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.moe = wh.nn.MoE(dim, 8, 4, top_k=2, router="expert-choice", balance="none")

    def forward(self, h: Tensor) -> Tensor:
        return h + self.moe(h)


@block("moe-capacity", mixes=True, masked=True)
class Limited(nn.Module):
    """Limited room, with padding that goes nowhere."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.moe = wh.nn.MoE(dim, 8, 4, top_k=2, capacity_factor=0.8, balance="bias")

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        return h + self.moe(h, mask)


class Shared(wh.nn.MoE):
    """A subclass with a shared expert of its own."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, 8, 4, top_k=2, balance="none")
        self.shared = nn.Linear(dim, dim)

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        return super().forward(x, valid) + torch.tanh(self.shared(x))


@block("moe-subclass")
class SharedExpert(nn.Module):
    """A MoE subclass that adds a shared expert."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.moe = Shared(dim)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.moe(h)


class Stack(nn.Module):
    """Stacked experts as Hugging Face has them, with oddities by `kind`."""

    def __init__(self, dim: int, kind: str) -> None:
        super().__init__()
        self.num_experts, self.kind = 4, kind
        self.hidden_dim = dim
        self.gate_up_proj = nn.Parameter(torch.randn(4, 16, dim) * dim**-0.5)
        self.down_proj = nn.Parameter(torch.randn(4, dim, 8) * 8**-0.5)
        if kind == "buffer":
            self.register_buffer("gain", torch.linspace(0.5, 2.0, 4))
        if kind == "bias":
            self.bias = nn.Parameter(torch.randn(4, dim) * 0.3)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        hits = F.one_hot(top_k_index, self.num_experts).permute(2, 1, 0)
        for expert in range(self.num_experts):
            slot, token = torch.where(hits[expert])
            state = hidden_states[token]
            weights = top_k_weights[token, slot, None]
            if self.kind == "input":
                state = state * weights
            gate, up = F.linear(state, self.gate_up_proj[expert]).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, self.down_proj[expert])
            if self.kind == "buffer":
                y = y * self.gain[expert]
            if self.kind == "bias":
                y = y + self.bias[expert]
            if self.kind == "index" and expert % 2:
                y = -y
            if self.kind != "input":
                y = y * weights
            out.index_add_(0, token, y.to(out.dtype))
        return out


@block("stack")
class Stacked(nn.Module):
    """Stacked experts in a loop: a buffer, a bias, the index or the input may matter."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, 4, bias=False)
        self.kind = pick.choice(("plain", "buffer", "bias", "index", "input"))
        self.experts = Stack(dim, self.kind)

    def forward(self, h: Tensor) -> Tensor:
        flat = h.reshape(-1, h.shape[-1])
        weights, ids = torch.topk(self.router(flat).softmax(-1), 2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        return h + self.experts(flat, ids, weights).reshape(h.shape)


@block("expert-list")
class Listed(nn.Module):
    """Experts in a ModuleList, indexed by where their tokens are: some may get none."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, 5)
        self.experts = nn.ModuleList([nn.Linear(dim, dim) for _ in range(5)])

    def forward(self, h: Tensor) -> Tensor:
        flat = h.flatten(0, 1)
        gates = self.router(flat).softmax(-1)
        best = gates.argmax(-1)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            chosen = (best == index).nonzero(as_tuple=True)[0]
            if chosen.numel():
                y = expert(flat[chosen]) * gates[chosen, index, None]
                out = out.index_add(0, chosen, y.to(out.dtype))
        return h + out.view_as(h)


@block("soft-experts", easy=True)
class Soft(nn.Module):
    """Dense gates over stacked weights, batched products."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, 3)
        self.w = nn.Parameter(torch.randn(3, dim, dim) * dim**-0.5)

    def forward(self, h: Tensor) -> Tensor:
        each = torch.stack([h @ w for w in self.w], 2)
        return h + (torch.tanh(each) * self.gate(h).softmax(-1).unsqueeze(-1)).sum(2)
