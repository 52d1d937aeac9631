"""A split over replicas gathers rows around every call of a module: all calls must have them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import whale as wh


class Net(nn.Module):
    def __init__(self, use: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.shared, self.use = nn.Linear(6, 8), nn.Linear(8, 8), use
        self.table = nn.Parameter(torch.randn(3, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, self.up(x)).sum(-1)


def rows(net: Net, h: Tensor) -> Tensor:
    return net.shared(h) + net.shared(h * 2)


def tokens(net: Net, h: Tensor) -> Tensor:
    return net.shared(h.repeat_interleave(3, 0)).view(-1, 3, 8).mean(1)


def first_rows_then_a_table(net: Net, h: Tensor) -> Tensor:
    return net.shared(h) @ net.shared(net.table).t()


def first_a_table(net: Net, h: Tensor) -> Tensor:
    return net.shared(net.table).mean(0) + net.shared(h)


def beside_a_table(net: Net, h: Tensor) -> Tensor:
    return net.shared(torch.cat([h, net.table]))[: len(h)]


def row_by_row(net: Net, h: Tensor) -> Tensor:
    return torch.stack([net.shared(row) for row in h])


def plan(use: Callable[[Net, Tensor], Tensor]) -> wh.Plan:
    model = wh.annotate(Net(use), {"shared": wh.split(), "...": wh.replicate()})
    batch = (torch.randn(8, 6), torch.randn(8))
    return wh.plan(model, cluster="1x2xCPU", batch=batch, loss=nn.functional.mse_loss)


@pytest.mark.parametrize("use", [rows, tokens])
def test_rows_are_gathered(use: Callable[[Net, Tensor], Tensor]) -> None:
    assert [split.path for t in plan(use).taskgraphs for split in t.splits] == ["shared"]


@pytest.mark.parametrize(
    "use", [first_rows_then_a_table, first_a_table, beside_a_table, row_by_row]
)
def test_calls_without_rows_are_refused(use: Callable[[Net, Tensor], Tensor]) -> None:
    with pytest.raises(wh.WhaleError, match="not every call has the rows"):
        plan(use)
