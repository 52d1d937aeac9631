"""Halves and chances: float32 values kept in half precision, on any part of a tensor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.covering import some
from whale.ir.sharding import WHOLE, Piece
from whale.runtime.masters import Halves, Masters, joined, rounded_by_chance, split

HALF = (torch.bfloat16, torch.float16)


def odd_values(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(40, 30, generator=generator)
    values *= torch.exp2(torch.randint(-140, 127, values.shape, generator=generator).float())
    values.flatten()[:6] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45])
    return values


@settings(max_examples=some(20), deadline=None)
@given(seed=st.integers(0, 10**6))
def test_two_halves_are_the_same_bits(seed: int) -> None:
    values = odd_values(seed)
    halves = split(values)
    assert halves.upper.dtype == torch.bfloat16 and halves.lower.dtype == torch.int16
    assert torch.equal(joined(halves).view(torch.int32), values.view(torch.int32))
    # The nearest: half way is away from zero, where torch takes the even one.
    finite = values.isfinite() & values.bfloat16().isfinite()
    off = (halves.upper.float() - values).abs()[finite]
    assert torch.equal(off, (values.bfloat16().float() - values).abs()[finite])
    # A bfloat16 that came by itself is a float32 with nothing below.
    exact = values.bfloat16().float()
    assert torch.equal(split(exact).upper.view(torch.int16), values.bfloat16().view(torch.int16))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_rounding_by_chance_is_right_on_average(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.tensor([1.0009765, -1.3333, 3e-3, 2.0**-13, 1000.4, -7.77])
    rounds = 4000
    total, seen = torch.zeros(6, dtype=torch.float64), []
    for _ in range(rounds):
        noise = torch.randint(0, 2**32, values.shape, generator=generator)
        found = rounded_by_chance(values, noise, dtype)
        seen.append(found)
        total += found.double()
    step = (torch.stack(seen).double().amax(0) - torch.stack(seen).double().amin(0)).abs()
    off = (total / rounds - values.double()).abs()
    assert bool((off <= 4.0 * step / rounds**0.5).all()), (off, step)
    # Only ever one of the two neighbours.
    assert all(len(torch.stack(seen)[:, i].unique()) <= 2 for i in range(6))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_what_is_no_number_or_exact_stays(dtype: torch.dtype) -> None:
    noise = torch.randint(0, 2**32, (7,))
    values = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, 1.0, -2.5, 3.4e38])
    found = rounded_by_chance(values, noise, dtype)
    want = values.to(dtype)
    assert torch.equal(found.isnan(), want.isnan())
    assert torch.equal(found[~want.isnan()], want[~want.isnan()])


def masters(kind: str, value: Tensor, piece: Piece, shape: tuple[int, ...]) -> Masters:
    narrow = split(value).upper if kind == "split" else value.bfloat16()
    lower = {"w": split(value).lower} if kind == "split" else {}
    return Masters(kind, {"w": nn.Parameter(narrow)}, {"w": piece}, lower, {"w": shape}, 3)


def updated(kind: str, value: Tensor, piece: Piece, shape: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Three AdamW steps; gives what is computed with, and what is kept."""
    found = masters(kind, value, piece, shape)
    parameter = found.kept["w"]
    with found.widened(["w"], 0, rounds=False):
        optimizer = torch.optim.AdamW([parameter], lr=1e-3)
    for step in range(3):
        parameter.grad = (0.1 * value * (step + 1)).bfloat16()
        with found.widened(["w"], step):
            assert parameter.dtype == torch.float32 == parameter.grad.dtype
            optimizer.step()
        assert parameter.dtype == torch.bfloat16
    assert all(s.dtype == torch.float32 for s in optimizer.state[parameter].values())
    return parameter.detach(), found.value("w").clone()


def test_split_updates_as_float32_does() -> None:
    value = torch.randn(9, 5)
    narrow, wide = updated("split", value, WHOLE, (9, 5))
    plain = nn.Parameter(value.clone())
    optimizer = torch.optim.AdamW([plain], lr=1e-3)
    for step in range(3):
        plain.grad = (0.1 * value * (step + 1)).bfloat16().float()
        optimizer.step()
    assert torch.equal(wide, plain.detach())
    assert torch.equal(narrow, split(plain.detach()).upper)
    assert not torch.equal(narrow.float(), wide)


def test_small_updates_are_lost_without_a_master_and_kept_by_chance() -> None:
    value = torch.ones(4000)
    for kind, moved in (("none", False), ("stochastic", True)):
        found = masters(kind, value, WHOLE, (4000,))
        parameter = found.kept["w"]
        for step in range(20):
            with found.widened(["w"], step):
                parameter.data -= 1e-4
        mean = parameter.float().mean().item()
        assert (abs(mean - (1.0 - 20e-4)) < 3e-4) == moved, (kind, mean)


@settings(max_examples=some(25), deadline=None)
@given(cut=st.integers(1, 8), column=st.integers(1, 6), seed=st.integers(0, 99))
def test_every_cut_rounds_alike(cut: int, column: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(9, 7, generator=generator)
    whole, _ = updated("stochastic", value, WHOLE, (9, 7))
    pieces = [
        Piece(dims=((0, ((0, cut),)),)),
        Piece(dims=((0, ((cut, 9),)), (1, ((0, column),)))),
        Piece(dims=((0, ((cut, 9),)), (1, ((column, 7),)))),
        Piece(dims=((1, ((0, 1), (column, 7))),)),
    ]
    for piece in pieces:

        def taken(tensor: Tensor, piece: Piece = piece) -> Tensor:
            for dim, spans in piece.dims:
                tensor = torch.cat([tensor.narrow(dim, a, b - a) for a, b in spans], dim)
            return tensor

        part, _ = updated("stochastic", taken(value), piece, (9, 7))
        assert torch.equal(part, taken(whole)), piece


def test_assign_and_value_are_inverse() -> None:
    for kind in ("split", "none"):
        found = masters(kind, torch.randn(3, 4), WHOLE, (3, 4))
        new = torch.randn(3, 4)
        found.assign("w", new)
        want = new if kind == "split" else new.bfloat16()
        assert torch.equal(found.value("w"), want)
    assert isinstance(split(torch.ones(2)), Halves)
