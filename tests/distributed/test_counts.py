"""Counts of nothing, coefficients of sums, and state dicts that are loaded in part."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale as wh
from tests.distributed.beside import sgd
from tests.ranks import run_ranks

WIDTH, ROWS = 4, 6
Loss = Callable[[Tensor, Tensor], Tensor]


def chosen(out: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over what is above a threshold that no mask of the batch shows, and its count."""
    high = target > 0.6
    return ((out - target).square() * high).sum(), high.sum()


def floored(out: Tensor, target: Tensor) -> Tensor:
    total, count = chosen(out, target)
    return total / count.clamp(min=1)


def floored_by_width(out: Tensor, target: Tensor) -> Tensor:
    total, count = chosen(out, target)
    return total / (count.clamp(min=1) * 3)


def python_floor(out: Tensor, target: Tensor) -> Tensor:
    total, count = chosen(out, target)
    return total / max(int(count), 1)


def replaced(out: Tensor, target: Tensor) -> Tensor:
    total, count = chosen(out, target)
    return total / torch.where(count > 0, count, 1)


def plus_none(out: Tensor, target: Tensor) -> Tensor:
    total, count = chosen(out, target)
    return total / (count + (count == 0))


def divergence(out: Tensor, target: Tensor) -> Tensor:
    """As variational autoencoders have it."""
    apart = -0.5 * torch.sum(1 + out - out.exp()) / len(out)
    return (out - target).square().sum() / len(out) + 0.3 * apart


EXACT = (floored, floored_by_width, divergence)
REFUSED = (python_floor, replaced, plus_none)


def batches() -> list[tuple[Tensor, Tensor]]:
    """From the fourth on, the first half of the rows has nothing above the threshold."""
    found = []
    for seed in range(5):
        g = torch.Generator().manual_seed(seed)
        x, y = (torch.rand(ROWS, WIDTH, generator=g, dtype=torch.float64) for _ in "xy")
        y[:, 0] = 0.9
        if seed > 2:
            y[: ROWS // 2] *= 0.5
        found.append((x, y))
    return found


def trained(loss: Loss, micro: int) -> str | float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH)).double()
    plain = copy.deepcopy(model)
    optimizer, far = sgd(plain.parameters()), []
    config = {"timeout_seconds": 20, "pipeline.num_micro_batch": micro}
    step = None
    try:
        step = wh.parallelize(
            wh.annotate(model, {"": wh.replicate()}),
            optimizer=sgd,
            batch=batches()[0],
            loss=loss,
            config=config,
        )
        for x, y in batches():
            optimizer.zero_grad()
            value = loss(plain(x), y)
            value.backward()
            optimizer.step()
            far.append(abs(float(step((x, y))["loss"]) - value.item()))
        return max(far)
    except wh.WhaleError as error:
        return str(error)
    finally:
        if step is not None:
            step.close(forget=True)


def on_rank(names: list[str], micros: list[int]) -> dict[str, Any]:
    torch.set_num_threads(1)
    wh.init()
    return {f"{name} {m}": trained(globals()[name], m) for name in names for m in micros}


def test_counts_of_nothing() -> None:
    for found in run_ranks(2, on_rank, [f.__name__ for f in EXACT], [1, 3], timeout=60.0):
        for name, far in found.items():
            assert isinstance(far, float) and far < 1e-12, (name, far)


@pytest.mark.parametrize("loss", REFUSED, ids=lambda loss: loss.__name__)
def test_numbers_that_may_stand_for_nothing_are_refused(loss: Loss) -> None:
    """One rank sees it, in the middle of training, and tells the other."""
    for found in run_ranks(2, on_rank, [loss.__name__], [1], timeout=60.0):
        (said,) = found.values()
        assert isinstance(said, str) and "hint:" in said, said
        # What it is, or, where a look at the rows comes before, that its parts do not add up.
        ways = ("stands in for a count of nothing", "neither one number nor a count")
        assert any(way in said for way in ways), said


class Own(nn.Linear):
    """Fills in what is missing from what it has."""

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        state.setdefault(f"{prefix}weight", self.weight.detach().clone())
        super()._load_from_state_dict(state, prefix, *args)


def loaded_in_part() -> float:
    torch.set_num_threads(1)
    wh.init()
    torch.manual_seed(0)
    own, norm, last = Own(WIDTH, 5), nn.BatchNorm1d(5, momentum=None), nn.Linear(5, WIDTH)
    model = nn.Sequential(own, norm, last).double()
    plain = copy.deepcopy(model)
    part = {"2.weight": torch.full((WIDTH, 5), 0.2, dtype=torch.float64)}
    optimizer = sgd(plain.parameters())
    step = wh.parallelize(
        wh.annotate(model, {"": wh.replicate()}),
        optimizer=sgd,
        batch=batches()[0],
        loss=nn.functional.mse_loss,
        config={"timeout_seconds": 20},
    )
    for index, (x, y) in enumerate(batches()):
        if index == 3:
            plain.load_state_dict(dict(part), strict=False)
            model.load_state_dict(dict(part), strict=False)
        optimizer.zero_grad()
        nn.functional.mse_loss(plain(x), y).backward()
        optimizer.step()
        step((x, y))
    state = step.state_dict()
    step.close(forget=True)
    return max(float((state[k] - v).abs().max()) for k, v in plain.state_dict().items())


def test_what_is_loaded_in_part_leaves_the_rest_as_trained() -> None:
    assert max(run_ranks(2, loaded_in_part)) < 1e-12
