"""Masters: parameters in half precision, and the float32 values that are updated.

Place in the flow: under `runtime.store`, around the update of an apply group. With float32 masters
there is nothing to do here: what is kept is a tensor of its own. The other ways hold float32 values
only while a group is updated.

[Note: two halves] A bfloat16 has the upper half of a float32's bits. `split` computes with the
bfloat16 that is nearest to each value and keeps what is left of its bits, a signed number of 16,
beside it: 4 bytes for each instead of 6, and an update loses nothing.

[Note: by chance] Rounded to the nearest, an update smaller than half a step of bfloat16 is lost
every time. Rounded up with the chance that its distance says, it counts on average. The chance is a
hash of seed, step, parameter and place, so every layout rounds alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from whale.ir.sharding import Piece, Span
from whale.runtime.hashing import key_of, position_hash
from whale.runtime.units import stand_in

_LARGE = 1 << 28
"""Elements of which no wide copy is made for their looks."""


@dataclass(frozen=True, slots=True)
class Halves:
    """A float32 tensor as two of half its size."""

    upper: torch.Tensor
    lower: torch.Tensor


def split(values: torch.Tensor) -> Halves:
    """A float32 tensor's halves: the nearest bfloat16, and what its bits are off by."""
    bits = values.contiguous().view(torch.int32)
    # Half way goes away from zero: to even, one of 65,536 rests would need a 17th bit.
    upper = torch.where(values.isnan(), bits, bits + 0x8000) >> 16
    lower = (bits - (upper << 16)).to(torch.int16)
    return Halves(upper.to(torch.int16).view(torch.bfloat16), lower)


def joined(halves: Halves) -> torch.Tensor:
    """The float32 tensor of two halves; what is no number stays none."""
    upper = halves.upper.view(torch.int16).to(torch.int32) << 16
    whole = (upper + halves.lower.to(torch.int32)).view(torch.float32)
    return torch.where(halves.upper.isnan(), halves.upper.float(), whole)


