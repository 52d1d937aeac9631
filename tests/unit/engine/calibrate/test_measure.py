"""`engine.calibrate` on the CPU: all is measured and makes sense; never how long it took."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from whale.engine.calibrate import layers
from whale.engine.calibrate import profile as measure
from whale.engine.calibrate.devices import (
    available_memory,
    measure_apply,
    measure_launch,
    measure_rates,
)
from whale.engine.calibrate.layers import heaviest, measure_layers
from whale.engine.calibrate.links import measure_contention, measure_links
from whale.engine.calibrate.profile import calibrate
from whale.engine.calibrate.stopwatch import fit_line
from whale.engine.capture.captured import capture
from whale.ir.profile import Curve, DeviceProfile, Profile
from whale.models.registry import preset

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in a rank; threads on a busy machine wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def squared(out: Tensor, target: Tensor) -> Tensor:
    return ((out - target) ** 2).mean()


def measured(model: nn.Module, batch: Any, rows: tuple[int, ...] = (1, 2), **more: Any) -> Any:
    captured = capture(model, batch, squared)
    return captured, measure_layers(model, captured, CPU, rows, repeats=1, **more)


@pytest.mark.parametrize("on_meta", [True, False])
def test_every_kind_of_layer_has_rising_curves(on_meta: bool) -> None:
    subject = preset("gpt-tiny")
    with torch.device("meta" if on_meta else "cpu"):
        model, batch = subject.build(), subject.batch(4, 16)
    captured = capture(model, batch, subject.loss)
    found = measure_layers(model, captured, CPU, (4, 1, 2, 1), repeats=2)
    assert set(found) == {layer.signature for layer in captured.graph.layers}
    for time in found.values():
        for curve in (time.forward, time.backward):
            assert [x for x, _ in curve.points] == [1, 2, 4]
            seconds = [y for _, y in curve.points]
            assert min(seconds) > 0
            assert seconds == sorted(seconds)
    assert all(p.is_meta == on_meta and p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", ["resnet-tiny", "gnmt-tiny", "t5-tiny"])
def test_other_families(name: str) -> None:
    """Convolutions and batch norm, recurrent layers that give tuples, masks and biases."""
    subject = preset(name)
    with torch.device("meta"):
        model, batch = subject.build(), subject.batch(2, None)
    captured = capture(model, batch, subject.loss)
    found = measure_layers(model, captured, CPU, (2,), repeats=1)
    assert set(found) == {layer.signature for layer in captured.graph.layers}


class Pairs(nn.Module):
    """Gives a mapping with a tuple in it, and changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.norm(self.relu(x))
        return {"both": (y, y.detach()), "name": "pair"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.pairs = Pairs()
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.last(self.pairs(self.first(x))["both"][0]))


def test_layers_with_structured_outputs_in_place_work_and_two_calls() -> None:
    model, x = Net(), torch.randn(6, 4)
    captured, found = measured(model, (x, x), (1, 2, 3))
    rows = {
        layer.kind: [int(r) for r, _ in found[layer.signature].forward.points]
        for layer in captured.graph.layers
    }
    # Batch norm refuses to train on one row.
    assert rows == {"Linear": [1, 2, 3], "Pairs": [2, 3]}
    assert layers._num_calls(captured, "last") == 2
    assert model.pairs.norm.num_batches_tracked == 0
    assert model.pairs.relu.inplace


class Refuses(nn.Module):
    """Runs in its model, and not alone: it wants to know where its input comes from."""

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad and x.is_leaf:
            raise RuntimeError("a leaf")
        return x * 2


def test_a_layer_that_cannot_run_alone_is_left_out() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), Refuses()), torch.randn(6, 4)
    with pytest.warns(UserWarning, match="1 cannot be timed alone: RuntimeError: a leaf"):
        captured, found = measured(model, (x, x))
    kinds = {layer.kind for layer in captured.graph.layers if layer.signature in found}
    assert kinds == {"Linear"}


