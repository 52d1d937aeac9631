"""Memory of a device in a step: what it holds all the time, what comes and goes, and their peak.

Place in the flow: `cost.memory` fills it for what a rank has; planner, prices and simulator ask the
same value what the peak is, each with the activations that it knows of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """What a device's memory holds at its peak, in bytes."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    workspace: int = 0
    """Tensors that come and go inside a Layer or the update."""
    reserve: int = 0
    """Lost to the driver's context and the allocator's gaps; not in `total`."""

    @property
    def total(self) -> int:
        """The peak of what tensors take."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.workspace

    @property
    def with_reserve(self) -> int:
        """All that must fit: what no tensor can have is a part of the capacity."""
        return self.total + self.reserve


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBytes:
    """What a device's memory holds beside activations, in bytes."""

    parameters: float
    gradients: float
    optimizer: float
    scratch: float
    """While the update runs, when no activations are left."""
    workspace: float
    """While a Layer runs."""
    driver: float
    """What no tensor can have."""
    gaps: float
    """What the allocator loses to gaps and rounding, as a share of what tensors take."""
    host: float = 0.0
    """What the rank has in the memory of its node."""

    @property
    def static(self) -> float:
        """What is held all the time."""
        return self.parameters + self.gradients + self.optimizer

    def peak(self, activations: float) -> float:
        """All bytes that must be there for so many of activations."""
        busy = activations + self.workspace
        return float(peak_bytes(self.static, busy, self.scratch, self.driver, self.gaps))

    def parts(self, activations: float) -> MemoryParts:
        """The same peak by what it is made of."""
        workspace = self.workspace
        if self.scratch > activations + workspace:
            # The update needs more than the backward did.
            activations, workspace = 0.0, self.scratch
        taken = self.static + activations + workspace
        return MemoryParts(
            parameters=int(self.parameters),
            gradients=int(self.gradients),
            optimizer=int(self.optimizer),
            activations=int(activations),
            workspace=int(workspace),
            reserve=int(self.driver + self.gaps * taken),
        )


def peak_bytes(
    static: Any,
    busy: Any,
    scratch: Any,
    driver: float,
    gaps: float,
    larger: Callable[[Any, Any], Any] = max,
) -> Any:
    """The bytes a device must have: numbers, or arrays with an elementwise `larger`.

    Args:
        static: Held all the time.
        busy: Activations and workspace at the worst moment of the backward.
        scratch: What the update makes, when these are gone.
        driver: What no tensor can have.
        gaps: The share of what tensors take that the allocator loses.
        larger: The maximum of two.
    """
    return (static + larger(busy, scratch)) * (1.0 + gaps) + driver
