"""Measured: what a run was seen to take.

Place in the flow: made by Step on the torch side, put beside the prediction in a `sim.Report`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredDevice:
    """What one device was seen to do, median over the steps measured."""

    rank: int
    peak_bytes: int | None = None
    """Highest memory in use; None where the device cannot tell (CPU)."""
    compute_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a run was seen to take."""

    num_steps: int
    step_seconds: float
    """Median; the first steps, which warm up, are left out."""
    low_seconds: float
    high_seconds: float
    """10th and 90th percentile."""
    devices: tuple[MeasuredDevice, ...] = ()
