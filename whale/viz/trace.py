"""Report -> a trace that Perfetto and chrome://tracing open.

Place in the flow: what `whale simulate --trace` writes. A process per node, a thread per rank for
its computes and another for its communication, a counter per rank for its memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from whale.sim.report import DeviceReport, Event, Report
from whale.viz.facts import computes_and_communication, lanes
from whale.viz.units import percent, seconds


def chrome_trace(report: Report) -> dict[str, Any]:
    """The Trace Event Format, ready for `json.dump`; times in microseconds.

    What overlaps on one rank (a gradient sum beside a message) gets a thread of its own: a viewer
    nests the events of a thread and would drop it.
    """
    return {
        "traceEvents": list(_trace_events(report)),
        "displayTimeUnit": "ms",
        "otherData": _about(report),
    }


def _trace_events(report: Report) -> Iterator[dict[str, Any]]:
    by_rank: dict[int, list[Event]] = {}
    for event in report.events:
        by_rank.setdefault(event.rank, []).append(event)
    for node in sorted({device.node for device in report.devices}):
        yield _metadata("process_name", _pid(node), 0, name=f"node {node}")
        yield _metadata("process_sort_index", _pid(node), 0, sort_index=node)
        if report.measured is not None:
            yield _metadata("process_labels", _pid(node), 0, labels=_measured(report))
    # 0 is the idle thread to a viewer, so threads and processes count from 1.
    thread = 0
    for device in sorted(report.devices, key=lambda d: d.rank):
        computes, communication = computes_and_communication(by_rank.get(device.rank, []))
        named = [(f"rank {device.rank} {device.type}", lane) for lane in lanes(computes) or ((),)]
        named += [(f"rank {device.rank} communication", lane) for lane in lanes(communication)]
        for name, lane in named:
            thread += 1
            yield _metadata("thread_name", _pid(device.node), thread, name=name)
            yield _metadata("thread_sort_index", _pid(device.node), thread, sort_index=thread)
            for event in lane:
                yield _complete(event, _pid(device.node), thread)
        yield from _counters(device)


def _complete(event: Event, pid: int, thread: int) -> dict[str, Any]:
    start, end = _microseconds(event.start_s), _microseconds(event.end_s)
    places = {"stage": event.stage, "micro_batch": event.micro_batch}
    return {
        "ph": "X",
        "name": event.name or event.kind,
        "cat": event.kind,
        "pid": pid,
        "tid": thread,
        "ts": start,
        "dur": round(end - start, 3),
        "args": {key: value for key, value in places.items() if value is not None},
    }


def _counters(device: DeviceReport) -> Iterator[dict[str, Any]]:
    for time, value in device.memory_curve:
        yield {
            "ph": "C",
            "name": f"memory of rank {device.rank}",
            "pid": _pid(device.node),
            "ts": _microseconds(time),
            "args": {"bytes": value},
        }


def _metadata(what: str, pid: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": thread, "args": args}


def _about(report: Report) -> dict[str, Any]:
    about: dict[str, Any] = {
        "title": report.title,
        "strategy": report.strategy,
        "cluster": report.cluster,
        "schedule": report.schedule,
        "predicted_step_seconds": report.step_seconds,
        "fits": report.fits,
    }
    if report.measured is not None:
        about["measured_step_seconds"] = report.measured.step_seconds
        about["measured"] = _measured(report)
    return about


def _measured(report: Report) -> str:
    assert report.measured is not None
    error = report.time_error
    text = f"predicted {seconds(report.step_seconds)}, measured "
    text += seconds(report.measured.step_seconds)
    return text if error is None else f"{text}, error {percent(error, signed=True)}"


def _pid(node: int) -> int:
    return node + 1


def _microseconds(time: float) -> float:
    return round(time * 1e6, 3)
