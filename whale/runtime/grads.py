"""Gradient synchronisation: fused buckets, reduced while the backward still runs.

Place in the flow: made by `engine.lower` from `ir.homes`; the executor arms it for the last
backward of each stage, `runtime.store` does the rest. Every reduction is a SUM over contributions;
the division by the global count happens once, afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import torch
from torch import nn

from whale.errors import WhaleError
from whale.ir.homes import Bucket, Slice
from whale.ir.sharding import Piece
from whale.runtime import compat
from whale.runtime.groups import Communicator, Groups, Work
from whale.runtime.half import HalfSums, HalfWork

_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class _Filled:
    """A bucket with its memory: flat, so that one collective reduces it.

    One that nobody else contributes to has none: its gradients stay where the backward makes them.
    """

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
        self.reduces = comm.size > 1
        device = self.params[0].device
        total = sum(s.numel for s in bucket.slices) if self.reduces else 0
        self.flat = torch.empty(total, dtype=_DTYPES[bucket.dtype], device=device)
        self.views: list[torch.Tensor] = []
        """By slice, its stretch of `flat`."""
        offset = 0
        for piece, param in zip(bucket.slices, self.params, strict=True):
            if self.reduces:
                part = self.flat.narrow(0, offset, piece.numel)
                self.views.append(part.view(param.shape) if piece.span is None else part)
                offset += piece.numel
        self.names = frozenset(s.home.name for s in bucket.slices)
        self.waiting: set[str] = set()
        self.work: Work | HalfWork | None = None
        self.armed = False
        """Whether the backward that completes it runs, or has run."""
        self.launched = False

    def cuts(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Slices that are only a part of their parameter: (its gradient there, its view here)."""
        for piece, held, param, view in zip(
            self.bucket.slices, self.pieces, self.params, self.views, strict=True
        ):
            if piece.span is not None and param.grad is not None:
                target = _part(param.grad, piece, held)
                yield target, view.view(target.shape)


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
    """All gradients of one rank.

    A step begins without any, so the first backward writes them. `param.grad` is a view into a
    bucket from then on, wherever a slice that others contribute to is a whole parameter.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        params: dict[str, nn.Parameter],
        pieces: dict[str, Piece],
        groups: Groups,
        rank: int,
        stages: dict[str, set[int]],
        half: HalfSums | None = None,
    ) -> None:
        self.rank = rank
        self.half = half
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
        self._views: dict[str, torch.Tensor] = {}
        """By parameter that is one slice of a bucket, its gradient there."""
        for item in self.filled:
            for piece in item.bucket.slices:
                self.of_param.setdefault(piece.home.name, []).append(item)
            self._views |= {
                piece.home.name: view
                for piece, view in zip(item.bucket.slices, item.views, strict=False)
                if piece.span is None
            }
        self._shared = [
            name for name, items in self.of_param.items() if any(item.reduces for item in items)
        ]
        """Parameters that other ranks contribute to."""
        self._own = [name for name in self.of_param if name not in set(self._shared)]
        """The others: nobody waits for their gradients, so nothing looks at them as they come."""
        self.touched: set[str] = set()
        """Parameters that got a gradient in this step, on this rank."""
        self.unfinished: frozenset[int] = frozenset()
        """Ids of parameters of which the compute that runs has more to add."""
        self.next = 0
        self.on_launch: Callable[[int], None] | None = None
        self._hooks = [
            params[name].register_post_accumulate_grad_hook(self._hook(name))
            for name in self._shared
        ]

    def close(self) -> None:
        """Gives the buckets' memory back at once, whoever still holds a gradient's parameter."""
        for hook in self._hooks:
            hook.remove()
        for param in self.params.values():
            param.grad = None
        self.filled.clear()
        self.of_param.clear()
        self._views.clear()

    def _hook(self, name: str) -> Callable[[torch.Tensor], None]:
        view = self._views.get(name)
        shared = [item for item in self.of_param[name] if item.reduces]

        def accumulated(param: torch.Tensor) -> None:
            grad = param.grad
            if grad is None:
                return  # it was only an anchor (`nn.deferred`)
            self.touched.add(name)
            if any(item.launched for item in shared):
                raise WhaleError(
                    f"a gradient of {name} came after those of all ranks were summed: a backward "
                    "inside the backward (an autograd.Function that calls `backward`) adds to it "
                    "once more",
                    hint="let the Function return its gradients, or use torch.utils.checkpoint; or "
                    "set communication.bucket_bytes so large that all gradients are one bucket",
                )
            if grad.is_sparse:
                param.grad = grad = grad.to_dense()
            if view is not None and grad is not view:
                param.grad = view.copy_(grad)
            if id(param) not in self.unfinished:
                for item in shared:
                    item.waiting.discard(name)
                self._launch_complete()

        return accumulated

    def begin(self) -> None:
        """Before a step: no gradients, nothing launched."""
        for item in self.filled:
            item.waiting = set()
            item.work, item.armed, item.launched = None, False, False
        for name in self.of_param:
            self.params[name].grad = None
        self.touched.clear()
        self.next = 0

    def complete(self, absent: Collection[str]) -> None:
        """Those without a gradient here: zeros, or none at all where they had none anywhere.

        The optimizer must not see a gradient of what nobody used, until the next step.
        """
        for name in self.of_param.keys() - self.touched:
            param = self.params[name]
            if name in absent:
                param.grad = None
            elif param.grad is None:
                param.grad = torch.zeros_like(param)

    def arm(self, stage: int, numbers: Collection[int]) -> None:
        """The backward about to run is `stage`'s, and completes these buckets.

        A bucket's sum begins as soon as what it waits for has come, while the backward still runs.
        """
        for number in numbers:
            item = self.filled[number]
            here = {name for name in item.names if stage in self.stages[name]}
            self._wait_for(item, here if item.reduces else set())
        self._launch_complete()

    def reduce(self, number: int) -> None:
        """A bucket is complete: what has no gradient by now gets none."""
        self._wait_for(self.filled[number], set())
        self._launch_complete()

    def _wait_for(self, item: _Filled, names: set[str]) -> None:
        """Of a bucket, these alone may still get a gradient."""
        item.armed, item.waiting = True, names
        for name in item.names - names - self.touched if item.reduces else ():
            self._contribute_nothing(name)

    def _launch_complete(self) -> None:
        """In the order that all ranks share; those that nobody else has are in nobody's way."""
        while self.next < len(self.filled):
            item = self.filled[self.next]
            if item.reduces and (not item.armed or item.waiting):
                return
            self._launch(item)
            self.next += 1

    def _contribute_nothing(self, name: str) -> None:
        """Others may have a gradient: its sum needs a place here."""
        view, param = self._views.get(name), self.params[name]
        if view is not None:
            param.grad = view.zero_()
        elif param.grad is None:
            param.grad = torch.zeros_like(param)

    def _launch(self, item: _Filled) -> None:
        item.launched = True
        if not item.reduces:
            return
        for source, view in item.cuts():
            view.copy_(source)
        if self.rank not in item.bucket.sync.leads:
            item.flat.zero_()
        if self.on_launch is not None:
            self.on_launch(self.next)
        if self.half is not None and item.flat.element_size() > 2:
            item.work = self.half.start(item.comm, item.flat)
        else:
            item.work = item.comm.all_reduce_(item.flat, async_op=True)

    def wait(self) -> None:
        """All reductions done and every gradient in place."""
        for name in self._own:
            grad = self.params[name].grad
            if grad is not None:
                self.touched.add(name)
                if grad.is_sparse:
                    self.params[name].grad = grad.to_dense()
        for item in self.filled:
            assert item.launched, "a bucket was never complete"
            if item.work is not None:
                item.work.wait()
                item.work = None
            if item.reduces:
                for target, view in item.cuts():
                    target.copy_(view)

    def square_sum(self, device: torch.device) -> torch.Tensor:
        """Sum of squares of the elements this rank answers for, each once in the world."""
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
        found = [item.flat for item in self.filled if item.reduces]
        found += [
            param.grad
            for name in self.of_param
            if name not in self._views and (param := self.params[name]).grad is not None
        ]
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in found:
            if tensor.dtype.itemsize < 4:
                # In half precision the factor itself would be rounded, by up to 0.4 % in bfloat16.
                tensor.copy_(tensor.float().mul_(factor.float()))
            else:
                by_dtype.setdefault(tensor.dtype, []).append(tensor)
        for dtype, tensors in by_dtype.items():
            compat.multiply(tensors, factor.to(dtype))
