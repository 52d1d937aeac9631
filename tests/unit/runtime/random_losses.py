"""Random loss expressions: masked, weighted and plain means and sums, scaled and added.

Each is made of pieces that a user may write. Some are exact in parts, some are not and must be
refused; which is which is not said here, so that a test can only compare with the whole.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import whale as wh

ROWS, LENGTH, DIM, CLASSES = 9, 5, 4, 6


class Target(NamedTuple):
    """What the loss reads beside the output."""

    labels: Tensor
    mask: Tensor
    weights: Tensor
    values: Tensor


Piece = Callable[[Tensor, Target], Tensor]


class Model(nn.Module):
    """Some rows to logits [rows, LENGTH, CLASSES]."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, 7)
        self.head = nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x).tanh())


def batch(seed: int, *, holes: bool = True) -> tuple[Tensor, Target]:
    """Inputs and targets; with holes, the first row has nothing valid."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    labels = (draw(ROWS, LENGTH) * CLASSES).long()
    mask = torch.ones(ROWS, LENGTH, dtype=torch.float64)
    if holes:
        mask = (draw(ROWS, LENGTH) < draw(ROWS, 1)).double()
        mask[0], mask[1, 0] = 0.0, 1.0
        labels = torch.where(mask > 0, labels, -100)
    weights = draw(ROWS, LENGTH) * mask
    return draw(ROWS, LENGTH, DIM) - 0.5, Target(labels, mask, weights, draw(ROWS, LENGTH))


def _each(out: Tensor, t: Target) -> Tensor:
    flat = F.cross_entropy(out.flatten(0, 1), t.labels.flatten(), reduction="none")
    return flat.view(t.labels.shape)


def _squares(out: Tensor, t: Target) -> Tensor:
    return (out[..., 0] - t.values) ** 2


PER_TOKEN: list[Piece] = [
    _each,
    _squares,
    lambda o, t: o.logsumexp(-1),
    lambda o, t: o[..., 1] ** 2,
]
COUNTS: list[Callable[[Tensor, Target], Tensor | float]] = [
    lambda o, t: t.mask.sum(),
    lambda o, t: (t.labels != -100).sum().double(),
    lambda o, t: t.weights.sum(),
    lambda o, t: t.mask.sum() + 1e-3,
    lambda o, t: t.mask.sum().clamp(min=1),
    lambda o, t: torch.clamp(t.weights.sum(), min=0.25),
    lambda o, t: torch.maximum(t.mask.sum(), torch.ones((), dtype=torch.float64)),
    lambda o, t: t.mask.count_nonzero().double(),
    lambda o, t: t.mask.sum().item(),
    lambda o, t: len(o),
    lambda o, t: o[..., 0].numel(),
    lambda o, t: 64.0,
    lambda o, t: max(t.mask.sum(), 1),  # type: ignore[type-var]
    lambda o, t: max(t.mask.sum().item(), 1),
    lambda o, t: o.abs().sum(),  # has a gradient
    lambda o, t: t.mask.sum().sqrt(),
    lambda o, t: t.mask.sum(1).max(),
    lambda o, t: t.mask.sum() * 2,
    lambda o, t: t.mask.sum() + t.weights.sum(),
]
LOSSES: list[Piece] = [
    lambda o, t: F.cross_entropy(o.flatten(0, 1), t.labels.flatten()),
    lambda o, t: F.cross_entropy(o.transpose(1, 2), t.labels, label_smoothing=0.1),
    lambda o, t: nn.CrossEntropyLoss(weight=torch.linspace(0.5, 2, CLASSES).to(o))(
        o.flatten(0, 1), t.labels.flatten()
    ),
    lambda o, t: F.nll_loss(o.log_softmax(-1).flatten(0, 1), t.labels.flatten()),
    lambda o, t: nn.MSELoss()(o[..., 0], t.values),
    lambda o, t: F.l1_loss(o[..., 0], t.values, None, None, "mean"),
    lambda o, t: F.mse_loss(o[..., 0], t.values, weight=t.weights),
    lambda o, t: F.smooth_l1_loss(o[..., 0], t.values, reduction="sum"),
    lambda o, t: F.kl_div(
        o.log_softmax(-1), torch.full_like(o, 1 / CLASSES), reduction="batchmean"
    ),
    lambda o, t: F.binary_cross_entropy_with_logits(
        o[..., 0], t.values, weight=t.weights, pos_weight=torch.full_like(t.values[0], 2.0)
    ),
    lambda o, t: F.poisson_nll_loss(o[..., 0], t.values, True),
    lambda o, t: F.gaussian_nll_loss(o[..., 0], t.values, o[..., 1].exp()),
    lambda o, t: F.soft_margin_loss(o[..., 0], t.values.round() * 2 - 1),
    lambda o, t: F.cosine_embedding_loss(o[:, 0], o[:, 1], t.values[:, 0].round() * 2 - 1),
    lambda o, t: F.triplet_margin_loss(o[:, 0], o[:, 1], o[:, 2]),
    lambda o, t: F.margin_ranking_loss(o[:, 0, 0], o[:, 1, 0], t.values[:, 0].round() * 2 - 1),
    lambda o, t: F.hinge_embedding_loss(o[..., 0], t.values.round() * 2 - 1),
    lambda o, t: F.multi_margin_loss(o[:, 0], t.labels[:, 1].clamp(min=0)),
    lambda o, t: F.multilabel_soft_margin_loss(o[:, 0], (o[:, 0] > 0).to(o)),
    lambda o, t: torch.where(t.mask > 0, _each(o, t), torch.nan).nanmean(),
    lambda o, t: wh.weighted_mean((_each(o, t) * t.weights).sum(), t.weights.sum()),
    lambda o, t: F.ctc_loss(
        o.log_softmax(-1).transpose(0, 1),
        torch.ones(len(o), 2, dtype=torch.long),
        torch.full((len(o),), LENGTH),
        torch.full((len(o),), 2),
    ),
]


def _reductions(x: Piece, count: Callable[[Tensor, Target], Tensor | float]) -> list[Piece]:
    def masked(o: Tensor, t: Target) -> Tensor:
        return x(o, t) * t.mask

    return [
        lambda o, t: x(o, t).mean(),
        lambda o, t: x(o, t).mean(1).mean(),
        lambda o, t: x(o, t).mean(0).mean(),
        lambda o, t: x(o, t).mean((0, 1)),
        lambda o, t: x(o, t)[t.mask.bool()].mean(),
        lambda o, t: torch.masked_select(x(o, t), t.mask.bool()).mean(),
        lambda o, t: (masked(o, t).sum(1) / t.mask.sum(1).clamp(min=1)).mean(),
        lambda o, t: masked(o, t).sum() / count(o, t),
        lambda o, t: torch.sum(masked(o, t)).div(count(o, t)),
        lambda o, t: masked(o, t).sum() * (1 / count(o, t)),
        lambda o, t: (masked(o, t) / count(o, t)).sum(),
        lambda o, t: (x(o, t) * (t.mask / count(o, t))).sum(),
        lambda o, t: torch.einsum("bl,bl->", x(o, t), t.mask) / count(o, t),
        lambda o, t: masked(o, t).sum(1).sum(0) / count(o, t),
        lambda o, t: x(o, t).sum(),
        lambda o, t: x(o, t).std(),
        lambda o, t: x(o, t).mean().sqrt(),
        lambda o, t: x(o, t).amax(),
        lambda o, t: wh.weighted_mean(masked(o, t).sum(), t.mask.sum()),
    ]


def expression(seed: int) -> tuple[Piece, str]:
    """A loss function, and what it is made of."""
    rng = random.Random(seed)
    terms: list[tuple[float, Piece]] = []
    told = []
    shared = rng.randrange(len(COUNTS))
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
        if rng.random() < 0.25:
            which = rng.randrange(len(LOSSES))
            piece = LOSSES[which]
            told.append(f"loss {which}")
        else:
            x = rng.randrange(len(PER_TOKEN))
            count = shared if rng.random() < 0.5 else rng.randrange(len(COUNTS))
            made = _reductions(PER_TOKEN[x], COUNTS[count])
            which = rng.randrange(len(made))
            piece = made[which]
            told.append(f"reduction {which} of {x} by {count}")
        terms.append((rng.choice((1.0, 0.5, -0.3, 2.0)), piece))
    how = rng.choice(("python", "stack", "in place", "zeros", "cast"))
    shift = rng.choice((0.0, 0.0, 0.7))

    def loss(out: Tensor, target: Target) -> Tensor:
        values = [piece(out, target) * scale for scale, piece in terms]
        if how == "stack":
            total = torch.stack(values).sum()
        elif how == "in place":
            total = values[0]
            for value in values[1:]:
                total += value
        elif how == "zeros":
            total = torch.zeros((), dtype=out.dtype)
            for value in values:
                total = value + total
        else:
            total = sum(values)  # type: ignore[assignment]
        total = total.to(torch.float64) if how == "cast" else total
        return total + shift if shift else total

    return loss, f"{', '.join(told)} ({how}, + {shift})"
