"""Saving: this rank's file of blocks, and the index that rank 0 makes of all files' headers.

Place in the flow: between `engine.checkpoint`, which says when and where, and the blocks it writes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from whale.engine.checkpoint.blocks import (
    FORMAT,
    INDEX,
    SCHEMA,
    Cells,
    Parts,
    Spans,
    buffer_names,
    class_name,
    dtype_name,
    file_name,
    first_writer,
    fsync,
    groups_of,
    model_hash,
    part_of,
    plain,
    state_names,
    volume,
    whole,
)
from whale.errors import CheckpointError
from whale.ir.plan import Home


class _File:
    """The blocks of one rank's file, and what its header says of them in the words of the index."""

    def __init__(self) -> None:
        self.blocks: dict[str, torch.Tensor] = {}
        self.tensors: dict[str, Any] = {}
        self.state: dict[str, dict[str, Any]] = {}

    def put(self, name: str, shape: Iterable[int], spans: Spans, part: torch.Tensor) -> None:
        """Adds a block of the tensor `name` of global `shape`."""
        shape = tuple(shape)
        at = ",".join(f"{low}:{high}" for low, high in spans)
        key = name if spans == whole(shape) else f"{name}[{at}]"
        # Blocks must not share memory, or safetensors takes them for tied tensors.
        block = part.detach().to("cpu", copy=True).contiguous()
        # safetensors has no double complex numbers: pairs of real ones.
        double = block.dtype == torch.complex128
        self.blocks[key] = torch.view_as_real(block) if double else block
        entry = {"shape": shape, "dtype": dtype_name(part), "blocks": []}
        self.tensors.setdefault(name, entry)["blocks"].append((key, spans))


def write(parts: Parts, writers: Mapping[str, Cells], folder: Path) -> None:
    """This rank's file, durable."""
    file = _File()
    for home in parts.plan.homes:
        mine = [spans for spans, writer in writers[home.name] if writer == parts.rank]
        if not mine:
            continue
        local, piece = (
            parts.lowered.store.value(home.name),
            parts.lowered.store.kept_pieces[home.name],
        )
        for spans in mine:
            file.put(home.name, home.shape, spans, part_of(local, piece, home.shape, spans))
        _put_state(parts, file, home, mine, first_writer(writers, home.name) == parts.rank)
    buffers = dict(parts.lowered.model.named_buffers())
    for name in buffer_names(parts.model):
        if first_writer(writers, name) == parts.rank:
            buffer = buffers[name]
            file.put(name, buffer.shape, whole(buffer.shape), buffer)
    groups = [
        {
            "index": position,
            "params": [n for n in names if first_writer(writers, n) == parts.rank],
            "options": options,
        }
        for position, (names, options) in enumerate(groups_of(parts))
    ]
    header = json.dumps({"tensors": file.tensors, "state": file.state, "groups": groups})
    path = folder / file_name(parts.rank)
    save_file(file.blocks, path, metadata={"whale": header})
    fsync(path)
    fsync(folder)


def _put_state(parts: Parts, file: _File, home: Home, mine: list[Spans], first: bool) -> None:
    """Optimizer state of a parameter: cut as it is, or, what it has once, by its `first` writer."""
    local, piece = parts.lowered.store.kept[home.name], parts.lowered.store.kept_pieces[home.name]
    for key, value in (parts.optimizer.state.get(local) or {}).items():
        name = f"optimizer/{home.name}/{key}"
        if isinstance(value, torch.Tensor) and value.shape == local.shape:
            for spans in mine:
                file.put(name, home.shape, spans, part_of(value, piece, home.shape, spans))
            saved: dict[str, Any] = {"tensor": name, "cut": True}
        elif isinstance(value, torch.Tensor):
            if value.dim() and not piece.whole:
                raise CheckpointError(
                    f"optimizer state {key} of {home.name} has shape {tuple(value.shape)}, this "
                    f"rank's piece {tuple(local.shape)}, so no other plan could cut it",
                    hint="save from a plan that does not split this parameter",
                )
            if not first:
                continue
            file.put(name, value.shape, whole(value.shape), value)
            saved = {"tensor": name, "cut": False}
        elif first:
            saved = {"value": plain(value, f"optimizer state {key} of {home.name}")}
        else:
            continue
        file.state.setdefault(home.name, {})[key] = saved


def merge(parts: Parts, writers: Mapping[str, Cells], folder: Path) -> dict[str, Any]:
    """The index, from the headers of all files; refuses one that would not cover every tensor."""
    tensors: dict[str, Any] = {}
    state: dict[str, Any] = {}
    groups: dict[tuple[int, str], Any] = {}
    for rank in sorted({writer for cells in writers.values() for _, writer in cells}):
        file = file_name(rank)
        with safe_open(folder / file, "pt") as handle:
            header = json.loads(handle.metadata()["whale"])
        for name, entry in header["tensors"].items():
            blocks = tensors.setdefault(name, {**entry, "blocks": []})["blocks"]
            blocks += [(file, key, spans) for key, spans in entry["blocks"]]
        for name, held in header["state"].items():
            state.setdefault(name, {}).update(held)
        for group in header["groups"]:
            same = (group["index"], json.dumps(group["options"], sort_keys=True))
            groups.setdefault(same, {**group, "params": []})["params"] += group["params"]
    names = state_names(parts.model)
    for name in {*names.values(), *tensors}:
        written = sum(volume(spans) for _, _, spans in tensors[name]["blocks"])
        assert written == prod(tensors[name]["shape"]), (name, written, tensors[name]["shape"])
    used = {group["index"] for group in groups.values() if group["params"]}
    return {
        "format": FORMAT,
        "schema": SCHEMA,
        "model_hash": model_hash(parts.plan),
        "state_dict": names,
        "optimizer": {
            "class": class_name(parts.optimizer),
            "groups": [
                group
                for _, group in sorted(groups.items(), key=lambda item: item[0])
                # A rank that holds nothing of a group has no say in its options.
                if group["params"] or group["index"] not in used
            ],
            "state": state,
        },
        "tensors": tensors,
    }


def write_index(folder: Path, index: Mapping[str, Any]) -> None:
    """The last file of a checkpoint: without it there is none."""
    with (folder / INDEX).open("w", encoding="utf-8") as file:
        json.dump(index, file)
        file.flush()
        os.fsync(file.fileno())
    fsync(folder)
