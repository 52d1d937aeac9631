"""Feeds: what both sides of a verification are fed, step by step, and which check each is for.

Place in the flow: made by `wh.verify`, run by one device and by the ranks. The first steps see the
batch as it is. Then come the ways a training script goes on: through `wh.shard`, from a checkpoint
in a fresh Step, with the last batch of an epoch, with other lengths.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whale.errors import WhaleError
from whale.runtime import batch as batches

CHECKS = {
    "steps": "loss, gradients, weights and buffers of every step, on every rank and gathered",
    "optimizer state": "what the optimizer keeps, on every rank, after the last step",
    "evaluate": "the loss in eval mode, before and after training",
    "later steps": "steps after those, one of them fed through wh.shard",
    "checkpoint": "saved, loaded into a fresh Step, trained on",
    "outputs": "named outputs in training and evaluation, merged",
    "fewer rows": "a batch with one row less",
    "one row": "a batch of one row, fewer than replicas or micro-batches",
    "shorter": "a batch of a shorter sequence or smaller image",
    "longer": "a batch of a longer one",
    "autocast": "a step in bfloat16 autocast, on float32 weights",
}
"""Name of a check, and what it compares."""

LATER = 2
"""Steps after the first ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """One step's batch.

    Attributes:
        check: What it is for.
        batches: What to feed: the first of these with which the model trains on one device.
        optional: None of them may be such; then the check is not made.
        fresh: It goes to the Step that was loaded from the checkpoint.
        sharded: It goes through `wh.shard`.
    """

    check: str
    batches: tuple[Any, ...]
    optional: bool = False
    fresh: bool = False
    sharded: bool = False


def make_feeds(batch: Any, steps: int, wanted: frozenset[str]) -> tuple[Feed, ...]:
    """The steps to run; in the k-th one, rows are those of `batch`, k - 1 places further."""
    feeds = [Feed(check="steps", batches=(rolled(batch, step),)) for step in range(steps)]
    if "later steps" in wanted:
        feeds += [
            Feed(check="later steps", batches=(rolled(batch, steps + i),), sharded=i == 0)
            for i in range(LATER)
        ]
    if wanted & FRESH:
        feeds.append(Feed(check="checkpoint", batches=(rolled(batch, len(feeds)),), fresh=True))
    rows = batches.num_rows(batch)
    variants: dict[str, tuple[Any, ...]] = {
        "fewer rows": (_first(batch, rows - 1),) if rows > 1 else (),
        "one row": (_first(rolled(batch, 1), 1), _first(batch, 1)) if rows > 2 else (),
        "shorter": tuple(_resized(batch, _narrower)),
        "longer": tuple(_resized(batch, _wider)),
    }
    feeds += [
        Feed(check=check, batches=found, optional=True, fresh=True)
        for check, found in variants.items()
        if check in wanted
    ]
    return tuple(feeds)


FRESH = frozenset({"checkpoint", "outputs", "fewer rows", "one row", "shorter", "longer"})
"""The checks that are made on the Step loaded from a checkpoint."""


def check_names(wanted: Collection[str] | None) -> frozenset[str]:
    """The checks asked for; all when None. The steps themselves always are."""
    if wanted is None:
        return frozenset(CHECKS)
    unknown = sorted(set(wanted) - set(CHECKS))
    if unknown:
        raise WhaleError(
            f"checks has {unknown}; allowed: {', '.join(CHECKS)}",
            hint="leave `checks` out to make all of them",
        )
    return frozenset(wanted) | {"steps"}


def rolled(batch: Any, shift: int) -> Any:
    """The same rows, each a few places further: every rank sees others in every step."""
    return _each_with_rows(batch, lambda leaf: leaf.roll(shift, 0))


def _first(batch: Any, count: int) -> Any:
    return _each_with_rows(batch, lambda leaf: leaf[:count])


def _each_with_rows(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    rows = batches.num_rows(batch)
    leaves = [
        change(leaf) if leaf.dim() and leaf.shape[0] == rows else leaf
        for leaf in batches.leaves(batch)
    ]
    return batches.rebuild(batch, leaves)


def _resized(batch: Any, change: Callable[[Tensor, int], Tensor]) -> list[Any]:
    """The batch with another length, and with another size of images, as far as it has them."""
    rows = batches.num_rows(batch)
    inner = [t for t in batches.leaves(batch) if t.dim() > 1 and t.shape[0] == rows]
    made = []
    for dims in ((1,), (2, 3)):
        sizes = Counter(t.shape[d] for t in inner for d in dims if d < t.dim())
        sizes = Counter({size: n for size, n in sizes.items() if size > 1})
        if not sizes:
            continue
        length = sizes.most_common(1)[0][0]

        def resized(leaf: Tensor, length: int = length, first: int = dims[0]) -> Tensor:
            for dim in range(first, leaf.dim()):
                if leaf.shape[dim] == length:
                    leaf = change(leaf, dim)
            return leaf

        made.append(_each_with_rows(batch, resized))
    return made


def _narrower(leaf: Tensor, dim: int) -> Tensor:
    return leaf.narrow(dim, 0, leaf.shape[dim] - 1)


def _wider(leaf: Tensor, dim: int) -> Tensor:
    return torch.cat([leaf, leaf.narrow(dim, 0, 1)], dim)
