"""Means of torch seen as sums and counts, and `wh.weighted_mean`, which says both itself.

Place in the flow: used by `runtime.weighing`, which follows them to the loss. A mean over rows
cannot be added up over replicas; the sum and the count it is made of can (design, decision 5).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import _reduction
from torch.nn import functional as F  # noqa: N812
from torch.overrides import handle_torch_function, has_torch_function

from whale.errors import WhaleError

Number = Tensor | float


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """What a mean divides by: a sum over rows, without a gradient.

    Attributes:
        value: The count of these rows.
        origin: What was counted: equal origins count alike on every part.
        per: `value` is this many times what `origin` counts.
        extra: Added once to the count of all parts (an epsilon).
        floor: The least that the count of all parts is taken for (`clamp(min=...)`).
        keep: Tensors whose addresses are in `origin`.
        divides: Whether the loss code itself divides by it: by nothing at all, gradients are nan
            then, where those of torch's means are zero.
    """

    value: Tensor
    origin: tuple[Any, ...]
    per: float = 1.0
    extra: Number = 0.0
    floor: Number = 0.0
    keep: tuple[Tensor, ...] = ()
    divides: bool = False


Known = tuple[Tensor, Count | None]
"""(the sum, its count); a loss that is a sum has no count."""


def weighted_mean(total: Tensor, count: Number) -> Tensor:
    """`total / count`, known to Whale as a mean: `total` and `count` are sums over rows.

    Over several replicas or micro-batches it is the sum of all totals by the sum of all counts,
    whatever else the loss code does to compute the two. Without Whale it is a division.

    Args:
        total: A sum over the rows at hand, with a gradient.
        count: How many elements, or which weight, it is the sum of; it may be 0 where others have
            some.

    Example:
        >>> mask = torch.tensor([1.0, 1.0, 0.0])
        >>> weighted_mean((torch.tensor([1.0, 3.0, 9.0]) * mask).sum(), mask.sum())
        tensor(2.)
    """
    tensors = tuple(t for t in (total, count) if isinstance(t, Tensor))
    if has_torch_function(tensors):
        return handle_torch_function(weighted_mean, tensors, total, count)  # type: ignore[no-any-return]
    return total / count


def same_for_all(value: Tensor) -> Tensor:
    """`value`, of which replicas have told each other: it is no sum over the rows of one part."""
    if has_torch_function((value,)):
        return handle_torch_function(same_for_all, (value,), value)  # type: ignore[no-any-return]
    return value.view_as(value)


def elements(size: int, rows: int, like: Tensor, *, ragged: bool) -> Count:
    """The count of a mean over `size` elements; `ragged`: how many depends on values."""
    value = torch.full((), float(size), device=like.device)
    if ragged or (rows and size % rows):
        return Count(value=value, origin=("elements", id(value)), keep=(value,))
    return Count(value=value, origin=("rows",), per=size / rows if rows and size else 1.0)


def summed_count(weights: Tensor) -> Count:
    """The count of a mean weighed by `weights`."""
    return Count(value=weights.detach().sum(), origin=address("sum", weights), keep=(weights,))


def address(kind: str, tensor: Tensor) -> tuple[Any, ...]:
    """Names the values of a tensor that is kept alive."""
    place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride()) if tensor.numel() else ()
    return (kind, *place, tensor.dtype, tensor._version)


# ---- torch's own losses --------------------------------------------------------------------------


@cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def known_mean(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], rows: int, ragged: bool
) -> Known | None:
    """(sum, count) of a call of one of torch's losses or of `weighted_mean`; None of any other."""
    if function is weighted_mean:
        return _told(*args, **kwargs)
    how = _LOSSES.get(function)
    if how is None:
        return None
    bound = _signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    said = dict(bound.arguments)
    if said.get("size_average") is not None or said.get("reduce") is not None:
        said["reduction"] = _reduction.legacy_get_string(said["size_average"], said["reduce"])
    said.pop("size_average", None)
    said.pop("reduce", None)
    reduction = said.pop("reduction")
    if reduction not in ("mean", "sum", "batchmean"):
        return None
    first = next(iter(said))
    if said[first].dtype == torch.float16:
        said[first] = said[first].float()  # a sum of many may be more than float16 holds
    return how(function, said, reduction, rows, ragged)


