"""Parts against whole: can this model's loss be computed in parts, and how? Tried at build time.

Place in the flow: called by `wh.parallelize` before lowering. A loss or a named output that does
not come out the same when the rows are computed apart (`engine.trials.trial_rows`) is refused here,
never silently weighed (design, decision 5); in training, and in evaluation, whose code may be
another.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from whale.engine.trials.held import MOST_COPIED
from whale.engine.trials.norm_calls import joins_norms
from whale.engine.trials.trial_rows import Rows
from whale.errors import WhaleError
from whale.ir.plan import Plan
from whale.nn.randomness import BatchDims
from whale.nn.router_losses import has_router_losses
from whale.runtime import batch as batches
from whale.runtime.compat import about_fakes
from whale.runtime.outputs import Merge
from whale.runtime.weighing import Trial

# Rows tried, spread over the batch: the first ones alone may look alike where others differ. The
# first number that is no size of a weight: then no weight looks as if it had rows.
_ROWS, _FEW_ROWS = (6, 7, 5), (4, 5, 3)
_LARGE = 1e9
"""Parameters times elements of a row, from which on fewer rows are tried, in fewer ways; times
elements of the batch, from which on not all of it is tried."""


def check_parts(
    model: nn.Module,
    batch: Any,
    loss: batches.Loss | None,
    plan: Plan,
    dims: BatchDims | None = None,
    outputs: Mapping[str, Merge] | None = None,
    written: Collection[str] = (),
    *,
    training: bool = True,
    briefly: bool = False,
) -> Trial:
    """Compares the loss and the gradients of a few rows with those of the same rows in two parts.

    What the model draws is the same for the same rows; `dims` say where they are in each draw.
    Without, draws are constants. `outputs` are compared as they will be merged.
    Where not `training`, in evaluation alone. Briefly: these very rows, and little else.
    Weights that a forward writes to are found, where the model is copied; else they are `written`.
    Nothing is tried where one replica computes all rows of a step at once, nor on the meta device,
    where there are no values yet.
    """
    replicas = max(len(stage.virtual_device.replicas) for stage in plan.stages)
    total = batches.num_rows(batch)
    tensors = [*model.parameters(), *model.buffers(), *batches.leaves(batch)]
    size = sum(p.numel() for p in model.parameters())
    width = max(t.numel() // total for t in batches.leaves(batch) if batches.has_rows(t, total))
    large = size > MOST_COPIED or size * width > _LARGE
    # What has no rows must not look as if it had them.
    sizes = {size for parameter in model.parameters() for size in parameter.shape}
    sizes |= {t.shape[0] for t in batches.leaves(batch) if t.dim() and t.shape[0] != total}
    rows = _num_rows(_FEW_ROWS if large else _ROWS, total, sizes)
    alone = replicas == 1 and plan.num_micro_batch == 1
    if alone or any(t.is_meta for t in tensors):
        return Trial(router_losses=has_router_losses(model))
    if rows < 2:
        raise WhaleError(
            f"the example batch has one row, and the plan computes batches in parts ({replicas} "
            f"replicas, {plan.num_micro_batch} micro-batches): whether that changes the loss "
            "cannot be tried",
            hint="give parallelize a batch of two rows or more",
        )
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    few = batches.spread_rows(batch, rows, device)
    own = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    copied = size <= MOST_COPIED
    dtypes = [torch.float64, torch.float32, own] if copied else [own]
    error: Exception | None = None
    for dtype in dict.fromkeys(dtypes):
        try:
            tried = Rows(
                model,
                loss,
                few,
                dtype,
                copied=copied,
                dims=dims,
                outputs=outputs,
                written=None if copied else written,
                joins=joins_norms(plan),
                in_turn=plan.num_micro_batch > 1,
                training=training,
            )
            trial = tried.trial(large=large or briefly)
        except WhaleError:
            raise
        except Exception as found:  # noqa: BLE001 - a user's code in a dtype it was not made for
            error = error or found
            continue
        if trial.weighing is not None and training:
            if not briefly:
                tried.evaluate(trial.weighing, large=large)
            if size * width * total <= _LARGE:  # code that looks at their number
                every = batches.take_rows(batch, 0, total, device)
                tried.on(every).again(trial.weighing)
                if not briefly:
                    tried.on(every).evaluate(trial.weighing, large=True)
        return trial
    assert error is not None
    if about_fakes(error):
        raise error
    raise WhaleError(
        f"the model does not run on {rows} of the batch's {total} rows: "
        f"{type(error).__name__}: {error}",
        hint="tensors of the batch whose first dim is the number of rows are taken to have one "
        "entry for each: give a tensor that has none another first dim (unsqueeze(0))",
    ) from error


def _num_rows(wished: tuple[int, ...], total: int, sizes: set[int]) -> int:
    found = (rows for rows in wished if rows <= total and rows not in sizes)
    return next(found, min(wished[0], total))
