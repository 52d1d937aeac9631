"""Batches: what a step is fed, in many containers, and how one is cut into micro-batches.

Place in the flow: made by every rank from the spec's seed. The truth cuts them by what the
generator knows of them (`ROWLESS`), not by shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tests.odd.losses import IGNORED, LOSSES
from tests.odd.spec import Spec
from tests.odd.vocabulary import CLASSES, DIM, VOCAB

FORMS = (
    "tuple",
    "masked",
    "dict",
    "dict-masked",
    "dict-extra",
    "dict-extra-first",
    "dict-values",
)
ROWLESS = ("positions",)
"""Keys whose tensors have no rows."""


def masked(spec: Spec) -> bool:
    """Whether the batch of a spec carries a mask."""
    return spec.batch in ("masked", "dict-masked")


def make(spec: Spec, index: int, rows: int, length: int) -> Any:
    """The global batch of a number."""
    g = torch.Generator().manual_seed(spec.seed * 97 + index)
    dtype = torch.float32 if spec.autocast else torch.float64
    lengths = torch.randint(1, length + 1, (rows, 1), generator=g)
    mask = torch.arange(length) < lengths
    x: Tensor = torch.randint(1, VOCAB, (rows, length), generator=g)
    if spec.stem.startswith("ids"):
        x = x.masked_fill(~mask, 0)
    else:
        x = torch.randn(rows, length, DIM, generator=g, dtype=torch.float64).to(dtype)
    kind = LOSSES[spec.loss].target
    if kind == "values":
        y: Tensor = torch.randn(rows, length, 3, generator=g, dtype=torch.float64).to(dtype)
    elif kind == "classes":
        y = torch.randint(0, CLASSES, (rows,), generator=g)
    else:
        y = torch.randint(0, VOCAB, (rows, length), generator=g)
    if kind == "labels":
        y = y.masked_fill(~mask, IGNORED)
    if spec.batch == "tuple":
        return (x, y)
    if spec.batch == "masked":
        return (x, mask, y)
    batch: dict[str, Any] = {"x": x, "labels": y}
    if spec.batch == "dict-masked":
        batch = {"mask": mask, **batch}
    if spec.batch == "dict-extra":
        batch["positions"] = torch.arange(length).flip(0)
    if spec.batch == "dict-extra-first":
        batch = {"positions": torch.arange(length).flip(0), **batch}
    if spec.batch == "dict-values":
        batch.update(scale=0.5, flag=True, name="odd", nothing=None)
    return batch


def cut(batch: Any, low: int, high: int) -> Any:
    """Rows [low, high)."""
    if isinstance(batch, Mapping):
        return {
            key: value[low:high] if isinstance(value, Tensor) and key not in ROWLESS else value
            for key, value in batch.items()
        }
    return tuple(value[low:high] for value in batch)


def micro_batches(batch: Any, rows: int, count: int) -> list[Any]:
    """Consecutive parts whose sizes differ by at most one, the larger ones first; none empty."""
    size, more = divmod(rows, count)
    sizes = [size + (i < more) for i in range(count)]
    ends = [sum(sizes[: i + 1]) for i in range(count)]
    return [cut(batch, e - s, e) for s, e in zip(sizes, ends, strict=True) if s]


def parts(batch: Any) -> tuple[Any, Any, int]:
    """(target, mask or None, rows) of a batch."""
    if isinstance(batch, Mapping):
        return batch["labels"], batch.get("mask"), len(batch["labels"])
    return batch[-1], batch[1] if len(batch) == 3 else None, len(batch[0])
