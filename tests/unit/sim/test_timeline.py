"""The timeline of a schedule agrees with the closed forms of the literature."""

from __future__ import annotations

import pytest

import whale as wh
from tests.unit.sim.timeline import timeline
from whale.ir.schedule import Action, Schedule
from whale.planner.schedules import compute_order, rank_actions

COST = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def schedule(kind: str, groups: int, chunks: int, micro: int) -> Schedule:
    stages = groups * chunks
    return Schedule(
        kind=kind,
        num_micro_batch=micro,
        groups=tuple(tuple(range(g, stages, groups)) for g in range(groups)),
        edges=tuple((s, s + 1) for s in range(stages - 1)),
    )


def run(made: Schedule, scale: float = 1.0) -> float:
    orders = {g: rank_actions(made, g) for g in range(len(made.groups))}
    return timeline(made, orders, lambda action: COST[action.kind] * scale).step_s


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("groups", "micro"), [(1, 3), (2, 2), (4, 8), (3, 5)])
def test_gpipe_and_1f1b(kind: str, groups: int, micro: int) -> None:
    assert run(schedule(kind, groups, 1, micro)) == (micro + groups - 1) * 3.0


def test_interleaving_and_zero_bubble_shorten_the_step() -> None:
    plain = run(schedule("1f1b", 4, 1, 8))
    assert run(schedule("interleaved", 4, 2, 8), 0.5) < plain
    assert run(schedule("zero-bubble", 4, 1, 8)) < plain


def test_bubble_is_the_share_of_waiting() -> None:
    made = schedule("1f1b", 4, 1, 8)
    orders = {g: compute_order(made, g) for g in range(4)}
    line = timeline(made, orders, lambda action: COST[action.kind])
    assert line.bubble == pytest.approx(3 / 11)
    assert line.busy_s(0) == 24.0


def test_an_order_that_cannot_go_on_is_named() -> None:
    made = schedule("1f1b", 2, 1, 1)
    backward_first = [Action(kind="B", stage=1, micro_batch=0)]
    with pytest.raises(wh.ScheduleError, match="1B0"):
        timeline(made, {0: [], 1: backward_first}, lambda _: 1.0)
