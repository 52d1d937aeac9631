"""`finish`: what computes and sums take from each other, against results worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.covering import some
from whale.sim.finish import Runner, Sum, finish


def lane(rank: int, end_s: float, *, free_s: float = 0.0, lost: float = 0.0) -> Runner:
    return Runner(ranks=(rank,), free_s=free_s, end_s=end_s, lost=lost)


def bucket(seconds: float, *released: float, ranks: tuple[int, ...] = (0, 1)) -> Sum:
    return Sum(ranks=ranks, seconds=seconds, released=tuple(zip(ranks, released, strict=True)))


def test_a_sum_after_the_computes_takes_its_time() -> None:
    lanes, item = [lane(0, 1.0), lane(1, 2.0)], bucket(0.5, 1.0, 2.0)
    finish(lanes, [item], 0.5)
    assert (item.begin_s, item.end_s) == (2.0, 2.5)
    assert lanes[0].real(1.0) == 1.0


def test_a_sum_beside_computes_loses_and_takes_away() -> None:
    # From 1 to 3 both lanes compute at half speed beside a sum at 3/4 of its speed: 1.5 s of it are
    # done when the lanes are (nominal 2); the half second that is left goes at full speed.
    lanes, item = [lane(0, 2.0, lost=0.5), lane(1, 2.0, lost=0.5)], bucket(2.0, 1.0, 1.0)
    finish(lanes, [item], 0.25)
    assert lanes[0].real(2.0) == pytest.approx(3.0)
    assert lanes[0].real(1.5) == pytest.approx(2.0)
    assert lanes[0].real(0.5) == 0.5
    assert (item.begin_s, item.end_s) == (1.0, pytest.approx(3.5))


def test_a_sum_waits_for_its_last_rank_and_for_the_sum_before_it() -> None:
    first, second = bucket(1.0, 0.5, 1.0), bucket(1.0, 0.6, 1.2)
    finish([lane(0, 2.0), lane(1, 4.0)], [first, second], 0.0)
    assert (first.begin_s, first.end_s) == (1.0, 2.0)
    assert (second.begin_s, second.end_s) == (2.0, 3.0)


def test_groups_of_other_ranks_do_not_wait() -> None:
    lanes = [lane(i, 1.0) for i in range(4)]
    one = bucket(3.0, 1.0, 1.0)
    other = Sum(ranks=(2, 3), seconds=1.0, released=((2, 0.5), (3, 0.5)))
    finish(lanes, [other, one], 0.0)
    assert other.end_s == 1.5
    assert one.end_s == 4.0


def test_before_a_lane_is_free_nothing_stretches_it() -> None:
    # Two stages on one device: the sum of one is ready while the lane still waits for messages.
    lanes, item = [lane(0, 4.0, free_s=3.0, lost=0.5), lane(1, 1.0)], bucket(2.5, 1.0, 1.0)
    finish(lanes, [item], 0.0)
    assert item.end_s == 3.5
    # A quarter second's work was done beside the sum from 3 to 3.5.
    assert lanes[0].real(3.25) == pytest.approx(3.5)
    assert lanes[0].real(4.0) == pytest.approx(4.25)


def test_who_is_left_on_a_card_has_its_memory_alone() -> None:
    fast, slow = lane(0, 1.0), lane(1, 3.0)
    fast.neighbours, slow.neighbours, slow.alone = {1: 1.0}, {0: 1.0}, 0.8
    finish([fast, slow], [], 0.5)
    assert fast.real(1.0) == pytest.approx(1.0)
    assert slow.real(3.0) == pytest.approx(1.0 + 2.0 * 0.8)


def test_nothing_to_sum_takes_no_time() -> None:
    item = bucket(0.0, 0.0, 0.0)
    lanes = [lane(0, 1.0), lane(1, 1.0)]
    finish(lanes, [item, bucket(1.0, 0.0, 0.0)], 0.0)
    assert item.end_s == 0.0
    idle = Sum(ranks=(7, 8), seconds=2.0, released=())
    finish(lanes, [idle], 0.5)
    assert idle.end_s == 2.0


ends = st.lists(st.floats(0.1, 5.0), min_size=2, max_size=4)


@settings(max_examples=some(150), deadline=None)
@given(
    ends=ends,
    parts=st.lists(st.tuples(st.floats(0.0, 2.0), st.floats(0.0, 1.0)), max_size=6),
    lost=st.floats(0.0, 0.9),
    contention=st.floats(0.0, 0.9),
)
def test_times_never_shrink_and_orders_hold(
    ends: list[float], parts: list[tuple[float, float]], lost: float, contention: float
) -> None:
    ranks = tuple(range(len(ends)))
    lanes = [lane(i, end, lost=lost) for i, end in enumerate(ends)]
    shares = sorted(after for _, after in parts)
    sums = [
        bucket(seconds, *(after * end for end in ends), ranks=ranks)
        for (seconds, _), after in zip(parts, shares, strict=True)
    ]
    finish(lanes, sums, contention)
    for runner in lanes:
        points = [runner.real(t * runner.end_s / 8) for t in range(9)]
        assert points == sorted(points)
        assert runner.real(runner.end_s) >= runner.end_s - 1e-9
        # Beside sums all the way, it takes as much longer as they slow it.
        assert runner.real(runner.end_s) <= runner.end_s / (1.0 - lost) + 1e-6
    free = 0.0
    for item in sums:
        assert item.begin_s >= free - 1e-9
        assert item.end_s - item.begin_s >= item.seconds - 1e-9
        assert item.end_s - item.begin_s <= item.seconds / (1.0 - contention) + 1e-6
        free = item.end_s
