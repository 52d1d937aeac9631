"""Novelty: does a batch have something in it that no batch before it had?

Place in the flow: asked by the checks that look at a batch while training (`engine.watch.recheck`,
`engine.watch.kinds`). Code may do something else for the first nan, the first padded token, a flag
that turns, a label that occurs twice. It is cheap to see that a batch is the first with such a
thing, and then worth the while to try its rows. What is noted are plain traits of each tensor, of
which there are few, so that this comes to an end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from whale.engine.state.rarely import rarely
from whale.runtime.signature import named_leaves

_EVERY = 256
"""Batches of which each is looked at; of later ones, tensors on the CPU up to `_MOST` elements."""
_MOST = 1 << 20
_SPECIAL = (-100, -1, 0, 1, 2, 3)
"""Numbers that have a meaning of their own among labels and tokens."""
_SMALLEST = -12
"""Powers of two below this are not told apart."""


class Novelty:
    """What the tensors of batches had in them so far."""

    def __init__(self, example: Any) -> None:
        self._seen = set(_traits(example, most=None))
        self._batches = self._found = 0

    def is_new(self, batch: Any, first: int) -> bool:
        """Whether something in it is new: the `first` times that there is, then rarely."""
        self._batches += 1
        early = self._batches <= _EVERY
        found = set(_traits(batch, most=None if early else _MOST)) - self._seen
        if not found:
            return False
        self._seen |= found
        self._found += 1
        return rarely(self._found, first)


def _traits(batch: Any, *, most: int | None) -> Iterator[tuple[str, str]]:
    for name, leaf in named_leaves(batch):
        if not isinstance(leaf, Tensor) or leaf.is_meta or not leaf.numel() or leaf.is_complex():
            continue
        if most is not None and (leaf.is_cuda or leaf.numel() > most):
            continue
        if leaf.layout == torch.strided:
            yield from ((name, trait) for trait in _of(leaf.detach()))


def _of(tensor: Tensor) -> Iterator[str]:
    if tensor.dtype == torch.bool:
        yield from (str(value) for value in (True, False) if bool((tensor == value).any()))
        if tensor.dim() > 1:
            rows = tensor.flatten(1)
            yield from (text for text, found in _rows(rows.all(1), ~rows.any(1)) if found)
        return
    low, high = (float(number) for number in tensor.aminmax())
    if math.isnan(low) or math.isnan(high):
        yield "nan"
        return
    yield from _sizes(low, high)
    if tensor.numel() > _MOST:
        return
    if tensor.is_floating_point():
        if tensor.dim() > 1 and bool((tensor == 0).flatten(1).all(1).any()):
            yield "a row of zeros"
        return
    for value in _SPECIAL:
        if low <= value <= high and bool((tensor == value).any()):
            yield f"has {value}"
    if tensor.dim() == 1 and len(tensor) > 1:
        num = len(tensor.unique())
        yield "alike" if num == 1 else "varied"
        if num < len(tensor):
            yield "repeated"


def _rows(every: Tensor, none: Tensor) -> Iterator[tuple[str, bool]]:
    yield "a row of True", bool(every.any())
    yield "a row of False", bool(none.any())


def _sizes(low: float, high: float) -> Iterator[str]:
    """Signs, and the powers of two that are reached."""
    for text, number in (("below", -low), ("above", high)):
        if number <= 0:
            continue
        if math.isinf(number):
            yield f"{text} all"
            number = 2.0**64
        reached = max(_SMALLEST, min(64, math.floor(math.log2(number))))
        yield from (f"{text} 2^{power}" for power in range(_SMALLEST, reached + 1))
        yield f"{text} about 2^{reached}"  # smaller numbers than ever are news too
