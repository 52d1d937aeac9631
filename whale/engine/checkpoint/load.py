"""Loading: an open checkpoint, what this rank needs of it, and putting that in place.

Place in the flow: used by `engine.checkpoint`. `check` finds every fault without reading data or
changing anything; `Restore.apply` then copies, so that a rank holds only one tensor twice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from whale.engine.checkpoint.blocks import (
    FORMAT,
    INDEX,
    SCHEMA,
    Parts,
    buffer_names,
    class_name,
    dtype_name,
    groups_of,
    model_hash,
    sibling,
    slices,
    state_names,
    tensors_of,
    volume,
)
from whale.errors import CheckpointError
from whale.ir.sharding import WHOLE, Piece, Span, intersect


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A tensor to read: its local shape, and where each part of it comes from."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    reads: tuple[tuple[str, str, tuple[slice, ...], tuple[slice, ...]], ...]
    """(file, key, slices there, slices here)."""


class Reader:
    """An open checkpoint. `plan` finds faults without reading data, `fill` and `read` read."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        target = Path(os.path.realpath(path))
        replaced = sibling(target, "replaced")
        self.folder = target
        if not (target / INDEX).is_file() and (replaced / INDEX).is_file():
            self.folder = replaced
        self.index = self._index()
        self._files: dict[str, tuple[Any, frozenset[str]]] = {}

    def _index(self) -> dict[str, Any]:
        file = self.folder / INDEX
        if not file.is_file():
            raise CheckpointError(
                f"{self.folder} is not a checkpoint: it has no {INDEX}",
                hint="give `load` the path that `save` was given",
            )
        try:
            index: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CheckpointError(f"{file} is damaged: {error}", hint=_ANOTHER) from error
        found = (index.get("format"), index.get("schema"))
        if found != (FORMAT, SCHEMA):
            raise CheckpointError(
                f"{file} has format {found[0]!r}, schema {found[1]!r}; this Whale reads "
                f"{FORMAT!r}, {SCHEMA}",
                hint="load it with the version that wrote it",
            )
        return index

    def entry(self, name: str) -> dict[str, Any]:
        """What the index says of a tensor."""
        found: dict[str, Any] | None = self.index["tensors"].get(name)
        if found is None:
            raise CheckpointError(f"{self.folder} has no tensor {name}", hint=_ANOTHER)
        return found

    def plan(self, name: str, piece: Piece) -> Target:
        """The reads that fill a piece of a tensor, checked against the headers of the files."""
        entry = self.entry(name)
        shape = tuple(entry["shape"])
        reads: list[tuple[str, str, tuple[slice, ...], tuple[slice, ...]]] = []
        found = 0
        for inside, outside in piece.blocks(shape):
            for file, key, saved in entry["blocks"]:
                spans = [(low, high) for low, high in saved]
                common = [intersect(a, b) for a, b in zip(spans, outside, strict=True)]
                both = tuple(span for span in common if span is not None)
                if len(both) < len(common):
                    continue
                self._check_block(name, file, key, spans, entry["dtype"])
                here = (
                    (at[0] + c[0] - out[0], at[0] + c[1] - out[0])
                    for at, out, c in zip(inside, outside, both, strict=True)
                )
                there = ((c[0] - s[0], c[1] - s[0]) for s, c in zip(spans, both, strict=True))
                reads.append((file, key, slices(there), slices(here)))
                found += volume(both)
        local = piece.shape(shape)
        if found != prod(local):
            raise CheckpointError(
                f"{self.folder} holds {found} of the {prod(local)} elements needed of {name}",
                hint=_ANOTHER,
            )
        return Target(shape=local, dtype=getattr(torch, entry["dtype"]), reads=tuple(reads))

    def _check_block(
        self, name: str, file: str, key: str, spans: Iterable[Span], dtype: str
    ) -> None:
        handle, keys = self._open(file)
        if key not in keys:
            raise CheckpointError(
                f"{self.folder / file} has no block {key} of {name}", hint=_ANOTHER
            )
        shape = handle.get_slice(key).get_shape()
        pair = [2] if dtype == "complex128" else []
        if shape != [*(high - low for low, high in spans), *pair]:
            raise CheckpointError(
                f"{key} has shape {shape} in {self.folder / file}, {INDEX} says {list(spans)}",
                hint=_ANOTHER,
            )

    def _open(self, file: str) -> tuple[Any, frozenset[str]]:
        if file not in self._files:
            try:
                handle = safe_open(self.folder / file, "pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(
                    f"{self.folder / file} is missing, cut short or damaged: {error}", hint=_ANOTHER
                ) from error
            self._files[file] = (handle, frozenset(handle.keys()))
        return self._files[file]

    def fill(self, out: torch.Tensor, target: Target) -> None:
        """Reads into a tensor of the target's shape."""
        for file, key, there, here in target.reads:
            handle, _ = self._open(file)
            part = handle.get_slice(key)[there] if there else handle.get_tensor(key)
            if target.dtype == torch.complex128:
                part = torch.view_as_complex(part.contiguous())
            out[here].copy_(part)

    def read(self, target: Target, device: torch.device | str = "cpu") -> torch.Tensor:
        """A new tensor."""
        out = torch.empty(target.shape, dtype=target.dtype, device=device)
        self.fill(out, target)
        return out


