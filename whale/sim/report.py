"""Report: what a step costs, as a value: time, memory and energy of every device, and its events.

Place in the flow: made by `sim.simulate` from a priced Plan, completed with measurements by
`Step.report()`, drawn by `whale.viz`. Plain data, JSON both ways.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from whale.ir.codec import from_plain, to_plain
from whale.ir.measured import Measured
from whale.ir.memory import MemoryParts

EVENT_KINDS = ("F", "B", "I", "W", "message", "collective", "reduce", "apply")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something a device does, in seconds from the start of the step.

    `F`, `B`, `I`, `W` are a stage's computes (see `ir.schedule`); `message` is a wait for another
    stage's values that nothing hides; `reduce` is a gradient sum, beside or after the backward;
    `apply` is the optimizer.
    """

    rank: int
    kind: str
    name: str
    start_s: float
    end_s: float
    stage: int | None = None
    micro_batch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport:
    """One device in a step."""

    rank: int
    type: str
    node: int
    stages: tuple[int, ...]
    share: float
    """Its fraction of the step's FLOPs."""
    rows: int
    """Rows of the global batch that it computes (all micro-batches)."""
    compute_s: float
    communicate_s: float
    """Communication that nothing hides."""
    memory: MemoryParts
    capacity_bytes: int
    memory_curve: tuple[tuple[float, int], ...] = ()
    """(seconds, bytes) through the step: a staircase."""
    binds: str = ""
    """What limits its share: `time`, `memory`, `idle`, or empty where nothing was chosen."""

    @property
    def fits(self) -> bool:
        """Whether the peak is within what the device can give to tensors."""
        return self.memory.with_reserve <= self.capacity_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReport:
    """The memory of one node, where ranks keep something in it."""

    node: int
    nbytes: int
    capacity_bytes: int

    @property
    def fits(self) -> bool:
        """Whether its ranks leave some of it to everything else that runs there."""
        return self.nbytes <= HOST_SHARE * self.capacity_bytes


HOST_SHARE = 0.9
"""Of a node's memory, for training state: the rest is for the system, loaders and the program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A step, predicted; and measured, once it has run."""

    title: str
    strategy: str
    cluster: str
    batch_rows: int
    num_micro_batch: int
    schedule: str
    step_seconds: float
    lower_bound_seconds: float
    joules_per_step: float
    bubble: float
    """Share of the devices' time in which they neither compute nor communicate."""
    devices: tuple[DeviceReport, ...]
    hosts: tuple[HostReport, ...] = ()
    """Nodes in whose memory something waits."""
    events: tuple[Event, ...] = ()
    where_time_goes: Mapping[str, float] = field(default_factory=dict)
    """Seconds per device on average, by what they are spent on; sums to the step time."""
    notes: tuple[str, ...] = ()
    measured: Measured | None = None

    @property
    def samples_per_second(self) -> float:
        """Rows of the global batch per second."""
        return self.batch_rows / self.step_seconds if self.step_seconds else 0.0

    @property
    def fits(self) -> bool:
        """Whether every device holds what it must."""
        return all(d.fits for d in self.devices) and all(host.fits for host in self.hosts)

    @property
    def time_error(self) -> float | None:
        """(predicted - measured) / measured step time; None before it has run."""
        if self.measured is None or not self.measured.step_seconds:
            return None
        return self.step_seconds / self.measured.step_seconds - 1.0

    @property
    def memory_errors(self) -> dict[int, float]:
        """(predicted - measured) / measured peak memory by rank, where it was measured."""
        if self.measured is None:
            return {}
        predicted = {d.rank: d.memory.total for d in self.devices}
        return {
            m.rank: predicted[m.rank] / m.peak_bytes - 1.0
            for m in self.measured.devices
            if m.peak_bytes
        }

    def __str__(self) -> str:
        """Two lines: what was predicted, and what came of it."""
        lines = [
            f"predicted: {_seconds(self.step_seconds)} a step, "
            f"{self.samples_per_second:.4g} samples/s, "
            f"{'fits' if self.fits else 'DOES NOT FIT'}"
        ]
        seen, error = self.measured, self.time_error
        if seen is not None and error is not None:
            text = (
                f"measured:  {_seconds(seen.step_seconds)} a step "
                f"({_seconds(seen.low_seconds)} to {_seconds(seen.high_seconds)} over "
                f"{seen.num_steps} steps), prediction {error:+.1%}"
            )
            worst = max(self.memory_errors.values(), key=abs, default=None)
            if worst is not None:
                text += f"; peak memory {worst:+.1%} at worst"
            lines.append(text)
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        found: dict[str, Any] = to_plain(self)
        return found

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """The inverse of `to_dict`, also after a trip through JSON."""
        return from_plain(cls, data, "the report")


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1.0 else f"{value * 1e3:.3g} ms"
