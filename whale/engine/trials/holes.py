"""Holes: a batch with holes in masks and labels, other lengths, rows alike, as later ones have.

Place in the flow: used by `engine.trials.parts`. The first batch is often full: no padding, all
labels valid, every id once. A mean that is weighed by rows where it should be weighed by tokens
shows only in others, and so do rows that have to do with each other only where they are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from whale.runtime import batch as batches

IGNORED = -100
"""The label that torch's losses leave out."""
_LABELS = ("label", "target", "tgt")
_ALONE = 4
"""Tensors of whole numbers of which each alone is made alike in some rows."""

Change = Callable[[str, Tensor], Tensor]


def with_holes(batch: Any, rows: int, *, ignored: bool = True) -> Iterator[tuple[str, Any]]:
    """(what it is, the batch): some of them, each with the same shapes.

    `ignored`: whether labels may be what losses leave out.
    """
    for text, change in (*_hole_changes(batch, rows, ignored), *_copy_changes(batch, rows)):
        made = _walk("", batch, change, rows)
        pairs = zip(batches.leaves(batch), batches.leaves(made), strict=True)
        if any(not torch.equal(a, b) for a, b in pairs):
            yield text, made


def _copy_changes(batch: Any, rows: int) -> Iterator[tuple[str, Change]]:
    """Rows of the second half that are those of the first: ids, groups and labels then coincide.

    In all of their tensors; in those of whole numbers, beside other values; and in one of these
    alone: what rows that are alike in all do to each other may be nothing.
    """
    source = torch.arange(rows) % max(1, rows // 2)

    def copied(tensor: Tensor) -> Tensor:
        return tensor.index_select(0, source.to(tensor.device))

    def whole(tensor: Tensor) -> bool:
        return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)

    found = [t for t in batches.leaves(batch) if batches.has_rows(t, rows)]
    numbers = [t for t in found if whole(t)]
    yield "some rows alike", lambda name, tensor: copied(tensor)
    if numbers and len(numbers) < len(found):
        yield "the same numbers in some rows", lambda name, t: copied(t) if whole(t) else t
    if len(numbers) < 2:
        return
    for one in sorted(numbers, key=lambda t: t.dim())[:_ALONE]:

        def alone(name: str, tensor: Tensor, one: Tensor = one) -> Tensor:
            return copied(tensor) if tensor is one else tensor

        yield "the same numbers of one tensor in some rows", alone


def _hole_changes(batch: Any, rows: int, ignored: bool) -> tuple[tuple[str, Change], ...]:
    target = _target_name(batch)

    def labels(name: str, tensor: Tensor) -> bool:
        if not ignored:
            return False
        wide = not tensor.is_floating_point() and tensor.dtype != torch.bool
        return wide and (name == target or any(word in name.lower() for word in _LABELS))

    def scattered(name: str, tensor: Tensor) -> Tensor:
        holes = _holes(tensor, rows)
        if _is_mask(tensor):
            return torch.where(holes, torch.zeros_like(tensor), torch.ones_like(tensor))
        return tensor.masked_fill(holes, IGNORED) if labels(name, tensor) else tensor

    def padded(name: str, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() or tensor.dim() < 2:
            return tensor
        return tensor.masked_fill(_tail(tensor, rows), 0)

    def empty(name: str, tensor: Tensor) -> Tensor:
        """The first row has nothing to count."""
        if labels(name, tensor):
            value = IGNORED
        elif _is_mask(tensor) and "attention" not in name:
            value = 0
        else:
            return tensor
        tensor = tensor.clone()
        tensor[0] = value
        return tensor

    sizes = _widths(batch, rows)

    def shorter(name: str, tensor: Tensor) -> Tensor:
        """What may be lengths, one of each row; as labels they stay valid ones."""
        wide = tensor.dtype in (torch.int32, torch.int64) and tensor.dim() == 1
        if not wide or int(tensor.min()) < 0:
            return tensor
        most = int(tensor.max())
        if not most or not any(most <= size for size in sizes):
            return tensor
        # The greatest in the first rows: what a part is padded to differs.
        steps = torch.arange(rows, device=tensor.device) * max(1, most // 3) % most
        return tensor.clamp(max=1) * (most - steps.to(tensor.dtype).sort().values)

    return (
        ("holes in masks and labels", scattered),
        ("zeros at the end of rows", padded),
        ("a first row without labels", empty),
        ("other lengths of rows", shorter),
    )


def _widths(batch: Any, rows: int) -> set[int]:
    """Second dims of tensors with rows, which may be lengths."""
    found = (t for t in batches.leaves(batch) if batches.has_rows(t, rows) and t.dim() > 1)
    return {t.shape[1] for t in found if t.shape[1] > 1}


def _is_mask(tensor: Tensor) -> bool:
    return tensor.dtype == torch.bool or bool(((tensor == 0) | (tensor == 1)).all())


def _holes(tensor: Tensor, rows: int) -> Tensor:
    """Places to leave out, more in some rows than in others, never a whole row."""
    generator = torch.Generator().manual_seed(13)
    shares = torch.linspace(0.1, 0.7, rows)[torch.randperm(rows, generator=generator)]
    drawn = torch.rand(tensor.shape, generator=generator)
    holes = drawn < shares.view(-1, *[1] * (tensor.dim() - 1))
    if tensor.dim() > 1:
        holes.view(rows, -1)[:, 0] = False
    else:
        holes[0] = False
    return holes.to(tensor.device)


def _tail(tensor: Tensor, rows: int) -> Tensor:
    length = tensor.shape[1]
    ends = (torch.arange(rows) * max(1, length // 3)) % max(1, length - 1) + 1
    tail = torch.arange(length).view(1, -1) >= ends.view(-1, 1)
    shape = (rows, length, *[1] * (tensor.dim() - 2))
    return tail.view(shape).expand(tensor.shape).to(tensor.device)


def _target_name(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return "labels"
    return f".{len(batch) - 1}" if isinstance(batch, (tuple, list)) else ""


def _walk(name: str, value: Any, change: Change, rows: int) -> Any:
    if isinstance(value, Tensor):
        return change(name.lstrip("/"), value) if batches.has_rows(value, rows) else value
    if isinstance(value, Mapping):
        return {key: _walk(f"{name}/{key}", item, change, rows) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [_walk(f"{name}.{i}", v, change, rows) for i, v in enumerate(value)]
        return batches.like_sequence(value, items)
    return value
