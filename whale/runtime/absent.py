"""Absent gradients: parameters that no rank had a gradient for in a step, and so are not updated.

Place in the flow: asked by Step between the sums and the optimizer. torch leaves `grad` at None for
a parameter that no micro-batch used, and its optimizers pass it by; a gradient of zeros would still
decay it and follow its momentum. Gradients live in buckets that begin a step as zeros, so who had
one is kept beside them.

What counts is the whole parameter: a shard whose experts no row chose has a gradient of zeros where
another shard had rows, as on one device. So ranks add up, for every parameter of the model, how
many of them had a gradient; only a rank that misses one has to look at the sum.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Presence:
    """Which of the model's trainable parameters had a gradient, over all ranks."""

    def __init__(self, names: Iterable[str], held: Iterable[str], device: torch.device) -> None:
        self.names = tuple(names)
        self.held = frozenset(held) & frozenset(self.names)
        self.device = device
        self._flags: tuple[frozenset[str], torch.Tensor] | None = None

    def flags(self, touched: Iterable[str]) -> torch.Tensor:
        """By parameter, 1 where this rank had a gradient; to be summed over all ranks."""
        mine = frozenset(touched)
        if self._flags is None or self._flags[0] != mine:
            numbers = [float(name in mine) for name in self.names]
            made = torch.tensor(numbers, dtype=torch.float64, device=self.device)
            self._flags = (mine, made)
        return self._flags[1]

    def absent(self, touched: Iterable[str], summed: torch.Tensor) -> list[str]:
        """This rank's parameters that had a gradient nowhere.

        A rank that had all of its own need not wait for the sum.
        """
        missing = self.held - frozenset(touched)
        if not missing:
            return []
        counts = dict(zip(self.names, summed.tolist(), strict=True))
        return [name for name in self.names if name in missing and not counts[name]]
