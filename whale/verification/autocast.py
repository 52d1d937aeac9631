"""Autocast: a step in bfloat16 against plain torch in bfloat16.

Place in the flow: the last check of a rank. Rounding to 8 bits differs with every layout, so what
is allowed follows from plain torch itself: a few times what bfloat16 changes there against float32.
That is enough for a value read in the wrong dtype, and too little for a wrong digit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from whale import parallel
from whale.engine.state.copies import copied
from whale.verification.compare import SMALL, dense
from whale.verification.comparison import Report, part_of
from whale.verification.task import Task, read_truth
from whale.verification.verdict import Mismatch

_TIMES = 4.0
_LEAST = 2.0**-6
"""Of the truth's size, allowed in any case."""


def compare(task: Task, report: Report, rank: int) -> None:
    """Builds a float32 Step, runs it in autocast, notes gradients and loss that are far off."""
    step = parallel.parallelize(
        copied(task.model),
        optimizer=task.make_optimizer(float32=True),
        batch=task.first,
        loss=task.loss,
        config=task.config,
        plan=task.plan,
    )
    with torch.autocast("cpu", torch.bfloat16):
        metrics = step(task.first)
    truth = read_truth(task, "autocast")
    full, low = truth["float32"], truth["autocast"]
    lowered = step._lowered
    largest = max((_size(g) for g in low["gradients"].values()), default=0.0)
    spread = max(
        (
            _off(full["gradients"][n], g, max(_size(g), SMALL * largest))
            for n, g in low["gradients"].items()
        ),
        default=0.0,
    )
    size = _size(low["loss"])
    found = {"loss": _off(metrics["loss"], low["loss"], size)}
    allowed = {"loss": _off(full["loss"], low["loss"], size)}
    for name, parameter in lowered.store.kept.items():
        if parameter.requires_grad:
            want = low["gradients"][name]
            own = None if want is None else part_of(want, lowered.store.kept_pieces[name])
            found[name] = _off(parameter.grad, own, max(_size(want), SMALL * largest))
            allowed[name] = spread
    _note(report, rank, found, allowed)
    step.close(forget=True)


def _note(
    report: Report, rank: int, found: Mapping[str, float], allowed: Mapping[str, float]
) -> None:
    for name, error in found.items():
        report.worst["autocast"] = max(report.worst.get("autocast", 0.0), error)
        if not error <= _TIMES * max(allowed[name], _LEAST):
            kind = "loss" if name == "loss" else "gradient"
            report.local.append(
                Mismatch(kind=kind, tensor=name, rank=rank, step=1, error=error, check="autocast")
            )


def _off(got: Tensor | None, want: Tensor | None, scale: float) -> float:
    """The norm of the difference relative to `scale`; none is as good as zeros."""
    if got is None or want is None:
        apart = _size(got) + _size(want)
    else:
        apart = _size(dense(got).to(torch.complex128) - dense(want).to(torch.complex128))
    apart = apart / scale if scale else apart
    return apart if apart == apart else float("inf")


def _size(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None else float(dense(tensor).to(torch.complex128).norm())
