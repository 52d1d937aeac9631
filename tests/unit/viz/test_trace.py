"""The trace: what the Trace Event Format asks for, and nothing lost or overlapping."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from tests.unit.viz import reports
from whale.sim.report import Event, Report
from whale.viz.trace import chrome_trace

COMMUNICATION = {"message", "collective", "reduce"}


def complete(trace: dict[str, Any]) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def names(trace: dict[str, Any], what: str) -> dict[tuple[int, int], str]:
    return {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["ph"] == "M" and event["name"] == what
    }


@pytest.mark.parametrize(
    "report",
    [
        reports.pipeline(),
        reports.pipeline(kind="zero-bubble"),
        reports.measured(),
        reports.pipeline(num_replicas=4, per_node=8),
    ],
    ids=["1f1b", "zero-bubble", "measured", "replicated"],
)
def test_every_event_is_complete_and_a_thread_does_one_thing_at_a_time(report: Report) -> None:
    trace = json.loads(json.dumps(chrome_trace(report), allow_nan=False))
    found = complete(trace)
    assert len(found) == len(report.events)
    threads: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in found:
        assert {"name", "cat", "ts", "dur", "pid", "tid"} <= set(event)
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        threads.setdefault((event["pid"], event["tid"]), []).append(event)
    for events in threads.values():
        assert len({event["cat"] in COMMUNICATION for event in events}) == 1
        for before, after in pairwise(sorted(events, key=lambda e: e["ts"])):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-4
    assert set(threads) <= set(names(trace, "thread_name"))
    assert all(pid > 0 and tid > 0 for pid, tid in threads)


def test_a_process_per_node_and_threads_per_rank() -> None:
    trace = chrome_trace(reports.pipeline())
    assert set(names(trace, "process_name").values()) == {"node 0", "node 1"}
    threads = list(names(trace, "thread_name").values())
    assert threads[:2] == ["rank 0 V100-32GB", "rank 0 communication"]
    assert len(threads) == 8


def test_times_are_microseconds() -> None:
    report = reports.pipeline()
    ends = max(event["ts"] + event["dur"] for event in complete(chrome_trace(report)))
    assert ends == pytest.approx(report.step_seconds * 1e6, abs=0.01)


def test_what_overlaps_gets_a_thread_of_its_own() -> None:
    report = reports.pipeline()
    beside = Event(rank=0, kind="collective", name="all-gather", start_s=0.0, end_s=1.0)
    trace = chrome_trace(replace(report, events=(*report.events, beside)))
    threads = list(names(trace, "thread_name").values())
    assert threads.count("rank 0 communication") == 2


def test_memory_counters() -> None:
    report = reports.pipeline()
    counters = [e for e in chrome_trace(report)["traceEvents"] if e["ph"] == "C"]
    assert len(counters) == sum(len(device.memory_curve) for device in report.devices)
    assert {e["name"] for e in counters} == {f"memory of rank {rank}" for rank in range(4)}
    assert all(isinstance(e["args"]["bytes"], int) for e in counters)


def test_the_measured_step_is_noted() -> None:
    report = reports.measured()
    assert report.measured is not None
    about = chrome_trace(report)["otherData"]
    assert about["measured_step_seconds"] == report.measured.step_seconds
    assert "measured 402 ms" in about["measured"]
    assert "measured" not in chrome_trace(reports.pipeline())["otherData"]
