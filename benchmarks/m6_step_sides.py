"""The sides of `m6_step.py`: who computes the experts of an M6's mixture-of-experts layers.

All sides are in one model. `Exchange` stands where a block had its `wh.nn.MoE` and keeps that
layer's router, counters and balancing; the experts' part is given to `MoE.run` as its `compute`,
which for Whale is the layer's own (`MoE.here`, what `MoE.forward` gives). Experts are M6's: gelu,
not gated, no biases.

Each side stores weights in the layout it is made for, and sides with the same layout share them:

| | w_in | w_out |
|---|---|---|
| whale | [E, d, f] | [E, d, f] |
| transformers | [E, f, d] | [E, d, f] |
| plain, compiled | [E, d, f] | [E, f, d] |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from benchmarks.moe_layer_sides import plain
from whale.models.m6.config import M6Config
from whale.models.m6.model import M6
from whale.models.m6.objectives import example_batch
from whale.models.m6.tokenizer import PAD
from whale.nn.moe.layer import MoE
from whale.nn.moe.router import Alone, Routed

Batch = dict[str, Tensor]

BALANCING = [0.02 * 0.9**i for i in range(30)]
"""Steps of the balancing bias, one for each forward before anything is recorded."""


class Weights:
    """One layer's experts, and the copies with the last two dims swapped, each made once."""

    def __init__(self, moe: MoE) -> None:
        self.moe = moe

    @cached_property
    def w_in_swapped(self) -> nn.Parameter:
        return nn.Parameter(self.moe.w_in.detach().transpose(1, 2).contiguous())

    @cached_property
    def w_out_swapped(self) -> nn.Parameter:
        return nn.Parameter(self.moe.w_out.detach().transpose(1, 2).contiguous())


class Side(nn.Module):
    """One layer's experts: tokens [T, d] and where they go in, their weighted sums out."""

    w_in: nn.Parameter
    w_out: nn.Parameter

    def forward(self, tokens: Tensor, routed: Routed) -> Tensor:
        raise NotImplementedError

    def gradients(self) -> tuple[Tensor, Tensor]:
        """Of w_in as [E, d, f] and of w_out as [E, f, d]."""
        raise NotImplementedError


class Whale(Side):
    """`wh.nn.MoE` as it is."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.moe = weights.moe
        self.w_in, self.w_out = weights.moe.w_in, weights.moe.w_out

    def forward(self, tokens: Tensor, routed: Routed) -> Tensor:
        return self.moe.here(tokens, routed)

    def gradients(self) -> tuple[Tensor, Tensor]:
        return _grad(self.w_in), _grad(self.w_out).transpose(1, 2)


class Plain(Side):
    """Sort, gather, two grouped products, weighted scatter-add, in plain torch."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.w_in, self.w_out = weights.moe.w_in, weights.w_out_swapped

    def forward(self, tokens: Tensor, routed: Routed) -> Tensor:
        return _plain(tokens, routed.ids, routed.gates, self.w_in, self.w_out)

    def gradients(self) -> tuple[Tensor, Tensor]:
        return _grad(self.w_in), _grad(self.w_out)


class Compiled(Plain):
    """The plain layer under torch.compile, one program for all layers."""

    def forward(self, tokens: Tensor, routed: Routed) -> Tensor:
        return _compiled()(tokens, routed.ids, routed.gates, self.w_in, self.w_out)


