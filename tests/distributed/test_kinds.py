"""Batches of a kind that the first one was not: other values, keys, lengths, settings."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

import whale as wh
from tests.covering import part
from tests.distributed.beside import beside
from tests.ranks import run_ranks

WIDTH = 6
Mode = str | int | None


def alone(h: Tensor, net: Net) -> Tensor:
    return torch.relu(h)


def by_rows(h: Tensor, net: Net) -> Tensor:
    return h - h.mean(0, keepdim=True)


def softmax(h: Tensor, net: Net) -> Tensor:
    return torch.softmax(h, -1)


def by_width(h: Tensor, net: Net) -> Tensor:
    return h / h.shape[-1]


def decayed(h: Tensor, net: Net) -> Tensor:
    return torch.relu(h) * (1 + net.up.weight.norm())


def centred(h: Tensor, net: Net) -> Tensor:
    if net.training:
        net.centre.copy_(0.9 * net.centre + 0.1 * h.detach().mean())
    return torch.relu(h) - net.centre


def skipped(h: Tensor, net: Net) -> Tensor:
    return torch.relu(h) * 2


Inside = Callable[[Tensor, Any], Tensor]


class Net(nn.Module):
    """What is between its Linears depends on the batch, or on an attribute."""

    centre: Tensor

    def __init__(self, inside: Inside) -> None:
        super().__init__()
        self.up, self.down, self.extra = (
            nn.Linear(WIDTH, 8),
            nn.Linear(8, WIDTH),
            nn.Linear(WIDTH, 2),
        )
        self.register_buffer("centre", torch.zeros(()))
        self.inside, self.mode = inside, "first"

    def forward(self, x: Tensor, mode: Mode = None, weight: Tensor | None = None) -> Tensor:
        h = self.up(x)
        other = mode == "other" or weight is not None or x.dim() == 3 or self.mode == "other"
        other = other or (self.training and not self.extra.training)
        h = self.inside(h, self) if other else torch.relu(h)
        out = self.down(h) if weight is None else self.down(h) * weight
        if not other:  # a module that the other kind has no use for
            out = out + self.extra(x).sum(-1, keepdim=True)
        return out.mean(1) if x.dim() == 3 else out


class Whole(nn.Module):
    """A block, which is one Layer, and a head."""

    def __init__(self, inside: Inside) -> None:
        super().__init__()
        self.block, self.head = Net(inside), nn.Linear(WIDTH, WIDTH)

    def forward(self, *args: Any) -> Tensor:
        return self.head(self.block(*args))


def batch(how: str, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    shape = (8, 3, WIDTH) if how == "length" else (8, WIDTH)
    weight = torch.rand(8, 1, generator=generator) if how == "key" else None
    x, y = torch.randn(shape, generator=generator), torch.randn(8, WIDTH, generator=generator)
    return x, "other" if how == "value" else "first", weight, y


LAYOUTS: dict[str, Callable[[], dict[str, Any]]] = {
    "data": lambda: {"": wh.replicate()},
    "split": lambda: {"": wh.split()},
    "both": lambda: {"block": wh.split(), "...": wh.replicate()},
    "stages": lambda: {"block": wh.stage(1), "head": wh.stage(1)},
}
MICRO_BATCHES: dict[str, dict[str, Any]] = {"stages": {"pipeline.num_micro_batch": 2}}
REFUSED: dict[Inside, set[str]] = {
    alone: set(),
    skipped: set(),
    by_rows: {"data", "split", "both", "stages"},
    softmax: {"split", "both"},
    by_width: {"split", "both"},
    decayed: {"split", "both"},
    centred: {"data", "split", "both", "stages"},
}
WAYS = ("value", "key", "length", "attribute", "part")


KINDS = (False, False, True, False, True)
"""Whether each of the batches is of the other kind."""


def on_rank() -> dict[tuple[str, str, str], str | float]:
    wh.init()
    torch.set_default_dtype(torch.float64)
    found: dict[tuple[str, str, str], str | float] = {}
    names = {inside.__name__: inside for inside in REFUSED}
    for name, layout, how in part(product(names, LAYOUTS, WAYS), 2):
        inside = names[name]

        def before(model: Whole, index: int, how: str = how) -> None:
            if how == "attribute":
                model.block.mode = "other" if KINDS[index] else "first"
            elif how == "part":  # code may look at the mode of one module alone
                model.block.extra.train(not KINDS[index])

        torch.manual_seed(0)
        batches = [batch(how if other else "", seed) for seed, other in enumerate(KINDS)]
        found[inside.__name__, layout, how] = beside(
            Whole(inside),
            batches,
            LAYOUTS[layout](),
            before=before,
            config=MICRO_BATCHES.get(layout),
        )
    return found


def test_other_kinds_of_batches_are_exact_or_refused() -> None:
    for found in run_ranks(2, on_rank, timeout=110.0):
        for (inside, layout, how), result in found.items():
            refused = {f.__name__: where for f, where in REFUSED.items()}[inside]
            assert isinstance(result, str) == (layout in refused), (inside, layout, how, result)
            assert isinstance(result, str) or result < 1e-9, (inside, layout, how, result)
