"""Measured: what a run was seen to take.

Place in the flow: made by Step on the torch side, put beside the prediction in a `sim.Report`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


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

    @classmethod
    def of(cls, ranks: Sequence[tuple[Sequence[float], int, Sequence[float]]]) -> Measured | None:
        """From what each rank saw: seconds by step, peak bytes, seconds of computing by step.

        None before there are enough steps.
        """
        count = min(len(times) for times, _, _ in ranks)
        if not count:
            return None
        # A step is over when its slowest rank is.
        slowest = sorted(max(times[i] for times, _, _ in ranks) for i in range(count))
        return cls(
            num_steps=count,
            step_seconds=median(slowest),
            low_seconds=slowest[count // 10],
            high_seconds=slowest[count - 1 - count // 10],
            devices=tuple(
                MeasuredDevice(
                    rank=rank, peak_bytes=peak, compute_s=median(computes) if computes else None
                )
                for rank, (_, peak, computes) in enumerate(ranks)
            ),
        )
