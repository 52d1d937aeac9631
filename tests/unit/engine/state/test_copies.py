"""Models that torch alone does not copy, and such as are no plain modules yet."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations, prune

import whale as wh


class Remembers(nn.Module):
    """Keeps what its last forward computed, with its graph, in places of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 6)
        self.kept: dict[str, Any] = {}

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        self.kept = {"last": h, "all": [(h, {"deep": h.sum()})]}
        return h


def linear() -> nn.Module:
    return nn.Linear(6, 6)


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(linear())


def pruned() -> nn.Module:
    made = linear()
    prune.l1_unstructured(made, "weight", amount=0.5)
    return made


def weight_norm() -> nn.Module:
    return parametrizations.weight_norm(linear())


def orthogonal() -> nn.Module:
    return parametrizations.orthogonal(linear())


KINDS: tuple[Callable[[], nn.Module], ...] = (
    Remembers, old_weight_norm, pruned, weight_norm, orthogonal,
)  # fmt: skip


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1)


@pytest.mark.parametrize("used", [False, True], ids=["new", "used"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_as_one_device(kind: Callable[[], nn.Module], used: bool) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        made = nn.Sequential(kind(), nn.Tanh(), nn.Linear(6, 6)).double()
        if used:
            made(torch.ones(2, 6, dtype=torch.float64))
        return made

    x, y = torch.randn(2, 8, 6, dtype=torch.float64)
    plain, losses = build(), []
    optimizer = sgd(plain.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        value = F.mse_loss(plain(x), y)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    step = wh.parallelize(
        build(),
        optimizer=sgd,
        batch=(x, y),
        loss=F.mse_loss,
        config={"pipeline.num_micro_batch": 2},
    )
    assert [float(step((x, y))["loss"]) for _ in range(3)] == pytest.approx(losses, abs=1e-12)
    step.close(forget=True)


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(linear())


@pytest.mark.parametrize(
    ("kind", "said"), [(scripted, "TorchScript"), (lambda: nn.LazyLinear(6), "has no shape yet")]
)
@pytest.mark.parametrize("inside", [False, True])
def test_it_is_refused(kind: Callable[[], nn.Module], said: str, inside: bool) -> None:
    model = nn.Sequential(linear(), kind()) if inside else kind()
    with pytest.raises(wh.WhaleError, match=said):
        wh.parallelize(model, optimizer=sgd, batch=torch.randn(4, 6), loss=None)


@pytest.mark.parametrize("module", [False, True], ids=["function", "module"])
def test_a_compiled_loss_is_run_as_it_was_written(module: bool) -> None:
    def weighed(out: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(out, labels, ignore_index=-100)

    plain = nn.CrossEntropyLoss() if module else weighed
    torch.manual_seed(0)
    model = nn.Linear(6, 4).double()
    batch = (
        torch.randn(8, 6, dtype=torch.float64),
        torch.tensor([0, 1, -100, -100, -100, 3, 2, 1]),
    )
    want = plain(model(batch[0]), batch[1])
    step = wh.parallelize(
        model,
        optimizer=sgd,
        batch=batch,
        loss=torch.compile(plain, backend="eager"),
        config={"pipeline.num_micro_batch": 2},
    )
    assert float(step(batch)["loss"]) == pytest.approx(want.item(), abs=1e-12)
    step.close(forget=True)
