"""Adafactor beside torch's own, by stretches, and rounded by chance."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import whale as wh
from tests.covering import some
from whale.errors import WhaleError
from whale.optim import adafactor
from whale.runtime.hashing import key_of
from whale.runtime.masters import Rounding, rounded_by_chance

SHAPES = st.lists(st.integers(1, 7), min_size=0, max_size=4).map(tuple)
OPTIONS = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([0.0, 1e-3, 0.1]),
        "weight_decay": st.sampled_from([0.0, 0.1]),
        "d": st.sampled_from([1.0, 2.0]),
        "eps": st.sampled_from([(None, 1e-3), (1e-6, 0.0)]),
        "beta2_decay": st.sampled_from([-0.8, -0.5]),
    }
)


@settings(max_examples=some(40), deadline=None)
@given(shape=SHAPES, options=OPTIONS, stretch=st.integers(1, 40))
def test_it_computes_what_torchs_does(
    shape: tuple[int, ...], options: dict[str, object], stretch: int
) -> None:
    torch.manual_seed(len(shape))
    before, adafactor.STRETCH = adafactor.STRETCH, stretch
    try:
        start = torch.randn(shape, dtype=torch.float64)
        ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
        mine = wh.optim.Adafactor([ours], **options)
        other = torch.optim.Adafactor([theirs], foreach=False, **options)
        for size in (1.0, 1e-3, 0.0, 30.0):
            ours.grad = torch.randn(shape, dtype=torch.float64) * size
            theirs.grad = ours.grad.clone()
            mine.step()
            other.step()
            assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)
    finally:
        adafactor.STRETCH = before


def test_half_precision_keeps_its_factors_in_float32() -> None:
    weight = nn.Parameter(torch.randn(6, 5).bfloat16())
    optimizer = wh.optim.Adafactor([weight])
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    kept = {v.dtype for v in optimizer.state[weight].values()}
    assert weight.dtype == torch.bfloat16 and kept == {torch.float32}


@pytest.mark.parametrize("shape", [(), (9,), (6, 5), (4, 3, 5)])
def test_any_stretches_round_alike(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit: what is rounded depends on the place of an element alone."""
    torch.manual_seed(0)
    start, grad = torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16()
    whole = tuple(size + 2 for size in shape)
    inside = tuple((0, size) for size in shape)
    outside = tuple((1, size + 1) for size in shape)
    key = key_of(3, 1, "weight", 0)
    rounding = Rounding(key, shape, ((inside, outside),) if shape else (), torch.bfloat16)
    assert rounding.offsets == tuple(1 for _ in whole) if shape else rounding.offsets is None
    found = []
    for stretch in (1, 7, 10_000):
        monkeypatch.setattr(adafactor, "STRETCH", stretch)
        weight = nn.Parameter(start.clone())
        optimizer = wh.optim.Adafactor([weight], lr=1e-3)
        optimizer.rounding = {weight: rounding}
        weight.grad = grad.clone()
        optimizer.step()
        found.append(weight.detach())
    assert all(torch.equal(found[0], other) for other in found[1:])
    plain = nn.Parameter(start.float())
    plain.grad = grad.float()
    wh.optim.Adafactor([plain], lr=1e-3).step()
    noise = rounding.noise(0, shape[0] if shape else 1, torch.device("cpu"))
    want = rounded_by_chance(plain.detach(), noise, torch.bfloat16)
    assert torch.equal(found[-1], want)


@pytest.mark.parametrize(
    "wrong",
    [{"lr": -1.0}, {"beta2_decay": 0.1}, {"d": 0.5}, {"weight_decay": -1.0}, {"lr": float("nan")}],
)
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(WhaleError, match=next(iter(wrong))):
        wh.optim.Adafactor([nn.Parameter(torch.zeros(2))], **wrong)


def test_a_sparse_gradient_is_refused() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(WhaleError, match="sparse"):
        wh.optim.Adafactor(table.parameters()).step()
