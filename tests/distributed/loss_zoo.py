"""Models and losses whose parts are weighed, and what plain torch makes of them at once.

Place in the flow: read by `test_losses`, in ranks too. The truth is one process, one batch, plain
`loss.backward()`: rows do not interact in any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import whale as wh
from tests.parity.hf_expert_zoo import ToyExperts
from tests.parity.layouts import Layout
from tests.unit.runtime.random_losses import PER_TOKEN, Model, Target, batch

ROWS, LENGTH, CLASSES = 9, 5, 7


class Masked(nn.Module):
    """A model that returns its loss: a masked mean, written by hand."""

    def __init__(self, mean: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, 6)
        self.inner = nn.Linear(6, 8)
        self.head = nn.Linear(8, CLASSES)
        self.mean = mean

    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.inner(self.embedding(ids)).tanh())
        losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
        return {"loss": self.mean(losses.view_as(mask), mask)}


def divided(losses: Tensor, mask: Tensor) -> Tensor:
    return (losses * mask).sum() / mask.sum()


def told(losses: Tensor, mask: Tensor) -> Tensor:
    return wh.weighted_mean((losses * mask).sum(), mask.sum())


def two_counts(losses: Tensor, mask: Tensor) -> Tensor:
    return (losses * mask).sum() / mask.sum() + 0.3 * losses.mean()


def masked_batch(seed: int, *, full: bool = False) -> dict[str, Tensor]:
    """The last rows have nothing valid, so that some part has only padding."""
    generator = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(CLASSES, (ROWS, LENGTH), generator=generator) for _ in range(2))
    mask = torch.ones(ROWS, LENGTH, dtype=torch.float64)
    if not full:
        mask = (torch.rand(ROWS, LENGTH, generator=generator) < 0.6).double()
        mask[0, 0], mask[5:] = 1.0, 0.0
    return {"ids": ids, "labels": labels, "mask": mask}


class Sparse(nn.Module):
    """Stacked experts some of whose choices are none."""

    def __init__(self, none: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, 6)
        self.router = nn.Linear(6, 4)
        self.experts = ToyExperts(4, 6, 5)
        self.head = nn.Linear(6, CLASSES)
        self.none = none

    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        x = self.embedding(ids).flatten(0, 1)
        gates, chosen = self.router(x).softmax(-1).topk(2)
        chosen = torch.where(ids.flatten().unsqueeze(1) < 3, self.none, chosen)
        return F.cross_entropy(self.head(x + self.experts(x, chosen, gates)), labels.flatten())


def _count(o: Tensor, t: Target) -> Tensor:
    return t.mask.sum()


LOSSES: dict[str, Callable[[Tensor, Target], Tensor]] = {
    "masked": lambda o, t: (PER_TOKEN[0](o, t) * t.mask).sum() / _count(o, t),
    "epsilon": lambda o, t: (PER_TOKEN[0](o, t) * t.mask).sum() / (_count(o, t) + 1e-3),
    "selected": lambda o, t: PER_TOKEN[0](o, t)[t.mask.bool()].mean(),
    "sum": lambda o, t: (
        F.cross_entropy(o.flatten(0, 1), t.labels.flatten(), reduction="sum", ignore_index=-100)
        / 64
    ),
    "by number": lambda o, t: PER_TOKEN[1](o, t).sum() / len(o),
    "normalised": lambda o, t: (PER_TOKEN[1](o, t) * (t.weights / t.weights.sum())).sum(),
    "shares": lambda o, t: (PER_TOKEN[1](o, t).mean(0) * o.new_tensor([1, 2, 3, 4, 5])).sum(),
}
TWO_COUNTS: dict[str, Callable[[Tensor, Target], Tensor]] = {
    "two": lambda o, t: (
        F.cross_entropy(o.flatten(0, 1), t.labels.flatten())
        + 0.2 * (PER_TOKEN[1](o, t) * t.weights).sum() / t.weights.sum()
        + 0.1 * PER_TOKEN[2](o, t).mean()
    ),
}


def head(model: nn.Module, _: Any) -> Any:
    return wh.annotate(model, {"embedding|inner": wh.replicate(), "head": wh.split()})


def stages(model: nn.Module, _: Any) -> Any:
    return wh.annotate(
        model,
        {"embedding|inner": (wh.stage(), wh.replicate()), "head": (wh.stage(), wh.replicate())},
    )


def experts(model: nn.Module, _: Any) -> Any:
    return wh.annotate(model, {"experts": wh.split(), "...": wh.replicate()})


def data(model: nn.Module, _: Any) -> Any:
    return wh.annotate(model, {"": wh.replicate()})


UNEVEN = (3.0, 1.0, 2.0)


def micro(number: int) -> dict[str, Any]:
    return {"pipeline.num_micro_batch": number}


def hf(kind: str) -> nn.Module:
    """A tiny model of transformers with a router loss."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM  # noqa: PLC0415

    shape = {
        "vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 8, "d_model": 8, "d_kv": 4,
        "d_ff": 8, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2, "pad_token_id": 0,
        "num_experts_per_tok": 2, "num_local_experts": 4, "num_experts": 4, "bos_token_id": 1,
        "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "eos_token_id": 2,
        "decoder_start_token_id": 0, "expert_capacity": 64, "router_aux_loss_coef": 0.5,
        "router_z_loss_coef": 0.2, "experts_implementation": "eager", "dropout_rate": 0.0,
        "initializer_range": 0.4, "router_jitter_noise": 0.0, "attention_dropout": 0.0,
    }  # fmt: skip
    config = AutoConfig.for_model(kind, **shape)
    made = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model: nn.Module = made.from_config(config, attn_implementation="eager")
    return model


