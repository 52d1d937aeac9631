"""Half precision beside plain torch in the same precision, under layouts; scaling agreed by all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import whale as wh
from tests.distributed.test_zero import ADAMW, LAYOUTS, data, model
from tests.ranks import run_ranks
from whale.engine.state.copies import in_precision
from whale.ir.precision import Precision
from whale.runtime.masters import split

pytestmark = pytest.mark.usefixtures("untried")

STEPS = 4


def settings(layout: str, **more: Any) -> dict[str, Any]:
    return {
        "pipeline.num_micro_batch": 2 if layout == "stages" else 1,
        "timeout_seconds": 20,
        **{key.replace("__", "."): value for key, value in more.items()},
    }


def trained(layout: str, rows: int = 0, **more: Any) -> tuple[list[dict[str, Any]], Any]:
    torch.set_num_threads(1)
    wh.init()
    net = wh.annotate(model(), LAYOUTS[layout]())
    step = wh.parallelize(
        net, optimizer=ADAMW, loss=F.mse_loss, batch=data(0), config=settings(layout, **more)
    )
    return [step(data(i)) for i in range(STEPS)], step


def plain(precision: Precision, scaler: torch.amp.GradScaler | None = None) -> list[float]:
    """The same in plain torch; masters are float32 where the precision has any."""
    net = in_precision(model(), precision)
    wide = {n: p.detach().float().requires_grad_() for n, p in model().named_parameters()}
    trains = wide if precision.parameters else dict(net.named_parameters())
    optimizer = torch.optim.AdamW(list(trains.values()), lr=1e-2, weight_decay=0.1)
    if precision.master == "split":
        _compute_with(net, wide)
    losses = []
    low = getattr(torch, precision.half, torch.bfloat16)
    for index in range(STEPS):
        x, y = data(index)
        for parameter in net.parameters():
            parameter.grad = None
        with torch.autocast("cpu", low, enabled=bool(precision.autocast)):
            loss = F.mse_loss(net(x.to(low) if precision.parameters else x), y)
        (loss if scaler is None else scaler.scale(loss)).backward()
        losses.append(loss.item())
        if precision.parameters:
            for name, parameter in net.named_parameters():
                wide[name].grad = None if parameter.grad is None else parameter.grad.float()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        if precision.parameters:
            _compute_with(net, wide, halves=precision.master == "split")
    return losses


def _compute_with(net: nn.Module, wide: dict[str, Tensor], halves: bool = True) -> None:
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(split(wide[name].detach()).upper if halves else wide[name])


def far(metrics: list[dict[str, Any]], want: list[float]) -> float:
    return max(abs(float(m["loss"]) - w) for m, w in zip(metrics, want, strict=True))


def compared(kind: str, layout: str, zero: str) -> tuple[float, float, float]:
    """How far from plain torch in this precision, and how far that is from float32."""
    autocast = kind == "autocast"
    precision = Precision(
        autocast="bfloat16" if autocast else "",
        parameters="" if autocast else "bfloat16",
        master="float32" if autocast else kind,
    )
    more = {"amp__level": "O1"} if autocast else {"amp__level": "O2", "amp__master": kind}
    metrics, step = trained(layout, **more, zero__level=zero)
    assert {t.dtype for t in step.state_dict().values()} == {torch.float32}
    low = {p.dtype for p in step._lowered.params.values()}
    assert low == {torch.float32 if autocast else torch.bfloat16}
    evaluated = float(step.evaluate(data(9))["loss"])
    step.close(forget=True)
    want, full = plain(precision), plain(Precision())
    spread = max(abs(a - b) for a, b in zip(want, full, strict=True))
    return far(metrics, want), spread, evaluated


CASES = [
    (kind, layout, zero)
    for kind in ("autocast", "float32", "split")
    for layout in LAYOUTS
    for zero in ("", "v1", "v2")
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("zero", ["", "v1", "v2"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["autocast", "float32", "split"])
def test_half_precision_is_that_of_one_device(kind: str, layout: str, zero: str) -> None:
    """Sums in another order round otherwise, by no more than half precision itself is off."""
    for off, spread, evaluated in run_ranks(4, compared, kind, layout, zero):
        assert off <= max(spread, 2e-3), (off, spread)
        assert 0.5 < evaluated < 2.5


def by_chance(layout: str, zero: str) -> tuple[list[float], dict[str, Tensor]]:
    metrics, step = trained(layout, amp__level="O2", amp__master="stochastic", zero__level=zero)
    state = step.state_dict()
    assert all(torch.equal(v, v.bfloat16().float()) for v in state.values())
    step.close(forget=True)
    return [float(m["loss"]) for m in metrics], state


def test_rounding_by_chance_trains() -> None:
    want = plain(Precision(parameters="bfloat16"))
    for layout, zero in (("data", ""), ("data", "v1"), ("stages", "v2")):
        losses, _ = run_ranks(2, by_chance, layout, zero)[0]
        assert max(abs(a - b) for a, b in zip(losses, want, strict=True)) < 0.05


def scaled(layout: str, scale: float | str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    metrics, step = trained(layout, amp__level="O1", amp__dtype="float16", amp__loss_scale=scale)
    same = all(torch.equal(v, model().state_dict()[k]) for k, v in step.state_dict().items())
    step.close(forget=True)
    return [{k: float(v) for k, v in m.items()} for m in metrics], {"untouched": same}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_scale_of_float16_is_divided_out(layout: str) -> None:
    want = plain(Precision(autocast="float16"))
    for metrics, _ in run_ranks(2, scaled, layout, 128.0):
        assert far(metrics, want) < 5e-3
        assert all(m["loss_scale"] == 128.0 and not m["overflowed"] for m in metrics)


def test_an_overflow_on_one_rank_leaves_the_step_out_on_all() -> None:
    for metrics, more in run_ranks(2, scaled, "data", 1e30):
        assert all(m["overflowed"] for m in metrics) and more["untouched"]
    for metrics, more in run_ranks(2, scaled, "stages", "dynamic"):
        scales = [m["loss_scale"] for m in metrics]
        over = [m["overflowed"] for m in metrics]
        for number in range(STEPS - 1):
            assert scales[number + 1] == scales[number] / (2.0 if over[number] else 1.0)
        assert not over[-1] and not more["untouched"]


def resumed(folder: str) -> list[float]:
    """Saved in one precision, gone on with in others."""
    torch.set_num_threads(1)
    wh.init()
    found = []
    kinds: list[dict[str, Any]] = [
        {},
        {"amp.level": "O1", "amp.dtype": "float16"},
        {"amp.level": "O2"},
        {"amp.level": "O2", "amp.master": "split"},
        {"amp.level": "O2", "amp.master": "stochastic", "zero.level": "v2"},
    ]

    def made(kind: dict[str, Any]) -> Any:
        net = wh.annotate(model(), LAYOUTS["data"]())
        more = settings("data") | kind
        return wh.parallelize(net, optimizer=ADAMW, loss=F.mse_loss, batch=data(0), config=more)

    for number, kind in enumerate(kinds):
        step = made(kind)
        for index in range(3):
            step(data(index))
        path = str(Path(folder) / str(number))
        step.save(path)
        want = float(step(data(3))["loss"])
        scale = step._lowered.executor.loss_scale
        kept = None if scale is None else (scale.value, scale.good_steps)
        step.close(forget=True)
        for other in kinds:
            step = made(other)
            step.load(path)
            got = step(data(3))
            if other is kind:
                assert float(got["loss"]) == want
                if scale is not None:
                    mine = step._lowered.executor.loss_scale
                    assert (mine.value, mine.good_steps) == kept
            found.append(abs(float(got["loss"]) - want))
            step.close(forget=True)
    return found


@pytest.mark.full
def test_checkpoints_go_on_in_any_precision(tmp_path: Path) -> None:
    for found in run_ranks(2, resumed, str(tmp_path), timeout=150.0):
        assert max(found) < 0.05
