"""Code around a split: what it reads of the split module, calls past it, or runs it under."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import whale as wh
from tests.covering import part
from tests.distributed.beside import Before, beside
from tests.ranks import run_ranks

WIDTH = 8


def heads_of(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


class Attention(nn.Module):
    """Heads are counted in an attribute, or in a config."""

    def __init__(self, checkpointed: bool | None = None) -> None:
        super().__init__()
        self.num_heads, self.checkpointed = 4, checkpointed
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (heads_of(part(x), self.count()) for part in (self.q, self.k, self.v))
        made = F.scaled_dot_product_attention(q, k, v)
        return self.o(made.transpose(1, 2).flatten(2))

    def count(self) -> int:
        return self.num_heads

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpointed is None:
            return self.attend(x)
        return checkpoint(self.attend, x, use_reentrant=self.checkpointed)  # type: ignore[no-any-return]


class Configured(Attention):
    def __init__(self) -> None:
        super().__init__()
        del self.num_heads
        self.config = SimpleNamespace(n_head=4)

    def count(self) -> int:
        return int(self.config.n_head)


class Alike(nn.Module):
    """One tensor is query, key and value."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.inner(x, x, value=x, need_weights=False)[0]
        return made


class Gated(nn.Module):
    """A pair of which the gate is computed first."""

    def __init__(self, gate: Callable[[Gated, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.gate = gate
        self.up, self.side, self.down = (
            nn.Linear(WIDTH, 12),
            nn.Linear(WIDTH, 12),
            nn.Linear(12, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.side(x)) if self.gate is None else self.gate(self, x)
        return self.down(gate * self.up(x))


def frozen_gate(block: Gated, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.tanh(block.side(x))


def recomputed_gate(block: Gated, x: Tensor) -> Tensor:
    made = checkpoint(block.side, x, use_reentrant=True)
    return torch.tanh(made)


def late_cumsum(block: Gated, x: Tensor) -> Tensor:
    gate = torch.sigmoid(block.side(x))
    return gate.flip(-1) if x.shape[1] > 9 else gate


def by_rows(block: Gated, x: Tensor) -> Tensor:
    made: Tensor = torch.func.vmap(lambda row: torch.sigmoid(block.side(row)))(x)
    return made


class Experts(nn.Module):
    """Its weights are stored as those of Linears, or `turned`: [experts, in, out]."""

    def __init__(self, by_number: bool = False, turned: bool = False) -> None:
        super().__init__()
        self.num_experts, self.by_number, self.turned = 4, by_number, turned
        into, out = torch.randn(4, 5, WIDTH), torch.randn(4, WIDTH, 5)
        self.into = nn.Parameter(into.mT.contiguous() if turned else into)
        self.out = nn.Parameter(out.mT.contiguous() if turned else out)

    def weights(self, expert: int) -> tuple[Tensor, Tensor]:
        into, out = self.into[expert], self.out[expert]
        return (into.mT, out.mT) if self.turned else (into, out)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        total = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, place = torch.where(top_k_index == expert)
            into, out = self.weights(expert)
            inside = F.silu(F.linear(hidden_states[token], into))
            made = F.linear(inside, out) * top_k_weights[token, place, None]
            if self.by_number and not self.training:
                made = made * (expert + 1)
            total = total.index_add(0, token, made)
        return total


class Mixture(nn.Module):
    def __init__(self, by_number: bool = False, turned: bool = False) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 4), Experts(by_number, turned)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(2, -1)
        return self.experts(flat, chosen, weights).view_as(x)  # type: ignore[no-any-return]


Glue = Callable[[Any, Any, Tensor], Tensor]


class Whole(nn.Module):
    """A block, and what the model makes of it."""

    def __init__(self, block: nn.Module, glue: Glue) -> None:
        super().__init__()
        self.first, self.blocks, self.head = (
            nn.Linear(WIDTH, WIDTH),
            nn.ModuleList([block]),
            nn.Linear(WIDTH, WIDTH),
        )
        self.glue = glue

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.head(h + self.glue(self, self.blocks[0], h)).mean(1)


def plainly(model: Any, block: Any, h: Tensor) -> Tensor:
    return block(h)  # type: ignore[no-any-return]


def by_heads(model: Any, block: Any, h: Tensor) -> Tensor:
    return block(h) * torch.arange(block.count() + 1, dtype=h.dtype).mean()


def by_heads_in_evaluation(model: Any, block: Any, h: Tensor) -> Tensor:
    return block(h) if model.training else block(h) - block.count()


def by_experts(model: Any, block: Any, h: Tensor) -> Tensor:
    return block(h) * block.experts.num_experts


def up_in_evaluation(model: Any, block: Any, h: Tensor) -> Tensor:
    made = block(h)
    return made if model.training else made + block.up(h).amax(-1, keepdim=True)


def value_in_evaluation(model: Any, block: Any, h: Tensor) -> Tensor:
    made = block(h)
    return made if model.training else made * block.v(h).norm(dim=-1, keepdim=True)


def unseen_in_evaluation(model: Any, block: Any, h: Tensor) -> Tensor:
    if not model.training and float(h.detach().abs().sum()) > 0:  # no trace goes past this
        return block.up(h).sum(-1, keepdim=True) + h  # type: ignore[no-any-return]
    return block(h)  # type: ignore[no-any-return]


def mapped(model: Any, block: Any, h: Tensor) -> Tensor:
    made: Tensor = torch.func.vmap(block, in_dims=1, out_dims=1)(h)
    return made


def pushed(model: Any, block: Any, h: Tensor) -> Tensor:
    made: Tensor = torch.func.jvp(block, (h,), (torch.full_like(h, 0.5),))[1]
    return made


def hooked() -> nn.Module:
    block = Attention()
    block.register_forward_hook(lambda module, args, out: out / module.count())
    return block


def same_again(model: Any, index: int) -> None:
    model.blocks[0].num_heads = 4


def batch(seed: int, length: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(4, length, WIDTH, generator=generator),
        torch.randn(4, WIDTH, generator=generator),
    )


def nothing(model: Any, index: int) -> None:
    return


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A block, the code around it, and what becomes of it."""

    block: Callable[[], nn.Module]
    glue: Glue = plainly
    rule: str = ""
    """How the block must be split; empty: by anything, or not at all."""
    refused: str = ""
    lengths: tuple[int, ...] = (3, 3)
    before: Before = nothing
    layouts: tuple[str, ...] = field(default=("split",))


CASES = {
    "heads": Case(block=Attention, glue=by_heads, rule="attention", layouts=("split", "both")),
    "alike": Case(block=Alike, rule="multihead", layouts=("split", "both")),
    "config": Case(block=Configured, glue=by_heads, rule="attention"),
    "evaluation": Case(block=Attention, glue=by_heads_in_evaluation, rule="attention"),
    "hook": Case(block=hooked, rule="attention"),
    "set": Case(block=Attention, rule="attention", before=same_again),
    "checkpoint": Case(block=lambda: Attention(False), glue=by_heads, rule="attention"),
    "reentrant": Case(
        block=lambda: Attention(True), glue=by_heads, rule="attention", layouts=("split", "both")
    ),
    "experts": Case(
        block=Mixture, glue=by_experts, rule="stacked experts", layouts=("split", "both")
    ),
    "turned": Case(block=lambda: Mixture(turned=True), rule="stacked experts"),
    "numbers": Case(block=lambda: Mixture(True), refused="in evaluation"),
    "part": Case(block=Gated, glue=up_in_evaluation),
    "value": Case(block=Attention, glue=value_in_evaluation),
    "unseen": Case(block=Gated, glue=unseen_in_evaluation, refused="does not run"),
    "frozen": Case(block=lambda: Gated(frozen_gate), rule="pair", layouts=("split", "both")),
    "recomputed": Case(block=lambda: Gated(recomputed_gate), rule="pair"),
    "mapped": Case(block=Gated, glue=mapped),
    "pushed": Case(block=Gated, glue=pushed),
    "inside": Case(block=lambda: Gated(by_rows)),
    "late": Case(
        block=lambda: Gated(late_cumsum), refused="another kind", lengths=(3, 4, 5, 6, 7, 8, 9, 10)
    ),
}
LAYOUTS: dict[str, Callable[[], dict[str, Any]]] = {
    "split": lambda: {"": wh.split()},
    "both": lambda: {"blocks.0": wh.split(), "...": wh.replicate()},
}


def on_rank() -> dict[tuple[str, str], tuple[str | float, set[str]]]:
    wh.init()
    torch.set_default_dtype(torch.float64)
    found: dict[tuple[str, str], tuple[str | float, set[str]]] = {}
    for name, layout in part([(n, layout) for n, case in CASES.items() for layout in case.layouts]):
        case = CASES[name]
        torch.manual_seed(0)
        rules: set[str] = set()
        result = beside(
            Whole(case.block(), case.glue),
            [batch(seed, length) for seed, length in enumerate(case.lengths)],
            LAYOUTS[layout](),
            before=case.before,
            evaluated=[batch(99)],
            rules=rules,
        )
        found[name, layout] = result, rules
    return found


def test_code_around_a_split_sees_the_whole_module_or_is_refused() -> None:
    for found in run_ranks(2, on_rank, timeout=200.0):
        for (name, layout), (result, rules) in found.items():
            case = CASES[name]
            assert isinstance(result, str) == bool(case.refused), (name, layout, result)
            if isinstance(result, str):
                assert case.refused in result and "hint" in result, (name, layout, result)
            else:
                assert result < 1e-9, (name, layout, result)
            assert not case.rule or case.rule in rules, (name, layout, rules)
