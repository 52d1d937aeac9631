"""Losses: how an output meets its target, and how many elements the mean is over.

Place in the flow: `model` calls one, in the model or as `loss=`. `weights` is the generator's own
knowledge for the truth: what a micro-batch of this batch weighs, first choice first. A loss that is
no mean weighs its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tests.odd.vocabulary import CLASSES, VOCAB

IGNORED = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class LossWord:
    """One loss.

    Attributes:
        fn: (output, target, mask, model) -> scalar.
        output: `tokens` [B, T, V], `classes` [B, C] or `values` [B, T, 3].
        target: `labels` [B, T] with ignored ones, `full` without, `classes`, `values` or `none`.
        weights: Of one micro-batch of (rows, target, mask): each allowed.
        easy: It must work under every layout.
        needs: `mask` or `model`.
        mixes: Rows interact, or the loss is not linear in a mean.
        adds: It is a sum: parts add up, however many there are.
    """

    fn: Callable[..., Tensor]
    output: str
    target: str
    weights: tuple[Callable[[int, Any, Any], float], ...]
    easy: bool = False
    needs: str = ""
    mixes: bool = False
    adds: bool = False


def _rows(rows: int, target: Any, mask: Any) -> float:
    return float(rows)


def _valid(rows: int, target: Any, mask: Any) -> float:
    return float((target != IGNORED).sum())


def _masked(rows: int, target: Any, mask: Any) -> float:
    return float(mask.sum())


def _squares(rows: int, target: Any, mask: Any) -> float:
    return float(target.pow(2).sum())


def _by_sign(rows: int, target: Any, mask: Any) -> float:
    return float((target > 0).sum() + 0.5 * target.numel())


CLASS_WEIGHTS = torch.linspace(0.5, 2.0, CLASSES, dtype=torch.float64)


def _weighed(rows: int, target: Any, mask: Any) -> float:
    return float(CLASS_WEIGHTS[target].sum())


def _flat(out: Tensor, y: Tensor, **more: Any) -> Tensor:
    return F.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1), **more)


def _each(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.transpose(1, 2), y.clamp(min=0), reduction="none")


class OwnCrossEntropy(torch.autograd.Function):
    """Cross entropy over the classes with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, y: Tensor) -> Tensor:
        p = logits.softmax(-1)
        ctx.save_for_backward(p, y)
        return -p.gather(-1, y[:, None]).log().mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        p, y = ctx.saved_tensors
        return grad * (p - F.one_hot(y, p.shape[-1])) / y.shape[0], None


