"""Dropout keyed by seed, step, module and global sample: the same masks under every layout.

Place in the flow: installed by `engine.lower` on every `nn.Dropout`. An element's fate is a hash of
where it is in the whole tensor of the whole batch, so it does not matter which rank, micro-batch or
shard computes it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from whale.runtime.context import StepContext

_MASK = 0xFFFFFFFF


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A 32-bit hash ("lowbias32" constants) on int64: torch has no unsigned shifts."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def _mix_int(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def key_of(seed: int, step: int, name: str, call: int) -> int:
    """One number per (seed, step, module, call in this forward)."""
    key = _mix_int(seed & _MASK)
    for part in (step & _MASK, zlib.crc32(name.encode()), call):
        key = _mix_int(key ^ part)
    return key


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
    sizes = list(shape)
    whole = list(shape)
    offsets = [0] * len(sizes)
    if sharded is not None:
        dim, first, size = sharded
        whole[dim], offsets[dim] = size, first
    factor = sizes[batch_dim] // rows if rows else 1
    offsets[batch_dim] = first_row * factor
    counter = torch.full((), key, dtype=torch.int64, device=device)
    for dim in [batch_dim, *(d for d in range(len(sizes)) if d != batch_dim)]:
        index = torch.arange(offsets[dim], offsets[dim] + sizes[dim], device=device)
        index = index.view([-1 if d == dim else 1 for d in range(len(sizes))])
        # The sample's own hash first, then a mixed coordinate at a time: broadcasting keeps all but
        # the last round small.
        counter = _mix((counter ^ (index & _MASK)) & _MASK)
    return counter >= int(p * (_MASK + 1))


class KeyedDropout:
    """The forward of an `nn.Dropout` on this rank's copy."""

    def __init__(
        self, module: torch.nn.Module, name: str, context: StepContext, batch_dim: int | None = 0
    ) -> None:
        self.module, self.name, self.context, self.batch_dim = module, name, context, batch_dim
        self.sharded: tuple[int, int] | None = None
        self._position: tuple[int, ...] = ()
        self._calls = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The replaced forward."""
        p = float(self.module.p)  # type: ignore[arg-type]
        if not self.module.training or p == 0.0:
            return x
        context = self.context
        position = (context.step, context.stage, context.micro_batch, context.layer_entry)
        if position != self._position:
            self._position, self._calls = position, 0
        key = key_of(context.seed, context.step, self.name, self._calls)
        key = key_of(key, context.layer_call, "call", 0)
        self._calls += 1
        if p == 1.0:
            return x * 0
        sharded = (x.dim() - 1, *self.sharded) if self.sharded is not None else None
        return x * position_mask(x, p, key, context, self.batch_dim, sharded) * (1.0 / (1.0 - p))


def position_mask(
    x: torch.Tensor,
    p: float,
    key: int,
    context: StepContext,
    batch_dim: int | None,
    sharded: tuple[int, int, int] | None,
) -> torch.Tensor:
    """The mask of a call named by `key`; what has no batch in it gets one mask per micro-batch."""
    if batch_dim is None:
        key = key_of(key, context.micro_batch, "micro-batch", 0)
    return keep_mask(
        x.shape,
        p,
        key=key,
        first_row=context.first_row if batch_dim is not None else 0,
        rows=context.rows if batch_dim is not None else x.shape[0],
        batch_dim=batch_dim or 0,
        device=x.device,
        sharded=sharded,
    )
