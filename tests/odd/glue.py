"""Glue: what a model's own forward does to the states between its blocks.

Place in the flow: `model` applies one after each block. A function gets the model, the states and
the mask (all true where the batch has none). What must work everywhere is in `EASY`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.odd.vocabulary import BLOCKS

Glue = Callable[[Any, Tensor, Tensor], Tensor]


def _in_place(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    h += 0.1
    return h


def _index(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    h[:, 0] = 0.5
    h[..., :3] *= 2
    return h


def _masked(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    return h.masked_fill(~mask[..., None], 0.0)


def _hook(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(lambda g: g * 0.5)
    return h


def _clamp_hook(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    if h.requires_grad:
        h.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    return h


def _training(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    return h * 1.1 if model.training else h


def _length(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    return h + h.flip(1) if h.shape[1] > 3 else h


def _value(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    return h * 0.5 if h.abs().mean() > 0.7 else h


def _rows(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    return h * 0.5 if h.shape[0] > 2 else h


def _no_grad(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    with torch.no_grad():
        size = h.abs().amax(-1, keepdim=True)
    return h / (1 + size)


def _calls(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    if model.training:
        model.calls += 1
    return h * (1 + 0.1 * model.calls)


def _counter(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    if model.training:
        model.counter += 1
    return h * (1 + 0.1 * model.counter)


def _kept(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    model.last = h.detach()
    return h


def _flat(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    b, t, d = h.shape
    return torch.tanh(h.reshape(b * t, d) * 0.9).view(b, t, d)


def _time_first(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    x = h.transpose(0, 1).contiguous()
    return (x + x.roll(1, 0) * 0.1).permute(1, 0, 2)


def _checkpoint(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    return checkpoint(_tanh, h, use_reentrant=False)


def _tanh(h: Tensor) -> Tensor:
    return torch.tanh(h) + 0.1 * h


def _mean_rows(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    return h - 0.1 * h.mean(0, keepdim=True) if model.training else h


def _dtype(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    return h.float().to(h.dtype) * 0.5 + h * 0.5


def _drop_row(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    return h * (mask.long().sum(1) > 1).to(h.dtype)[:, None, None] + h.detach() * 0.1


def _again(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    first = model.spec.blocks[0]
    block = model.get_submodule(model.paths[0])
    out = block(h, mask) if BLOCKS[first].masked else block(h)
    return out[0] if BLOCKS[first].aux else out


def _teacher(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    with torch.no_grad():
        target = _again(model, h, mask)
    return h + 0.1 * torch.tanh(target)


def _mixed_precision(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = _again(model, h, mask)
    return h + 0.1 * torch.tanh(y.to(h.dtype))


def _energy(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    if not h.requires_grad:
        return h
    (force,) = torch.autograd.grad(h.square().sum(), h, retain_graph=True)
    return h - 0.05 * force


def _view(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    h = h * 1.0
    h[:, 0].mul_(0.5)
    return h


def _mask_view(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    keep = torch.ones_like(h)
    keep[:, -1].fill_(0.5)
    return h * keep


def _behind(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    """Writes to what an earlier block made, after another one has read it."""
    side = h.detach()
    out = _again(model, h.clone(), mask)
    side.add_(0.1)
    return h.clone() + 0.1 * torch.tanh(out)


def _numpy(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    rows = h.reshape(np.prod(h.shape[:2]), h.shape[2]) / np.sqrt(h.shape[2])
    return rows.reshape(tuple(np.array(h.shape))) * 3


def _range(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    return h[range(len(h))] * 0.9


def _words(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    parts = {"left": h * 0.5, "right": torch.tanh(h)}
    return sum(parts[word] for word in sorted(set(parts)))  # type: ignore[return-value]


def _deep(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    for _ in range(2):
        h = h + 0.1 * torch.tanh(checkpoint(_again, model, h, mask, use_reentrant=True))
    return h


def _turned(model: Any, h: Tensor, mask: Tensor) -> Tensor:
    """A flag of a block, up for one call."""
    block = model.get_submodule(model.paths[0])
    mode = block.training
    block.eval()
    out = _again(model, h, mask)
    block.train(mode)
    return h + 0.1 * torch.tanh(out)


GLUES: dict[str, Glue] = {
    "": lambda model, h, mask: h,
    "scale": lambda model, h, mask: h * 0.9,
    "width": lambda model, h, mask: h / h.shape[-1] ** 0.5 * 3,
    "shift": lambda model, h, mask: h + model.shift,
    "centre": lambda model, h, mask: h - h.mean(1, keepdim=True),
    "detach": lambda model, h, mask: torch.cat([h[..., :4].detach(), h[..., 4:]], -1),
    "dropout": lambda model, h, mask: F.dropout(h, 0.2, model.training),
    "module-dropout": lambda model, h, mask: model.drop(h),
    "in-place": _in_place,
    "index": _index,
    "masked": _masked,
    "hook": _hook,
    "clamp-hook": _clamp_hook,
    "training": _training,
    "length": _length,
    "value": _value,
    "rows": _rows,
    "no-grad": _no_grad,
    "calls": _calls,
    "counter": _counter,
    "kept": _kept,
    "flat": _flat,
    "time-first": _time_first,
    "checkpoint": _checkpoint,
    "mean-rows": _mean_rows,
    "dtype": _dtype,
    "drop-row": _drop_row,
    "teacher": _teacher,
    "mixed-precision": _mixed_precision,
    "energy": _energy,
    "view": _view,
    "mask-view": _mask_view,
    "behind": _behind,
    "numpy": _numpy,
    "range": _range,
    "words": _words,
    "deep": _deep,
    "turned": _turned,
}
EASY = {"", "scale", "width", "shift", "centre", "detach", "masked", "flat", "no-grad"}
"""Glue that must work under every layout."""
RANDOM = {"dropout", "module-dropout"}
MIXING = {"value", "mean-rows", "rows"}
