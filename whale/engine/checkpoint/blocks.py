"""Blocks of a checkpoint: what is saved, under which names, and which rank writes which block.

Place in the flow: under `engine.checkpoint.save` and `engine.checkpoint.load`. Pure functions of a
Step's parts, so that every rank finds the same answer by itself.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import nn

from whale.engine.lower.lowered import Lowered, stage_of_module
from whale.errors import CheckpointError
from whale.ir.keeping import kept_pieces
from whale.ir.plan import Plan
from whale.ir.sharding import Piece, Span
from whale.runtime.loss_scale import LossScale

FORMAT = "whale-checkpoint"
SCHEMA = 1
INDEX = "index.json"

# How an optimizer computes, not what: these stay as the running optimizer has them.
_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})

Spans = tuple[Span, ...]
Cells = list[tuple[Spans, int]]
"""(spans, the rank that writes them): together the whole tensor, each element once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What of a Step a checkpoint is made of, on this rank."""

    model: nn.Module
    plan: Plan
    lowered: Lowered
    optimizer: torch.optim.Optimizer
    loss_scale: LossScale | None
    rank: int


def writers_of(parts: Parts) -> dict[str, Cells]:
    """Cells of every parameter and buffer, the largest first, to the holder with least so far."""
    plan = parts.plan
    tensors = tensors_of(parts.model)
    items: list[tuple[int, str, Spans, tuple[int, ...]]] = []
    every = [kept_pieces(plan, rank) for rank in range(plan.num_ranks)]
    for home in plan.homes:
        pieces = {rank: own[home.name] for rank, own in enumerate(every) if home.name in own}
        for spans, holders in cells_of(home.shape, pieces):
            size = volume(spans) * tensors[home.name].element_size()
            items.append((size, home.name, spans, holders))
    for name in buffer_names(parts.model):
        stage = plan.stages[stage_of_module(plan, name.rpartition(".")[0])]
        buffer = tensors[name]
        size = buffer.numel() * buffer.element_size()
        items.append((size, name, whole(buffer.shape), stage.virtual_device.active))
    load = [0] * plan.num_ranks
    found: dict[str, Cells] = {}
    for size, name, spans, holders in sorted(items, key=lambda item: (-item[0], item[1], item[2])):
        writer = min(holders, key=lambda rank: (load[rank], rank))
        load[writer] += size
        found.setdefault(name, []).append((spans, writer))
    return {name: sorted(cells) for name, cells in found.items()}


def cells_of(
    shape: tuple[int, ...], pieces: Mapping[int, Piece]
) -> list[tuple[Spans, tuple[int, ...]]]:
    """The coarsest blocks no piece cuts through, each with the ranks that hold it."""
    if 0 in shape:
        return [(whole(shape), tuple(pieces))]
    points = [{0, size} for size in shape]
    for piece in pieces.values():
        for dim, spans in piece.dims:
            points[dim].update(point for span in spans for point in span)
    ordered = [sorted(along) for along in points]
    found: list[tuple[Spans, tuple[int, ...]]] = []
    for cell in product(*(zip(along, along[1:], strict=False) for along in ordered)):
        holders = tuple(rank for rank, piece in pieces.items() if _holds(piece, cell))
        assert holders, (shape, cell, pieces)
        if found and found[-1][1] == holders:
            last = found[-1][0]
            changed = [dim for dim in range(len(shape)) if last[dim] != cell[dim]]
            if len(changed) == 1 and last[changed[0]][1] == cell[changed[0]][0]:
                dim = changed[0]
                joined = (*last[:dim], (last[dim][0], cell[dim][1]), *last[dim + 1 :])
                found[-1] = (joined, holders)
                continue
        found.append((cell, holders))
    return found


def _holds(piece: Piece, cell: Spans) -> bool:
    return all(
        any(low <= cell[dim][0] and cell[dim][1] <= high for low, high in spans)
        for dim, spans in piece.dims
    )


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by first name."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def state_names(model: nn.Module) -> dict[str, str]:
    """Every key of the model's state dict, and the first name of its tensor."""
    first = {id(tensor): name for name, tensor in tensors_of(model).items()}
    every: dict[str, torch.Tensor] = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    keys = list(model.state_dict())
    for key in keys:
        if key not in every:
            raise CheckpointError(
                f"{key} in the model's state dict is neither a parameter nor a buffer",
                hint="save it yourself, as JSON, with `extra`",
            )
    return {key: first[id(every[key])] for key in keys}


