"""Task and Reference: what both sides of a verification run, and what one device made of it.

Place in the flow: between the two halves of `wh.verify`; handed to the ranks by fork, but for the
tensors, which are in files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from whale.config import Config
from whale.engine.updating import OptimizerFactory
from whale.ir.plan import Plan
from whale.runtime import batch as batches
from whale.verification.feeds import Feed
from whale.verification.shares import Span
from whale.verification.verdict import Mismatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What both sides run: a model and a global batch per step. Forked, never pickled."""

    model: nn.Module
    feeds: tuple[Feed, ...]
    loss: batches.Loss | None
    optimizer: OptimizerFactory | None
    config: Config
    plan: Plan
    folder: Path
    tolerance: float | None
    wanted: frozenset[str]
    dtype: torch.dtype = torch.float64
    low: Task | None = None
    """The same in float32, for autocast; None where that is not checked."""

    def truth(self, name: int | str) -> Path:
        """The file of what one device had after a feed, or of a check by its name."""
        return self.folder / f"truth-{name}.pt"

    @property
    def first(self) -> Any:
        """The batch of the first step."""
        return self.feeds[0].batches[0]

    def make_optimizer(self, float32: bool) -> OptimizerFactory:
        """The user's optimizer, or AdamW.

        AdamW divides by the gradient's own size, so where a gradient is zero but for rounding (the
        bias of attention's keys), rounding decides the update unless `eps` is well above it.
        """
        if self.optimizer is not None:
            return self.optimizer
        return partial(torch.optim.AdamW, lr=1e-2, eps=1e-2 if float32 else 1e-5)

    def allowed(self, float32: bool) -> float:
        """The tolerance."""
        if self.tolerance is not None:
            return self.tolerance
        if self.dtype == torch.float32:
            return 1e-4
        return 1e-6 if float32 else 1e-9


@dataclass(slots=True, kw_only=True)
class Reference:
    """What the one-device run was.

    Attributes:
        text: In words.
        float32: The loss came out in float32.
        chosen: By feed that was run, which of its batches.
        skipped: By check that cannot be made, why.
        outputs: Named outputs and how they merge: `concat`, `mean` or `sum`.
        mismatches: What is wrong before any rank has run.
    """

    text: str = ""
    float32: bool = False
    chosen: dict[int, int] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    mismatches: list[Mismatch] = field(default_factory=list)


def micro_batches(rows: int, number: int) -> list[Span]:
    """Consecutive rows, sizes that differ by at most one, larger first; no empty ones."""
    sizes = [rows // number + (index < rows % number) for index in range(number)]
    points = [sum(sizes[:index]) for index in range(number + 1)]
    return [(low, high) for low, high in zip(points, points[1:], strict=False) if high > low]


def read_truth(task: Task, name: int | str) -> dict[str, Any]:
    """What one device had after a feed; pages are shared by all ranks that read it."""
    data: dict[str, Any] = torch.load(task.truth(name), mmap=True, weights_only=True)
    return data
