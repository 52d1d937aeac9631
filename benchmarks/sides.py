"""The two sides of every overhead benchmark: a Whale step, and the same written by hand on torch.

Place in the flow: built on every rank by `overhead_rank`. Both sides start from copies of one
model, see the same batches and use the same optimizer settings; nothing is clipped, dropout is 0.
Where torch offers several ways to write a step, each is a side of its own, and the fastest is the
one Whale is measured against.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import whale as wh
from whale.models.gpt import GPT, GPTConfig

BUCKET_MIB = 25
"""DDP's default bucket, given to both sides (where DDP's first is smaller, that is its own)."""

NUM_BATCHES = 4
"""Batches that are rotated, so that no step sees the last one's data in cache."""

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A model and its batch; `batch` is rows per rank in data parallel, rows in all otherwise."""

    config: GPTConfig
    seq: int
    batch: int


SIZES = {
    "cpu": Size(
        config=GPTConfig(
            vocab_size=512,
            max_seq_len=64,
            dim=128,
            num_layers=4,
            num_heads=4,
            tie_embeddings=False,
        ),
        seq=64,
        batch=8,
    ),
    "gpu": Size(
        config=GPTConfig(
            vocab_size=8192,
            max_seq_len=512,
            dim=1024,
            num_layers=8,
            num_heads=16,
            tie_embeddings=False,
        ),
        seq=512,
        batch=8,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What both sides share."""

    model: GPT
    batches: Sequence[Batch]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    device: torch.device
    num_micro_batch: int = 1
    bucket_mib: float = BUCKET_MIB

    def fresh(self) -> GPT:
        """A copy of the model on the device."""
        return copy.deepcopy(self.model).to(self.device).train()


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One way to run a step. `step(i)` trains on batch i; `loss` makes its result the mean."""

    name: str
    step: Callable[[int], Any]
    loss: Callable[[Any], float]
    close: Callable[[], None]


def make_setting(
    size: Size,
    *,
    rows: int,
    device: torch.device,
    dtype: torch.dtype,
    optimizer: str,
    num_micro_batch: int = 1,
    bucket_mib: float = BUCKET_MIB,
) -> Setting:
    """The model and the batches, the same on every rank."""
    torch.manual_seed(0)
    model = GPT(size.config).to(dtype)
    generator = torch.Generator().manual_seed(1)
    shape = (NUM_BATCHES, rows, size.seq + 1)
    tokens = torch.randint(size.config.vocab_size, shape, generator=generator).to(device)
    batches = [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in tokens]
    kinds: dict[str, dict[str, Any]] = {
        "fused": {"fused": True},
        "foreach": {"foreach": True},
        "default": {},
    }
    return Setting(
        model=model,
        batches=batches,
        optimizer=partial(torch.optim.AdamW, lr=1e-4, weight_decay=0.1, **kinds[optimizer]),
        device=device,
        num_micro_batch=num_micro_batch,
        bucket_mib=bucket_mib,
    )


def mean_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Next-token cross-entropy, in float32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def _nothing() -> None:
    return None


# ---- Whale ---------------------------------------------------------------------------------------


def whale_side(setting: Setting, annotations: dict[str, Any], config: dict[str, Any]) -> Side:
    """The model under `annotations`, as a user writes it."""
    model = wh.annotate(copy.deepcopy(setting.model), annotations)
    step = wh.parallelize(
        model,
        optimizer=setting.optimizer,
        loss=mean_loss,
        batch=tuple(t.cpu() for t in setting.batches[0]),
        config={
            "communication.bucket_bytes": int(setting.bucket_mib * 2**20),
            # Build-time only: this benchmark compares the losses itself.
            "check_parts": False,
            **config,
        },
    )
    return Side(
        name="whale",
        step=lambda i: step(setting.batches[i % NUM_BATCHES])["loss"],
        loss=float,
        close=step.close,
    )


# ---- data parallel -------------------------------------------------------------------------------


def ddp_side(setting: Setting, *, view: bool) -> Side:
    """DistributedDataParallel, with gradients as views of its buckets or apart from them."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(
        setting.fresh(),
        device_ids=[setting.device.index] if setting.device.type == "cuda" else None,
        bucket_cap_mb=setting.bucket_mib,
        gradient_as_bucket_view=view,
    )
    optimizer = setting.optimizer(model.parameters())
    own = [(x.chunk(num_ranks)[rank], y.chunk(num_ranks)[rank]) for x, y in setting.batches]

    def step(index: int) -> Tensor:
        x, y = own[index % NUM_BATCHES]
        optimizer.zero_grad()
        loss = mean_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def loss(value: Tensor) -> float:
        total = value.clone()
        dist.all_reduce(total)
        return float(total) / num_ranks

    return Side(name="ddp-view" if view else "ddp-copy", step=step, loss=loss, close=_nothing)


# ---- tensor parallel -----------------------------------------------------------------------------