class Transformers(Side):
    """transformers' `grouped_mm` experts, declared not gated, as those of Nemotron-H are."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        config = SimpleNamespace(_experts_implementation="grouped_mm")
        self.experts = _transformers_experts()(config)
        self.w_in, self.w_out = weights.w_in_swapped, weights.moe.w_out
        self.experts.up_proj, self.experts.down_proj = self.w_in, self.w_out
        self.experts.num_experts = weights.moe.num_experts

    def forward(self, tokens: Tensor, routed: Routed) -> Tensor:
        return self.experts(tokens, routed.ids, routed.gates)

    def gradients(self) -> tuple[Tensor, Tensor]:
        return _grad(self.w_in).transpose(1, 2), _grad(self.w_out).transpose(1, 2)


SIDES: dict[str, Callable[[Weights], Side]] = {
    "whale": Whale,
    "transformers": Transformers,
    "plain": Plain,
    "compiled": Compiled,
}


class Exchange(nn.Module):
    """A mixture-of-experts layer whose experts are computed by the side `name`.

    The ids of the first forward are kept and given to every later one: rounding decides between
    experts that are nearly equal, and sides would otherwise route a few tokens differently. The
    router runs all the same.

    Attributes:
        seen: Tokens and routing of the first forward, without gradients.
    """

    def __init__(self, moe: MoE) -> None:
        super().__init__()
        self.moe, self.weights = moe, Weights(moe)
        self.sides = nn.ModuleDict()
        self.name = "whale"
        self.seen: tuple[Tensor, Routed] | None = None

    @property
    def side(self) -> Side:
        return self.sides[self.name]  # type: ignore[return-value]

    def forward(self, x: Tensor, valid: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return self.moe.run(x, valid, Alone(), self._compute)

    def _compute(self, tokens: Tensor, routed: Routed) -> Tensor:
        if self.seen is None:
            self.seen = tokens.detach(), routed._replace(gates=routed.gates.detach())
        return self.side(tokens, routed._replace(ids=self.seen[1].ids))

    def experts_only(self) -> None:
        """Forward and backward of the experts alone, on what was seen first."""
        assert self.seen is not None
        tokens, routed = self.seen
        routed = routed._replace(gates=routed.gates.detach().requires_grad_())
        out = self.side(tokens.detach().requires_grad_(), routed)
        out.backward(tokens)  # any gradient of this shape does


@dataclass
class Bench:
    """One model with all its sides, its batch and its optimizer."""

    model: M6
    layers: list[Exchange]
    batch: Batch
    optimizer: torch.optim.Optimizer

    def use(self, name: str) -> None:
        """Experts are computed by this side from now on; gradients of the last one are freed."""
        for layer in self.layers:
            layer.name = name
        self.model.zero_grad(set_to_none=True)

    def forward_backward(self) -> Tensor:
        loss: Tensor = self.model(**self.batch)["loss"]
        loss.backward()
        return loss.detach()

    def step(self, name: str) -> None:
        self.use(name)
        self.forward_backward()
        self.optimizer.step()

    def gradients(self) -> dict[str, Tensor]:
        """Some of the last backward's, in one layout for all sides."""
        first, last = self.layers[0], self.layers[-1]
        found = {
            "embedding": self.model.text_stem.token_embedding.weight.grad,
            "first q_proj": self.model.blocks[0].attention.q_proj.weight.grad,
        }
        for place, layer in (("first", first), ("last", last)):
            found[f"{place} router"] = layer.moe.router.weight.grad
            found[f"{place} w_in"], found[f"{place} w_out"] = layer.side.gradients()
        return {name: grad.detach() for name, grad in found.items() if grad is not None}


def build(config: M6Config, rows: int, device: str, dtype: torch.dtype) -> tuple[M6, Batch]:
    """A model whose experts are about equally busy, and a batch without padding."""
    torch.manual_seed(0)
    with torch.device(device):
        model = M6(config).to(dtype)
    batch = example_batch(config, rows)
    batch["tokens"] = batch["tokens"].masked_fill(batch["tokens"] == PAD, PAD + 1)
    batch["has_image"] = torch.ones_like(batch["has_image"])
    batch = {name: value.to(device) for name, value in batch.items()}
    layers = [block.ffn for block in model.blocks if block.has_experts]
    for rate in (*BALANCING, 0.0):
        for layer in layers:
            layer.balance_rate = rate
        if rate:
            with torch.no_grad():
                model(**batch)
    return model, batch


def exchange(model: M6) -> list[Exchange]:
    """Puts an `Exchange` in the place of every mixture of experts; they have no sides yet."""
    layers = []
    for block in model.blocks:
        if block.has_experts:
            block.ffn = Exchange(block.ffn)
            layers.append(block.ffn)
    return layers


def _grad(weight: nn.Parameter) -> Tensor:
    assert weight.grad is not None
    return weight.grad


def _plain(x: Tensor, ids: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    return plain(x, ids, gates, w_in, w_out, F.gelu)


@cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(_plain, dynamic=False)


@cache
def _transformers_experts() -> Callable[..., Any]:
    from transformers.activations import ACT2FN  # noqa: PLC0415 - slow to load, one side only
    from transformers.integrations import use_experts_implementation  # noqa: PLC0415

    @use_experts_implementation(has_gate=False)
    class Experts(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.act_fn = ACT2FN["gelu"]

        def forward(self, x: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
            raise NotImplementedError("replaced by the grouped_mm implementation")

    return Experts
