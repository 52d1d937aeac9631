"""The chain of stages is exact: against every cut in every order of groups, and at the edges."""

from __future__ import annotations

import random

import pytest

import whale.planner.chain as chain_module
from tests.unit.planner.instances import REGIMES, ChainCase, best_chain, chain_case, stage_seconds
from whale.errors import PlanError
from whale.planner.chain import Chain, GroupKind, Stage, partition
from whale.planner.span_memory import SpanMemory


def kind(
    name: str, count: int, layer_seconds: float, capacity: float = 1e9, layers: int = 8
) -> GroupKind:
    """Ten bytes a layer, and one byte of it per micro-batch in flight."""
    return GroupKind(
        name=name,
        count=count,
        capacity_bytes=capacity,
        seconds=(layer_seconds,) * layers,
        memory=SpanMemory(static=(10.0,) * layers, kept=(1.0,) * layers),
    )


def check(case: ChainCase, found: Chain) -> None:
    """A chain of all layers, within the groups and the memory, with honest seconds."""
    assert [stage.start for stage in found.stages] == [0, *(s.end for s in found.stages[:-1])]
    assert found.stages[-1].end == len(case.flops)
    assert all(stage.start < stage.end for stage in found.stages)
    for number, group in enumerate(case.kinds):
        assert sum(stage.kind == number for stage in found.stages) <= group.count
    assert case.fits(found.stages)
    assert found.seconds == pytest.approx(case.seconds(found.stages), rel=1e-12)
    assert found.bound_seconds <= found.seconds


@pytest.mark.parametrize("regime", REGIMES)
def test_as_good_as_the_best_of_all_chains(regime):
    rng = random.Random(regime)
    feasible = 0
    for _ in range(300):
        case = chain_case(rng, regime)
        best = best_chain(case)
        if best is None:
            with pytest.raises(PlanError, match="fits into memory"):
                partition(case.kinds, case.num_micro_batch)
            continue
        found = partition(case.kinds, case.num_micro_batch, tolerance=0)
        check(case, found)
        assert found.seconds == pytest.approx(best, rel=1e-9)
        assert found.bound_seconds == pytest.approx(best, rel=1e-9)
        feasible += 1
    assert feasible > 20 if regime != "short" else feasible < 280


@pytest.mark.parametrize("tolerance", [0.01, 0.3])
def test_bound_and_tolerance_hold(tolerance):
    rng = random.Random(1)
    for _ in range(150):
        case = chain_case(rng, "loose")
        best = best_chain(case)
        found = partition(case.kinds, case.num_micro_batch, tolerance=tolerance)
        check(case, found)
        assert found.bound_seconds <= best * (1 + 1e-9)
        assert found.seconds <= found.bound_seconds * (1 + tolerance) * (1 + 1e-9)


def test_fixed_number_of_stages():
    rng = random.Random(2)
    for _ in range(200):
        case = chain_case(rng, rng.choice(["loose", "tight"]))
        count = rng.randint(1, min(len(case.flops), sum(k.count for k in case.kinds)))
        best = best_chain(case, lambda stages, count=count: len(stages) == count)
        if best is None:
            with pytest.raises(PlanError, match=r"exactly|fits into memory"):
                partition(case.kinds, case.num_micro_batch, num_stages=count)
            continue
        found = partition(case.kinds, case.num_micro_batch, num_stages=count, tolerance=0)
        check(case, found)
        assert len(found.stages) == count
        assert found.seconds == pytest.approx(best, rel=1e-9)


def test_a_schedule_that_holds_all_micro_batches():
    """GPipe: every stage holds m, wherever it stands."""
    groups = [kind("a", 2, 1.0, capacity=4 * (10 + 8))]
    found = partition(groups, 8, in_flight=lambda k: 8)
    assert [(s.start, s.end) for s in found.stages] == [(0, 4), (4, 8)]
    groups = [kind("a", 2, 1.0, capacity=4 * (10 + 8) - 1)]
    partition(groups, 8)
    with pytest.raises(PlanError):
        partition(groups, 8, in_flight=lambda k: 8)


def test_kinds_are_merged_when_there_are_too_many(monkeypatch):
    monkeypatch.setattr(chain_module, "MAX_CELLS", 60)
    rng = random.Random(4)
    merged = 0
    for _ in range(200):
        case = chain_case(rng, rng.choice(["loose", "tight"]))
        best = best_chain(case)
        try:
            found = partition(case.kinds, case.num_micro_batch)
        except PlanError as error:
            assert best is None or "too many to search exactly" in error.message
            continue
        check(case, found)
        assert found.bound_seconds <= best * (1 + 1e-9)
        merged += found.bound_seconds < best * (1 - 1e-9)
    assert merged > 20


def test_one_group_takes_all():
    found = partition([kind("a", 1, 0.5)], 4)
    assert found.stages == (Stage(kind=0, start=0, end=8),)
    assert found.seconds == found.bound_seconds == 16.0


