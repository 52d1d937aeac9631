"""Parts against whole: can this model's loss be computed in parts? Tried at build time.

Place in the flow: called by `wh.parallelize` before lowering. A loss that does not come out the
same when the rows are computed apart is refused here, never silently weighed (design, decision 5).
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from whale.errors import WhaleError
from whale.nn.randomness import BatchDims, PlainDraws
from whale.runtime import batch as batches
from whale.runtime import generators
from whale.runtime.means import MeanTracker

# Rows tried, spread over the batch: the first ones alone may look alike where others differ.
_ROWS = 16


def check_parts(model: nn.Module, batch: Any, loss: batches.Loss | None, dims: BatchDims) -> None:
    """Compares the loss of a few rows with that of the same rows in two parts.

    What the model draws is the same for the same rows; `dims` say where they are.

    A model on the meta device has no values yet and is not tried, nor is one with a layer that says
    its rows interact: experts with limited room see the whole micro-batch under every layout.
    """
    rows = min(_ROWS, batches.num_rows(batch))
    tensors = [*model.parameters(), *model.buffers(), *batches.leaves(batch)]
    if rows < 2 or any(t.is_meta for t in tensors):
        return
    if any(getattr(module, "rows_interact", False) for module in model.modules()):
        return
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    flags = {module: module.training for module in model.modules()}
    model.eval()
    draws = PlainDraws(model, dims, 0)
    draws.draws.lenient = True
    try:
        with torch.no_grad(), generators.kept(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
            few = batches.spread_rows(batch, rows, device)
            whole, *parts = (
                _measure(model, loss, few, draws, low, high)
                for low, high in ((0, rows), (0, 1), (1, rows))
            )
    finally:
        draws.close()
        for module, flag in flags.items():
            module.training = flag
    if draws.draws.unplaced:
        return  # rows have no numbers of their own to compare by; replicas are refused
    total, count, dtype = whole
    apart = sum(p[0] for p in parts)
    counted = sum(p[1] for p in parts)
    tolerance = 1e-9 if dtype == torch.float64 else (1e-3 if dtype == torch.float32 else 5e-2)
    scale = max(abs(total), abs(apart), 1e-12)
    if abs(count - counted) > 1e-6 * max(1.0, count) or abs(total - apart) > tolerance * scale:
        raise WhaleError(
            f"the loss of {rows} rows is {total / max(count, 1e-12):.6g} computed at once and "
            f"{apart / max(counted, 1e-12):.6g} in two parts",
            hint="average with a torch loss (F.cross_entropy, F.mse_loss, Tensor.mean, ...), "
            "which Whale weighs by its "
            "count; set Config check_parts=False only if rows interact on purpose",
        )


def _measure(
    model: nn.Module, loss: batches.Loss | None, few: Any, draws: PlainDraws, low: int, high: int
) -> tuple[float, float, torch.dtype]:
    tracker = MeanTracker()
    rows, batch = batches.num_rows(few), batches.take_rows(few, low, high)
    with (
        draws.at(step=0, first_row=low, rows=high - low, micro_rows=rows),
        generators.seeded(0),
        tracker,
    ):
        value = batches.call_model(model, loss, batch)["loss"]
    count = float(tracker.count(value, batches.num_rows(batch)))
    return float(value) * count, count, value.dtype
