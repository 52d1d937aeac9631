"""Replay: does a recorded Program compute what the model's own code computes on some rows?

Place in the flow: asked by `engine.variants` where code runs other operations for another number of
rows. Libraries do that without meaning anything by it (no `expand` for a single row); code that
means something by it gives another loss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from whale.engine.held import Quiet, held, undisturbed
from whale.engine.program import Program, Ref, run_ops
from whale.runtime import batch as batches
from whale.runtime import generators

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_COARSE = 2e-2


def gives_the_same(
    model: nn.Module, loss: batches.Loss | None, program: Program, result: Any, batch: Any
) -> bool:
    """Whether the program's loss of these rows is the model's; False where it cannot be tried."""
    tensors = [*model.parameters(), *model.buffers(), *batches.leaves(batch)]
    ref = result.get("loss")
    if any(t.is_meta for t in tensors) or not isinstance(ref, Ref):
        return False
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    rows = batches.take_rows(batch, 0, batches.num_rows(batch), device)
    layers = {op.layer: model.get_submodule(op.layer) for op in program.ops if op.layer is not None}

    def state(name: str) -> torch.Tensor:
        owner, _, leaf = name.rpartition(".")
        found: torch.Tensor = getattr(model.get_submodule(owner), leaf)
        return found

    found = []
    for replayed in (False, True):
        with (
            held(model, training=model.training),
            undisturbed(model, next((p.dtype for p in model.parameters()), torch.float32)),
            generators.seeded(0),
            torch.no_grad(),
            Quiet(draws=True),
        ):
            if replayed:
                values = dict(enumerate(batches.leaves(batches.own(rows))))
                count = batches.num_rows(rows)
                run_ops(program.ops, values, count, layers, state, device, lambda op: None)
                found.append(values[ref.index])
            else:
                found.append(batches.call_model(model, loss, batches.own(rows))["loss"])
    want, got = (value.double() for value in found)
    allowed = _TOLERANCE.get(found[0].dtype, _COARSE)
    return bool((want - got).abs() <= allowed * want.abs().clamp(min=1e-12))
