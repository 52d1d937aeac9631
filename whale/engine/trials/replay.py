"""Replay: a recorded Program on real rows, beside the model's own code.

Place in the flow: asked by `engine.watch.variants` where code runs other operations for another
number of rows, and by `engine.trials.borders`. Libraries do that without meaning anything by it (no
`expand` for a single row); code that means something by it gives another loss, another gradient or
another buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from whale.engine.lower.random import place_draws
from whale.engine.lower.stages import called
from whale.engine.state.outside import as_it_was
from whale.engine.trace.program import Op, Program, Ref, run_ops
from whale.engine.trials.differences import GRADIENT, allowed, close, gradients_of
from whale.engine.trials.held import MOST_COPIED, undisturbed
from whale.nn.randomness import BatchDims, PlainDraws
from whale.runtime import batch as batches
from whale.runtime import generators

_MOST = 10 * MOST_COPIED
"""Parameters of the largest model whose gradients are compared."""


class Replay:
    """A model's Program, to be run on its own tensors; its draws are the same for the same rows."""

    def __init__(self, model: nn.Module, program: Program, dims: BatchDims) -> None:
        self.model, self.program, self.dims = model, program, dims
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        paths = {op.layer for op in program.ops if op.layer is not None}
        self.layers = {path: called(model.get_submodule(path)) for path in paths}

    def _state(self, name: str) -> Tensor:
        owner, _, leaf = name.rpartition(".")
        found: Tensor = getattr(self.model.get_submodule(owner), leaf)
        return found

    @contextmanager
    def drawing(self, first: int, rows: int, total: int) -> Iterator[PlainDraws]:
        """Around one forward on `rows` of `total` rows; afterwards the model is as before."""
        with ExitStack() as stack:
            stack.enter_context(as_it_was(self.model))
            stack.enter_context(undisturbed(self.model, torch.get_default_dtype()))
            stack.enter_context(generators.seeded(0))
            draws = PlainDraws(self.model, self.dims, 0)
            draws.draws.lenient = True
            stack.callback(draws.close)
            stack.enter_context(draws.at(step=0, first_row=first, rows=rows, micro_rows=total))
            yield draws

    def values(self, draws: PlainDraws, batch: Any) -> dict[int, Tensor]:
        """Every value of the Program on a batch."""

        def before(op: Op) -> None:
            place_draws(draws.names, op)

        found = dict(enumerate(batches.leaves(batch)))
        rows = batches.num_rows(batch)
        return run_ops(self.program.ops, found, rows, self.layers, self._state, self.device, before)


def gives_the_same(
    model: nn.Module,
    loss: batches.Loss | None,
    program: Program,
    result: Any,
    batch: Any,
    dims: BatchDims,
    *,
    grad: bool,
) -> bool:
    """Whether the Program does with these rows what the model's code does.

    Compared are the loss, with `grad` the gradients, and what is in buffers afterwards. False where
    it cannot be tried.
    """
    tensors = [*model.parameters(), *model.buffers(), *batches.leaves(batch)]
    ref = result.get("loss")
    if any(t.is_meta for t in tensors) or not isinstance(ref, Ref):
        return False
    if grad and sum(p.numel() for p in model.parameters()) > _MOST:
        return False
    replay = Replay(model, program, dims)
    rows = batches.num_rows(batch)
    batch = batches.take_rows(batch, 0, rows, replay.device)
    trained = [p for p in model.parameters() if p.requires_grad]
    found = []
    for replayed in (False, True):
        with torch.set_grad_enabled(grad), replay.drawing(0, rows, rows) as draws:
            if replayed:
                value = replay.values(draws, batches.own(batch))[ref.index]
            else:
                value = batches.call_model(model, loss, batches.own(batch))["loss"]
            gradients = gradients_of(value, trained) if grad else []
            found.append((value.detach(), gradients, [b.clone() for b in model.buffers()]))
    (want, want_grads, want_buffers), (got, got_grads, got_buffers) = found
    far = allowed(want.dtype)
    same = close(want, got, far)
    pairs = zip(want_grads, got_grads, strict=True)
    same = same and all(_same_gradient(a, b, GRADIENT * far) for a, b in pairs)
    buffers = zip(want_buffers, got_buffers, strict=True)
    return same and all(close(a, b, far) for a, b in buffers)


def _same_gradient(a: Tensor | None, b: Tensor | None, far: float) -> bool:
    if a is None or b is None:
        return a is b
    return close(a, b, far)
