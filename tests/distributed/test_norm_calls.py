"""Batch norms that are called on other than all rows at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import whale as wh
from tests.distributed.beside import beside
from tests.ranks import run_ranks

ROWS, WIDTH = 12, 5


class Net(nn.Module):
    def __init__(self, norm: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Linear(4, WIDTH)
        self.table = nn.Parameter(torch.randn(3, 4))
        self.how = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.how(self, self.up(x))))


def in_groups(net: Net, h: Tensor) -> Tensor:
    return torch.cat([net.norm(part) for part in h.split(3)])


def in_halves(net: Net, h: Tensor) -> Tensor:
    return torch.cat([net.norm(part) for part in h.chunk(2)])


def row_by_row(net: Net, h: Tensor) -> Tensor:
    return torch.stack([net.norm(row.unsqueeze(0).expand(3, -1) * net.table)[0] for row in h])


def with_a_table(net: Net, h: Tensor) -> Tensor:
    return net.norm(torch.cat([h, net.table]))[: len(h)]


def of_a_table(net: Net, h: Tensor) -> Tensor:
    return h @ net.norm(net.table).t() @ net.table


def at_once(net: Net, h: Tensor) -> Tensor:
    return net.norm(h)


def twice(net: Net, h: Tensor) -> Tensor:
    return net.norm(h) + net.norm(h * 2 + 1)


def two_views(net: Net, h: Tensor) -> Tensor:
    first, second = net.norm(torch.cat([h, h.flip(1)])).chunk(2)
    return first * second


def selected(net: Net, h: Tensor) -> Tensor:
    chosen = h.detach()[:, 0] > 0
    out = torch.zeros_like(h)
    out[chosen] = net.norm(h[chosen])
    return out


def outside_in(net: Net, h: Tensor) -> Tensor:
    """The rows in the last dim."""
    return net.norm(h.t().unsqueeze(0)).squeeze(0).t()


REFUSED = (in_groups, in_halves, row_by_row, with_a_table, of_a_table)
EXACT = (at_once, twice, two_views, selected, outside_in)


def on_rank() -> dict[str, str | float]:
    wh.init()
    torch.set_default_dtype(torch.float64)
    found: dict[str, str | float] = {}
    for norm in (*REFUSED, *EXACT):
        torch.manual_seed(0)
        model = Net(norm)
        batch = (torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH))
        found[norm.__name__] = beside(model, [batch] * 3, {"": wh.replicate()})
    return found


def test_calls_that_replicas_cannot_join_are_refused_and_others_exact() -> None:
    for found in run_ranks(2, on_rank, timeout=60.0):
        for norm in REFUSED:
            assert "cannot join its statistics" in str(found[norm.__name__]), (norm, found)
        for norm in EXACT:
            far = found[norm.__name__]
            assert isinstance(far, float) and far < 1e-9, (norm, far)
