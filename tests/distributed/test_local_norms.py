"""Batch norm of each replica's own rows (`communication.batch_norm = "local"`), as DDP has it."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import whale as wh
from tests.ranks import run_ranks
from whale.errors import PlanError

pytestmark = pytest.mark.usefixtures("untried")

ROWS, CUT = 9, 6
CLUSTER = """
[[node]]
count = 1
gpus = 1
type = "CPU"
pace_flops = 2e9

[[node]]
count = 1
gpus = 1
type = "CPU"
pace_flops = 1e9
"""


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, 5, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 3, (ROWS,), generator=generator)


def plan(model: nn.Module, folder: Any, **config: Any) -> Any:
    path = folder / "cluster.toml"
    path.write_text(CLUSTER)
    return wh.plan(
        model,
        cluster=wh.cluster(str(path)).cluster,
        batch=data(),
        loss=F.cross_entropy,
        config={"cluster.balance": "speed", **config},
    )


def train(chosen: Any) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    wh.init()
    step = wh.parallelize(
        make(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        loss=F.cross_entropy,
        batch=data(),
        plan=chosen,
        config={"check_parts": False},
    )
    for _ in range(2):
        step(data())
    return step.gradients(), step.state_dict(), float(step.evaluate(data())["loss"])


def by_hand() -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    """Two replicas with norms of their own, summed over the whole batch."""
    model = make()
    x, y = data()
    stats = {}
    replicas = [copy.deepcopy(model), copy.deepcopy(model)]
    for _ in range(2):
        model.zero_grad()
        for replica, part in zip(replicas, (slice(0, CUT), slice(CUT, ROWS)), strict=True):
            replica.load_state_dict(
                {**replica.state_dict(), **dict(model.named_parameters())}, strict=False
            )
            replica.zero_grad()
            loss = F.cross_entropy(replica(x[part]), y[part], reduction="sum") / ROWS
            loss.backward()
            for p, q in zip(model.parameters(), replica.parameters(), strict=True):
                p.grad = q.grad.clone() if p.grad is None else p.grad + q.grad
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
    for name in ("1.running_mean", "1.running_var"):
        a, b = (r.state_dict()[name] for r in replicas)
        stats[name] = (CUT * a + (ROWS - CUT) * b) / ROWS
    gradients = {n: p.grad for n, p in model.named_parameters()}
    model.load_state_dict({**model.state_dict(), **stats, "1.num_batches_tracked": torch.tensor(2)})
    model.eval()
    with torch.no_grad():
        return gradients, model.state_dict(), float(F.cross_entropy(model(x), y))


def test_replicas_normalise_their_own_rows(tmp_path: Any) -> None:
    chosen = plan(make(), tmp_path, **{"communication.batch_norm": "local"})
    assert [d.rows for d in chosen.prices.devices] == [CUT, ROWS - CUT]
    assert all(not any(layer.meets) for stage in chosen.stages for layer in stage.layers)
    expected = by_hand()
    for found in run_ranks(2, train, chosen):
        assert found[2] == pytest.approx(expected[2], abs=1e-12)
        for part, whole in zip(found[:2], expected[:2], strict=True):
            assert part.keys() == whole.keys()
            for name, value in whole.items():
                torch.testing.assert_close(part[name], value, rtol=1e-11, atol=1e-11)


def test_verify_has_nothing_to_compare_them_with(tmp_path: Any) -> None:
    chosen = plan(make(), tmp_path, **{"communication.batch_norm": "local"})
    with pytest.raises(PlanError, match="normalise by its own rows in 1 batch norms"):
        wh.verify(make(), chosen, data(), loss=F.cross_entropy)
