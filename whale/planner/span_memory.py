"""SpanMemory: what a stretch of Layers needs on one device of a group, for all stretches at once.

Place in the flow: under `chain`, which looks for the last Layer that a stage can hold. It is
`cost.memory` and `ir.memory` on arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from whale.ir.memory import peak_bytes

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class SpanMemory:
    """Bytes by Layer, on one device; those left out are zeros.

    Args:
        static: Parameters, gradients and optimizer state.
        kept: What the forward of a micro-batch leaves for the backward.
        passing: What the backward holds beside that (`cost.memory.LayerBytes`).
        scratch: What the update makes.
        received: What a micro-batch in flight holds of the stage before, if a stage begins here.
        driver: What no tensor can have.
        gaps: The share of what tensors take that the allocator loses.
    """

    static: tuple[float, ...]
    kept: tuple[float, ...]
    passing: tuple[float, ...] = ()
    scratch: tuple[float, ...] = ()
    received: tuple[float, ...] = ()
    driver: float = 0.0
    gaps: float = 0.0

    def __post_init__(self) -> None:
        given = (self.static, self.kept, self.passing, self.scratch, self.received)
        assert {len(item) for item in given} <= {0, len(self.static)}, given
        assert all(min(item, default=0.0) >= 0.0 for item in given), given

    @property
    def num_layers(self) -> int:
        """Layers there are."""
        return len(self.static)

    def peak(self, start: int, end: int, held: int) -> float:
        """Of the stage [start, end) with so many micro-batches in flight."""
        return float(self._peaks(np.array([start]), np.array([end]), held)[0])

    def stays(self, layer: int, held: int) -> float:
        """Of one Layer, what does not depend on the Layers beside it."""
        return (self.static[layer] + held * self.kept[layer]) * (1.0 + self.gaps)

    def last_ends(self, capacity: float, held: int) -> Ints:
        """By start, the last end of a stage that fits into `capacity`; itself where none does."""
        low = np.arange(self.num_layers)
        starts, high = low, np.full(self.num_layers, self.num_layers)
        while (low < high).any():
            middle = (low + high + 1) // 2
            fits = self._peaks(starts, middle, held) <= capacity
            low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
        return low

    def merged(self, other: SpanMemory, choose: Callable[[float, float], float]) -> SpanMemory:
        """What both need at most, or at least."""

        def both(a: tuple[float, ...], b: tuple[float, ...]) -> tuple[float, ...]:
            none = (0.0,) * self.num_layers
            return tuple(map(choose, a or none, b or none))

        return SpanMemory(
            static=both(self.static, other.static),
            kept=both(self.kept, other.kept),
            passing=both(self.passing, other.passing),
            scratch=both(self.scratch, other.scratch),
            received=both(self.received, other.received),
            driver=choose(self.driver, other.driver),
            gaps=choose(self.gaps, other.gaps),
        )

    def _peaks(self, starts: Ints, ends: Ints, held: int) -> Floats:
        static, kept, scratch = self._prefixes
        received = np.append(self._array(self.received), 0.0)[starts]
        # By the time of a Layer's backward, what the Layers after it kept is free again.
        workspace = np.maximum(0.0, self._largest(starts, ends) - kept[ends])
        busy = held * (kept[ends] - kept[starts] + received) + workspace
        found: Floats = peak_bytes(
            static[ends] - static[starts],
            busy,
            scratch[ends] - scratch[starts],
            self.driver,
            self.gaps,
            np.maximum,
        )
        return found

    @cached_property
    def _prefixes(self) -> tuple[Floats, Floats, Floats]:
        static, kept, scratch = (
            np.concatenate([[0.0], np.cumsum(self._array(item))])
            for item in (self.static, self.kept, self.scratch)
        )
        return static, kept, scratch

    def _array(self, item: tuple[float, ...]) -> Floats:
        return np.array(item or (0.0,) * self.num_layers, dtype=np.float64)

    def _largest(self, starts: Ints, ends: Ints) -> Floats:
        """The most of what passes and what was kept up to there, over each stretch."""
        power = np.frexp(np.maximum(ends - starts, 1))[1] - 1
        tops = self._tops
        last = np.maximum(ends - (1 << power), 0)
        found: Floats = np.maximum(
            tops[power, np.minimum(starts, self.num_layers - 1)],
            tops[power, np.minimum(last, self.num_layers - 1)],
        )
        return found

    @cached_property
    def _tops(self) -> Floats:
        """[power, start]: the maximum over 2**power Layers from a start on."""
        tops = [self._array(self.passing) + self._prefixes[1][1:]]
        while 2 ** len(tops) <= self.num_layers:
            half = 2 ** (len(tops) - 1)
            shifted = np.append(tops[-1][half:], np.full(half, -np.inf))
            tops.append(np.maximum(tops[-1], shifted))
        return np.array(tops)
