"""Balance is exact: against every possible share, and at the edges."""

from __future__ import annotations

import random
from itertools import product

import pytest

from tests.unit.planner.instances import REGIMES, balance_case, best_balance
from whale.errors import PlanError
from whale.planner.balance import Member, balance, balance_shards, format_bytes


def device(
    name: str, row_seconds: float, *, floor: float = 0.0, fixed: int = 0, capacity: float = 1e9
) -> Member:
    """Ten bytes a row."""
    return Member(
        name=name,
        seconds=lambda x: max(floor, x * row_seconds),
        bytes=lambda x: fixed + 10 * x,
        capacity_bytes=capacity,
    )


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("minimum", [0, 1])
def test_as_good_as_the_best_of_all_shares(regime, minimum):
    rng = random.Random(f"{regime} {minimum}")
    feasible = 0
    for _ in range(300):
        case = balance_case(rng, regime)
        best = best_balance(case, minimum)
        if best is None:
            with pytest.raises(PlanError):
                balance(case.members, case.total, minimum=minimum)
            continue
        found = balance(case.members, case.total, minimum=minimum)
        assert sum(found.units) == case.total and min(found.units) >= minimum
        assert case.fits(found.units)
        assert found.seconds == case.seconds(found.units) == best
        feasible += 1
    assert feasible > 20 if regime != "short" else feasible < 280


def test_one_device_takes_all():
    found = balance([device("a", 0.5)], 8)
    assert (found.units, found.seconds, found.binds) == ((8,), 4.0, ("time",))


def test_no_units_leave_everyone_idle():
    found = balance([device("a", 0.5), device("b", 1.0)], 0)
    assert (found.units, found.seconds, found.binds) == ((0, 0), 0.0, ("idle", "idle"))


def test_a_device_that_only_slows_things_down_gets_nothing():
    found = balance([device("a", 1.0), device("slow", 1.0, floor=9.0), device("c", 1.0)], 16)
    assert found.units == (8, 0, 8)
    assert found.binds == ("time", "idle", "time")


def test_a_shard_must_exist_even_where_it_slows_things_down():
    found = balance([device("a", 1.0), device("slow", 20.0), device("c", 1.0)], 17, minimum=1)
    # The two fast ones still share evenly, though the slow one leaves them time for anything.
    assert found.units == (8, 1, 8)
    assert found.seconds == 20.0


def test_memory_exactly_met():
    found = balance([device("a", 1.0, capacity=30), device("b", 1.0, fixed=5, capacity=75)], 10)
    assert found.units == (3, 7)
    assert found.binds == ("memory", "time")
    with pytest.raises(PlanError):
        balance([device("a", 1.0, capacity=29), device("b", 1.0, fixed=5, capacity=75)], 10)


def test_memory_does_not_bind_where_time_would_stop_the_device_anyway():
    found = balance([device("a", 1.0, capacity=50), device("b", 1.0)], 10)
    assert (found.units, found.binds) == ((5, 5), ("time", "time"))


def test_lower_indices_keep_more():
    assert balance([device(str(i), 1.0) for i in range(4)], 6).units == (2, 2, 1, 1)
    flat = [device(str(i), 0.1, floor=5.0) for i in range(3)]
    assert balance(flat, 70).units == (50, 20, 0)


def test_few_are_slowest_then_little_work():
    """Both at 6 s: the one that drops to 3 s gives the surplus, not the one that stays at 5 s."""
    coarse = Member(name="coarse", seconds=lambda x: 3.0 * x, bytes=lambda x: x, capacity_bytes=99)
    found = balance([coarse, device("fine", 1.0)], 7)
    assert found.units == (1, 6)


def test_fixed_memory_counts_even_without_units():
    too_big = device("P100", 1.0, fixed=100, capacity=90)
    with pytest.raises(PlanError, match=r"P100 needs 100 B for 0 rows and has 90 B; short of 10 B"):
        balance([device("V100", 1.0, fixed=100), too_big], 4)


def test_error_says_what_fits_where_and_what_is_missing():
    members = [device("rank 0", 1.0, capacity=30), device("rank 1", 2.0, capacity=45)]
    with pytest.raises(PlanError) as caught:
        balance(members, 12, unit="heads")
    assert caught.value.message == (
        "12 heads do not fit: the devices hold 7 (rank 0: 3, rank 1: 4); the other 5 need at least "
        "45 B more, on rank 1"
    )
    assert "micro-batches" in caught.value.hint and "recompute" in caught.value.hint


def test_error_over_many_devices_is_short():
    members = [device(f"rank {i}", 1.0, capacity=30 if i % 2 else 50) for i in range(64)]
    with pytest.raises(PlanError, match=r"hold 256 \(32 like rank 0: 5 each, 32 like rank 1: 3 e"):
        balance(members, 1000)
    members = [device(f"rank {i}", 1.0, capacity=10 * i + 10) for i in range(20)]
    with pytest.raises(PlanError, match=r"rank 7: 8, 12 more sizes\)"):
        balance(members, 1000)


def test_more_shards_than_units():
    with pytest.raises(PlanError, match="3 heads cannot be divided over 4 members") as caught:
        balance([device(str(i), 1.0) for i in range(4)], 3, unit="heads", minimum=1)
    assert "at most 3 devices" in caught.value.hint


def test_scale():
    """Each device is as full as the time allows: nobody could take a unit from the slowest."""
    rng = random.Random(0)
    members = [
        device(str(i), rng.uniform(1, 5), floor=rng.uniform(0, 40), capacity=rng.randint(50, 300))
        for i in range(512)
    ]
    found = balance(members, 4096)
    assert sum(found.units) == 4096
    takers = [
        i
        for i, member in enumerate(members)
        if member.bytes(found.units[i] + 1) <= member.capacity_bytes
        and member.seconds(found.units[i] + 1) < found.seconds
    ]
    assert takers == []


def test_shards_as_good_as_the_best_of_all():
    rng = random.Random(3)
    for _ in range(300):
        n, total = rng.randint(1, 4), rng.randint(0, 12)
        caps = [rng.randint(0, 9) for _ in range(n)]
        speeds = [rng.choice([1.0, 3.0, 0.1, rng.uniform(0.05, 9)]) for _ in range(n)]
        if sum(caps) < total:
            with pytest.raises(PlanError, match="too little"):
                balance_shards(total, caps, speeds)
            continue
        shards = balance_shards(total, caps, speeds)
        assert sum(shards) == total and all(s <= c for s, c in zip(shards, caps, strict=True))
        best = min(
            max(s / v for s, v in zip(each, speeds, strict=True))
            for each in product(*(range(cap + 1) for cap in caps))
            if sum(each) == total
        )
        assert max(s / v for s, v in zip(shards, speeds, strict=True)) == pytest.approx(best)


def test_shards_stay_exact_beyond_floats():
    total = 3 * 2**60 + 1
    shards = balance_shards(total, [2**62] * 3, [1.0] * 3)
    assert shards == (2**60 + 1, 2**60, 2**60)


def test_sizes_are_read_as_on_data_sheets():
    assert [format_bytes(n) for n in (17, 1_500, 16e9, 1.25e12)] == [
        "17 B",
        "1.5 kB",
        "16.0 GB",
        "1.2 TB",
    ]