_ANOTHER = "the checkpoint is not whole; load another one"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """All that a load will do on this rank."""

    parameters: tuple[tuple[str, Target], ...]
    buffers: tuple[tuple[torch.Tensor, Target], ...]
    state: tuple[tuple[nn.Parameter, bool, Mapping[str, Any]], ...]
    """(parameter, whether its steps are counted on the device, {key: a Target or a value})."""
    options: tuple[tuple[dict[str, Any], Mapping[str, Any]], ...]
    """(parameter group, its saved options)."""

    def apply(self, parts: Parts, reader: Reader) -> None:
        """Changes the running step."""
        store = parts.lowered.store
        for name, target in self.parameters:
            value = store.value(name)
            reader.fill(value, target)
            store.assign(name, value)
        for buffer, target in self.buffers:
            reader.fill(buffer.detach(), target)
        for parameter, on_device, saved in self.state:
            old = parts.optimizer.state.pop(parameter, {})
            new = {
                key: reader.read(value, _device(parameter, key, old.get(key), on_device))
                if isinstance(value, Target)
                else value
                for key, value in saved.items()
            }
            if new:
                parts.optimizer.state[parameter] = new
        for group, options in self.options:
            for key, value in options.items():
                now = group.get(key)
                if isinstance(now, torch.Tensor):
                    now.fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(value, list) else value
        store.publish()


def _device(parameter: nn.Parameter, key: str, old: Any, on_device: bool) -> torch.device:
    """Where an optimizer wants its state: the rule of torch's own `load_state_dict`."""
    if isinstance(old, torch.Tensor):
        return old.device
    return torch.device("cpu") if key == "step" and not on_device else parameter.device


def check(parts: Parts, reader: Reader) -> Restore:
    """All that a load will do on this rank; raises when anything needed is wrong."""
    _check_model(parts, reader)
    store = parts.lowered.store
    parameters = [
        (home.name, reader.plan(home.name, store.kept_pieces[home.name]))
        for home in parts.plan.homes
        if home.name in store.kept
    ]
    held = dict(parts.lowered.model.named_buffers())
    buffers = [
        (held[name], reader.plan(name, WHOLE))
        for name in buffer_names(parts.model)
        if not held[name].is_meta
    ]
    saved = reader.index["optimizer"]
    if saved["class"] != class_name(parts.optimizer):
        raise CheckpointError(
            f"the checkpoint has the state of {saved['class']}, this step's optimizer is "
            f"{class_name(parts.optimizer)}",
            hint="use the optimizer the checkpoint was made with, or take the weights alone with "
            "whale.engine.checkpoint.read_state_dict",
        )
    state: list[tuple[nn.Parameter, bool, Mapping[str, Any]]] = []
    options: list[tuple[dict[str, Any], Mapping[str, Any]]] = []
    for position, (names, _) in enumerate(groups_of(parts)):
        group = parts.optimizer.param_groups[position]
        options.append((group, _saved_options(saved["groups"], position, names)))
        on_device = bool(group.get("capturable") or group.get("fused"))
        for name in names:
            held = saved["state"].get(name, {})
            values = {key: _state_value(parts, reader, name, key, held[key]) for key in held}
            state.append((store.kept[name], on_device, values))
    return Restore(
        parameters=tuple(parameters),
        buffers=tuple(buffers),
        state=tuple(state),
        options=tuple(options),
    )


