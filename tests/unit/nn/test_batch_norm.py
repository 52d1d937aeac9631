"""Batch norm over members equals nn.BatchNorm over the joined batch."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.nn.members import together
from whale.nn.batch_norm import SyncedBatchNorm
from whale.nn.forwards import replace_forward

Found = dict[str, Any]


def _module(channels: int, dims: int, dtype: torch.dtype, **options: Any) -> nn.Module:
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[dims]
    module = kind(channels, **options).to(dtype)
    generator = torch.Generator().manual_seed(7)
    for value in (*module.parameters(), *module.buffers()):
        if value.is_floating_point():
            value.data.copy_(torch.rand(value.shape, generator=generator) + 0.5)
    return module


def _train(module: nn.Module, x: torch.Tensor, weights: torch.Tensor, group: str | None) -> Found:
    """Two steps of forward and backward, so that running statistics move twice."""
    module = deepcopy(module)
    if group is not None:
        replace_forward(module, SyncedBatchNorm(module, group))
    x = x.detach().requires_grad_()
    for factor in (1.0, 3.0):
        out = module(x * factor)
        (out * weights).sum().backward()
    return {
        "out": out.detach(),
        "x": x.grad,
        "parameters": [p.grad for p in module.parameters()],
        "buffers": [b.clone() for b in module.buffers()],
    }


def _compare(
    module: nn.Module, x: torch.Tensor, rows: list[int], tolerance: float
) -> tuple[list[Found], list[str]]:
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(3)).to(x.dtype)
    truth = _train(module, x, weights, None)
    parts = zip(x.split(rows), weights.split(rows), strict=True)
    found, kinds = together(
        [lambda group, part=part: _train(module, *part, group) for part in parts]
    )

    def close(got: torch.Tensor, want: torch.Tensor) -> None:
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)

    close(torch.cat([f["out"] for f in found]), truth["out"])
    close(torch.cat([f["x"] for f in found]), truth["x"])
    for number, want in enumerate(truth["parameters"]):
        close(torch.stack([f["parameters"][number] for f in found]).sum(0), want)
    for f in found:
        for got, want in zip(f["buffers"], truth["buffers"], strict=True):
            close(got, want)
    return found, kinds


@pytest.mark.parametrize("rows", [[7], [4, 3], [1, 6], [0, 7], [3, 0, 4], [7, 0]])
@pytest.mark.parametrize("shape", [(7, 3), (7, 3, 5), (7, 3, 5, 4), (7, 3, 2, 5, 4)])
def test_equal_to_one_device(shape: tuple[int, ...], rows: list[int]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    _, kinds = _compare(_module(3, len(shape), torch.float64), x, rows, 1e-12)
    assert kinds == ["all_gather", "all_reduce"] * 2


@pytest.mark.parametrize(
    "options",
    [{"momentum": None}, {"affine": False}, {"track_running_stats": False}, {"momentum": 0.0}],
    ids=str,
)
def test_options(options: dict[str, Any]) -> None:
    x = torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    _compare(_module(4, 3, torch.float64, **options), x, [2, 4], 1e-12)


def test_a_large_mean_costs_no_digits() -> None:
    x = 1e4 + torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(2))
    module = _module(3, 4, torch.float32)
    weights = torch.ones_like(x)
    found, _ = together(
        [lambda group, p=part: _train(module, p, p * 0 + 1, group) for part in x.split([5, 3])]
    )
    truth = _train(deepcopy(module).double(), x.double(), weights.double(), None)
    got = torch.cat([f["out"] for f in found]).double()
    # x itself has only 1e-3 of its spread left.
    torch.testing.assert_close(got, truth["out"], rtol=0, atol=5e-3)


def test_half_precision_has_statistics_in_float32() -> None:
    x = torch.randn(8, 3, 6, 6, generator=torch.Generator().manual_seed(2)).bfloat16()
    _compare(_module(3, 4, torch.float32), x, [5, 3], 2e-2)


def test_channels_last_stays() -> None:
    x = torch.randn(6, 8, 4, 5, dtype=torch.float64).to(memory_format=torch.channels_last)
    found, _ = _compare(_module(8, 4, torch.float64), x, [4, 2], 1e-12)
    assert found[0]["out"].is_contiguous(memory_format=torch.channels_last)


def test_evaluation_uses_the_running_statistics() -> None:
    module = _module(3, 2, torch.float64).eval()
    x = torch.randn(4, 3, dtype=torch.float64)
    found, kinds = together([lambda group: SyncedBatchNorm(module, group)(x)])
    assert torch.equal(found[0], module(x))
    assert kinds == []


def test_an_input_without_a_gradient_costs_no_sum() -> None:
    module = _module(3, 2, torch.float64)
    x = torch.randn(4, 3, dtype=torch.float64)

    def part(group: str) -> torch.Tensor:
        own = deepcopy(module)
        SyncedBatchNorm(own, group)(x).square().sum().backward()
        return own.weight.grad

    found, kinds = together([part, part])
    assert kinds == ["all_gather"]
    module(x).square().sum().backward()
    torch.testing.assert_close(found[0], module.weight.grad, rtol=1e-12, atol=1e-12)


def test_only_x_and_numbers_per_channel_are_saved() -> None:
    saved: list[torch.Size] = []
    module = _module(3, 4, torch.float64)
    x = torch.randn(5, 3, 4, 4, dtype=torch.float64, requires_grad=True)

    def part(group: str) -> None:
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: (saved.append(t.shape), t)[1], lambda t: t
        ):
            SyncedBatchNorm(module, group)(x)

    together([part])
    assert saved.count(x.shape) == 1
    assert all(len(shape) == 1 for shape in saved if shape != x.shape)
