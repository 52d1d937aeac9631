"""Dropout keyed by seed, step, module and global sample: the same masks under every layout.

Place in the flow: under `nn.keyed_modules` (dropout as a module) and `nn.randomness` (as a
function). An element's fate is a hash of where it is in the whole tensor of the whole batch, so it
does not matter which rank, micro-batch or shard computes it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from whale.runtime.context import StepContext
from whale.runtime.hashing import MASK, key_of, position_hash


def keep_mask(
    shape: Sequence[int],
    p: float,
    *,
    key: int,
    first_row: int,
    rows: int,
    batch_dim: int,
    device: torch.device,
    sharded: tuple[int, int, int] | None = None,
) -> torch.Tensor:
    """Which elements stay; `sharded` is (dim, first, whole size) of a dim that is a part."""
    offsets = offsets_of(shape, first_row, rows, batch_dim, sharded)
    counter = position_hash(shape, key, offsets, batch_dim, device)
    return counter >= int(p * (MASK + 1))


def offsets_of(
    shape: Sequence[int],
    first_row: int,
    rows: int,
    batch_dim: int,
    sharded: tuple[int, int, int] | None,
) -> list[int]:
    """Where the tensor starts in the whole one, by dim."""
    offsets = [0] * len(shape)
    if sharded is not None:
        offsets[sharded[0]] = sharded[1]
    offsets[batch_dim] = first_row * (shape[batch_dim] // rows if rows else 1)
    return offsets


def drop(
    x: torch.Tensor,
    p: float,
    key: int,
    context: StepContext,
    batch_dim: int | None,
    sharded: tuple[int, int, int] | None,
) -> torch.Tensor:
    """`x` with the mask of `position_mask`, scaled.

    On CUDA in one kernel that saves no mask.
    """
    if p == 1.0:
        return x * 0
    if x.is_cuda:
        from whale.nn import dropout_kernel  # noqa: PLC0415 - it loads Triton

        if dropout_kernel.takes(x):
            key, first_row, rows, dim = _placed(x, key, context, batch_dim)
            offsets = offsets_of(x.shape, first_row, rows, dim, sharded)
            return dropout_kernel.drop(x, p, key, offsets, dim)
    return x * position_mask(x, p, key, context, batch_dim, sharded) * (1.0 / (1.0 - p))


def position_mask(
    x: torch.Tensor,
    p: float,
    key: int,
    context: StepContext,
    batch_dim: int | None,
    sharded: tuple[int, int, int] | None,
) -> torch.Tensor:
    """The mask of a call named by `key`; what has no batch in it gets one mask per micro-batch."""
    key, first_row, rows, dim = _placed(x, key, context, batch_dim)
    return keep_mask(
        x.shape,
        p,
        key=key,
        first_row=first_row,
        rows=rows,
        batch_dim=dim,
        device=x.device,
        sharded=sharded,
    )


def _placed(
    x: torch.Tensor, key: int, context: StepContext, batch_dim: int | None
) -> tuple[int, int, int, int]:
    """Key, first row, rows and the dim they are in."""
    if batch_dim is None:
        return key_of(key, context.micro_batch, "micro-batch", 0), 0, x.shape[0], 0
    return key, context.first_row, context.rows, batch_dim
