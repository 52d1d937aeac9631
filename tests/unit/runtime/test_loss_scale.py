"""The loss scale: it falls where a gradient overflows, grows where none did, as torch's does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.covering import some
from whale.ir.precision import Precision
from whale.runtime import loss_scale
from whale.runtime.loss_scale import LossScale, overflow

DYNAMIC = Precision(autocast="float16", loss_scale=65536.0, dynamic=True)


@settings(max_examples=some(30), deadline=None)
@given(overflows=st.lists(st.booleans(), max_size=60))
def test_it_moves_as_torchs_does(overflows: list[bool]) -> None:
    scaler = torch.amp.GradScaler("cpu", growth_interval=5)
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    ours = LossScale(DYNAMIC, ahead=True)
    before, loss_scale.GROWS_AFTER = loss_scale.GROWS_AFTER, 5
    try:
        for bad in overflows:
            assert ours.value == scaler.get_scale() or not scaler.is_enabled()
            weight.grad = torch.full((1,), float("inf") if bad else 1.0)
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
            ours.after(bad, 1.0)
        scaler.scale(torch.ones(()))
        assert ours.value == scaler.get_scale()
    finally:
        loss_scale.GROWS_AFTER = before


def test_a_fixed_scale_stays() -> None:
    scale = LossScale(Precision(autocast="float16", loss_scale=128.0), ahead=True)
    scale.after(True, 1.0)
    assert scale.value == scale.seed == 128.0
    scale.load({"value": 4.0, "good_steps": 1})
    assert scale.value == 128.0


def test_gradients_of_sums_are_as_large_as_those_of_means() -> None:
    scale = LossScale(DYNAMIC, ahead=False)
    scale.begin(512)
    assert scale.seed == 65536.0 / 512
    scale.after(False, 1.0 / 3000)  # tokens, as it turned out
    assert scale.seed == 65536.0 / 2048 or scale.seed == 65536.0 / 4096
    scale.begin(512)
    assert scale.seed < 65536.0 / 1024
    for nothing in (0.0, float("nan"), float("inf")):
        before = scale.seed
        scale.after(False, nothing)
        assert scale.seed == before


def test_it_is_kept_with_a_checkpoint() -> None:
    scale = LossScale(DYNAMIC, ahead=True)
    scale.after(True, 1.0)
    scale.after(False, 1.0)
    other = LossScale(DYNAMIC, ahead=True)
    other.load(scale.state())
    assert (other.value, other.good_steps) == (32768.0, 1)


@pytest.mark.parametrize(
    ("values", "bad"),
    [
        ([[1.0, 2.0], [3e38]], 0.0),
        ([[1.0], [float("inf")]], 1.0),
        ([[float("nan")], []], 1.0),
        ([], 0.0),
    ],
)
def test_overflow(values: list[list[float]], bad: float) -> None:
    found = overflow([torch.tensor(v) for v in values], torch.device("cpu"))
    assert found.item() == bad


def test_a_nonsense_precision_is_refused() -> None:
    for wrong in (
        Precision(autocast="float8"),
        Precision(parameters="float16", master="split"),
        Precision(master="many"),
        Precision(loss_scale=-1.0),
        Precision(dynamic=True),
        Precision(gradients="float16"),
    ):
        with pytest.raises(Exception, match="hint: make the plan again"):
            wrong.check()
    Precision().check()
    DYNAMIC.check()
