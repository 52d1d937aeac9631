"""Half precision on the way: sums of gradients and journeys of tokens are as exact as stated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import whale as wh
from tests.parity.parity import compare
from tests.ranks import run_ranks
from whale.nn.moe.courier import Courier
from whale.runtime import groups
from whale.runtime.collectives import packed, unpacked
from whale.runtime.groups import Communicator
from whale.runtime.half import HalfSums

pytestmark = pytest.mark.usefixtures("untried")

UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def sums(room: int) -> list[tuple[str, float, float]]:
    """(dtype, size, worst error in units of n * u * sum of absolute values)."""
    wh.init()
    rank, count = dist.get_rank(), dist.get_world_size()
    comm = Communicator("sums", tuple(range(count)), rank, dist.group.WORLD)
    found = []
    for dtype, unit in UNIT.items():
        for size in (1e-30, 1e-6, 1.0, 1e12):
            parts = [
                size * torch.randn(5000, generator=torch.Generator().manual_seed(r)).double()
                for r in range(count)
            ]
            flat = parts[rank].clone()
            HalfSums(dtype, room).start(comm, flat).wait()
            due = torch.stack(parts).sum(0)
            bound = count * unit * torch.stack(parts).abs().sum(0)
            found.append((str(dtype), size, float(((flat - due).abs() / bound).max())))
    zeros = torch.zeros(3)
    HalfSums(torch.float16, room).start(comm, zeros).wait()
    assert torch.equal(zeros, torch.zeros(3))
    broken = torch.full((2,), float("inf") if rank else 1.0)
    HalfSums(torch.float16, room).start(comm, broken).wait()
    assert not torch.isfinite(broken).any(), "an overflow must not be hidden"
    return found


@pytest.mark.parametrize("room", [1, 128])
def test_sums_are_within_the_stated_bound(room: int) -> None:
    for found in run_ranks(4, sums, room):
        for dtype, size, error in found:
            assert error < 1.0, (dtype, size)


@pytest.mark.parametrize("dtype", list(UNIT), ids=str)
def test_a_packed_row_is_within_its_unit(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(200, 33, dtype=torch.float64, generator=generator)
    rows *= torch.exp2(torch.randint(-60, 60, (200, 1), generator=generator).double())
    rows[3] = 0.0
    back = unpacked(packed(rows, dtype), torch.float64)
    assert torch.equal(back[3], rows[3])
    error = (back - rows).abs().amax(1) / rows.abs().amax(1).clamp(min=1e-300)
    assert float(error.max()) <= UNIT[dtype]


def journey(dtype: torch.dtype, per_node: int) -> float:
    """The worst error of rows that travel and whose gradients come back."""
    wh.init()
    rank, count = dist.get_rank(), dist.get_world_size()
    names = {}
    for key, members in (
        ("all", [tuple(range(count))]),
        ("inside", [(0, 1), (2, 3)]),
        ("between", [(0, 2), (1, 3)]),
    ):
        for ranks in members:
            made = dist.new_group(list(ranks))
            if rank in ranks:
                names[key] = f"{key}{ranks}"
                groups._open[names[key]] = Communicator(names[key], ranks, rank, made)
    counts = torch.tensor([[1, 2, 0, 3], [0, 1, 4, 1], [2, 2, 2, 2], [5, 0, 1, 0]])
    rows = torch.randn(int(counts[rank].sum()), 7, dtype=torch.float64, requires_grad=True)
    levels = (names["inside"], names["between"]) if per_node else None
    courier = Courier(names["all"], dtype=dtype, levels=levels, per_node=per_node)
    exact = Courier(names["all"])
    worst = 0.0
    for wait in (True, False):
        got = courier.start(rows, counts, wait=wait)()
        due = exact.send(rows, counts)
        worst = max(worst, float(((got - due).abs().amax(1) / due.abs().amax(1)).max()))
        weights = torch.randn(got.shape, dtype=torch.float64)
        (of_got,) = torch.autograd.grad((got * weights).sum(), rows)
        (of_due,) = torch.autograd.grad((due * weights).sum(), rows)
        worst = max(worst, float(((of_got - of_due).abs().amax(1) / of_due.abs().amax(1)).max()))
    return worst


@pytest.mark.parametrize("per_node", [0, 2])
@pytest.mark.parametrize("dtype", list(UNIT), ids=str)
def test_a_journey_is_within_its_unit_per_leg(dtype: torch.dtype, per_node: int) -> None:
    legs = 2 if per_node else 1
    for error in run_ranks(4, journey, dtype, per_node):
        assert 0.0 < error <= legs * UNIT[dtype] * (1 + 1e-3)


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("more", "least", "most"),
    [
        ({"communication.fp16": True}, 1e-6, 5e-3),
        ({"communication.bf16": True}, 1e-5, 4e-2),
        ({"communication.token_dtype": "fp16"}, 1e-7, 2e-2),
        ({"communication.token_dtype": "bf16"}, 1e-6, 1e-1),
    ],
    ids=str,
)
def test_a_step_is_near_one_device(more: dict[str, Any], least: float, most: float) -> None:
    """Not by a bound, which the model's own slopes would be part of, but close, and not equal."""
    worst = compare("moe/top-k/2/none/none", "experts-4", more)
    assert least < worst["gradient"] < most, worst
    assert worst["loss"] < most, worst


def test_gradients_travel_in_one_dtype() -> None:
    with pytest.raises(wh.ConfigError, match="both true"):
        wh.Config(communication={"fp16": True, "bf16": True})
