"""Buckets of gradients on their way: summed whole, or into what each rank keeps.

Place in the flow: under `runtime.grads`, which says when each is complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from whale.ir.homes import Bucket
from whale.ir.sharding import Piece
from whale.runtime.groups import Communicator, Later, Work
from whale.runtime.half import HalfSums, HalfWork
from whale.runtime.shards import Shards, stretch_of

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class SumBucket:
    """A bucket on its way.

    One that nobody else contributes to goes nowhere: its gradients stay where the backward makes
    them.
    """

    def __init__(
        self, bucket: Bucket, params: Mapping[str, nn.Parameter], comm: Communicator
    ) -> None:
        # Those whose `.grad` is what is summed.
        self.bucket, self.comm = bucket, comm
        self.number, self.rounds = 0, 1
        self.params = {s.home.name: params[s.home.name] for s in bucket.slices}
        self.reduces = comm.size > 1
        self.names = frozenset(self.params)
        self.waiting: set[str] = set()
        self.armed = False
        """Whether the backward that completes it runs, or has run."""
        self.launched = False
        self.left = 0
        """How often it is still to be complete in this step."""

    def adds(self, rank: int) -> bool:
        """Whether the rank contributes, and has no copy of what another does."""
        return rank in self.bucket.sync.leads

    def begin(self) -> None:
        """Before a step."""
        self.waiting, self.armed, self.launched, self.left = set(), False, False, self.rounds

    def launch(self, rank: int, half: HalfSums | None) -> None:
        """Its sum begins."""

    def finish(self) -> None:
        """Its sum is done, and in place."""

    def let_go(self) -> None:
        """Its sum has been used: what memory it takes is free."""

    def squares(self, rank: int) -> Iterator[torch.Tensor]:
        """The gradients of which this rank answers for the norm."""
        for piece in self.bucket.slices:
            grad = self.params[piece.home.name].grad
            if piece.owner == rank and grad is not None:
                yield grad


class WholeBucket(SumBucket):
    """One that is summed in a flat buffer, of which the gradients are views."""

    def __init__(
        self,
        bucket: Bucket,
        params: Mapping[str, nn.Parameter],
        pieces: Mapping[str, Piece],
        comm: Communicator,
    ) -> None:
        super().__init__(bucket, params, comm)
        self.pieces = pieces
        self.views = frozenset(s.home.name for s in bucket.slices if s.span is None)
        """Parameters that are one slice of it."""
        self._parts: list[torch.Tensor] = []
        """By slice, its stretch of the buffer, once there is one."""
        self._work: Work | HalfWork | None = None

    def flat(self) -> torch.Tensor:
        """The buffer, made where there is none."""
        if not self._parts:
            total = sum(s.numel for s in self.bucket.slices)
            device = next(iter(self.params.values())).device
            self._flat = torch.empty(total, dtype=DTYPES[self.bucket.dtype], device=device)
            sizes = [s.numel for s in self.bucket.slices]
            self._parts = list(self._flat.split(sizes))
        return self._flat

    def view(self, name: str) -> torch.Tensor:
        """Where the gradient of a parameter that is one slice has its place."""
        self.flat()
        index = next(i for i, s in enumerate(self.bucket.slices) if s.home.name == name)
        return self._parts[index].view(self.params[name].shape)

    def let_go(self) -> None:
        """The buffer, with the views into it."""
        self._parts = []
        vars(self).pop("_flat", None)

    def _cuts(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Slices that are only a part of their parameter: (its gradient there, its view here)."""
        for piece, part in zip(self.bucket.slices, self._parts, strict=True):
            grad = self.params[piece.home.name].grad
            if piece.span is not None and grad is not None:
                target = stretch_of(grad, piece, self.pieces[piece.home.name])
                yield target, part.view(target.shape)

    def launch(self, rank: int, half: HalfSums | None) -> None:
        """Its sum begins."""
        flat = self.flat()
        for source, view in self._cuts():
            view.copy_(source)
        if not self.adds(rank):
            flat.zero_()
        if half is not None and flat.element_size() > 2:
            self._work = half.start(self.comm, flat)
        else:
            self._work = self.comm.all_reduce_(flat, async_op=True)

    def finish(self) -> None:
        """Its sum is done, and in place."""
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        for target, view in self._cuts():
            target.copy_(view)

    def squares(self, rank: int) -> Iterator[torch.Tensor]:
        """The gradients of which this rank answers for the norm."""
        for piece, part in zip(self.bucket.slices, self._parts, strict=True):
            if piece.owner == rank and self.params[piece.home.name].grad is not None:
                yield part


class ScatteredBucket(SumBucket):
    """One that is summed into what each of its ranks keeps; the rest of a gradient is let go.

    `kept` are those whose `.grad` this rank's part of the sum is.
    """

    def __init__(
        self,
        bucket: Bucket,
        params: Mapping[str, nn.Parameter],
        shards: Shards,
        kept: Mapping[str, nn.Parameter],
    ) -> None:
        super().__init__(bucket, params, shards.comm)
        self.shards, self.kept = shards, kept
        self._coming: Later | None = None
        self._first = True

    def begin(self) -> None:
        """Before a step."""
        super().begin()
        self._first = True

    def launch(self, rank: int, half: HalfSums | None) -> None:
        """Its sum begins."""
        self.finish()
        like = next(iter(self.params.values())).new_empty(0, dtype=DTYPES[self.bucket.dtype])
        grads = {n: p.grad if self.adds(rank) else None for n, p in self.params.items()}
        flat = self.shards.pack(grads, like)
        if half is not None and flat.element_size() > 2:
            self._coming = half.start_scatter(self.comm, flat, self.shards.sizes)
        else:
            self._coming = self.comm.start_scatter(flat, self.shards.sizes)

    def finish(self) -> None:
        """Its sum is done, and in place."""
        if self._coming is None:
            return
        flat, self._coming = self._coming.wait(), None
        for how, part in self.shards.own(flat):
            if not part.numel():
                continue
            kept = self.kept[how.slice.home.name]
            if kept.grad is None:
                kept.grad = torch.zeros_like(kept)
            place = self.shards.place(kept.grad, how)
            if self._first:
                place.copy_(part.view(place.shape))
            else:
                place.add_(part.view(place.shape))
        self._first = False

    def squares(self, rank: int) -> Iterator[torch.Tensor]:
        """The gradients of which this rank answers for the norm."""
        for how in self.shards.slices:
            if how.slice.counted and how.numel(self.comm.index):
                grad = self.kept[how.slice.home.name].grad
                if grad is not None:
                    yield self.shards.place(grad, how)
