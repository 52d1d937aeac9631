"""What the executor runs: stages, the values that cross between them, work that waits.

Place in the flow: `engine.lower.stages` and `nn.deferred` make such things, `runtime.executor` runs
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from whale.runtime.weighing import Weighed


@dataclass(slots=True)
class Outcome:
    """What a stage's forward made.

    Values for other stages, and what it adds to the loss in the stage that has it.
    """

    values: dict[int, torch.Tensor] = field(default_factory=dict)
    loss: Weighed | None = None
    named: dict[str, Any] = field(default_factory=dict)


class StageModule(Protocol):
    """A stage that can run: see `engine.lower.stages`."""

    incoming: Mapping[int, list[int]]
    outgoing: Mapping[int, list[int]]
    has_loss: bool

    def forward(self, batch: Any, received: dict[int, torch.Tensor], rows: int) -> Outcome:
        """Runs the stage on this rank's rows."""
        ...


class Border(Protocol):
    """Shape of a value that crosses stages."""

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        ...

    @property
    def batch_dim(self) -> int | None:
        """Where its rows are; None: nowhere."""
        ...

    @property
    def factor(self) -> int:
        """Elements along that dim per row."""
        ...

    @property
    def grad(self) -> bool:
        """Whether a gradient comes back for it."""
        ...

    def at(self, rows: int) -> tuple[int, ...]:
        """The shape for that many rows."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The stages of a rank for one kind of batch, and all values that cross."""

    modules: Mapping[int, StageModule]
    borders: Sequence[Border] = ()
    origins: Mapping[int, str] = field(default_factory=dict)
    """Where in the user's code each value is made."""


class WeightGradient(Protocol):
    """The weight gradients of one call of a module."""

    @property
    def weights(self) -> tuple[torch.Tensor, ...]:
        """Whose gradients they are."""
        ...

    def __call__(self) -> None:
        """Computes them, and adds them to those there are."""
        ...


class DeferredWork(Protocol):
    """Weight gradients that a backward left for later: see `nn.deferred`."""

    def take(self) -> Sequence[WeightGradient]:
        """What the backward just run left."""
        ...

    def aside(self) -> AbstractContextManager[None]:
        """Inside, nothing is left for later."""
        ...
