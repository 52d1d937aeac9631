"""Gradient synchronisation: fused buckets, reduced while the backward still runs.

Place in the flow: made by `runtime.store` from `ir.homes`; the executor arms it for the backwards
that complete buckets. Every reduction is a SUM over contributions; the division by the global count
happens once, afterwards. A bucket is summed into every rank that has it (`WholeBucket`), or, where
its ranks share it out, into what each keeps (`ScatteredBucket`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from whale.errors import WhaleError
from whale.ir.homes import Bucket
from whale.ir.sharding import Piece
from whale.runtime import compat
from whale.runtime.buckets import DTYPES, ScatteredBucket, SumBucket, WholeBucket
from whale.runtime.groups import Groups
from whale.runtime.half import HalfSums
from whale.runtime.shards import Shards
from whale.runtime.units import stand_in


def _as(tensor: torch.Tensor) -> tuple[torch.dtype, torch.device]:
    return tensor.dtype, tensor.device


class GradientBuckets:
    """All gradients of one rank.

    A step begins without any, so the first backward writes them. `param.grad` is a view into a
    bucket from then on, wherever a slice that others contribute to is a whole parameter.

    Args:
        buckets: As `ir.updates` counts them.
        params: What this rank computes with.
        pieces: Which part of the model's parameters these are.
        groups: The communicators.
        rank: This one.
        stages: By parameter, the stages of this rank that use it.
        half: Sums in half precision, if asked for.
        shards: By number of a bucket that its ranks share out, how.
        kept: What this rank keeps: other parameters where it is shared out, the same elsewhere.
        rounds: By number of a bucket, how often it is complete in a step, if not once.
        watches_all: Whether it is told of gradients that nobody else waits for, too.
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
        shards: Mapping[int, Shards] | None = None,
        kept: dict[str, nn.Parameter] | None = None,
        rounds: Mapping[int, int] | None = None,
        watches_all: bool = False,
    ) -> None:
        self.rank, self.half, self.params, self.stages = rank, half, params, stages
        self.kept = params if kept is None else kept
        self.sinks: dict[str, nn.Parameter] = {}
        """By parameter, whose `.grad` its gradient is while it is added up and summed."""
        self._targets: dict[str, nn.Parameter] = {}
        """By parameter that is shared out, whose `.grad` this rank's part of its gradient is."""
        self.filled: list[SumBucket] = []
        """By number."""
        pools: dict[tuple[int, ...], int] = {}
        for number, bucket in enumerate(buckets):
            pool = groups.pool(bucket.sync.ranks)
            turn = pools.get(bucket.sync.ranks, 0)
            pools[bucket.sync.ranks] = turn + 1
            comm = pool[turn % len(pool)]
            own = (shards or {}).get(number)
            sinks = self._sinks_of(bucket)
            if own is not None:
                self.filled.append(ScatteredBucket(bucket, sinks, own, self._targets_of(bucket)))
            elif comm.size > 1:
                self.filled.append(WholeBucket(bucket, sinks, pieces, comm))
            else:
                self.filled.append(SumBucket(bucket, sinks, comm))
        self.of_param: dict[str, list[SumBucket]] = {}
        self._views: dict[str, WholeBucket] = {}
        """By parameter that is one slice of a bucket, that."""
        for number, item in enumerate(self.filled):
            item.number, item.rounds = number, (rounds or {}).get(number, 1)
            for name in item.names:
                self.of_param.setdefault(name, []).append(item)
            if isinstance(item, WholeBucket):
                self._views |= dict.fromkeys(item.views, item)
        self._shared = [
            name for name, items in self.of_param.items() if any(item.reduces for item in items)
        ]
        """Parameters that other ranks contribute to."""
        aside = [n for n, sink in self.sinks.items() if sink is not params[n]]
        seen = dict.fromkeys([*self._shared, *aside])
        self._own = [n for n in self.of_param if n not in seen and not watches_all]
        """The others: nobody waits for their gradients, so nothing looks at them as they come."""
        self._let_go = {
            name for item in self.filled if isinstance(item, ScatteredBucket) for name in item.names
        }
        """Parameters whose gradients are somebody's to keep."""
        sources = {
            name: self._targets.get(name) if name in self._let_go else sink
            for name, sink in self.sinks.items()
        }
        self._copied = {
            name: source
            for name, source in sources.items()
            if source is not None and self.kept.get(name) is not source
        }
        """By parameter that is updated elsewhere, or in another dtype, than it is summed: whose
        `.grad` the sum is."""
        self._gone: dict[str, set[int]] = {}
        """Of one that is in several buckets, those that have its gradient."""
        self._placed: dict[str, torch.Tensor] = {}
        """By parameter, its gradient where its bucket has a place for it, once it is there."""
        self.touched: set[str] = set()
        """Parameters that got a gradient in this step, on this rank."""
        self.unfinished: frozenset[int] = frozenset()
        """Ids of parameters of which the compute that runs has more to add."""
        self.early: Callable[[int], None] | None = None
        """Is told of apply groups that are complete while the backward runs."""
        self._open: dict[int, int] = {}
        """By apply group, its buckets that are still to come."""
        self._of_group: dict[int, set[str]] = {}
        for item in self.filled:
            self._of_group.setdefault(item.bucket.apply_group, set()).update(item.names)
        self._queue: list[SumBucket] = []
        """Armed and not yet launched, in the order that all ranks share."""
        self.on_launch: Callable[[int], None] | None = None
        self._watched = tuple(self.of_param if watches_all else seen)
        self._hooks: list[RemovableHandle] = []

    def watch(self) -> None:
        """From here on gradients are those of steps: what was tried before has its own."""
        self._hooks = [
            self.params[name].register_post_accumulate_grad_hook(self._hook(name))
            for name in self._watched
        ]

    def _targets_of(self, bucket: Bucket) -> dict[str, nn.Parameter]:
        """What is kept, or what has the dtype that gradients are added up in."""
        dtype = DTYPES[bucket.dtype]
        for name in dict.fromkeys(s.home.name for s in bucket.slices):
            kept = self.kept.get(name)
            if kept is None or name in self._targets:
                continue
            self._targets[name] = kept
            if kept.dtype.itemsize < dtype.itemsize:
                like = kept.new_empty(0, dtype=dtype)
                target = nn.Parameter(stand_in(like, tuple(kept.shape)), requires_grad=False)
                self._targets[name] = target
        return self._targets

    def _sinks_of(self, bucket: Bucket) -> dict[str, nn.Parameter]:
        """The parameter itself, or what has the dtype that its gradients are added up in."""
        dtype, found = DTYPES[bucket.dtype], {}
        for name in dict.fromkeys(s.home.name for s in bucket.slices):
            param, kept = self.params[name], self.kept.get(name)
            if name in self.sinks:
                sink = self.sinks[name]
            elif param.dtype == dtype:
                sink = param
            elif kept is not None and not bucket.zero and _as(kept) == (dtype, param.device):
                sink = kept
            else:
                like = param.new_empty(0, dtype=dtype)
                sink = nn.Parameter(stand_in(like, tuple(param.shape)), requires_grad=False)
            found[name] = self.sinks[name] = sink
        return found

    def close(self) -> None:
        """Gives the buckets' memory back at once, whoever still holds a gradient's parameter."""
        for hook in self._hooks:
            hook.remove()
        for param in (*self.params.values(), *self.kept.values(), *self.sinks.values()):
            param.grad = None
        self.filled.clear()
        self.of_param.clear()
        self._views.clear()

    def _hook(self, name: str) -> Callable[[torch.Tensor], None]:
        whole, sink = self._views.get(name), self.sinks[name]
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
            if self.early is not None and any(item.launched for item in self.of_param[name]):
                raise WhaleError(
                    f"a gradient of {name} came after it was complete and may have been used: a "
                    "backward inside the backward (an autograd.Function that calls `backward`) "
                    "adds to it once more",
                    hint="leave optimizer.apply_in_backward out for this model",
                )
            if grad.is_sparse:
                param.grad = grad = grad.to_dense()
            if sink is not param:
                param.grad = None
                if sink.grad is not None:
                    sink.grad.add_(grad)
                else:
                    place = sink.new_empty(grad.shape) if whole is None else whole.view(name)
                    sink.grad = place.copy_(grad)
            elif whole is not None and grad is not self._placed.get(name):
                param.grad = self._placed[name] = whole.view(name).copy_(grad)
            if id(param) not in self.unfinished:
                for item in self.of_param[name]:
                    item.waiting.discard(name)
                self._launch_complete()

        return accumulated

    def begin(self) -> None:
        """Before a step: no gradients, nothing launched."""
        for item in self.filled:
            item.begin()
        for item in self.filled:
            self._open[item.bucket.apply_group] = 0
        for item in self.filled:
            self._open[item.bucket.apply_group] += 1
        self._queue.clear()
        self._gone.clear()
        self._placed.clear()
        for name, sink in self.sinks.items():
            sink.grad = self.params[name].grad = None
        for name in (*self._let_go, *self._copied):
            for held in (self.kept.get(name), self._targets.get(name)):
                if held is not None:
                    held.grad = None
        self.touched.clear()

    def complete(self, names: AbstractSet[str], absent: Collection[str]) -> None:
        """Of `names`, those without a gradient here: zeros, or none where they had none anywhere.

        The optimizer must not see a gradient of what nobody used, until the next step.
        """
        for name in names & self._copied.keys():
            grad, kept = self._copied[name].grad, self.kept[name]
            kept.grad = None if grad is None else grad.to(kept)
        for name in (self.of_param.keys() - self.touched) & names:
            param = self.kept.get(name)
            if param is None:
                continue
            if name in absent:
                param.grad = None
            elif param.grad is None:
                param.grad = torch.zeros_like(param)

    def is_last(self, names: Collection[str]) -> bool:
        """Whether the backward that runs is the last that these get a gradient from."""
        found = [item for name in names for item in self.of_param.get(name, ())]
        return bool(found) and all(item.armed and item.left == 1 for item in found)

    def arm(
        self, stage: int, numbers: Collection[int], weights: Collection[int] | None = None
    ) -> None:
        """The backward about to run is `stage`'s, and completes these buckets.

        A bucket's sum begins as soon as what it waits for has come, while the backward still runs:
        the parameters of the stage, or, by their ids, those `weights` alone.
        """
        for number in numbers:
            item = self.filled[number]
            here = {name for name in item.names if stage in self.stages[name]}
            if weights is not None:
                here = {name for name in here if id(self.params[name]) in weights}
            self._wait_for(item, here if item.reduces or self.early is not None else set())
        self._launch_complete()

    def reduce(self, number: int) -> None:
        """A bucket is complete: what has no gradient by now gets none."""
        item = self.filled[number]
        if not item.launched:
            self._wait_for(item, set())
            self._launch_complete()
        item.left -= 1
        if item.left:  # with the next micro-batch there is more to sum
            item.armed = item.launched = False

    def _wait_for(self, item: SumBucket, names: set[str]) -> None:
        """Of a bucket, these alone may still get a gradient."""
        if not item.armed:
            self._queue.append(item)
        item.armed, item.waiting = True, names
        for name in item.names - names - self.touched if isinstance(item, WholeBucket) else ():
            self._contribute_nothing(name)

    def _launch_complete(self) -> None:
        """In the order that all ranks share; those that nobody else has are in nobody's way."""
        before = False
        for item in list(self._queue):
            if item.waiting or (before and item.reduces):
                before |= item.reduces
                continue
            self._queue.remove(item)
            item.launched = True
            if item.reduces:
                if self.on_launch is not None:
                    self.on_launch(item.number)
                item.launch(self.rank, self.half)
                self._release(item)
            self._note_complete(item)

    def _note_complete(self, item: SumBucket) -> None:
        """A group all of whose gradients are on their way may be updated."""
        if self.early is None or item.left != 1:
            return
        group = item.bucket.apply_group
        self._open[group] -= 1
        if not self._open[group] and self._of_group[group] <= self.touched:
            self.early(group)

    def _release(self, item: SumBucket) -> None:
        """Lets gradients go that are on their way to who keeps them."""
        for name in item.names & self._let_go:
            gone = self._gone.setdefault(name, set())
            gone.add(item.number)
            if len(gone) == len(self.of_param[name]):
                self.sinks[name].grad = None
                gone.clear()

    def _contribute_nothing(self, name: str) -> None:
        """Others may have a gradient: its sum needs a place here."""
        whole, param = self._views.get(name), self.sinks[name]
        if whole is not None:
            param.grad = self._placed[name] = whole.view(name).zero_()
        elif param.grad is None:
            param.grad = torch.zeros_like(param)

    def wait(self) -> None:
        """All reductions done and every gradient in place."""
        for name in self._own:
            grad = self.params[name].grad
            if grad is not None:
                self.touched.add(name)
                if grad.is_sparse:
                    self.params[name].grad = grad.to_dense()
        assert not self._queue, "a bucket was never complete"
        for item in self.filled:
            item.finish()

    def square_sum(self, device: torch.device) -> torch.Tensor:
        """Sum of squares of the elements this rank answers for, each once in the world."""
        total = torch.zeros((), dtype=torch.float64, device=device)
        for item in self.filled:
            for grad in item.squares(self.rank):
                total += grad.double().square().sum().to(device)
        return total

    def all(self) -> list[torch.Tensor]:
        """What this rank keeps of all gradients, or will when they are copied."""
        found = [p.grad for n, p in self.kept.items() if n not in self._copied]
        found += [source.grad for source in self._copied.values()]
        return [grad for grad in found if grad is not None]

    def finish(self, names: Collection[str]) -> None:
        """The sums of these are done."""
        for item in self.filled:
            if not item.names.isdisjoint(names):
                item.finish()

    def let_go(self, names: AbstractSet[str]) -> None:
        """Gradients of these have been used: their memory is free."""
        for name in names:
            everywhere = (self.params, self.kept, self.sinks, self._targets)
            for held in (where.get(name) for where in everywhere):
                if held is not None:
                    held.grad = None
            self._placed.pop(name, None)
        for item in self.filled:
            if item.names <= names:
                item.let_go()

    def scale(self, factor: torch.Tensor, names: AbstractSet[str]) -> None:
        """Multiplies every gradient of these, once."""
        at_once = [
            item
            for item in self.filled
            if isinstance(item, WholeBucket)
            and self._copied.keys().isdisjoint(item.names)
            and item.names <= names
        ]
        found = [item.flat() for item in at_once]
        found += [
            param.grad
            for name in self.of_param.keys() & names
            if self._views.get(name) not in at_once
            and (param := self.kept.get(name)) is not None
            and param.grad is not None
        ]
        by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for tensor in found:
            if tensor.dtype.itemsize < 4:
                # In half precision the factor itself would be rounded, by up to 0.4 % in bfloat16.
                tensor.copy_(tensor.float().mul_(factor.to(tensor.device).float()))
            else:
                by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for (dtype, device), tensors in by_kind.items():
            compat.multiply(tensors, factor.to(device=device, dtype=dtype))
