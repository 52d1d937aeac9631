"""Autocast around the step, under splits and replicas: what autocast on one device computes.

Sums over shards round in bfloat16 where one device sums in float32, so equality is measured by what
autocast itself changes: layouts may differ by twice the distance of bfloat16 from float32.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import whale as wh
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("untried")

SGD = partial(torch.optim.SGD, lr=0.1)
BF16 = partial(torch.autocast, "cpu", dtype=torch.bfloat16)


class Pair(nn.Module):
    """Column and row split, by torch's Linear or by transformers' Conv1D."""

    def __init__(self, conv1d: bool = False) -> None:
        super().__init__()
        make = (lambda i, o: Conv1D(o, i)) if conv1d else nn.Linear
        self.up, self.down = make(6, 12), make(12, 6)
        nn.init.normal_(self.up.bias)
        nn.init.normal_(self.down.bias)
        self.dtypes: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(x)))
        self.dtypes.add(y.dtype)
        # Code that writes into a tensor wants the dtype that one device has there.
        out = torch.empty_like(y)
        out[:] = y
        return out.index_add(1, torch.arange(x.shape[1]), y)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 3, batch_first=True)
        self.out = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attention(x, x, x, need_weights=False)[0])


class Pictures(nn.Module):
    """A convolution of fewer channels than ranks could share evenly, and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(5, 3, 3, padding=1), nn.BatchNorm1d(3)
        self.head = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.conv(x))).repeat(1, 2, 1)[:, :5])


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(6, 6)
        self.moe = wh.nn.MoE(6, 8, num_experts=4, top_k=2)
        self.out = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.moe(self.inp(x))
        return self.out(y[0] if isinstance(y, tuple) else y)


class Words(nn.Module):
    """Vocabulary split, read and written."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.mlp, self.head = nn.Embedding(11, 6), Pair(), nn.Linear(6, 11)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.mlp(self.emb(ids)))


def mean_square(out: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(out.float(), target)


def entropy(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1).float(), target.flatten())


def vectors(seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(5, 5, 6, generator=g), torch.randn(5, 5, 6, generator=g)


def words(seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 11, (5, 4), generator=g), torch.randint(0, 11, (5, 4), generator=g)


Around = Callable[[], AbstractContextManager[Any]]
MODELS: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
    "pair": (Pair, vectors, mean_square),
    "conv1d": (partial(Pair, True), vectors, mean_square),
    "heads": (Heads, vectors, mean_square),
    "pictures": (Pictures, vectors, mean_square),
    "experts": (Experts, vectors, mean_square),
    "words": (Words, words, entropy),
}


def build(name: str, layout: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name][0]()
    scope = {"split": wh.split, "data": wh.replicate}[layout]
    return wh.annotate(model, {"": scope()})


def one_device(name: str, around: Around) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    model, (_, make, loss_of) = MODELS[name][0](), MODELS[name]
    model = copy.deepcopy(model)
    optimizer = SGD(model.parameters())
    losses = []
    for seed in range(3):
        batch = make(seed)
        with around():
            loss = loss_of(model(batch[0]), batch[1])
        # Sums, divided once at the end: a scale rounds bfloat16 in other places.
        count = batch[1].numel()
        loss.backward(torch.tensor(float(count)))
        for parameter in model.parameters():
            parameter.grad /= count
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()


def train(layout: str) -> dict[str, Any]:
    wh.init()
    found = {}
    for name, (_, make, loss_of) in MODELS.items():
        model = build(name, layout)
        step = wh.parallelize(
            model, optimizer=SGD, batch=make(0), loss=loss_of, config={"check_parts": False}
        )
        with BF16():
            losses = [float(step(make(seed))["loss"]) for seed in range(3)]
        dtypes = {
            dtype for m in step._lowered.model.modules() for dtype in getattr(m, "dtypes", ())
        }
        found[name] = (losses, step.state_dict(), dtypes)
        step.close()
    return found


def _distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return float(
        torch.cat(
            [(a[k].double() - b[k].double()).flatten() for k in a if a[k].is_floating_point()]
        )
        .square()
        .mean()
        .sqrt()
    )


def test_split_and_data_as_one_device() -> None:
    for layout in ("split", "data"):
        results = run_ranks(2, train, layout, timeout=80.0)
        for name in MODELS:
            exact, (casts, state) = one_device(name, nullcontext), one_device(name, BF16)
            rounding = _distance(exact[1], state)
            for result in results:
                losses, weights, dtypes = result[name]
                where = (layout, name)
                assert _distance(weights, state) < 2.0 * rounding, where
                for got, want in zip(losses, casts, strict=True):
                    assert abs(got - want) < 4e-3 * abs(want), (where, losses, casts)
                assert dtypes <= {torch.bfloat16}, (where, dtypes)
