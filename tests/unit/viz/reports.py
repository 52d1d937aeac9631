"""Reports to draw: their events come from real schedules on a clock, their sizes are made up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from tests.unit.sim.timeline import Timeline, timeline
from whale.ir.measured import Measured, MeasuredDevice
from whale.ir.memory import MemoryParts
from whale.ir.schedule import Action, Schedule
from whale.planner.schedules import rank_actions
from whale.sim.report import DeviceReport, Event, Report

COMPUTES = ("F", "B", "I", "W", "apply")
REDUCE_S, APPLY_S = 0.004, 0.006
GB = 10**9


def chain(kind: str, num_stages: int, num_micro_batch: int) -> Schedule:
    return Schedule(
        kind=kind,
        num_micro_batch=num_micro_batch,
        groups=tuple((stage,) for stage in range(num_stages)),
        edges=tuple((stage, stage + 1) for stage in range(num_stages - 1)),
    )


def clocked(schedule: Schedule, speeds: Sequence[float]) -> Timeline:
    """A forward of 10 ms on a device of speed 1, a backward of twice that."""
    cost = {"F": 0.010, "B": 0.020, "I": 0.010, "W": 0.010}
    orders = {g: rank_actions(schedule, g) for g in range(len(schedule.groups))}
    return timeline(schedule, orders, lambda a: cost[a.kind] / speeds[a.stage])


def group_events(line: Timeline, group: int, rank: int) -> list[Event]:
    """A rank's computes, the waits between them, its gradient sum and its apply."""
    spans = [span for span in line.spans if span.group == group]
    events: list[Event] = []
    clock = 0.0
    for span in spans:
        action = span.action
        if span.start_s > clock:
            events.append(wait(rank, action, max(clock, span.start_s - 0.002), span.start_s))
        events.append(
            Event(
                rank=rank,
                kind=action.kind,
                name=str(action),
                start_s=span.start_s,
                end_s=span.end_s,
                stage=action.stage,
                micro_batch=action.micro_batch,
            )
        )
        clock = span.end_s
    last = spans[-1]
    # Half of the sum hides behind the last backward.
    reduced = clock + REDUCE_S
    events.append(
        Event(
            rank=rank,
            kind="reduce",
            name="gradient sum",
            start_s=(last.start_s + last.end_s) / 2,
            end_s=reduced,
        )
    )
    events.append(
        Event(rank=rank, kind="apply", name="AdamW", start_s=reduced, end_s=reduced + APPLY_S)
    )
    return events


def wait(rank: int, action: Action, start_s: float, end_s: float) -> Event:
    return Event(
        rank=rank,
        kind="message",
        name=f"wait for {action}",
        start_s=start_s,
        end_s=end_s,
        stage=action.stage,
        micro_batch=action.micro_batch,
    )


def curve(
    events: Sequence[Event], fixed: int, activation: int
) -> tuple[tuple[tuple[float, int], ...], int]:
    """The staircase of activations in flight above what is always there, and its highest part."""
    now = peak = 0
    steps: list[tuple[float, int]] = [(0.0, fixed)]
    for event in events:
        if event.kind == "F":
            now += activation
            steps.append((event.start_s, fixed + now))
        elif event.kind in "BW":
            now -= activation
            steps.append((event.end_s, fixed + now))
        peak = max(peak, now)
    return tuple(steps), peak