class Hungry(nn.Module):
    """Does not fit with more than 2 rows."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 3:
            raise torch.OutOfMemoryError("too many rows")
        return x * 2


def test_rows_that_do_not_fit_end_the_curve_and_ranks_stay_in_step() -> None:
    """With the others waiting: as many calls of `synchronize` whatever fits."""
    model, x = nn.Sequential(nn.Linear(4, 4), Hungry()), torch.randn(6, 4)
    waits: list[bool] = []

    def synchronize(work: Any) -> None:
        waits.append(work is not None)
        if work is not None:
            work()

    captured, found = measured(model, (x, x), (1, 2, 4, 8), synchronize=synchronize)
    rows = {
        layer.kind: [int(r) for r, _ in found[layer.signature].forward.points]
        for layer in captured.graph.layers
    }
    assert rows == {"Linear": [1, 2, 4, 8], "Hungry": [1, 2]}
    # Of each size once before it, at rest, and once after it, at work if it fits.
    assert waits == [False, True] * 6 + [False, False] * 2


def test_a_very_wide_linear_is_timed_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may not fit whole; its time is that of the part, as many times as it is wider."""
    monkeypatch.setattr(layers, "_MOST_WEIGHTS", 4 * 25)
    widths: list[int] = []
    plain = layers._Bench._timed

    def timed(self: Any, ready: Any, repeats: int, budget_s: float) -> tuple[float, float]:
        widths.append(self.layer.out_features)
        plain(self, ready, repeats, budget_s)
        return 1.0, 2.0

    monkeypatch.setattr(layers._Bench, "_timed", timed)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 100, bias=False))
        batch = (torch.empty(2, 8), torch.empty(2, 100))
    captured, found = measured(model, batch, rows=(2,))
    assert widths == [4, 25]
    small, wide = (found[layer.signature] for layer in captured.graph.layers)
    assert (small.forward.at(2), wide.forward.at(2), wide.backward.at(2)) == (1.0, 4.0, 8.0)