def buffer_names(model: nn.Module) -> list[str]:
    """First names of the buffers that a state dict has."""
    kept = set(state_names(model).values())
    return [name for name, _ in model.named_buffers() if name in kept]


def groups_of(parts: Parts) -> list[tuple[list[str], dict[str, Any]]]:
    """The optimizer's groups as (names of this rank's parameters, options in JSON values)."""
    names = {id(p): name for name, p in parts.lowered.store.kept.items()}
    found: list[tuple[list[str], dict[str, Any]]] = []
    for group in parts.optimizer.param_groups:
        # Without a name and without elements: the stand-in of a rank that has nothing to train.
        held = [p for p in group["params"] if id(p) in names or p.numel()]
        for parameter in held:
            if id(parameter) not in names:
                raise CheckpointError(
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is "
                    "not the model's, so it has no name to be saved under",
                    hint="make it a part of the model",
                )
        options = {
            key: plain(value, f"{key} of a parameter group")
            for key, value in group.items()
            if key not in _IMPLEMENTATION and key not in ("params", "param_names")
        }
        found.append(([names[id(p)] for p in held], options))
    return found


def plain(value: Any, what: str) -> Any:
    """A JSON value."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (list, tuple)):
        return [plain(item, what) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise CheckpointError(
        f"{what} is a {type(value).__name__}, which JSON cannot hold",
        hint="allowed are numbers, strings, None, lists and tensors of one element",
    )


def model_hash(plan: Plan) -> str:
    """Of parameter names and shapes only, so that it is the same under every plan."""
    named = sorted((home.name, list(home.shape)) for home in plan.homes)
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()[:16]


def class_name(optimizer: torch.optim.Optimizer) -> str:
    """With its module: two packages may have an AdamW."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def first_writer(writers: Mapping[str, Cells], name: str) -> int:
    """The rank that answers for what a tensor has once."""
    return writers[name][0][1]


def part_of(
    local: torch.Tensor, piece: Piece, shape: tuple[int, ...], spans: Spans
) -> torch.Tensor:
    """The stretch of a rank's piece that `spans` names in global positions."""
    for inside, outside in piece.blocks(shape):
        if all(a <= low and high <= b for (a, b), (low, high) in zip(outside, spans, strict=True)):
            here = (
                (at[0] + low - out[0], at[0] + high - out[0])
                for at, out, (low, high) in zip(inside, outside, spans, strict=True)
            )
            return local[slices(here)]
    assert not volume(spans), (piece, shape, spans)
    return local.new_empty([high - low for low, high in spans])


def whole(shape: Iterable[int]) -> Spans:
    """All of a tensor."""
    return tuple((0, size) for size in shape)


def volume(spans: Iterable[Span]) -> int:
    """Elements of a block."""
    return prod(high - low for low, high in spans)


def slices(spans: Iterable[Span]) -> tuple[slice, ...]:
    """To index a tensor with."""
    return tuple(slice(low, high) for low, high in spans)


def dtype_name(tensor: torch.Tensor) -> str:
    """As in the index: `float32`."""
    return str(tensor.dtype).removeprefix("torch.")


def file_name(rank: int) -> str:
    """The file a rank writes."""
    return f"rank-{rank:05d}.safetensors"


def sibling(target: Path, what: str) -> Path:
    """The hidden directory beside a checkpoint, for what is not finished or no longer needed."""
    return target.with_name(f".{target.name}.{what}")


def fsync(path: Path) -> None:
    """A file, or the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
