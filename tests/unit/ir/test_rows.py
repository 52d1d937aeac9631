"""`needed_rows`: the rows a rank computes, over its stages and micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from whale.ir.plan import Plan, StagePlan
from whale.ir.rows import needed_rows, union
from whale.ir.schedule import Schedule
from whale.ir.virtual_device import VirtualDevice, micro_batch_cuts

Replicas = Sequence[tuple[tuple[int, ...], int]]


def plan(stages: Sequence[Replicas], num_micro_batch: int) -> Plan:
    """A plan with nothing in it but rows; each stage is its replicas with their weights."""
    devices = [VirtualDevice.of([r for r, _ in s], [w for _, w in s]) for s in stages]
    num_ranks = len({rank for device in devices for rank in device.ranks})
    return Plan(
        model_hash="",
        num_ranks=num_ranks,
        device_types=("CPU",) * num_ranks,
        batch_rows=8,
        stages=tuple(
            StagePlan(index=i, taskgraphs=(), virtual_device=d) for i, d in enumerate(devices)
        ),
        taskgraphs=(),
        homes=(),
        groups=(),
        schedule=Schedule(
            kind="1f1b",
            num_micro_batch=num_micro_batch,
            groups=tuple((i,) for i in range(len(stages))),
            edges=(),
            orders=((),) * len(stages),
        ),
    )


def indices(spans: Sequence[tuple[int, int]]) -> list[int]:
    return [row for low, high in spans for row in range(low, high)]


UNEVEN = [((0,), 3), ((1,), 1), ((2,), 2)]


def test_replicas_take_rows_by_weight() -> None:
    made = plan([UNEVEN], 1)
    assert [needed_rows(made, rank, 12) for rank in range(3)] == [((0, 6),), ((6, 8),), ((8, 12),)]


def test_each_micro_batch_is_cut_alone() -> None:
    made = plan([[((0,), 2), ((1,), 1)]], 2)
    assert needed_rows(made, 0, 6) == ((0, 2), (3, 5))
    assert needed_rows(made, 1, 6) == ((2, 3), (5, 6))


def test_touching_spans_are_one() -> None:
    assert needed_rows(plan([[((0,), 1)]], 4), 0, 10) == ((0, 10),)


def test_shards_of_a_replica_need_the_same_rows() -> None:
    made = plan([[((0, 1), 1), ((2, 3), 2)]], 1)
    assert needed_rows(made, 0, 6) == needed_rows(made, 1, 6) == ((0, 2),)
    assert needed_rows(made, 2, 6) == needed_rows(made, 3, 6) == ((2, 6),)


def test_stages_of_a_rank_are_joined() -> None:
    made = plan([[((0,), 1), ((1,), 1)], [((0,), 1), ((1,), 3)]], 1)
    assert needed_rows(made, 0, 8) == ((0, 4),)
    assert needed_rows(made, 1, 8) == ((2, 8),)


def test_an_idle_replica_needs_nothing() -> None:
    made = plan([[((0,), 1), ((1,), 0)]], 2)
    assert needed_rows(made, 1, 8) == ()
    assert needed_rows(plan([UNEVEN], 1), 1, 1) == ()
    assert needed_rows(plan([UNEVEN], 1), 0, 0) == ()


@pytest.mark.parametrize("total_rows", range(14))
@pytest.mark.parametrize("num_micro_batch", [1, 2, 3, 5])
def test_every_stage_has_every_row_once(total_rows: int, num_micro_batch: int) -> None:
    stages: list[Replicas] = [UNEVEN, [((3,), 1), ((4,), 5)], [((5,), 1)]]
    made = plan(stages, num_micro_batch)
    for stage in stages:
        rows = [indices(needed_rows(made, ranks[0], total_rows)) for ranks, _ in stage]
        assert sorted(row for part in rows for row in part) == list(range(total_rows))
    # What the executor takes at once lies in one span.
    points = micro_batch_cuts(total_rows, num_micro_batch)
    for rank in range(3):
        spans = needed_rows(made, rank, total_rows)
        for first, end in zip(points, points[1:], strict=False):
            low, high = made.stages[0].virtual_device.rows(rank, end - first)
            assert low == high or any(a <= first + low and first + high <= b for a, b in spans)


def test_union() -> None:
    assert union([]) == ()
    assert union([(4, 4)]) == ()
    assert union([(5, 7), (0, 2), (2, 3), (6, 9), (1, 2)]) == ((0, 3), (5, 9))
