"""`auto` splits a Layer that holds most of the model by itself, and the maths stays the same."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import whale as wh
from tests.ranks import run_ranks
from whale.ir.cluster import Cluster, Device, Link, Node

ROWS, STEPS = 7, 3
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def head() -> nn.Module:
    """A trunk, and a classifier ten times as large."""
    return nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 301))


def table() -> nn.Module:
    """An embedding far larger than what follows, and a head that is not worth splitting."""
    return nn.Sequential(nn.Embedding(997, 12), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 5))


def batch(name: str, seed: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    if name == "head":
        x = torch.randn(ROWS, 8, generator=made, dtype=torch.float64)
        return x, torch.randint(301, (ROWS,), generator=made)
    x = torch.randint(997, (ROWS, 4), generator=made)
    return x, torch.randint(5, (ROWS, 4), generator=made)


def loss(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, -2), target.flatten())


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return (head() if name == "head" else table()).double()


def cluster(name: str) -> Cluster:
    """Devices of two speeds, none to spare, and a network on which sums of gradients are dear."""
    pace = 1e6 if name == "head" else 1e5
    paces = (2 * pace, pace, pace)
    return Cluster(
        devices=tuple(
            Device(rank=r, type="CPU", node=0, pace_flops=pace, memory_bytes=1 << 30)
            for r, pace in enumerate(paces)
        ),
        nodes=(Node(index=0, link=Link(intra_bytes_per_s=1e6)),),
    )


def train(name: str, more: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    wh.init()
    step = wh.parallelize(
        build(name),
        optimizer=SGD,
        batch=batch(name, 0),
        loss=loss,
        config={"auto.auto_parallel": True, **more},
        cluster=cluster(name),
    )
    losses, gradients = [], {}
    for seed in range(STEPS):
        losses.append(float(step(batch(name, seed))["loss"]))
        gradients = gradients or step.gradients()
    found = {
        "losses": losses,
        "gradients": gradients,
        "state": step.state_dict(),
        "strategy": step.plan.strategy,
        "splits": {s.path: s.rule for t in step.plan.taskgraphs for s in t.splits},
    }
    step.close()
    return found


@pytest.mark.parametrize(
    ("name", "layer", "rules"),
    [("head", "2", {"column", "row"}), ("table", "0", {"embedding"})],
)
@pytest.mark.parametrize("num_micro_batch", [1, 2])
def test_a_large_layer_is_split_by_itself(
    name: str, layer: str, rules: set[str], num_micro_batch: int
) -> None:
    more = {"pipeline.num_micro_batch": num_micro_batch, "pipeline.num_stages": 1}
    found = run_ranks(3, train, name, more)[0]
    assert f"with {layer} split" in found["strategy"]
    assert set(found["splits"]) == {layer}
    assert set(found["splits"].values()) <= rules
    model = build(name)
    optimizer = SGD(model.parameters())
    for seed in range(STEPS):
        x, target = batch(name, seed)
        optimizer.zero_grad()
        value = loss(model(x), target)
        value.backward()
        assert found["losses"][seed] == pytest.approx(value.item(), rel=1e-12)
        if seed == 0:
            for key, p in model.named_parameters():
                torch.testing.assert_close(found["gradients"][key], p.grad, rtol=1e-10, atol=1e-12)
        optimizer.step()
    for key, value in model.state_dict().items():
        torch.testing.assert_close(found["state"][key], value, rtol=1e-9, atol=1e-12)
