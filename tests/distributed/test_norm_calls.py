"""Batch norms that are called on other than all rows at once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import whale as wh
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


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1)


def on_rank() -> dict[str, str | float]:
    wh.init()
    torch.set_default_dtype(torch.float64)
    found: dict[str, str | float] = {}
    for norm in (*REFUSED, *EXACT):
        torch.manual_seed(0)
        model = Net(norm)
        batch = (torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH))
        plain = copy.deepcopy(model)
        optimizer, losses = sgd(plain.parameters()), []
        for _ in range(3):
            optimizer.zero_grad()
            value = F.mse_loss(plain(batch[0]), batch[1])
            value.backward()
            optimizer.step()
            losses.append(value.item())
        try:
            step = wh.parallelize(
                wh.annotate(model, {"": wh.replicate()}),
                optimizer=sgd,
                batch=batch,
                loss=F.mse_loss,
                config={"timeout_seconds": 20},
            )
        except wh.WhaleError as error:
            found[norm.__name__] = str(error)
            continue
        got = [float(step(batch)["loss"]) for _ in losses]
        state = step.state_dict()
        far = [abs(a - b) for a, b in zip(got, losses, strict=True)]
        far += [float((state[k] - v).abs().max()) for k, v in plain.state_dict().items()]
        found[norm.__name__] = max(far)
        step.close(forget=True)
    return found


def test_calls_that_replicas_cannot_join_are_refused_and_others_exact() -> None:
    for found in run_ranks(2, on_rank, timeout=60.0):
        for norm in REFUSED:
            assert "cannot join its statistics" in str(found[norm.__name__]), (norm, found)
        for norm in EXACT:
            far = found[norm.__name__]
            assert isinstance(far, float) and far < 1e-9, (norm, far)
