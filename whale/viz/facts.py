"""What a Report says, before it is drawn: alike ranks, lanes, the headline, predicted vs measured.

Place in the flow: reads a `sim.report.Report`; the table, the trace and the page draw from here, so
that they can not disagree.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, fields

from whale.ir.measured import MeasuredDevice
from whale.sim.report import DeviceReport, Event, Report
from whale.viz.units import nbytes, seconds

COMMUNICATION_KINDS = ("message", "collective", "reduce")
"""Kinds of events that are drawn beside a rank's computes, not among them."""

KIND_WORDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward, gradients of inputs",
    "W": "backward, gradients of weights",
    "message": "wait for a message",
    "collective": "collective",
    "reduce": "sum of gradients",
    "apply": "optimizer",
}
SHORT_KINDS = {"message": "msg", "collective": "coll", "reduce": "sum"}
"""What fits into a bar, where the kind itself does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alike:
    """Ranks whose devices and events are equal but for rank, node and names: drawn once."""

    ranks: tuple[int, ...]
    device: DeviceReport
    events: tuple[Event, ...]
    """Of the first of the ranks, in the order they start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One number, predicted and measured, as text."""

    what: str
    predicted: str
    measured: str
    error: float
    """(predicted - measured) / measured."""
    note: str = ""


def alike(report: Report) -> tuple[Alike, ...]:
    """All ranks in as few groups as they differ, in the order of each group's first rank.

    Times that differ by less than a millionth of the step count as equal.
    """
    events = _events_by_rank(report)
    tick = (report.step_seconds or 1.0) * 1e-6
    groups: dict[Hashable, list[DeviceReport]] = {}
    for device in sorted(report.devices, key=lambda d: d.rank):
        key = (_device_key(device, tick), _event_key(events.get(device.rank, []), tick))
        groups.setdefault(key, []).append(device)
    return tuple(
        Alike(
            ranks=tuple(device.rank for device in group),
            device=group[0],
            events=tuple(events.get(group[0].rank, [])),
        )
        for group in groups.values()
    )


def lanes(events: Iterable[Event]) -> tuple[tuple[Event, ...], ...]:
    """Events dealt into as many lanes as overlap at once, most often one.

    Compared in whole nanoseconds, the resolution of a trace.
    """
    dealt: list[list[Event]] = []
    for event in sorted(events, key=lambda e: (e.start_s, e.end_s)):
        start = round(event.start_s * 1e9)
        lane = next((x for x in dealt if round(x[-1].end_s * 1e9) <= start), None)
        if lane is None:
            dealt.append([event])
        else:
            lane.append(event)
    return tuple(tuple(lane) for lane in dealt)


def computes_and_communication(
    events: Iterable[Event],
) -> tuple[tuple[Event, ...], tuple[Event, ...]]:
    """The two sides of a rank: what its device computes, and what it sends and waits for."""
    every = tuple(events)
    return (
        tuple(e for e in every if e.kind not in COMMUNICATION_KINDS),
        tuple(e for e in every if e.kind in COMMUNICATION_KINDS),
    )


def label(event: Event, *, with_stage: bool) -> str:
    """What fits into a bar: `F3`, `2F3` where the device has several stages, `msg`, `apply`."""
    short = SHORT_KINDS.get(event.kind, event.kind)
    if event.kind not in ("F", "B", "I", "W"):
        return short
    stage = "" if event.stage is None or not with_stage else str(event.stage)
    return f"{stage}{short}{'' if event.micro_batch is None else event.micro_batch}"


def described(event: Event) -> str:
    """Lines for a reader: its name, what it is, where it belongs."""
    what = KIND_WORDS.get(event.kind, event.kind)
    lines = [f"{event.name}: {what}" if event.name not in ("", what) else what]
    if event.stage is not None:
        batch = "" if event.micro_batch is None else f", micro-batch {event.micro_batch}"
        lines.append(f"stage {event.stage}{batch}")
    return "\n".join(lines)


def gap(report: Report) -> float | None:
    """How far the step is above its lower bound, as a fraction of it; None without a bound."""
    if report.lower_bound_seconds <= 0:
        return None
    return max(0.0, report.step_seconds / report.lower_bound_seconds - 1.0)


def gap_percent(report: Report) -> str:
    """The gap in whole percents, rounded up: what follows `<=`; `?` without a bound."""
    above = gap(report)
    return "?" if above is None else f"{math.ceil(round(100.0 * above, 6))} %"


def needed(device: DeviceReport) -> int:
    """Bytes that a device must have: its peak and what is lost to driver and allocator."""
    return device.memory.with_reserve


def full(device: DeviceReport) -> float:
    """The part of its capacity that a device needs; more than 1 does not fit."""
    return needed(device) / device.capacity_bytes if device.capacity_bytes else 0.0


def over(report: Report) -> tuple[DeviceReport, ...]:
    """The devices that can not hold what they must, the worst first."""
    return tuple(
        sorted(
            (device for device in report.devices if not device.fits),
            key=lambda d: (d.capacity_bytes - needed(d), d.rank),
        )
    )


def over_text(device: DeviceReport) -> str:
    """`OVER by 1.2 GB`."""
    return f"OVER by {nbytes(needed(device) - device.capacity_bytes)}"


def fits_text(report: Report) -> str:
    """`fits`, or which devices do not and by how much."""
    worst = over(report)
    hosts = [host for host in report.hosts if not host.fits]
    if hosts and not worst:
        return (
            f"does not fit: the memory of {len(hosts)} of {len(report.hosts)} nodes, node "
            f"{hosts[0].node} would hold {nbytes(hosts[0].nbytes)} of "
            f"{nbytes(hosts[0].capacity_bytes)}"
        )
    if not worst:
        return "fits"
    return (
        f"does not fit: {len(worst)} of {len(report.devices)} devices "
        f"{'is' if len(worst) == 1 else 'are'} over, rank {worst[0].rank} "
        f"by {nbytes(needed(worst[0]) - worst[0].capacity_bytes)}"
    )


def fullest(report: Report) -> DeviceReport | None:
    """The device that needs most of its capacity."""
    return max(report.devices, key=full, default=None)


def step_compared(report: Report) -> Compared | None:
    """The step time; None before it has run."""
    measured, error = report.measured, report.time_error
    if measured is None or error is None:
        return None
    return Compared(
        what="step time",
        predicted=seconds(report.step_seconds),
        measured=seconds(measured.step_seconds),
        error=error,
        note=f"p10 to p90: {seconds(measured.low_seconds)} to {seconds(measured.high_seconds)}",
    )


def memory_compared(report: Report) -> tuple[Compared, ...]:
    """Peak memory of every rank that could tell, the worst error first."""
    return _worst_first(
        Compared(
            what=f"memory, rank {device.rank}",
            predicted=nbytes(device.memory.total),
            measured=nbytes(seen.peak_bytes),
            error=device.memory.total / seen.peak_bytes - 1.0,
        )
        for device, seen in _pairs(report)
        if seen.peak_bytes
    )


def compute_compared(report: Report) -> tuple[Compared, ...]:
    """Compute time of every rank that was measured, the worst error first."""
    return _worst_first(
        Compared(
            what=f"compute, rank {device.rank}",
            predicted=seconds(device.compute_s),
            measured=seconds(seen.compute_s),
            error=device.compute_s / seen.compute_s - 1.0,
        )
        for device, seen in _pairs(report)
        if seen.compute_s
    )


def _pairs(report: Report) -> list[tuple[DeviceReport, MeasuredDevice]]:
    predicted = {device.rank: device for device in report.devices}
    measured = report.measured.devices if report.measured else ()
    return [(predicted[seen.rank], seen) for seen in measured if seen.rank in predicted]


def _worst_first(rows: Iterable[Compared]) -> tuple[Compared, ...]:
    return tuple(sorted(rows, key=lambda row: -abs(row.error)))


def _events_by_rank(report: Report) -> dict[int, list[Event]]:
    events: dict[int, list[Event]] = {}
    for event in sorted(report.events, key=lambda e: (e.start_s, e.end_s)):
        events.setdefault(event.rank, []).append(event)
    return events


def _device_key(device: DeviceReport, tick: float) -> Hashable:
    """A device but for rank and node, its times on a grid."""
    values = {f.name: getattr(device, f.name) for f in fields(device)}
    del values["rank"], values["node"]
    values["share"] = round(device.share, 6)
    values["compute_s"] = round(device.compute_s / tick)
    values["communicate_s"] = round(device.communicate_s / tick)
    values["memory_curve"] = tuple((round(t / tick), b) for t, b in device.memory_curve)
    return tuple(values.values())


def _event_key(events: Sequence[Event], tick: float) -> Hashable:
    return tuple(
        (e.kind, e.stage, e.micro_batch, round(e.start_s / tick), round(e.end_s / tick))
        for e in events
    )
