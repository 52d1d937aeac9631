"""Deferred weight gradients, for zero-bubble schedules.

B computes input gradients, W the rest later.

Place in the flow: installed by `engine.lower` on Linear, convolution and embedding modules when the
schedule has W actions; every other parameter gets its gradient in B. The product runs on a small
graph of its own, of which backward takes only the input's part and leaves the weight's part in a
queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from whale.errors import PlanError
from whale.runtime import recompute
from whale.runtime.compat import in_transform
from whale.runtime.context import step_backward


@dataclass(frozen=True, slots=True)
class Later:
    """The weight gradients of one call of a module."""

    out: torch.Tensor
    grad: torch.Tensor
    weights: tuple[torch.Tensor, ...]

    def __call__(self) -> None:
        """Computes them, and adds them to those there are."""
        torch.autograd.backward(self.out, self.grad, inputs=list(self.weights))


class WeightQueue:
    """Weight gradients of the backward now running, to be computed when the schedule says W."""

    def __init__(self) -> None:
        self.waiting: deque[Later] = deque()
        self.idle = False

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, nothing is put off: for a run whose gradients are nobody's update."""
        before, self.idle = self.idle, True
        try:
            yield
        finally:
            self.idle = before

    def push(self, work: Later) -> None:
        """Adds the weight gradients of one module."""
        self.waiting.append(work)

    def run(self) -> None:
        """Computes all that waits."""
        for work in self.take():
            work()

    def take(self) -> list[Later]:
        """All that waits, in order; the queue is empty after."""
        found = list(self.waiting)
        self.waiting.clear()
        return found


class _Defer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        fn: Callable[[torch.Tensor], torch.Tensor],
        queue: WeightQueue,
        weights: tuple[torch.Tensor, ...],
        *anchors: torch.Tensor,
    ) -> torch.Tensor:
        with torch.enable_grad():
            inside = x.detach().requires_grad_(x.requires_grad)
            out = fn(inside)
        ctx.inside, ctx.out, ctx.queue, ctx.weights = inside, out, queue, weights
        ctx.num_anchors = len(anchors)
        return out.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        inside, out = ctx.inside, ctx.out
        if torch.is_grad_enabled() or not step_backward.running:
            raise PlanError(
                "the model differentiates inside its forward (torch.autograd.grad) through a "
                "module whose weight gradients are put off",
                hint='set pipeline.schedule to "1f1b", and `wh.replicate` that module',
            )
        grad = None
        if inside.requires_grad:
            (grad,) = torch.autograd.grad(out, inside, grads[0], retain_graph=True)
        ctx.queue.push(Later(out, grads[0], ctx.weights))
        ctx.inside = ctx.out = None
        return (grad, None, None, None, *([None] * ctx.num_anchors))


def deferred(
    fn: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    weights: list[torch.Tensor],
    queue: WeightQueue | None,
) -> torch.Tensor:
    """`fn(x)`, whose gradients for `weights` wait in `queue`; without a queue, plainly `fn(x)`."""
    trainable = tuple(w for w in weights if w.requires_grad)
    # A checkpoint recomputes for every graph that asks for what it saved, and this one is apart.
    if queue is None or queue.idle or not trainable:
        return fn(x)
    if not torch.is_grad_enabled() or recompute.inside():
        return fn(x)
    if not all(w.is_leaf for w in trainable) or in_transform():
        # `torch.func.functional_call` puts what was computed from a weight in its place: its
        # gradient is to go on from there.
        return fn(x)
    # Something must tie the output to the graph: the input, or the weights where it has no gradient
    # (token ids). Only there, for their hooks would take the missing gradient for the final one.
    anchors = () if x.requires_grad else trainable
    return _Defer.apply(x, fn, queue, trainable, *anchors)  # type: ignore[no-untyped-call,no-any-return]


QUEUE = "_whale_weight_queue"


def queue_of(module: torch.nn.Module) -> WeightQueue | None:
    """The queue a module defers to, if any."""
    queue: WeightQueue | None = module.__dict__.get(QUEUE)
    return queue
