"""Hugging Face models with stacked experts, from a config, and the layouts they are for.

`hf_mixtral` and `hf_qwen_moe` (which has a shared expert) are as they come. Their norms and the
softmax of their routers compute in float32 whatever the weights are in, so a difference in the last
bit of float64 may become one in the last bit of float32. `/wide` keeps these in float64.

`hf_toy` is nobody's model: its experts are found by how they look, compute something that Whale has
no kernel for, and the last of them is never chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import whale as wh
from tests.parity import zoo
from tests.parity.expert_zoo import SHARED
from tests.parity.layouts import M2, Annotate, Layout, pipeline, whole

SHAPE: dict[str, Any] = {
    "vocab_size": zoo.VOCAB_SIZE,
    "hidden_size": zoo.DIM,
    "num_hidden_layers": 2,
    "num_attention_heads": zoo.NUM_HEADS,
    "num_key_value_heads": zoo.NUM_HEADS // 2,
    "max_position_embeddings": zoo.SEQ_LEN + 1,
    "num_experts_per_tok": 2,
    "initializer_range": 0.3,
    # transformers' grouped products do not take float64.
    "experts_implementation": "eager",
}


def mixtral(**more: Any) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM  # noqa: PLC0415 - seconds to import

    config = MixtralConfig(**{**SHAPE, "intermediate_size": 20, "num_local_experts": 6, **more})
    return MixtralForCausalLM(config)


def qwen_moe(**more: Any) -> nn.Module:
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM  # noqa: PLC0415

    sizes = {"moe_intermediate_size": 20, "num_experts": 6, "shared_expert_intermediate_size": 16}
    config = Qwen2MoeConfig(**{**SHAPE, **sizes, **more})
    return Qwen2MoeForCausalLM(config)


class ToyExperts(nn.Module):
    """Stacked experts with biases."""

    def __init__(self, num_experts: int, dim: int, hidden: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.up = nn.Parameter(torch.randn(num_experts, hidden, dim))
        self.up_bias = nn.Parameter(torch.randn(num_experts, hidden))
        self.down = nn.Parameter(torch.randn(num_experts, dim, hidden))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, choice = torch.where(top_k_index == expert)
            h = F.linear(hidden_states[token], self.up[expert], self.up_bias[expert])
            y = F.linear(h.sin(), self.down[expert]) * top_k_weights[token, choice, None]
            out = out.index_add(0, token, y)
        return out


class ToyBlock(nn.Module):
    """A router and stacked experts."""

    def __init__(self, num_experts: int, dim: int) -> None:
        super().__init__()
        self.router = nn.Linear(dim, num_experts)
        with torch.no_grad():
            self.router.bias[-1] = -100.0
        self.experts = ToyExperts(num_experts, dim, 6)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        gates, ids = self.router(tokens).softmax(-1).topk(2)
        return x + self.experts(tokens, ids, gates).view_as(x)


class Toy(nn.Module):
    """A small language model; what it returns has a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(zoo.VOCAB_SIZE, 8)
        self.blocks = nn.ModuleList(ToyBlock(5, 8) for _ in range(2))
        self.lm_head = nn.Linear(8, zoo.VOCAB_SIZE)
        self.loss_function: Any = None

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        loss = self.loss_function(self.lm_head(x), labels, zoo.VOCAB_SIZE)
        return ToyOutput(loss, x)


class ToyOutput(NamedTuple):
    """What it returns."""

    loss: Tensor
    hidden: Tensor


HF_EXPERT_MODELS: dict[str, Callable[..., nn.Module]] = {
    "hf_mixtral": mixtral,
    "hf_qwen_moe": qwen_moe,
    "hf_toy": Toy,
}


def _norm(self: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), self.weight, self.variance_epsilon)


def _route(self: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = F.linear(x.reshape(-1, self.hidden_dim), self.weight)
    gates, ids = logits.softmax(-1).topk(self.top_k)
    if getattr(self, "norm_topk_prob", True):
        gates = gates / gates.sum(-1, keepdim=True)
    return logits, gates, ids


def _make(name: str, wide: bool) -> nn.Module:
    model = HF_EXPERT_MODELS[name]()
    model.loss_function = zoo._causal_loss  # in float64
    forwards = {"RMSNorm": _norm, "Router": _route} if wide else {}
    for module in model.modules():
        kind = type(module)
        for ending, forward in forwards.items():
            if kind.__name__.endswith(ending):
                module.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    return model


def hf_case(name: str) -> zoo.Case:
    """The case `hf_mixtral`, `hf_qwen_moe` or `hf_toy`; with `/wide` in float64 throughout."""
    model, _, wide = name.partition("/")
    return zoo.Case(
        name=name,
        build=partial(zoo._build, partial(_make, model, bool(wide))),
        batch=zoo._gpt2_batch,
        loss=None,
        count=partial(zoo._count_labels, shift=1),
    )


# ---- layouts -------------------------------------------------------------------------------------

EXPERTS = "model.layers.*.mlp.experts|blocks.*.experts"


def across(*primitives: Any) -> Annotate:
    """Experts under these primitives, all the rest data parallel on the same devices."""

    def annotate(model: nn.Module, paths: list[str]) -> Any:
        return wh.annotate(model, {EXPERTS: tuple(p() for p in primitives), "...": wh.replicate()})

    return annotate


def in_stages(model: nn.Module, paths: list[str]) -> Any:
    """Two stages, each with its experts over its devices."""
    return wh.annotate(
        model,
        {
            "model.embed_tokens|model.rotary_emb|model.layers.0": wh.stage(),
            "model.layers.1|model.norm|lm_head": wh.stage(),
            EXPERTS: wh.split(),
            "...": wh.replicate(),
        },
    )


HF_EXPERT_LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout("hf-across", 2, across(wh.split), M2),
        Layout("hf-across-uneven", 3, across(wh.split), speeds=(3.0, 1.0, 2.0)),
        Layout("hf-across-4", 4, across(wh.split)),
        Layout("hf-across-8", 8, across(wh.split)),  # more ranks than experts
        Layout("hf-across-groups", 4, across(lambda: wh.split(2)), SHARED),
        Layout("hf-inside", 2, whole(wh.split), M2),
        Layout("hf-inside-uneven", 2, whole(wh.split), speeds=(2.0, 1.0)),
        Layout("hf-nested", 4, whole(lambda: wh.replicate(4), lambda: wh.split(2)), M2),
        Layout("hf-staged", 4, in_stages, pipeline("1f1b", 3)),
    )
}
