"""Parts against whole: can this model's loss be computed in parts? Tried at build time.

Place in the flow: called by `wh.parallelize` before lowering. A loss that does not come out the
same when the rows are computed apart is refused here, never silently weighed (design, decision 5).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from whale.engine.changes import spare, spare_loss
from whale.errors import WhaleError
from whale.runtime import batch as batches
from whale.runtime.means import MeanTracker

# Rows tried, spread over the batch: the first ones alone may look alike where others differ.
_ROWS = 16


def check_parts(
    model: nn.Module,
    batch: Any,
    loss: batches.Loss | None,
    changes: frozenset[str] | None = None,
) -> None:
    """Compares the loss of a few rows with that of the same rows in two parts.

    Every run is on a copy, for a forward may change the model (`changes` are the names of what it
    changes, None: unknown): neither the next run nor the user may see that.

    A model on the meta device has no values yet and is not tried, nor is one with a layer that says
    its rows interact: experts with limited room see the whole micro-batch under every layout.
    """

    def measure(part: Any) -> tuple[float, float, torch.dtype]:
        return _measure(spare(model, changes).eval(), spare_loss(loss), part)

    rows = min(_ROWS, batches.num_rows(batch))
    tensors = [*model.parameters(), *model.buffers(), *batches.leaves(batch)]
    if rows < 2 or any(t.is_meta for t in tensors):
        return
    if any(getattr(module, "rows_interact", False) for module in model.modules()):
        return
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with torch.no_grad(), torch.random.fork_rng():
        few = batches.spread_rows(batch, rows, device)
        whole = measure(few)
        parts = [measure(batches.take_rows(few, low, high)) for low, high in ((0, 1), (1, rows))]
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
    model: nn.Module, loss: batches.Loss | None, batch: Any
) -> tuple[float, float, torch.dtype]:
    tracker = MeanTracker()
    with tracker:
        value = batches.call_model(model, loss, batch)["loss"]
    count = float(tracker.count(value, batches.num_rows(batch)))
    return float(value) * count, count, value.dtype