def _told(total: Tensor, count: Number) -> Known:
    if not isinstance(count, Tensor):
        count = torch.full((), float(count), device=total.device)
    if count.requires_grad:
        raise WhaleError(
            "wh.weighted_mean: `count` has a gradient",
            hint="a count is a constant: pass count.detach(), or weights that are not learned",
        )
    return total, Count(value=count, origin=("told", id(count)), keep=(count,))


def _labelled(
    function: Any, said: dict[str, Any], reduction: str, rows: int, ragged: bool
) -> Known:
    total = function(**said, reduction="sum")
    if reduction == "sum":
        return total, None
    target, weight = said["target"], said["weight"]
    if target.is_floating_point():
        inputs = said["input"]
        size = inputs.numel() // max(1, inputs.shape[1 if inputs.dim() > 1 else 0])
        return total, elements(size, rows, target, ragged=ragged)
    valid = target != said["ignore_index"]
    origin = (*address("labels", target), said["ignore_index"])
    if weight is None:
        return total, Count(value=valid.sum(), origin=origin, keep=(target,))
    picked = weight.detach()[torch.where(valid, target, torch.zeros_like(target))]
    origin += address("weight", weight)
    return total, Count(value=(picked * valid).sum(), origin=origin, keep=(target, weight))


def _each(
    function: Any, said: dict[str, Any], reduction: str, rows: int, ragged: bool
) -> Known | None:
    """A loss whose mean is that of the elements of its `reduction="none"`."""
    weight = said.get("weight") if function in _WEIGHED else None
    if weight is not None and weight.requires_grad:
        return None  # its sum has a gradient too
    each = function(**said, reduction="none")
    total = each.sum()
    if reduction == "sum":
        return total, None
    if reduction == "batchmean":
        return total, elements(said["input"].shape[0], rows, total, ragged=ragged)
    if weight is not None:
        return total, summed_count(weight)
    return total, elements(each.numel(), rows, total, ragged=ragged)


def _broadcast(
    function: Any, said: dict[str, Any], reduction: str, rows: int, ragged: bool
) -> Known | None:
    """The same where the sum needs no tensor of all elements."""
    if said.get("weight") is not None:
        return _each(function, said, reduction, rows, ragged)
    total = function(**said, reduction="sum")
    if reduction == "sum":
        return total, None
    size = torch.broadcast_shapes(said["input"].shape, said["target"].shape).numel()
    return total, elements(size, rows, total, ragged=ragged)


def _ctc(function: Any, said: dict[str, Any], reduction: str, rows: int, ragged: bool) -> Known:
    """By the length of each target first, then over the batch."""
    each = function(**said, reduction="none")
    if reduction == "sum":
        return each.sum(), None
    lengths = torch.as_tensor(said["target_lengths"], device=each.device).clamp(min=1)
    return (each / lengths.to(each.dtype)).sum(), elements(each.numel(), rows, each, ragged=ragged)


# With a weight these divide by its sum; others only multiply by it.
_WEIGHED = frozenset({F.mse_loss, F.l1_loss, F.huber_loss})
_LOSSES: dict[Any, Callable[[Any, dict[str, Any], str, int, bool], Known | None]] = {
    F.cross_entropy: _labelled,
    F.nll_loss: _labelled,
    F.ctc_loss: _ctc,
    **dict.fromkeys(
        (
            F.mse_loss,
            F.l1_loss,
            F.smooth_l1_loss,
            F.huber_loss,
            F.binary_cross_entropy,
            F.binary_cross_entropy_with_logits,
        ),
        _broadcast,
    ),
    **dict.fromkeys(
        (
            F.kl_div,
            F.poisson_nll_loss,
            F.gaussian_nll_loss,
            F.hinge_embedding_loss,
            F.margin_ranking_loss,
            F.cosine_embedding_loss,
            F.triplet_margin_loss,
            F.triplet_margin_with_distance_loss,
            F.soft_margin_loss,
            F.multilabel_margin_loss,
            F.multi_margin_loss,
            F.multilabel_soft_margin_loss,
        ),
        _each,
    ),
}
