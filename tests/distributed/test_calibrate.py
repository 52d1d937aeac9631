"""`calibrate` on two ranks: both measure at the same time and end with the same Profile."""

from __future__ import annotations

import time

import torch

import whale as wh
from tests.ranks import run_ranks
from whale.engine.calibrate.links import Together, measure_contention
from whale.engine.calibrate.profile import calibrate
from whale.ir.profile import Profile
from whale.models.registry import preset


def profile() -> dict[str, object]:
    wh.init()
    subject = preset("gpt-nano")
    with torch.device("meta"):
        model, batch = subject.build(), subject.batch(4, None)
    return calibrate(model, batch, subject.loss, (1, 2), repeats=1).to_dict()


def test_all_ranks_hold_the_same_profile() -> None:
    first, second = run_ranks(2, profile)
    assert first == second
    found = Profile.from_dict(first)
    assert len(found.devices) == 2
    assert all(device.layers and device.rates["matmul"] for device in found.devices)
    names = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
    assert set(found.links) == {(name, 2, 1) for name in names}
    assert all(latency >= 0 and speed > 0 for latency, speed in found.links.values())
    assert found.contention is None


def side_by_side() -> tuple[float, float]:
    wh.init()
    return measure_contention(2, torch.device("cpu"))


def test_sums_and_compute_side_by_side() -> None:
    first, second = run_ranks(2, side_by_side)
    assert first[1] == second[1]
    assert all(0 <= share <= 0.9 for share in (*first, *second))


def busy() -> int:
    """Rank 0 is done at once, and works on until rank 1 is."""
    wh.init()
    rounds = 0

    def work() -> None:
        nonlocal rounds
        rounds += 1
        time.sleep(0.01)

    with Together() as together:
        together.wait()
        if together.rank == 1:
            time.sleep(0.5)
        together.wait(work)
        assert together.gather(together.rank) == [0, 1]
    return rounds


def test_a_rank_that_is_done_keeps_busy() -> None:
    first, second = run_ranks(2, busy)
    assert first > 3
    assert second <= first