def rounded_by_chance(
    values: torch.Tensor, noise: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Float32 values in half precision; `noise` are 32 random bits for each, as int64.

    What is no number, infinite, or beyond the largest stays what rounding to the nearest makes it.
    """
    nearest = values.to(dtype)
    if dtype == torch.bfloat16:
        bits = values.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
        lifted = (bits + (noise & 0xFFFF)) & 0xFFFF0000
        lifted = torch.where(lifted > 0x7FFFFFFF, lifted - 0x100000000, lifted)
        found = lifted.to(torch.int32).view(torch.float32).to(dtype)
    else:
        other = _beside(values, nearest)
        gap = (other.float() - nearest.float()).abs()
        away = (values - nearest.float()).abs() / torch.where(gap > 0, gap, torch.ones_like(gap))
        found = torch.where(noise.double() * 2.0**-32 < away.double(), other, nearest)
    plain = torch.isfinite(nearest) & torch.isfinite(found) & torch.isfinite(values)
    return torch.where(plain, found, nearest)


def _beside(values: torch.Tensor, nearest: torch.Tensor) -> torch.Tensor:
    """The half number on the other side of each value."""
    towards = torch.where(values > nearest.float(), torch.inf, -torch.inf).to(nearest)
    return torch.nextafter(nearest, towards)


@dataclass(frozen=True, slots=True)
class Rounding:
    """How one update of what a rank keeps of a parameter is rounded by chance.

    `blocks` are (place in the piece, place in the whole), each by dim; `shape` is the piece's.
    """

    key: int
    shape: tuple[int, ...]
    blocks: tuple[tuple[Sequence[Span], Sequence[Span]], ...]
    dtype: torch.dtype

    @property
    def offsets(self) -> tuple[int, ...] | None:
        """Where the piece begins in the whole parameter, if it is one block of it."""
        if len(self.blocks) != 1:
            return None
        return tuple(low for low, _ in self.blocks[0][1])

    def noise(self, low: int, high: int, device: torch.device) -> torch.Tensor:
        """Random bits for the elements of a stretch of the piece's first dim."""
        if not self.shape:
            return position_hash((1,), self.key, (0,), 0, device).reshape(())
        noise = torch.empty((high - low, *self.shape[1:]), dtype=torch.int64, device=device)
        for inside, outside in self.blocks:
            first, last = max(low, inside[0][0]), min(high, inside[0][1])
            if first >= last:
                continue
            sizes = [last - first, *(b - a for a, b in outside[1:])]
            begin = outside[0][0] + first - inside[0][0]
            offsets = [begin, *(a for a, _ in outside[1:])]
            own = slice(first - low, last - low)
            place = noise[(own, *(slice(a, b) for a, b in inside[1:]))]
            place.copy_(position_hash(sizes, self.key, offsets, 0, device))
        return noise

    def rounded(self, values: torch.Tensor, low: int, high: int) -> torch.Tensor:
        """Float32 values of such a stretch in half precision."""
        return rounded_by_chance(values, self.noise(low, high, values.device), self.dtype)


class Masters:
    """What a rank's parameters in half precision are updated by.

    Args:
        kind: As `ir.precision` names it.
        kept: What this rank keeps, in half precision where that is computed with.
        pieces: Which parts of the model's parameters these are.
        lower: With `split`, the lower halves.
        shapes: Of the whole parameters.
        seed: Of the run.
    """

    def __init__(
        self,
        kind: str,
        kept: Mapping[str, nn.Parameter],
        pieces: Mapping[str, Piece],
        lower: Mapping[str, torch.Tensor],
        shapes: Mapping[str, tuple[int, ...]],
        seed: int,
    ) -> None:
        self.kind, self.kept, self.pieces, self.lower = kind, kept, pieces, lower
        self.shapes, self.seed = shapes, seed

    def value(self, name: str) -> torch.Tensor:
        """What is updated of a parameter."""
        kept = self.kept[name].detach()
        return joined(Halves(kept, self.lower[name])) if name in self.lower else kept

    def assign(self, name: str, value: torch.Tensor) -> None:
        """Gives a parameter another value."""
        kept = self.kept[name].detach()
        if name not in self.lower:
            kept.copy_(value)
            return
        halves = split(value.to(kept.device, torch.float32))
        kept.copy_(halves.upper)
        self.lower[name].copy_(halves.lower)

    def roundings(self, names: Iterable[str], step: int) -> dict[nn.Parameter, Rounding]:
        """For an optimizer that makes its own wide values: how each is rounded by chance."""
        if self.kind != "stochastic":
            return {}
        return {self.kept[n]: self._rounding(n, step) for n in names if self._widens(n)}

    def _rounding(self, name: str, step: int) -> Rounding:
        """By the place of each element in the whole."""
        kept, shape = self.kept[name], self.shapes[name]
        blocks = tuple(self.pieces[name].blocks(shape)) if shape else ()
        key = key_of(self.seed, step, name, 0)
        return Rounding(key, tuple(kept.shape), blocks, kept.dtype)

    @contextmanager
    def widened(self, names: Iterable[str], step: int, *, rounds: bool = True) -> Iterator[None]:
        """Inside, these parameters and their gradients are float32; after it, in half precision.

        Unless it `rounds`, what they became is thrown away, and large ones have no values: nobody
        updates them then.
        """
        wide = {name: self.kept[name] for name in names if self._widens(name)}
        narrow = {name: kept.data for name, kept in wide.items()}
        for name, kept in wide.items():
            grad, kept.grad = kept.grad, None
            if not rounds and kept.numel() > _LARGE:
                kept.data = stand_in(kept.data.new_empty(0, dtype=torch.float32), (*kept.shape,))
                continue
            kept.data = self.value(name).float()
            kept.grad = None if grad is None else grad.float()
        try:
            yield
        finally:
            for name, kept in wide.items():
                value, kept.data = kept.data, narrow[name]
                if kept.grad is not None:
                    kept.grad = kept.grad.to(kept.dtype)
                if not rounds:
                    continue
                if self.kind == "stochastic":
                    rows = kept.shape[0] if kept.dim() else 1
                    value = self._rounding(name, step).rounded(value, 0, rows)
                self.assign(name, value)

    def _widens(self, name: str) -> bool:
        kept = self.kept.get(name)
        if kept is None:
            return False
        half = kept.dtype in (torch.bfloat16, torch.float16)
        return self.kind in ("split", "stochastic") and half and kept.requires_grad
