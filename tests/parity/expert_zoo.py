"""Models with mixtures of experts for the parity matrix, and the layouts they are for.

A case is named by what its layers do: `moe/<router>/<top_k>/<balance>/<capacity>`, the capacity
`none` for dropless.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import whale as wh
from tests.parity import zoo
from tests.parity.layouts import M2, M3, Annotate, Layout, pipeline, whole

NUM_EXPERTS = 10
DIM, HIDDEN = 16, 12
NUM_BLOCKS = 2


class Block(nn.Module):
    """A linear layer over the sequence's running mean, then experts."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.mix = nn.Linear(2 * DIM, DIM)
        self.moe = wh.nn.MoE(DIM, HIDDEN, NUM_EXPERTS, **options)

    def forward(self, x: Tensor, valid: Tensor) -> tuple[Tensor, Tensor | None]:
        y = self.norm(x)
        y = self.mix(torch.cat([y, y.cumsum(1) / 4.0], -1))
        out = self.moe(y, valid)
        more, loss = out if isinstance(out, tuple) else (out, None)
        return x + more, loss


class Output(NamedTuple):
    """What the model returns."""

    loss: Tensor
    hidden: Tensor


class ExpertLM(nn.Module):
    """A small language model that returns its loss, the experts' own with it."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(zoo.VOCAB_SIZE, DIM)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(DIM, zoo.VOCAB_SIZE)

    def forward(self, tokens: Tensor, labels: Tensor) -> Output:
        x = self.embedding(tokens)
        losses = []
        for block in self.blocks:
            x, loss = block(x, labels != zoo.IGNORED)
            if loss is not None:
                losses.append(loss)
        total = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        for loss in losses:
            total = total + loss
        return Output(total, x)


def _batch(seed: int, rows: int) -> dict[str, Tensor]:
    tokens, labels = zoo.case("gpt").batch(seed, rows)
    return {"tokens": tokens, "labels": labels}


def expert_case(name: str) -> zoo.Case:
    """The case of a name like `moe/top-k/2/bias/1.25`."""
    _, router, top_k, balance, capacity = name.split("/")
    options = {
        "router": router,
        "top_k": int(top_k),
        "balance": balance.removesuffix("+z"),
        "capacity_factor": None if capacity == "none" else float(capacity),
        "z_loss": 0.05 if balance.endswith("+z") else 0.0,
        "loss_weight": 0.5,
        "balance_rate": 0.05,
    }
    return zoo.Case(
        name=name,
        build=partial(zoo._build, partial(ExpertLM, **options)),
        batch=_batch,
        loss=None,
        count=lambda batch: int((batch["labels"] != zoo.IGNORED).sum()),
    )


# ---- layouts -------------------------------------------------------------------------------------

_DENSE = ("norm", "mix")
_REST = "|".join(["embedding", *(f"blocks.*.{name}" for name in _DENSE), "head"])


def experts(*primitives: Any) -> Annotate:
    """Experts under these primitives, the rest data parallel on the same devices."""

    def annotate(model: nn.Module, paths: list[str]) -> Any:
        entries = {_REST: wh.replicate(), "blocks.*.moe": tuple(p() for p in primitives)}
        return wh.annotate(model, entries)

    return annotate


def columns(annotate: Annotate) -> Annotate:
    """The same with every expert cut by its hidden columns: tensor parallel experts."""

    def changed(model: nn.Module, paths: list[str]) -> Any:
        for module in model.modules():
            if isinstance(module, wh.nn.MoE):
                module.split_by = "columns"
        return annotate(model, paths)

    return changed


def in_stages(model: nn.Module, paths: list[str]) -> Any:
    """Two stages, each with its experts over its devices."""
    return wh.annotate(
        model,
        {
            "embedding|blocks.0": wh.stage(),
            "blocks.1|head": wh.stage(),
            _REST: wh.replicate(),
            "blocks.*.moe": wh.split(),
        },
    )


LEVELS = {"communication.all_to_all": "two-level"}
CHUNKS = {"communication.token_chunks": 2}
SHARED = {"cluster.colocate_split_and_replicate": True}
EXPERT_LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout("replicas", 3, whole(wh.replicate), M2, speeds=(3.0, 1.0, 2.0)),
        Layout("experts-2", 2, experts(wh.split)),
        Layout("experts-3-uneven", 3, experts(wh.split), M2, speeds=(3.0, 1.0, 2.0)),
        Layout("experts-4", 4, experts(wh.split), M3),
        Layout("experts-8", 8, experts(wh.split), LEVELS, num_nodes=2),
        Layout("experts-groups", 4, experts(lambda: wh.split(2)), {**SHARED, **M2}),
        Layout(
            "experts-levels",
            4,
            experts(wh.split),
            {**LEVELS, **M2},
            speeds=(1.0, 1.5, 1.0, 1.2),
            num_nodes=2,
        ),
        Layout("experts-chunks", 2, experts(wh.split), {**CHUNKS, **M2}),
        Layout("experts-levels-chunks", 4, experts(wh.split), {**LEVELS, **CHUNKS}, num_nodes=2),
        Layout("columns-inside", 2, columns(whole(wh.split)), speeds=(2.0, 1.0)),
        Layout("columns-across", 3, columns(experts(wh.split)), M2, speeds=(1.0, 2.0, 1.0)),
        Layout(
            "columns-nested",
            4,
            columns(whole(lambda: wh.replicate(4), lambda: wh.split(2))),
            M2,
        ),
        Layout("experts-inside", 2, whole(wh.split), M2, speeds=(2.0, 1.0)),
        Layout("experts-nested", 4, whole(lambda: wh.replicate(4), lambda: wh.split(2)), M2),
        Layout("experts-staged", 4, in_stages, pipeline("1f1b", 3)),
    )
}
