"""Checkpoint: `Step.save` and `Step.load`, from any plan to any other, as JSON and safetensors.

Place in the flow: beside training; called by `engine.step`. A checkpoint is a directory:
`index.json` names every tensor, its global shape and its blocks, and `rank-00003.safetensors` holds
the blocks that rank 3 wrote. It speaks of the user's parameters only, never of the plan, so every
plan can read it: a rank intersects the blocks with its own pieces and reads just those slices.

torch's DCP was considered: it plans a save by gathering every rank's metadata on rank 0 and stores
the result as a pickle. Our plan already tells every rank who owns what, so there is no planning
phase and no rank 0 that everything waits for: each element has one writer, chosen by arithmetic
that all ranks repeat, and no pickle is ever read or written.

[Note: durable] Ranks write into a sibling directory and fsync; rank 0 reads the headers of all
files back (so a directory that is not shared is noticed), writes `index.json` last and renames. A
save that dies leaves the checkpoint before it: at `path`, or, when it dies between the two renames,
beside it, where `load` looks too.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from whale.engine.checkpoint.blocks import INDEX, Parts, fsync, sibling, writers_of
from whale.engine.checkpoint.load import Reader, check
from whale.engine.checkpoint.save import merge, write, write_index
from whale.errors import CheckpointError, WhaleError
from whale.ir.sharding import WHOLE

__all__ = ["Parts", "load", "read_state_dict", "save"]


def save(
    parts: Parts,
    path: str | os.PathLike[str],
    *,
    num_steps: int,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Writes a checkpoint; every rank calls it and returns when it is durable."""
    target = Path(os.path.realpath(path))
    temporary = sibling(target, "saving")
    lead = parts.rank == 0
    with _together(parts):
        kept = _json(extra)
        if lead:
            _prepare(target)
    try:
        with _together(parts):
            writers = writers_of(parts)
            if any(writer == parts.rank for cells in writers.values() for _, writer in cells):
                write(parts, writers, temporary)
        with _together(parts):
            if lead:
                index = merge(parts, writers, temporary)
                index |= {"num_steps": num_steps, "extra": kept}
                # Where it is not that of the model that the user gave.
                index["precision"] = parts.plan.precision.parameters
                if parts.loss_scale is not None:
                    index["loss_scale"] = parts.loss_scale.state()
                write_index(temporary, index)
                _swap(target)
    except CheckpointError:
        if lead:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def load(parts: Parts, path: str | os.PathLike[str]) -> tuple[int, dict[str, Any]]:
    """Restores parameters, buffers and optimizer; gives the number of steps and the user's extra.

    Every rank first checks all it needs; one fault on one rank, and no rank changes anything.
    """
    with _together(parts):
        reader = Reader(path)
        restore = check(parts, reader)
    with _together(parts):
        try:
            restore.apply(parts, reader)
        except Exception as error:
            raise CheckpointError(
                f"reading {reader.folder} failed half-way, so the step is partly changed: {error}",
                hint="load again, or load another checkpoint, before training on",
            ) from error
    if parts.loss_scale is not None and "loss_scale" in reader.index:
        parts.loss_scale.load(reader.index["loss_scale"])
    return reader.index["num_steps"], reader.index["extra"]


def read_state_dict(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """The whole model's state dict on the CPU, for plain torch: no plan, no process group.

    Names that were tied in the model share one tensor.
    """
    reader = Reader(path)
    tensors = {
        name: reader.read(reader.plan(name, WHOLE)) for name in reader.index["state_dict"].values()
    }
    return {key: tensors[name] for key, name in reader.index["state_dict"].items()}


@contextmanager
def _together(parts: Parts) -> Iterator[None]:
    """What fails on any rank inside fails on all, with the same message; also a barrier."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    text = b"" if error is None else json.dumps(_message(error)).encode()
    num_ranks, device = parts.plan.num_ranks, parts.lowered.device
    sizes = torch.zeros(num_ranks, dtype=torch.int64, device=device)
    sizes[parts.rank] = len(text)
    if num_ranks > 1:
        dist.all_reduce(sizes)
    failed = sizes.nonzero().flatten().tolist()
    if not failed:
        return
    if num_ranks > 1:
        data = torch.zeros(int(sizes[failed[0]]), dtype=torch.uint8, device=device)
        if parts.rank == failed[0]:
            data.copy_(torch.tensor(list(text), dtype=torch.uint8))
        dist.broadcast(data, failed[0])
        text = bytes(data.tolist())
    message, hint = json.loads(text)
    where = f"rank {failed[0]}" if len(failed) < num_ranks else None
    raise CheckpointError(message, hint=hint, where=where) from error


def _message(error: Exception) -> tuple[str, str | None]:
    if isinstance(error, WhaleError):
        return error.message, error.hint
    hint = None
    if isinstance(error, OSError):
        hint = "a checkpoint must be in a directory that every rank can read and write"
    return f"{type(error).__name__}: {error}", hint


def _json(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    try:
        kept = json.loads(json.dumps({} if extra is None else extra))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"`extra` is not JSON: {error}", hint=_EXTRA) from error
    if not isinstance(kept, dict):
        raise CheckpointError(f"`extra` is a {type(extra).__name__}, not a mapping", hint=_EXTRA)
    return kept


_EXTRA = 'allowed are JSON values by name, such as extra={"epoch": 3}'


def _prepare(target: Path) -> None:
    """Clears what a dead save left and makes the directory that ranks write into."""
    temporary, replaced = sibling(target, "saving"), sibling(target, "replaced")
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists() and (replaced / INDEX).exists():
        os.rename(replaced, target)
    if target.exists():
        foreign = _foreign(target)
        if foreign is not None:
            raise CheckpointError(
                f"{target} is not replaced: {foreign} there was not written by a save",
                hint="save to another path, or move it away",
            )
    for leftover in (temporary, replaced):
        if leftover.exists():
            shutil.rmtree(leftover)
    temporary.mkdir()


def _foreign(target: Path) -> str | None:
    """Something at a path that only a person may remove; hidden files are nobody's."""
    if not target.is_dir():
        return target.name
    for name in sorted(entry.name for entry in target.iterdir()):
        ours = name == INDEX or (name.startswith("rank-") and name.endswith(".safetensors"))
        if not ours and not name.startswith("."):
            return name
    return None


def _swap(target: Path) -> None:
    """The finished directory takes the place of the old one; see [Note: durable]."""
    replaced = sibling(target, "replaced")
    if target.exists():
        os.rename(target, replaced)
    os.rename(sibling(target, "saving"), target)
    fsync(target.parent)
    # First its index: half removed, it must not be taken for a checkpoint.
    (replaced / INDEX).unlink(missing_ok=True)
    shutil.rmtree(replaced, ignore_errors=True)