def _contrastive(out: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(out, dim=-1)
    return F.cross_entropy(z @ z.roll(1, -1).T / 0.2, torch.arange(len(z)))


def _edited(out: Tensor, y: Tensor) -> Tensor:
    out[..., 2] = -1e4 if out.dim() == 2 else 0.0
    return F.cross_entropy(out, y.masked_fill(y == 2, 1))


def _hooked(out: Tensor, y: Tensor) -> Tensor:
    if out.requires_grad:
        out.register_hook(lambda g: g * 0.5)
    return _flat(out, y)


def _focal(out: Tensor, y: Tensor) -> Tensor:
    ce = F.cross_entropy(out, y, reduction="none")
    return ((1 - torch.exp(-ce)) ** 2 * ce).mean()


def _distilled(out: Tensor, y: Tensor) -> Tensor:
    soft = F.one_hot(y, out.shape[-1]).to(out.dtype) * 0.9 + 0.1 / out.shape[-1]
    return F.kl_div(F.log_softmax(out, -1), soft, reduction="batchmean")


def _chunked(out: Tensor, y: Tensor) -> Tensor:
    total = out.new_zeros(())
    for t in range(out.shape[1]):
        total = total + F.cross_entropy(out[:, t], y[:, t])
    return total / out.shape[1]


def _decayed(out: Tensor, y: Tensor, model: Any) -> Tensor:
    return F.cross_entropy(out, y) + 0.01 * sum(p.pow(2).sum() for p in model.parameters())


def _last(out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    ends = mask.long().sum(1).clamp(min=1) - 1
    rows = torch.arange(out.shape[0])
    return F.cross_entropy(out[rows, ends], y[rows, ends].clamp(min=0))


def _rowwise(out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    m = mask.to(out.dtype)
    return ((_each(out, y) * m).sum(1) / m.sum(1).clamp(min=1)).mean()


def _mask_mean(out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    m = mask.to(out.dtype)
    return (_each(out, y) * m).sum() / m.sum()


def _selected(out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    return F.cross_entropy(out[mask], y[mask].clamp(min=0))


def _valid_by_hand(out: Tensor, y: Tensor) -> Tensor:
    return _flat(out, y, reduction="sum") / (y != IGNORED).sum()


def _word(fn: Any, output: str, target: str, *weights: Any, **more: Any) -> LossWord:
    return LossWord(fn=fn, output=output, target=target, weights=weights or (_rows,), **more)


LOSSES: dict[str, LossWord] = {
    "tokens": _word(_flat, "tokens", "labels", _valid, easy=True),
    "tokens-full": _word(_flat, "tokens", "full", easy=True),
    "tokens-shifted": _word(
        lambda out, y: _flat(out[:, :-1], y[:, 1:]), "tokens", "full", easy=True
    ),
    "tokens-transposed": _word(
        lambda out, y: F.cross_entropy(out.transpose(1, 2), y), "tokens", "labels", _valid
    ),
    "tokens-log-softmax": _word(
        lambda out, y: F.nll_loss(out.log_softmax(-1).flatten(0, 1), y.flatten()),
        "tokens",
        "labels",
        _valid,
        easy=True,
    ),
    "tokens-by-hand": _word(_valid_by_hand, "tokens", "labels", _valid, _rows),
    "tokens-gathered": _word(
        lambda out, y: (out.logsumexp(-1) - out.gather(-1, y[..., None])[..., 0]).mean(),
        "tokens",
        "full",
        easy=True,
    ),
    "tokens-hooked": _word(_hooked, "tokens", "full"),
    "tokens-loop": _word(_chunked, "tokens", "full"),
    "masked-mean": _word(_mask_mean, "tokens", "full", _masked, _rows, needs="mask"),
    "mask-selected": _word(_selected, "tokens", "full", _masked, needs="mask"),
    "row-means": _word(_rowwise, "tokens", "full", needs="mask"),
    "last-token": _word(_last, "tokens", "full", needs="mask"),
    "classes": _word(F.cross_entropy, "classes", "classes", easy=True),
    "classes-weighted": _word(
        lambda out, y: F.cross_entropy(out, y, weight=CLASS_WEIGHTS.to(out.dtype)),
        "classes",
        "classes",
        _weighed,
    ),
    "classes-smoothed": _word(
        lambda out, y: F.cross_entropy(out, y, label_smoothing=0.1), "classes", "classes", easy=True
    ),
    "classes-weighted-smoothed": _word(
        lambda out, y: F.cross_entropy(
            out, y, weight=CLASS_WEIGHTS.to(out.dtype), label_smoothing=0.1
        ),
        "classes",
        "classes",
        _weighed,
    ),
    "classes-soft": _word(
        lambda out, y: F.cross_entropy(out, F.one_hot(y, CLASSES).to(out.dtype) * 0.8 + 0.2 / 7),
        "classes",
        "classes",
    ),
    "classes-module": _word(torch.nn.CrossEntropyLoss(), "classes", "classes", easy=True),
    "classes-own": _word(OwnCrossEntropy.apply, "classes", "classes"),
    "classes-edited": _word(_edited, "classes", "classes"),
    "classes-focal": _word(_focal, "classes", "classes", easy=True),
    "classes-kl": _word(_distilled, "classes", "classes"),
    "classes-margin": _word(F.multi_margin_loss, "classes", "classes"),
    "classes-bce": _word(
        lambda out, y: F.binary_cross_entropy_with_logits(
            out, F.one_hot(y, CLASSES).to(out.dtype), pos_weight=CLASS_WEIGHTS.to(out.dtype)
        ),
        "classes",
        "classes",
    ),
    "classes-multilabel": _word(
        lambda out, y: F.multilabel_soft_margin_loss(out, F.one_hot(y, CLASSES).to(out.dtype)),
        "classes",
        "classes",
    ),
    "classes-decayed": _word(_decayed, "classes", "classes", needs="model"),
    "contrastive": _word(_contrastive, "classes", "classes", mixes=True),
    "values": _word(F.mse_loss, "values", "values", easy=True),
    "values-l1": _word(F.l1_loss, "values", "values", easy=True),
    "values-smooth": _word(
        lambda out, y: F.smooth_l1_loss(out, y, beta=0.5), "values", "values", easy=True
    ),
    "values-huber": _word(
        lambda out, y: F.huber_loss(out, y, delta=0.7), "values", "values", easy=True
    ),
    "values-hand": _word(lambda out, y: (out - y).square().mean(), "values", "values", easy=True),
    "values-dim": _word(
        lambda out, y: (out - y).pow(2).mean(dim=(1, 2)).mean(0), "values", "values"
    ),
    "values-sum-rows": _word(
        lambda out, y: (out - y).abs().sum() / out.shape[0], "values", "values"
    ),
    "values-sum": _word(
        lambda out, y: (out - y).pow(2).sum(), "values", "values", mixes=True, adds=True
    ),
    "values-root": _word(lambda out, y: F.mse_loss(out, y).sqrt(), "values", "values", mixes=True),
    "values-log": _word(
        lambda out, y: torch.log1p(F.mse_loss(out, y)), "values", "values", mixes=True
    ),
    "values-max": _word(lambda out, y: (out - y).abs().max(), "values", "values", mixes=True),
    "values-clamped": _word(
        lambda out, y: F.mse_loss(out, y).clamp(max=1.0), "values", "values", mixes=True
    ),
    "values-two": _word(
        lambda out, y: F.mse_loss(out, y) + 0.1 * out.abs().mean(), "values", "values", easy=True
    ),
    "values-ratio": _word(
        lambda out, y: (out - y).pow(2).sum() / y.pow(2).sum(),
        "values",
        "values",
        _squares,
        mixes=True,
    ),
    "values-gaussian": _word(
        lambda out, y: F.gaussian_nll_loss(out, y, torch.full_like(y, 0.5)), "values", "values"
    ),
    "values-cosine": _word(
        lambda out, y: 1 - F.cosine_similarity(out, y, dim=-1).mean(), "values", "values"
    ),
    "values-stack": _word(
        lambda out, y: torch.stack([F.mse_loss(out, y), F.l1_loss(out, y)]).sum(),
        "values",
        "values",
    ),
    "values-weight": _word(
        lambda out, y: F.mse_loss(out, y, weight=(y > 0).to(y.dtype) + 0.5),
        "values",
        "values",
        _by_sign,
        _rows,
    ),
    "values-spread": _word(
        lambda out, y: F.mse_loss(out, y) + 0.1 * out.var(), "values", "values", mixes=True
    ),
    "values-normed": _word(
        lambda out, y: F.mse_loss(out, y) / F.mse_loss(out, y).detach(),
        "values",
        "values",
        mixes=True,
    ),
    "values-median": _word(
        lambda out, y: (out - y).abs().flatten().median(), "values", "values", mixes=True
    ),
    "values-none": _word(
        lambda out, y: out.pow(2).mean() + (out - 1).abs().mean(), "values", "values"
    ),
}

SIZES = {"tokens": VOCAB, "classes": CLASSES, "values": 3}


def call(word: LossWord, out: Tensor, target: Any, mask: Any, model: Any) -> Tensor:
    """The loss of an output."""
    if word.needs == "mask":
        return word.fn(out, target, mask)
    if word.needs == "model":
        return word.fn(out, target, model)
    return word.fn(out, target)