def pipeline(
    *,
    kind: str = "1f1b",
    types: Sequence[str] = ("V100-32GB", "V100-32GB", "P100-16GB", "P100-16GB"),
    capacities: Sequence[int] = (32 * GB, 32 * GB, 16 * GB, 16 * GB),
    speeds: Sequence[float] = (1.0, 1.05, 0.9, 0.85),
    num_micro_batch: int = 8,
    num_replicas: int = 1,
    title: str = "gpt-1.3b on a mixed pipeline",
    cluster: str = "1x2xV100-32GB+1x2xP100-16GB",
    per_node: int = 2,
    activation: float = 0.11,
) -> Report:
    """A pipeline with a device per stage, in as many equal replicas as wanted."""
    num_stages = len(types)
    line = clocked(chain(kind, num_stages, num_micro_batch), speeds)
    events: list[Event] = []
    devices: list[DeviceReport] = []
    shares = [0.30, 0.30, 0.21, 0.19] if num_stages == 4 else [1 / num_stages] * num_stages
    for rank in range(num_stages * num_replicas):
        stage = rank % num_stages
        own = group_events(line, stage, rank)
        fixed = int(capacities[stage] * 0.45)
        staircase, activations = curve(own, fixed, int(capacities[stage] * activation))
        events += own
        devices.append(
            DeviceReport(
                rank=rank,
                type=types[stage],
                node=rank // per_node,
                stages=(stage,),
                share=shares[stage] / num_replicas,
                rows=num_micro_batch * 8,
                compute_s=sum(e.end_s - e.start_s for e in own if e.kind in COMPUTES),
                communicate_s=REDUCE_S
                + sum(e.end_s - e.start_s for e in own if e.kind == "message"),
                memory=MemoryParts(
                    parameters=fixed // 8,
                    gradients=fixed // 8,
                    optimizer=fixed // 2,
                    activations=activations,
                    workspace=fixed - fixed // 2 - 2 * (fixed // 8),
                    reserve=GB // 2,
                ),
                capacity_bytes=capacities[stage],
                memory_curve=staircase,
                binds="memory" if stage >= 2 else "time",
            )
        )
    step = max(event.end_s for event in events)
    num = len(devices)
    compute = sum(d.compute_s for d in devices) / num
    communicate = sum(d.communicate_s for d in devices) / num
    return Report(
        title=title,
        strategy=f"{num_replicas} x pipeline of {num_stages} stages, {kind}",
        cluster=cluster,
        batch_rows=num_micro_batch * 8 * num_replicas,
        num_micro_batch=num_micro_batch,
        schedule=kind,
        step_seconds=step,
        lower_bound_seconds=step * 0.8,
        joules_per_step=260.0 * num * step,
        bubble=(step - compute - communicate) / step,
        devices=tuple(devices),
        events=tuple(events),
        where_time_goes={
            "compute": compute - APPLY_S,
            "apply": APPLY_S,
            "messages": communicate - REDUCE_S,
            "gradient sums": REDUCE_S,
            "waiting": step - compute - communicate,
        },
        notes=(
            *(f"stage {stage}: {6 - stage} layers" for stage in range(min(num_stages, 4))),
            "rejected: data parallel over all, 41.0 GB needed where 16.0 GB are",
        ),
    )


@cache
def large() -> Report:
    """64 nodes of 8: 64 replicas of a pipeline of 8 stages."""
    return pipeline(
        types=("V100-32GB",) * 8,
        capacities=(32 * GB,) * 8,
        speeds=(1.0,) * 8,
        num_micro_batch=32,
        num_replicas=64,
        title="gpt-100b",
        cluster="64x8xV100-32GB",
        per_node=8,
        activation=0.06,
    )


def too_big() -> Report:
    """The mixed pipeline with one device that can not hold its stage."""
    report = pipeline()
    *others, last = report.devices
    memory = replace(last.memory, activations=last.memory.activations + 8 * GB)
    staircase = tuple((t, size + 8 * GB) for t, size in last.memory_curve)
    last = replace(last, memory=memory, memory_curve=staircase)
    return replace(report, devices=(*others, last))


def measured() -> Report:
    """The mixed pipeline after it has run."""
    report = pipeline()
    seen = tuple(
        MeasuredDevice(
            rank=d.rank,
            peak_bytes=int(d.memory.total * (0.97 + 0.03 * d.rank)),
            compute_s=d.compute_s * (1.02 + 0.01 * d.rank),
        )
        for d in report.devices
    )
    return replace(
        report,
        measured=Measured(
            num_steps=20,
            step_seconds=report.step_seconds * 1.046,
            low_seconds=report.step_seconds * 1.03,
            high_seconds=report.step_seconds * 1.09,
            devices=seen,
        ),
    )


@cache
def uneven() -> Report:
    """512 devices of which no two are alike: nothing can be folded."""
    report = large()
    devices = tuple(
        replace(d, share=d.share * (1 + d.rank / 1000), rows=d.rows + d.rank)
        for d in report.devices
    )
    return replace(report, devices=devices)