def _check_model(parts: Parts, reader: Reader) -> None:
    """Every tensor of the model, on every rank alike: names, ties, shapes, dtypes."""
    wanted, saved = state_names(parts.model), reader.index["state_dict"]
    tensors = tensors_of(parts.model)
    there_too = set(saved.values())
    halved = bool(parts.plan.precision.parameters or reader.index.get("precision"))
    for name in dict.fromkeys(name for name in wanted.values() if name in there_too):
        entry = reader.entry(name)
        pairs: list[tuple[str, Any, Any]]
        pairs = [("shape", tuple(entry["shape"]), tuple(tensors[name].shape))]
        if not (halved and _both_floating(entry["dtype"], tensors[name])):
            pairs.append(("dtype", entry["dtype"], dtype_name(tensors[name])))
        for what, there, here in pairs:
            if there != here:
                raise CheckpointError(
                    f"{name} has {what} {there} in the checkpoint, {here} in this model",
                    hint="load it into the model it was saved from",
                )
    differences = [
        f"{key} is tied to {saved[key]} there" if key in saved else f"{key} is missing there"
        for key, name in wanted.items()
        if saved.get(key) != name
    ] + [f"{key} is not in this model" for key in saved if key not in wanted]
    if differences:
        raise CheckpointError(
            f"the checkpoint is of model {reader.index['model_hash']}, this one is "
            f"{model_hash(parts.plan)}: {differences[0]} ({len(differences)} differences)",
            hint="load it into the model it was saved from",
        )


def _both_floating(dtype: str, tensor: torch.Tensor) -> bool:
    """Whether one may be read as the other, where one of two plans has half precision."""
    return tensor.is_floating_point() and bool(getattr(torch, dtype).is_floating_point)


def _saved_options(
    groups: list[dict[str, Any]], position: int, names: list[str]
) -> Mapping[str, Any]:
    """The options of a parameter group, found by the names of its parameters."""
    by_name = {name: group["options"] for group in groups for name in group["params"]}
    for name in names:
        if name not in by_name:
            raise CheckpointError(
                f"the checkpoint's optimizer does not have {name}, this one does",
                hint="make the same parameters trainable as when it was saved",
            )
        if by_name[name] != by_name[names[0]]:
            raise CheckpointError(
                f"{names[0]} and {name} are in one parameter group here, but had different "
                f"options: {by_name[names[0]]} and {by_name[name]}",
                hint="make the optimizer with the same parameter groups as when it was saved",
            )
    if names:
        options: Mapping[str, Any] = by_name[names[0]]
        return options
    # No parameter of this group is here: its options still follow, for schedulers and loggers.
    return next((g["options"] for g in groups if g["index"] == position), {})


def _state_value(
    parts: Parts, reader: Reader, name: str, key: str, saved: Mapping[str, Any]
) -> Any:
    if "value" in saved:
        return saved["value"]
    piece = parts.lowered.store.kept_pieces[name]
    if saved["cut"]:
        return reader.plan(saved["tensor"], piece)
    shape = reader.entry(saved["tensor"])["shape"]
    if shape and not piece.whole:
        raise CheckpointError(
            f"optimizer state {key} of {name} has shape {tuple(shape)}, unlike the parameter, "
            "which this plan splits",
            hint="load it under a plan that does not split this parameter",
        )
    return reader.plan(saved["tensor"], WHOLE)
