"""Gradient synchronisation: fused buckets, reduced while the backward still runs.

Place in the flow: made by `engine.lower` from `ir.homes`; the executor arms it for the last backward of each
stage. Every reduction is a SUM over contributions; the division by the global count happens once, in `scale`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn

from whale.ir.homes import Bucket, Slice
from whale.ir.sharding import Piece
from whale.runtime.groups import Communicator, Groups

_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class _Filled:
    """A bucket with its memory: flat, so that one collective reduces it."""

    def __init__(
        self,
        bucket: Bucket,
        params: dict[str, nn.Parameter],
        pieces: dict[str, Piece],
        comm: Communicator,
    ) -> None:
        self.bucket, self.comm = bucket, comm
        self.params = [params[s.home.name] for s in bucket.slices]
        self.pieces = [pieces[s.home.name] for s in bucket.slices]
        device = self.params[0].device
        total = sum(s.numel for s in bucket.slices)
        self.flat = torch.zeros(total, dtype=_DTYPES[bucket.dtype], device=device)
        self.views: list[torch.Tensor] = []
        offset = 0
        for piece, param in zip(bucket.slices, self.params, strict=True):
            part = self.flat.narrow(0, offset, piece.numel)
            self.views.append(part.view(param.shape) if piece.span is None else part)
            offset += piece.numel
        self.waiting: set[str] = set()
        self.work: dist.Work | None = None
        self.launched = False

    @property
    def reduces(self) -> bool:
        return self.comm.size > 1

    def cuts(self) -> Iterable[tuple[Slice, torch.Tensor, torch.Tensor]]:
        """Slices that are only a part of their parameter: (slice, its gradient there, its view here)."""
        for piece, whole, param, view in zip(
            self.bucket.slices, self.pieces, self.params, self.views, strict=True
        ):
            if piece.span is not None and param.grad is not None:
                yield piece, _part(param.grad, piece, whole), view


def _part(grad: torch.Tensor, piece: Slice, held: Piece) -> torch.Tensor:
    """The stretch of a local gradient that a slice names in global positions."""
    assert piece.span is not None
    low, high = piece.span
    start = 0
    for a, b in dict(held.dims).get(piece.dim, ((0, piece.home.shape[piece.dim]),)):
        if a <= low and high <= b:
            return grad.narrow(piece.dim, start + low - a, high - low)
        start += b - a
    raise AssertionError(f"{piece.home.name}: slice {piece.span} outside {held}")


class GradientBuckets:
    """All gradients of one rank. `param.grad` is a view into a bucket wherever a slice is a whole parameter."""

    def __init__(
        self,
        buckets: list[Bucket],
        params: dict[str, nn.Parameter],
        pieces: dict[str, Piece],
        groups: Groups,
        rank: int,
        stages: dict[str, set[int]],
    ) -> None:
        self.rank = rank
        self.params = params
        self.stages = stages
        pools: dict[tuple[int, ...], int] = {}
        self.filled: list[_Filled] = []
        for bucket in buckets:
            pool = groups.pool(bucket.sync.ranks)
            turn = pools.get(bucket.sync.ranks, 0)
            pools[bucket.sync.ranks] = turn + 1
            self.filled.append(_Filled(bucket, params, pieces, pool[turn % len(pool)]))
        self.of_param: dict[str, list[_Filled]] = {}
        for item in self.filled:
            for piece in item.bucket.slices:
                self.of_param.setdefault(piece.home.name, []).append(item)
        self.armed: set[str] = set()
        self.next = 0
        self.on_launch: Callable[[int], None] | None = None
        for name in self.of_param:
            params[name].register_post_accumulate_grad_hook(self._hook(name))

    def _hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def accumulated(_: torch.Tensor) -> None:
            if name in self.armed:
                self.ready(name)

        return accumulated

    def zero(self) -> None:
        """Before a step: zeroed gradients in place, nothing launched."""
        for item in self.filled:
            item.flat.zero_()
            item.waiting = {s.home.name for s in item.bucket.slices}
            item.work, item.launched = None, False
            for piece, param, view in zip(item.bucket.slices, item.params, item.views, strict=True):
                if piece.span is None:
                    if param.grad is not view:
                        param.grad = view
                elif param.grad is None:
                    param.grad = torch.zeros_like(param)
        for name, items in self.of_param.items():
            if any(s.span is not None and s.home.name == name for i in items for s in i.bucket.slices):
                grad = self.params[name].grad
                assert grad is not None
                grad.zero_()
        self.armed.clear()
        self.next = 0

    def arm(self, stage: int, remaining: set[int]) -> None:
        """The backward about to run is the last of `stage`; its gradients are final when they come.

        `remaining` are stages of this rank that still have a backward to run.
        """
        self.armed.update(
            name
            for name in self.of_param
            if stage in self.stages[name] and not self.stages[name] & remaining
        )

    def finish(self, stage: int, remaining: set[int]) -> None:
        """After the last backward of `stage`: what got no gradient in it is final too."""
        for name in list(self.of_param):
            if stage in self.stages[name] and not self.stages[name] & remaining:
                self.ready(name)

    def ready(self, name: str) -> None:
        """A gradient is final; launches the buckets that are complete, in the order all ranks share."""
        self.armed.discard(name)
        for item in self.of_param[name]:
            item.waiting.discard(name)
        while self.next < len(self.filled) and not self.filled[self.next].waiting:
            self._launch(self.filled[self.next])
            self.next += 1

    def _launch(self, item: _Filled) -> None:
        item.launched = True
        if not item.reduces:
            return
        for _, source, view in item.cuts():
            view.view(source.shape).copy_(source)
        if self.rank not in item.bucket.sync.leads:
            item.flat.zero_()
        if self.on_launch is not None:
            self.on_launch(self.next)
        item.work = item.comm.all_reduce_(item.flat, async_op=True)

    def wait(self) -> None:
        """All reductions done and every gradient in place."""
        for item in self.filled:
            assert item.launched, "a bucket was never complete"
            if item.work is not None:
                item.work.wait()
                item.work = None
            if item.reduces:
                for _, target, view in item.cuts():
                    target.copy_(view.view(target.shape))

    def square_sum(self, device: torch.device) -> torch.Tensor:
        """Sum of squares over the elements this rank answers for (each element once in the world)."""
        total = torch.zeros((), dtype=torch.float64, device=device)
        for item in self.filled:
            for piece, param, held in zip(
                item.bucket.slices, item.params, item.pieces, strict=True
            ):
                if piece.owner == self.rank and param.grad is not None:
                    grad = param.grad if piece.span is None else _part(param.grad, piece, held)
                    total += grad.double().square().sum()
        return total

    def scale(self, factor: torch.Tensor) -> None:
        """Multiplies every gradient, once."""
        loose: set[int] = set()
        for item in self.filled:
            if any(s.span is None for s in item.bucket.slices):
                item.flat.mul_(factor.to(item.flat.dtype))
            for piece, param in zip(item.bucket.slices, item.params, strict=True):
                if piece.span is not None and id(param) not in loose and param.grad is not None:
                    loose.add(id(param))
                    param.grad.mul_(factor.to(param.grad.dtype))