def tensor_side(setting: Setting, *, prepared: bool, sharded_ends: bool) -> Side:
    """`parallelize_module`: columns for q, k, v and fc1, rows for out and fc2.

    Args:
        setting: What both sides share.
        prepared: Make the attention's input one DTensor, so that the gradients of q, k and v are
            summed in one all-reduce instead of three (as torchtitan does); costs DTensor dispatch.
        sharded_ends: Split the embedding by rows and the head by columns and take the loss on the
            sharded logits (`loss_parallel`), as Whale's split does; else both stay whole.
    """
    mesh = init_device_mesh(setting.device.type, (dist.get_world_size(),))
    model = setting.fresh()
    for block in model.blocks:
        plan: dict[str, Any] = {
            "attention.q_proj": ColwiseParallel(),
            "attention.k_proj": ColwiseParallel(),
            "attention.v_proj": ColwiseParallel(),
            "attention.out_proj": RowwiseParallel(),
            "mlp.fc1": ColwiseParallel(),
            "mlp.fc2": RowwiseParallel(),
        }
        if prepared:
            plan["attention"] = PrepareModuleInput(
                input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)
            )
        parallelize_module(block, mesh, plan)
    if sharded_ends:
        ends = {
            "token_embedding": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        }
        parallelize_module(model, mesh, ends)
    # One group per kind: a foreach or fused update takes DTensors or plain tensors, not both.
    sharded = [p for p in model.parameters() if isinstance(p, DTensor)]
    plain = [p for p in model.parameters() if not isinstance(p, DTensor)]
    optimizer = setting.optimizer([{"params": sharded}, {"params": plain}])

    def forward_backward(x: Tensor, y: Tensor) -> Tensor:
        loss = mean_loss(model(x), y)
        loss.backward()
        return loss.detach()

    def step(index: int) -> Tensor:
        x, y = setting.batches[index % NUM_BATCHES]
        optimizer.zero_grad()
        if sharded_ends:
            with loss_parallel():
                loss = forward_backward(x, y)
        else:
            loss = forward_backward(x, y)
        optimizer.step()
        return loss

    def loss(value: Tensor) -> float:
        return float(value.full_tensor() if isinstance(value, DTensor) else value)

    name = f"dtensor-{'one' if prepared else 'three'}-sum{'' if sharded_ends else '-whole-ends'}"
    return Side(name=name, step=step, loss=loss, close=_nothing)


# ---- pipeline ------------------------------------------------------------------------------------


def stage_bounds(num_layers: int, num_stages: int) -> list[tuple[int, int]]:
    """The blocks [low, high) of each stage: the same cut on both sides."""
    points = [i * num_layers // num_stages for i in range(num_stages + 1)]
    return list(zip(points, points[1:], strict=False))


def stage_annotations(num_layers: int, num_stages: int) -> dict[str, Any]:
    """The cut as Whale's annotations: embeddings in the first stage, norm and head in the last."""
    entries: dict[str, Any] = {}
    for index, (low, high) in enumerate(stage_bounds(num_layers, num_stages)):
        paths = [f"blocks.{i}" for i in range(low, high)]
        if index == 0:
            paths = ["token_embedding", "position_embedding", "dropout", *paths]
        if index == num_stages - 1:
            paths += ["norm", "lm_head"]
        entries["|".join(paths)] = wh.stage()
    return entries


class GPTStage(nn.Module):
    """Blocks [low, high) of a GPT, with the embeddings in the first stage, the head in the last."""

    def __init__(self, model: GPT, low: int, high: int) -> None:
        super().__init__()
        first, last = low == 0, high == len(model.blocks)
        self.token_embedding = model.token_embedding if first else None
        self.position_embedding = model.position_embedding if first else None
        self.dropout = model.dropout if first else None
        self.blocks = model.blocks[low:high]
        self.norm = model.norm if last else None
        self.lm_head = model.lm_head if last else None

    def forward(self, x: Tensor) -> Tensor:
        """Tokens or hidden states in; hidden states or logits out."""
        if self.token_embedding is not None:
            assert self.position_embedding is not None
            assert self.dropout is not None
            positions = torch.arange(x.shape[1], device=x.device)
            x = self.dropout(self.token_embedding(x) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x)
        if self.lm_head is not None:
            assert self.norm is not None
            x = self.lm_head(self.norm(x))
        return x


def pipeline_side(setting: Setting, *, schedule: str) -> Side:
    """torch.distributed.pipelining with one stage per rank."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    whole = setting.fresh()
    low, high = stage_bounds(len(whole.blocks), num_ranks)[rank]
    module = GPTStage(whole, low, high)
    optimizer = setting.optimizer(module.parameters())
    stage = PipelineStage(module, rank, num_ranks, setting.device)
    kinds = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}
    runner = kinds[schedule](stage, setting.num_micro_batch, loss_fn=mean_loss)
    last = rank == num_ranks - 1
    more: dict[str, Any] = {}
    if "return_outputs" in inspect.signature(runner.step).parameters:
        more["return_outputs"] = False  # else the last stage joins all logits, which nobody reads

    def step(index: int) -> Tensor:
        x, y = setting.batches[index % NUM_BATCHES]
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if rank == 0:
            runner.step(x, **({"target": y, "losses": losses} if last else {}), **more)
        elif last:
            runner.step(target=y, losses=losses, **more)
        else:
            runner.step(**more)
        optimizer.step()
        return torch.stack(losses).mean().detach() if last else torch.zeros((), device=x.device)

    def loss(value: Tensor) -> float:
        # Only the last stage knows it; the others hold zeros.
        total = value.float().clone()
        dist.all_reduce(total)
        return float(total)

    return Side(name=f"pipelining-{schedule}", step=step, loss=loss, close=_nothing)
