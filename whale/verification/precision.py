"""Precision: the copies of model, batch and loss that are compared, in float64 or float32.

Place in the flow: the beginning of `wh.verify`. In float64 a wrong factor cannot hide behind
rounding. A model that makes float32 tensors of its own cannot run in it; that is found by trying.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from whale.engine.state.copies import copied, in_dtype, module_in
from whale.errors import WhaleError
from whale.runtime import batch as batches
from whale.verification.processes import RankFailed, run_forked

DTYPES = {"float64": torch.float64, "float32": torch.float32}
_ABOUT_DTYPE = re.compile(
    r"dtype|scalar type|same type|(float|double|Float|Double)\b.*\b(but|and|!=)|"
    r"expected.*(Double|Float)",
)


def as_dtype(value: torch.dtype | str | None) -> torch.dtype | None:
    """The precision asked for; None: found by trying."""
    found = DTYPES.get(value) if isinstance(value, str) else value
    if value is not None and found not in DTYPES.values():
        raise WhaleError(
            f"dtype is {value}; allowed: {', '.join(DTYPES)}",
            hint="float64, or float32 for a model that makes float32 tensors of its own",
        )
    return found


def about_dtype(message: str) -> bool:
    """Whether an error is about tensors of different precision."""
    return _ABOUT_DTYPE.search(message) is not None


def model_in(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy on the CPU, every floating and complex tensor in `dtype`; meta tensors stay meta."""
    made = module_in(copied(model), dtype)
    if not any(t.is_meta for t in (*made.parameters(), *made.buffers())):
        made = made.cpu()
    # Modules that the user has set to eval in a model that trains stay so.
    return made if made.training else made.train()


def batch_in(batch: Any, dtype: torch.dtype) -> Any:
    """The batch on the CPU in `dtype`."""
    leaves = [in_dtype(leaf.detach().cpu(), dtype) for leaf in batches.leaves(batch)]
    return batches.rebuild(batch, leaves)


def loss_in(loss: batches.Loss | None, dtype: torch.dtype) -> batches.Loss | None:
    """A loss that is a module may hold class weights."""
    return model_in(loss, dtype) if isinstance(loss, nn.Module) else loss


def runnable(
    model: nn.Module, batch: Any, loss: batches.Loss | None, *, timeout: float, folder: Path
) -> tuple[torch.dtype, str]:
    """float64, or float32 where only that runs, with what float64 met."""
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        return torch.float64, ""
    trials = {
        str(dtype): partial(_trial, model, batch, loss, dtype)
        for dtype in (torch.float64, torch.float32)
    }
    try:
        met, also = run_forked(trials, timeout=timeout, folder=folder)
    except RankFailed:
        return torch.float64, ""  # the one-device run meets it again, and says what it is
    only_float32 = met and not also and about_dtype(met)
    return (torch.float32, met) if only_float32 else (torch.float64, "")


def _trial(model: nn.Module, batch: Any, loss: batches.Loss | None, dtype: torch.dtype) -> str:
    """What a forward and backward of the whole batch raises; empty when nothing."""
    try:
        made = model_in(model, dtype)
        given = batch_in(batch, dtype), loss_in(loss, dtype)
        batches.call_model(made, given[1], given[0])["loss"].backward()
    except RuntimeError as error:
        return str(error).strip().splitlines()[0]
    except Exception:
        return ""  # the one-device run meets it again
    return ""
