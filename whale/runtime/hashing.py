"""Hashing: random bits that are functions of a key and of places in a tensor.

Place in the flow: under `nn.dropout` and `nn.draws` (whose keys name calls of modules) and
`runtime.masters` (whose keys name parameters). It does not matter which rank computes an element.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

MASK = 0xFFFFFFFF


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A 32-bit hash ("lowbias32" constants) on int64: torch has no unsigned shifts."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def _mix_int(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def key_of(seed: int, step: int, name: str, call: int) -> int:
    """One number per (seed, step, module, call in this forward)."""
    key = _mix_int(seed & MASK)
    for part in (step & MASK, zlib.crc32(name.encode()), call):
        key = _mix_int(key ^ part)
    return key


def position_hash(
    shape: Sequence[int], key: int, offsets: Sequence[int], batch_dim: int, device: torch.device
) -> torch.Tensor:
    """32 bits for each element, by `key` and its place: `offsets` is where the tensor starts."""
    counter = torch.full((), key, dtype=torch.int64, device=device)
    for dim in [batch_dim, *(d for d in range(len(shape)) if d != batch_dim)]:
        index = torch.arange(offsets[dim], offsets[dim] + shape[dim], device=device)
        index = index.view([-1 if d == dim else 1 for d in range(len(shape))])
        # The sample's own hash first, then a mixed coordinate at a time: broadcasting keeps all but
        # the last round small.
        counter = _mix((counter ^ (index & MASK)) & MASK)
    return counter