def test_the_rich_in_memory_come_first_even_if_slower():
    """Early stages hold more micro-batches; the order is the planner's to find."""
    groups = [kind("small", 1, 1.0, capacity=4 * 11), kind("rich", 1, 1.2, capacity=1e9)]
    assert [stage.kind for stage in partition(groups, 16, tolerance=0).stages] == [1, 0]
    # Where only the first of two stages has the memory, the slow but rich one may do more, too.
    groups = [kind("small", 1, 1.0, capacity=3 * 11), kind("rich", 1, 1.2, capacity=1e9)]
    found = partition(groups, 16, tolerance=0)
    assert [(stage.kind, stage.end - stage.start) for stage in found.stages] == [(1, 5), (0, 3)]


def test_a_group_that_does_not_help_stays_unused():
    groups = [kind("fast", 2, 1.0), kind("slow", 2, 40.0)]
    found = partition(groups, 8, tolerance=0)
    assert [stage.kind for stage in found.stages] == [0, 0]
    # One micro-batch: no overlap to gain, and a second stage pays an edge.
    edge = GroupKind(
        name="edge",
        count=4,
        capacity_bytes=1e9,
        seconds=(1.0,) * 4,
        memory=SpanMemory(static=(1.0,) * 4, kept=(1.0,) * 4),
        edge_seconds=(0.0, 0.1, 0.1, 0.1),
    )
    assert len(partition([edge], 1).stages) == 1
    assert len(partition([edge], 2).stages) == 4


def test_memory_exactly_met():
    assert len(partition([kind("a", 2, 1.0, capacity=4 * 12)], 8).stages) == 2
    with pytest.raises(PlanError):
        partition([kind("a", 2, 1.0, capacity=4 * 12 - 9)], 8)


def test_the_sum_counts_besides_the_slowest_stage():
    """Balancing alone would use the slow group; with few micro-batches its seconds cost more."""
    groups = [kind("fast", 1, 1.0), kind("slow", 1, 3.0)]
    assert len(partition(groups, 2, tolerance=0).stages) == 1
    assert len(partition(groups, 64, tolerance=0).stages) == 2


def test_an_expired_deadline_still_gives_a_chain_and_a_bound():
    rng = random.Random(5)
    for _ in range(50):
        case = chain_case(rng, "loose")
        found = partition(case.kinds, case.num_micro_batch, tolerance=0, deadline_s=0)
        check(case, found)
        assert found.bound_seconds <= best_chain(case) * (1 + 1e-9)


def test_larger_than_can_be_tried():
    """64 groups of two kinds: the bound proves what brute force cannot."""
    rng = random.Random(6)
    groups = [
        GroupKind(
            name=name,
            count=16,
            capacity_bytes=capacity,
            seconds=tuple(rng.uniform(0.9, 1.1) / speed for _ in range(48)),
            memory=SpanMemory(static=(3e9,) * 48, kept=(2e8,) * 48),
        )
        for name, speed, capacity in (("fast", 1.0, 16e9), ("slow", 0.5, 40e9))
    ]
    found = partition(groups, 32)
    assert found.seconds <= 1.01 * found.bound_seconds
    exact = partition(groups, 32, tolerance=0)
    assert found.bound_seconds <= exact.seconds <= found.seconds
    assert exact.bound_seconds == pytest.approx(exact.seconds, rel=1e-9)
    slowest = max(stage_seconds(groups[stage.kind], stage) for stage in exact.stages)
    total = sum(stage_seconds(groups[stage.kind], stage) for stage in exact.stages)
    assert exact.seconds == pytest.approx(total + 31 * slowest)


@pytest.mark.parametrize(
    ("groups", "text"),
    [
        ([kind("a", 9, 1.0, capacity=10)], r"layer 0 alone needs 11 B on a, which has 10 B free: "),
        ([kind("a", 3, 1.0, capacity=25)], r"at least 88 B, and one .* 75 B free in all: 13 B too"),
        (
            [kind("a", 4, 1.0, capacity=23)],
            r"at best the last 5 layers do; the first 3 need at least 33 B more, and early stages",
        ),
    ],
)
def test_error_says_what_is_missing(groups, text):
    with pytest.raises(PlanError, match=text) as caught:
        partition(groups, 8)
    assert "fewer rows per micro-batch" in caught.value.hint


def test_a_number_of_stages_that_cannot_be():
    with pytest.raises(PlanError, match="5 stages asked for 8 layers on 4 device groups") as caught:
        partition([kind("a", 4, 1.0)], 8, num_stages=5)
    assert "1 to 4 stages" in caught.value.hint
    # Two stages hold one micro-batch more than one does, and the memory is full.
    groups = [kind("big", 1, 1.0, capacity=8 * 11), kind("tiny", 1, 1.0, capacity=5)]
    with pytest.raises(PlanError, match="exactly 2 stages"):
        partition(groups, 8, num_stages=2)
