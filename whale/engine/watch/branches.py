"""Branches on the batch's values: does each replica go its own way, and does it matter?

Place in the flow: around the forwards of a Step whose model could not be traced (code that reads
values cannot be: `if mask.any()`, `.item()`) and whose rows several replicas compute. One device
decides once for all rows of a micro-batch, a replica for its own. Whale notes what every replica
reads. Where they read different numbers, the rows of that micro-batch are computed once more in
eval mode, at once and in the replicas' parts: the same loss and gradients, and the decision does
not matter (a log, a loop over rows); else it is refused.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from whale.engine.lower.lowered import Lowered
from whale.engine.state.outside import as_it_was
from whale.engine.state.rarely import rarely
from whale.engine.state.stillness import Attributes
from whale.engine.trace.tracer import READS, called_by_machinery, user_line
from whale.errors import CaptureError
from whale.ir.plan import Plan
from whale.ir.virtual_device import micro_batch_cuts
from whale.runtime import batch as batches
from whale.runtime import generators
from whale.runtime.batch import LocalBatch
from whale.runtime.context import step_backward
from whale.runtime.signature import Context


@dataclass(frozen=True, slots=True)
class Read:
    """A number that Python code took out of a tensor."""

    where: str
    name: str
    value: str


class _Reads(TorchFunctionMode):
    """Notes the numbers that a forward reads; vectors are taken for data of single rows."""

    def __init__(self, found: list[Read]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        number = isinstance(out, (bool, int, float, complex))
        if name in READS and number and not called_by_machinery():
            self.found.append(Read(user_line(), name, repr(out)))
        return out


class Branches:
    """What the replicas of one Step read, compared."""

    def __init__(self, plan: Plan, lowered: Lowered, rank: int) -> None:
        self.plan, self.lowered, self.rank = plan, lowered, rank
        self._reads: dict[int, list[Read]] = {}
        self._differed = 0

    @staticmethod
    def needed(plan: Plan, lowered: Lowered) -> bool:
        """Whether values may be read, by several replicas."""
        one = len(plan.stages) == 1 and len(plan.stages[0].virtual_device.replicas) > 1
        interact = any(getattr(m, "rows_interact", False) for m in lowered.model.modules())
        return one and lowered.program is None and not interact

    def around(self, inner: Context) -> Context:
        """`inner`, and the notes of one forward."""

        @contextmanager
        def noted() -> Iterator[None]:
            found = self._reads.setdefault(self.lowered.context.micro_batch, [])
            with ExitStack() as stack:
                stack.enter_context(inner())
                stack.enter_context(_Reads(found))
                yield

        return noted

    def compare(self, batch: LocalBatch, around: Context) -> None:
        """After the forwards and backwards of a step; all ranks call it."""
        count = self.plan.num_micro_batch
        numbers = [self._number(self._reads.get(m)) for m in range(count)]
        mine = torch.tensor(numbers, dtype=torch.int64, device=self.lowered.device)
        everyone = [torch.empty_like(mine) for _ in range(self.plan.num_ranks)]
        dist.all_gather(everyone, mine)
        table = torch.stack(everyone).tolist()
        differing = [m for m in range(count) if len({row[m] for row in table} - {-1}) > 1]
        reads, self._reads = self._reads, {}
        if not differing:
            return
        self._differed += 1
        if rarely(self._differed, 3):
            self._try(batch, differing[0], reads.get(differing[0]), around)

    @staticmethod
    def _number(reads: list[Read] | None) -> int:
        """-1: no forward ran, for there were no rows."""
        if reads is None:
            return -1
        return zlib.crc32(repr([(r.where, r.name, r.value) for r in reads]).encode())

    def _try(
        self, batch: LocalBatch, micro_batch: int, reads: list[Read] | None, around: Context
    ) -> None:
        device = self.plan.stages[0].virtual_device
        points = micro_batch_cuts(batch.total_rows, self.plan.num_micro_batch)
        low, high = points[micro_batch], points[micro_batch + 1]
        start, end = device.rows(self.rank, high - low)
        here = batch.rows == ((0, batch.total_rows),)
        everywhere: list[Any] = [None] * self.plan.num_ranks
        dist.all_gather_object(everywhere, (here, reads))
        if not all(whole for whole, _ in everywhere):
            raise self._error([r for _, r in everywhere], "; wh.shard gave no rank all rows to try")
        if any(p.joins for p in self.lowered.parts.values()):
            said = "; replicas tell each other their counts, so that it cannot be tried apart"
            raise self._error([r for _, r in everywhere], said)
        if any(t.virtual_device != device for t in self.plan.taskgraphs):
            said = "; a split gathers the rows of all replicas, so that it cannot be tried apart"
            raise self._error([r for _, r in everywhere], said)
        _, shard = device.position(self.rank)
        part = self._numbers(batch, low + start, low + end, around)
        total = part if shard == 0 else torch.zeros_like(part)
        dist.all_reduce(total)
        whole = self._numbers(batch, low, high, around)
        if not _close(whole, total, self._tolerance(around)):
            mean = [float(n[0] / n[1].clamp(min=1e-12)) for n in (whole, total)]
            said = f": the loss is {mean[0]:.6g} for all rows at once and {mean[1]:.6g} in parts"
            if abs(mean[0] - mean[1]) <= 1e-12 * abs(mean[0]):
                said = ": the gradients of all rows at once are others than those in parts"
            raise self._error([r for _, r in everywhere], said)

    def _tolerance(self, around: Context) -> float:
        with around():
            cast = torch.is_autocast_enabled(self.lowered.device.type)
        kinds = {p.dtype for p in self.lowered.params.values()}
        if cast or kinds & {torch.bfloat16, torch.float16}:
            return 3e-2
        return 1e-9 if kinds == {torch.float64} else 1e-4

    def _numbers(self, batch: LocalBatch, low: int, high: int, around: Context) -> torch.Tensor:
        """(sum of the loss, its count, a projection of every gradient) of some rows."""
        params = [p for p in self.lowered.params.values() if p.requires_grad]
        found = torch.zeros(2 + len(params), dtype=torch.float64, device=self.lowered.device)
        if low == high:
            return found
        context = self.lowered.context
        context.first_row, context.rows = low, high - low
        rows = batches.take_rows(batch, low, high, self.lowered.device)
        loss = getattr(self.lowered.stages.modules[0], "loss", None)
        queue = self.lowered.executor.queue
        aside = nullcontext() if queue is None else queue.aside()
        with _untouched(self.lowered.model), as_it_was(self.lowered.model, loss), aside:
            with around():
                out = self.lowered.stages.modules[0].forward(rows, {}, high - low)
            assert out.loss is not None
            found[0], found[1] = out.loss.total.detach().double(), out.loss.count.double()
            if out.loss.total.requires_grad:
                with step_backward.run():
                    grads = torch.autograd.grad(out.loss.total, params, allow_unused=True)
                for i, grad in enumerate(grads):
                    found[2 + i] = 0.0 if grad is None else _projection(grad)
        return found

    def _error(self, reads: list[list[Read] | None], said: str) -> CaptureError:
        lists = {rank: found for rank, found in enumerate(reads) if found is not None}
        longest = max(len(found) for found in lists.values())
        for place in range(longest):
            at = {rank: found[place : place + 1] for rank, found in lists.items()}
            if len({tuple(read) for read in at.values()}) > 1:
                break
        seen = next(read[0] for read in at.values() if read)
        shown = ", ".join(
            f"rank {rank} {read[0].value if read else 'nothing'}" for rank, read in at.items()
        )
        return CaptureError(
            f"the model reads a value of its rows (`{seen.name}`), which differs between replicas "
            f"({shown}), where one device reads one for all rows{said}",
            hint="make the decision on the global batch and pass it in the batch as a Python "
            "value, or write it with torch.where; Config check_parts=False lets each replica "
            "decide for its rows",
            where=seen.where,
        )


def _projection(grad: torch.Tensor) -> torch.Tensor:
    places = torch.arange(1, grad.numel() + 1, device=grad.device, dtype=torch.float64)
    return (grad.double().flatten() * torch.cos(places)).sum()


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """In eval mode; what modules hold and random numbers are afterwards as if nothing had run."""
    flags = {module: module.training for module in model.modules()}
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    held = [Attributes(module) for module in model.modules()]
    model.eval()
    try:
        with generators.kept():
            yield
    finally:
        for each in held:
            each.put_back()
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)
        for module, flag in flags.items():
            module.training = flag


def _close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    scale = torch.cat([a.abs(), b.abs()])[2:].max() if len(a) > 2 else a.abs().max()
    loss = bool((a[:2] - b[:2]).abs().le(tolerance * a[:2].abs().clamp(min=1e-12)).all())
    return loss and bool((a[2:] - b[2:]).abs().le(tolerance * scale.clamp(min=1e-12)).all())