def test_neighbours_on_a_card_rest_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every Layer once more, alone; all ranks make the same calls, whatever their turn."""
    times: list[float] = []
    waits: list[bool] = []

    def timed(self: Any, ready: Any, repeats: int, budget_s: float) -> tuple[float, float]:
        return times.pop(0), 0.0

    monkeypatch.setattr(layers._Bench, "_timed", timed)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.randn(6, 4)
    target = torch.randn(6, 2)
    for mine in range(3):
        waits.clear()
        times[:] = [1.0, 2.0, 1.5, 1.0, 2.0, 1.98]
        captured, found = measured(
            model,
            (x, target),
            (1, 2),
            synchronize=lambda work: waits.append(work is None),
            turn=(mine, 3),
        )
        ratios = [found[layer.signature].alone for layer in captured.graph.layers]
        # The second differs by no more than noise does.
        assert ratios == [0.75, 1.0]
        assert len(waits) == 2 * (2 * 2 + 3)


class Crowded(nn.Module):
    """Finds no memory once a neighbour has taken it."""

    taken = False

    def forward(self, x: Tensor) -> Tensor:
        if self.taken:
            raise torch.OutOfMemoryError("taken by a neighbour")
        return x * 2


def test_a_layer_that_fails_alone_keeps_the_ranks_in_step(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(Crowded()), torch.randn(6, 4)
    plain = layers._Bench._once_more

    def crowded(self: Any, rows: int) -> tuple[float, float]:
        self.close()
        monkeypatch.setattr(Crowded, "taken", True)
        return plain(self, rows)

    calls: list[list[bool]] = []
    for once_more in (plain, crowded):
        monkeypatch.setattr(layers._Bench, "_once_more", once_more)
        waits: list[bool] = []

        def synchronize(work: Any, waits: list[bool] = waits) -> None:
            waits.append(work is None)

        _, found = measured(model, (x, x), (1,), synchronize=synchronize, turn=(0, 2))
        calls.append(waits)
    assert calls == [[True, False, True, True]] * 2
    assert [time.alone for time in found.values()] == [1.0]


def test_the_load_beside_sums_is_the_layer_that_takes_longest() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    captured, found = measured(model, (torch.randn(6, 4), torch.randn(6, 2)), (1, 2))
    first, _, last = (layer.signature for layer in captured.graph.layers)
    # Twice 3 is more than 5.
    by_hand = {
        first: replace(found[first], forward=Curve.of({2: 3.0}), backward=Curve.of({2: 0.0})),
        last: replace(found[last], forward=Curve.of({2: 5.0}), backward=Curve.of({2: 0.0})),
    }
    before = [p.clone() for p in model.parameters()]
    with heaviest(model, captured, by_hand, CPU) as load, FlopCounterMode(display=False) as counter:
        assert load is not None
        load()
    # 2 rows through 4 x 4, forward and the weight's gradient: its input is data.
    assert counter.get_total_flops() == 2 * 2 * 2 * 4 * 4
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    with heaviest(model, captured, {}, CPU) as nothing:
        assert nothing is None


def test_no_budget_leaves_the_smallest_size() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(6, 4)
    _, found = measured(model, (x, x), (1, 2, 4), budget_s=0.0)
    assert [len(time.forward.points) for time in found.values()] == [1]


def test_rates_are_positive() -> None:
    before = torch.get_float32_matmul_precision()
    rates = measure_rates(CPU, ("float32", "float64"))
    assert set(rates) == {"memory", "matmul", "conv", "attention", "rnn"}
    for kind, by_dtype in rates.items():
        assert set(by_dtype) == {"float32", "float64"}, kind
        for rate in by_dtype.values():
            assert rate.flops_per_s > 0
            assert rate.bytes_per_s > 0
            assert rate.overhead_s >= 0
    assert torch.get_float32_matmul_precision() == before


def test_a_device_and_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measure_launch(CPU) > 0
    assert measure_apply(CPU) > 0
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    whole, _ = available_memory(CPU)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert 0 < available_memory(CPU)[0] < whole
    assert measure_links(1, CPU) == {}
    assert measure_contention(1, CPU) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("points", "fixed", "slope"),
    [
        ([(1.0, 3.0), (2.0, 4.0), (10.0, 12.0)], 2.0, 1.0),
        ([(5.0, 10.0)], 0.0, 2.0),
        ([(1.0, 1.0), (10.0, 20.0)], 0.0, None),
        ([(1.0, 3.0), (10.0, 2.0)], 2.0, 0.2),
    ],
)
def test_lines(points: list[tuple[float, float]], fixed: float, slope: float | None) -> None:
    got = fit_line(points)
    assert got[0] == pytest.approx(fixed)
    assert got[1] > 0
    if slope is not None:
        assert got[1] == pytest.approx(slope)


def test_ranks_that_share_a_card_share_its_memory() -> None:
    def device(memory: int, card: str) -> tuple[DeviceProfile, int]:
        return DeviceProfile(type="H200", memory_bytes=memory, card=card), 100

    found = measure._shared([device(90, "a"), device(90, "a"), device(60, "b")])
    assert [(d.memory_bytes, d.card) for d in found] == [(45, "a"), (45, "a"), (60, "")]
    limited = measure._shared([device(60, "a"), device(30, "a")])
    assert [d.memory_bytes for d in limited] == [60, 30]


def test_a_profile_goes_to_json_and_back() -> None:
    subject = preset("gpt-nano")
    with torch.device("meta"):
        model, batch = subject.build(), subject.batch(4, None)
    profile = calibrate(model, batch, subject.loss, (1, 2), repeats=1)
    assert Profile.from_dict(json.loads(json.dumps(profile.to_dict()))) == profile
    assert len(profile.devices) == 1
    assert profile.device(0).type == "CPU"
    assert profile.device(0).layers
    assert not profile.links