def hf_batch(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 16, (ROWS, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[:4, 3:] = 0
    labels = torch.where(mask > 0, ids, -100)
    more = {"output_router_logits": True}
    return {"input_ids": ids, "attention_mask": mask, "labels": labels, **more}


def hf_experts(model: nn.Module, _: Any) -> Any:
    return wh.annotate(model, {"model.layers.*.mlp.experts": wh.split(), "...": wh.replicate()})


class Case:
    """A model, its loss, its batches, a layout."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        layout: Layout,
        loss: Any = None,
        make: Callable[[int], Any] = masked_batch,
        tolerance: float = 1e-9,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.build, self.layout, self.loss = build, layout, loss
        self.make, self.tolerance, self.dtype = make, tolerance, dtype

    def model(self) -> nn.Module:
        torch.manual_seed(4)
        return self.build().to(self.dtype)


def full_batch(seed: int) -> dict[str, Tensor]:
    """Without padding: different counts are in one ratio everywhere."""
    return masked_batch(seed, full=True)


def _loss_case(loss: Any, speeds: tuple[float, ...], micros: int) -> Case:
    layout = Layout("data", 3, data, micro(micros), speeds=speeds)
    return Case(Model, layout, loss, lambda seed: batch(seed, holes=seed > 0))


CASES: dict[str, Case] = {
    **{
        f"{name}, {m} micro-batches": _loss_case(loss, UNEVEN, m)
        for name, loss in LOSSES.items()
        for m in (1, 2)
    },
    **{f"{name} counts": _loss_case(loss, UNEVEN, 1) for name, loss in TWO_COUNTS.items()},
    "split head": Case(partial(Masked, divided), Layout("head", 3, head, speeds=UNEVEN)),
    "split head, told": Case(partial(Masked, told), Layout("head", 3, head, micro(2))),
    "split head, two counts": Case(partial(Masked, two_counts), Layout("head", 3, head)),
    "stages": Case(partial(Masked, divided), Layout("stages", 2, stages, micro(3))),
    "stages, told": Case(partial(Masked, told), Layout("stages", 2, stages, micro(2))),
    "stages, two counts in turn": Case(
        partial(Masked, two_counts), Layout("stages", 2, stages, micro(3)), None, full_batch
    ),
    "two counts in turn": Case(
        partial(Masked, two_counts), Layout("data", 3, data, micro(2), UNEVEN), None, full_batch
    ),
    "ids of -1": Case(partial(Sparse, -1), Layout("experts", 3, experts, micro(2))),
    "ids of no expert": Case(partial(Sparse, 4), Layout("experts", 3, experts, speeds=UNEVEN)),
}
WIDE: dict[str, Case] = {
    "wide stages": Case(partial(Masked, told), Layout("stages", 4, stages, micro(2))),
    "stages, two counts": Case(partial(Masked, two_counts), Layout("stages", 4, stages, micro(1))),
}
HF: dict[str, Case] = {
    "mixtral": Case(
        partial(hf, "mixtral"), Layout("data", 3, data, speeds=UNEVEN), None, hf_batch, 2e-6
    ),
    "mixtral, experts": Case(
        partial(hf, "mixtral"), Layout("experts", 3, hf_experts), None, hf_batch, 2e-6
    ),
    "gpt_oss": Case(partial(hf, "gpt_oss"), Layout("data", 3, data), None, hf_batch, 2e-6),
    "switch": Case(
        partial(hf, "switch_transformers"),
        Layout("data", 3, data, speeds=UNEVEN),
        None,
        hf_batch,
        1e-5,
        torch.float32,  # its routers cast themselves
    ),
}
ALL = {**CASES, **WIDE, **HF}
