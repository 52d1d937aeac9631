"""Losses of research code: smoothing, focus, mining and balance written by hand."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from tests.odd.losses import CLASS_WEIGHTS, IGNORED, LOSSES, LossWord
from tests.odd.vocabulary import CLASSES, VOCAB


def _rows(rows: int, target: Any, mask: Any) -> float:
    return float(rows)


def _valid(rows: int, target: Any, mask: Any) -> float:
    return float((target != IGNORED).sum())


def _even(rows: int, target: Any, mask: Any) -> float:
    return float((target % 2 == 0).sum())


def _weighed(rows: int, target: Any, mask: Any) -> float:
    return float(CLASS_WEIGHTS[target].sum())


def _smoothed(out: Tensor, y: Tensor) -> Tensor:
    logp = out.log_softmax(-1)
    hit = -logp.gather(-1, y[:, None])[:, 0]
    return (0.9 * hit - 0.1 * logp.mean(-1)).mean()


def _smoothed_padded(out: Tensor, y: Tensor) -> Tensor:
    logp = out.log_softmax(-1)
    pad = y.eq(IGNORED)
    hit = -logp.gather(-1, y.clamp(min=0)[..., None])[..., 0]
    smooth = -logp.sum(-1)
    hit, smooth = hit.masked_fill(pad, 0.0), smooth.masked_fill(pad, 0.0)
    count = pad.numel() - pad.long().sum()
    return 0.9 * hit.sum() / count + 0.1 * smooth.sum() / (count * logp.shape[-1])


def _poly(out: Tensor, y: Tensor) -> Tensor:
    p = (F.one_hot(y, CLASSES) * out.softmax(-1)).sum(-1)
    return (F.cross_entropy(out, y, reduction="none") + 2.0 * (1 - p)).mean()


def _focal_weighed(out: Tensor, y: Tensor) -> Tensor:
    ce = F.cross_entropy(out, y, reduction="none")
    alpha = CLASS_WEIGHTS.to(out.dtype)[y]
    return (alpha * (1 - (-ce).exp()).pow(1.5) * ce).sum() / alpha.sum()


def _dice_rows(out: Tensor, y: Tensor) -> Tensor:
    p, hot = out.softmax(-1), F.one_hot(y, VOCAB).to(out.dtype)
    both = (p * hot).sum((1, 2))
    return (1 - (2 * both + 1) / (p.sum((1, 2)) + hot.sum((1, 2)) + 1)).mean()


def _dice(out: Tensor, y: Tensor) -> Tensor:
    p, hot = out.softmax(-1), F.one_hot(y, VOCAB).to(out.dtype)
    both = (p * hot).sum((0, 1))
    return (1 - (2 * both + 1) / (p.sum((0, 1)) + hot.sum((0, 1)) + 1)).mean()


def _supervised_contrast(out: Tensor, y: Tensor) -> Tensor:
    z = F.normalize(out, dim=-1)
    near = (z @ z.T) / 0.5
    same = (y[:, None] == y[None]).to(out.dtype)
    return -(same * near.log_softmax(-1)).sum(1).div(same.sum(1)).mean()


def _triplets(out: Tensor, y: Tensor) -> Tensor:
    return F.triplet_margin_loss(out, out.detach() * 0.5, out.roll(1, 0)) + F.cross_entropy(out, y)


def _mixed_targets(out: Tensor, y: Tensor) -> Tensor:
    return 0.7 * F.cross_entropy(out, y) + 0.3 * F.cross_entropy(out, y.flip(0))


def _inverse_frequency(out: Tensor, y: Tensor) -> Tensor:
    counts = torch.bincount(y, minlength=CLASSES).to(out.dtype)
    return F.cross_entropy(out, y, weight=1.0 / counts.clamp(min=1))


def _hardest(out: Tensor, y: Tensor) -> Tensor:
    each = F.cross_entropy(out, y, reduction="none")
    return each.topk(max(1, len(each) // 2)).values.mean()


def _hardest_of_row(out: Tensor, y: Tensor) -> Tensor:
    each = F.cross_entropy(out.transpose(1, 2), y, reduction="none")
    return each.topk(2, dim=1).values.mean()


def _bootstrap(out: Tensor, y: Tensor) -> Tensor:
    own = out.detach().argmax(-1)
    return 0.8 * F.cross_entropy(out, y) + 0.2 * F.cross_entropy(out, own)


def _confident(out: Tensor, y: Tensor) -> Tensor:
    p = out.softmax(-1)
    return F.cross_entropy(out, y) + 0.1 * (p * p.log()).sum(-1).mean()


def _huber(out: Tensor, y: Tensor) -> Tensor:
    d = (out - y).abs()
    return torch.where(d < 1, 0.5 * d * d, d - 0.5).sum(-1).mean()


def _log_cosh(out: Tensor, y: Tensor) -> Tensor:
    d = out - y
    return (d + F.softplus(-2 * d) - 0.6931471805599453).mean(dim=(1, 2)).mean(dim=0)


def _root(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).pow(2).mean().sqrt()


def _explained(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).pow(2).sum() / (y - y.mean()).pow(2).sum()


def _perplexity(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten()).exp()


def _perplexity_rows(out: Tensor, y: Tensor) -> Tensor:
    each = F.cross_entropy(out.transpose(1, 2), y, reduction="none")
    return each.mean(1).exp().mean()


def _by_python_count(out: Tensor, y: Tensor) -> Tensor:
    rows, length = y.shape
    each = F.cross_entropy(out.transpose(1, 2), y, reduction="none")
    return each.sum() / (rows * length)


def _stacked(out: Tensor, y: Tensor) -> Tensor:
    return torch.stack([F.cross_entropy(o, t) for o, t in zip(out, y, strict=True)]).mean()


def _even_only(out: Tensor, y: Tensor) -> Tensor:
    keep = y % 2 == 0
    each = F.cross_entropy(out, y, reduction="none")
    return (each * keep).sum() / max(int(keep.sum()), 1)


def _even_clamped(out: Tensor, y: Tensor) -> Tensor:
    keep = (y % 2 == 0).to(out.dtype)
    each = F.cross_entropy(out, y, reduction="none")
    return torch.dot(each, keep) / keep.sum().clamp(min=1)


def _pinball(out: Tensor, y: Tensor) -> Tensor:
    levels = torch.tensor([0.1, 0.5, 0.9], dtype=out.dtype)
    d = y - out
    return torch.max(levels * d, (levels - 1) * d).sum(2).mean()


def _gaussian(out: Tensor, y: Tensor) -> Tensor:
    return F.gaussian_nll_loss(out[..., :1], y[..., :1], F.softplus(out[..., 1:2]) + 0.1)


def _average(out: Tensor, y: Tensor) -> Tensor:
    return torch.nanmean(torch.cat([(out - y).abs(), (out * y).square()], -1))


def _norm_of_rows(out: Tensor, y: Tensor) -> Tensor:
    return torch.linalg.vector_norm(out - y, dim=(1, 2)).mean()


def _sum_by_rows(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="sum") / out.size(0)


def _inner_mean(out: Tensor, y: Tensor) -> Tensor:
    each = F.cross_entropy(out, y, reduction="none")
    return (each - 0.5 * each.mean()).pow(2).mean()


def _weights_of_batch(out: Tensor, y: Tensor) -> Tensor:
    w = torch.softmax(-F.cross_entropy(out, y, reduction="none").detach(), 0)
    return (w * F.cross_entropy(out, y, reduction="none")).sum()


def _loops(out: Tensor, y: Tensor) -> Tensor:
    total: Any = 0.0
    for c in range(CLASSES):
        hit = y == c
        if hit.any():
            total = total + CLASS_WEIGHTS[c].item() * F.cross_entropy(
                out[hit], y[hit], reduction="sum"
            )
    return total / len(y)


def _vmapped(out: Tensor, y: Tensor) -> Tensor:
    return torch.vmap(lambda o, t: -(o.log_softmax(-1) * F.one_hot(t, CLASSES)).sum())(
        out, y
    ).mean()


def _masked_rows(out: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    m = mask.to(out.dtype)
    each = F.cross_entropy(out.transpose(1, 2), y.clamp(min=0), reduction="none")
    return torch.einsum("bt,bt->b", each, m).sum().div(torch.count_nonzero(mask))


def _of_mask(rows: int, target: Any, mask: Any) -> float:
    return float(mask.sum())


def _add(name: str, fn: Any, output: str, target: str, *weights: Any, **more: Any) -> None:
    assert name not in LOSSES, name
    LOSSES[name] = LossWord(
        fn=fn, output=output, target=target, weights=weights or (_rows,), **more
    )


_add("a-smoothed", _smoothed, "classes", "classes")
_add("a-smoothed-padded", _smoothed_padded, "tokens", "labels", _valid)
_add("a-poly", _poly, "classes", "classes")
_add("a-focal-weighed", _focal_weighed, "classes", "classes", _weighed)
_add("a-dice-rows", _dice_rows, "tokens", "full")
_add("a-dice", _dice, "tokens", "full", mixes=True)
_add("a-contrast", _supervised_contrast, "classes", "classes", mixes=True)
_add("a-triplets", _triplets, "classes", "classes", mixes=True)
_add("a-mixed-targets", _mixed_targets, "classes", "classes", mixes=True)
_add("a-inverse-frequency", _inverse_frequency, "classes", "classes", mixes=True)
_add("a-hardest", _hardest, "classes", "classes", mixes=True)
_add("a-hardest-of-row", _hardest_of_row, "tokens", "full")
_add("a-bootstrap", _bootstrap, "classes", "classes")
_add("a-confident", _confident, "classes", "classes")
_add("a-huber", _huber, "values", "values")
_add("a-log-cosh", _log_cosh, "values", "values")
_add("a-root", _root, "values", "values", mixes=True)
_add("a-explained", _explained, "values", "values", mixes=True)
_add("a-perplexity", _perplexity, "tokens", "full", mixes=True)
_add("a-perplexity-rows", _perplexity_rows, "tokens", "full")
_add("a-python-count", _by_python_count, "tokens", "full")
_add("a-stacked", _stacked, "tokens", "full")
_add("a-even-only", _even_only, "classes", "classes", _even)
_add("a-even-clamped", _even_clamped, "classes", "classes", _even)
_add("a-pinball", _pinball, "values", "values")
_add("a-gaussian", _gaussian, "values", "values")
_add("a-average", _average, "values", "values")
_add("a-norm-of-rows", _norm_of_rows, "values", "values")
_add("a-sum-by-rows", _sum_by_rows, "tokens", "full")
_add("a-inner-mean", _inner_mean, "classes", "classes", mixes=True)
_add("a-weights-of-batch", _weights_of_batch, "classes", "classes", mixes=True)
_add("a-loops", _loops, "classes", "classes")
_add("a-vmapped", _vmapped, "classes", "classes")
_add("a-masked-rows", _masked_rows, "tokens", "full", _of_mask, needs="mask")
