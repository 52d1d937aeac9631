"""Examples: what a Layer was called with, as shapes, so that it can be run alone at any row count.

Place in the flow: kept by `engine.capture`, used by `engine.calibrate` to time one Layer at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from whale.engine.trace.program import tensors_in, tree_map


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShape:
    """A tensor argument: its shape for one row, and where the rows are."""

    shape: tuple[int, ...]
    batch_dim: int | None
    """Of which the size in `shape` is that of one row; None: no rows in it."""
    dtype: torch.dtype
    requires_grad: bool

    def make(self, rows: int, device: torch.device) -> torch.Tensor:
        """A tensor of that shape: small random numbers, or zeros where they are indices."""
        shape = list(self.shape)
        if self.batch_dim is not None:
            shape[self.batch_dim] *= rows
        if not self.dtype.is_floating_point:
            return torch.zeros(shape, dtype=self.dtype, device=device)
        tensor = torch.randn(shape, dtype=self.dtype, device=device)
        return tensor.requires_grad_(self.requires_grad)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """The arguments of a Layer's first call, tensors as their shapes."""

    args: Any
    kwargs: Any

    def make(self, rows: int, device: torch.device) -> tuple[Any, Any]:
        """Arguments for so many rows."""

        def real(leaf: Any) -> Any:
            return leaf.make(rows, device) if isinstance(leaf, TensorShape) else leaf

        return tree_map(self.args, real), tree_map(self.kwargs, real)

    @property
    def shapes(self) -> list[TensorShape]:
        """All tensors among them."""
        found: list[TensorShape] = []

        def look(leaf: Any) -> Any:
            if isinstance(leaf, TensorShape):
                found.append(leaf)
            return leaf

        tree_map((self.args, self.kwargs), look)
        return found


def example_of(
    first: tuple[Any, Any], second: tuple[Any, Any], rows: tuple[int, int]
) -> Example | None:
    """From two calls with different numbers of rows; None where the calls differ otherwise."""
    others = iter(tensors_in(second))

    def shape(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return _shape(leaf, next(others), rows)

    try:
        return Example(args=tree_map(first[0], shape), kwargs=tree_map(first[1], shape))
    except (StopIteration, ValueError):
        return None


def _shape(a: torch.Tensor, b: torch.Tensor, rows: tuple[int, int]) -> TensorShape:
    sizes = list(a.shape)
    changed = [d for d, (x, y) in enumerate(zip(a.shape, b.shape, strict=True)) if x != y]
    if changed:
        dim = changed[0]
        slope, rest = divmod(b.shape[dim] - a.shape[dim], rows[1] - rows[0])
        if len(changed) > 1 or rest or slope * rows[0] != a.shape[dim]:
            raise ValueError(f"{tuple(a.shape)} and {tuple(b.shape)} are not so many rows")
        sizes[dim] = slope
    return TensorShape(
        shape=tuple(sizes),
        batch_dim=changed[0] if changed else None,
        dtype=a.dtype,
        requires_grad=a.requires_grad,
    )
