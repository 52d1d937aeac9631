"""Fingerprints: a number made of all bits of a tensor, equal only where the bits are equal.

Place in the flow: compared over ranks when a Step is built (`runtime.agreement`), while it trains
(`runtime.guard`) and for batches (`runtime.signature`). Integers, not sums of floats: they do not
depend on the device or on the order of additions, and one flipped bit always changes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd, so that a product with it loses nothing modulo 2**64.
_PRIME = 0x9E3779B97F4A7C15 - 2**64
_CHUNK = 1 << 22


def fingerprint_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The fingerprint as a scalar on the tensor's device: nothing waits for it there.

    The sum over places i of (bits of element i) * (an odd number that belongs to i), modulo 2**64.
    """
    flat = tensor.detach()
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    flat = flat.contiguous().flatten()
    flat = flat.view(_BITS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK].to(torch.int64)
        places = torch.arange(start, start + part.numel(), device=flat.device)
        # Every factor is odd: a change of one element cannot vanish.
        places.mul_(2).add_(1).mul_(_PRIME)
        places.bitwise_xor_(places >> 33).bitwise_or_(1)
        total += places.mul_(part).sum()
    return total


def fingerprint(tensor: torch.Tensor) -> int:
    """The same as a number, with shape and dtype in it. Waits for the device."""
    kind = list(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
    return combined([int(fingerprint_tensor(tensor)), *kind])


def combined(numbers: Sequence[int]) -> int:
    """One number of several, in order, below 2**64."""
    total = 0
    for number in numbers:
        total = (total * 0x100000001B3 + number + 1) % 2**64
    return total
