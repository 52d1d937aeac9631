"""The functions of torch that drop, one by one, with keyed masks.

And those written in Python that call them.

Place in the flow: half of the table that `nn.randomness` looks functions up in; the other half is
`nn.random_calls`.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from whale.nn import draws
from whale.nn.attention import attend

DROPOUTS: dict[Any, Callable[..., Any]] = {}
"""Function -> handler(mode, *its arguments); the mode gives the mask."""

COMPOSED = (F.multi_head_attention_forward, F.gumbel_softmax)
"""Functions in Python that call others of the table."""


def _handles(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        DROPOUTS.update(dict.fromkeys(functions, handler))
        return handler

    return register


@_handles(F.dropout)
def _dropout(
    mode: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if not training or p == 0.0:
        mode.spared(input.shape)
        return input
    out: Tensor = mode.dropped(input, float(p))
    return input.copy_(out) if inplace else out


@_handles(torch.dropout_)
def _dropout_in_place(mode: Any, input: Tensor, p: float, train: bool) -> Tensor:
    return _dropout(mode, input, p, train, True)


@_handles(torch.dropout)
def _dropout_builtin(mode: Any, input: Tensor, p: float, train: bool) -> Tensor:
    return _dropout(mode, input, p, train)


@_handles(torch.native_dropout)
def _native_dropout(mode: Any, input: Tensor, p: float, train: bool) -> tuple[Tensor, Tensor]:
    if not train or p == 0.0:
        mode.spared(input.shape)
        return input, torch.ones_like(input, dtype=torch.bool)
    kept = mode.dropped(torch.ones_like(input), float(p))
    return input * kept, kept != 0


def _by_feature(
    mode: Any, input: Tensor, p: float, training: bool, inplace: bool, batched: bool
) -> Tensor:
    if not training or p == 0.0:
        mode.spared(input.shape)
        return input
    x = input if batched else input.unsqueeze(0)
    ones = x.new_ones(*x.shape[:2], *[1] * (x.dim() - 2))
    out = x * mode.dropped(ones, float(p))
    out = out if batched else out.squeeze(0)
    return input.copy_(out) if inplace else out


@_handles(F.dropout1d)
def _dropout1d(
    mode: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    return _by_feature(mode, input, p, training, inplace, input.dim() == 3)


@_handles(F.dropout2d)
def _dropout2d(
    mode: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    return _by_feature(mode, input, p, training, inplace, True)


@_handles(F.dropout3d)
def _dropout3d(
    mode: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    return _by_feature(mode, input, p, training, inplace, input.dim() == 5)


@_handles(torch.feature_dropout)
def _feature_dropout(mode: Any, input: Tensor, p: float, train: bool) -> Tensor:
    return _by_feature(mode, input, p, train, False, True)


_SELU_FLOOR = -1.7580993408473766  # what SELU gives far to the left


def _alpha(mode: Any, x: Tensor, p: float, training: bool, inplace: bool, feature: bool) -> Tensor:
    if not training or p == 0.0:
        mode.spared(x.shape)
        return x
    ones = x.new_ones(*x.shape[:2], *[1] * (x.dim() - 2)) if feature else torch.ones_like(x)
    kept = mode.dropped(ones, float(p)) != 0
    a = ((_SELU_FLOOR**2 * p + 1) * (1 - p)) ** -0.5 if p < 1.0 else 0.0
    out = torch.where(kept, x, _SELU_FLOOR) * a - a * p * _SELU_FLOOR
    return x.copy_(out) if inplace else out


@_handles(F.alpha_dropout)
def _alpha_dropout(
    mode: Any, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Tensor:
    return _alpha(mode, input, p, training, inplace, False)


@_handles(F.feature_alpha_dropout)
def _feature_alpha_dropout(
    mode: Any, input: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False
) -> Tensor:
    return _alpha(mode, input, p, training, inplace, True)


@_handles(F.scaled_dot_product_attention)
def _attention(
    mode: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if dropout_p == 0.0:
        mode.expect(None)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    mode.expect((*query.shape[:-1], key.shape[-2]))
    return attend(
        query,
        key,
        value,
        mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        drop=mode.attention_dropped,
    )


@_handles(F.rrelu, torch.rrelu)
def _rrelu(
    mode: Any,
    input: Tensor,
    lower: float = 1.0 / 8,
    upper: float = 1.0 / 3,
    training: bool = False,
    inplace: bool = False,
) -> Tensor:
    if training:
        drawn = draws.uniform(mode.place(input.shape, input.device))
        slope = (lower + (upper - lower) * drawn).to(input.dtype)
    else:
        mode.spared(input.shape)
        slope = torch.full((), (lower + upper) / 2, dtype=input.dtype, device=input.device)
    out = torch.where(input >= 0, input, input * slope)
    return input.copy_(out) if inplace else out


# ---- in place, and under torch's own names -------------------------------------------------------


@_handles(torch.feature_dropout_)
def _feature_dropout_(mode: Any, input: Tensor, p: float, train: bool) -> Tensor:
    return _by_feature(mode, input, p, train, True, True)


@_handles(torch.alpha_dropout)
def _alpha_dropout_builtin(mode: Any, input: Tensor, p: float, train: bool) -> Tensor:
    return _alpha(mode, input, p, train, False, False)


@_handles(torch.alpha_dropout_)
def _alpha_dropout_(mode: Any, input: Tensor, p: float, train: bool) -> Tensor:
    return _alpha(mode, input, p, train, True, False)


@_handles(torch.feature_alpha_dropout)
def _feature_alpha_dropout_builtin(mode: Any, input: Tensor, p: float, train: bool) -> Tensor:
    return _alpha(mode, input, p, train, False, True)


@_handles(torch.feature_alpha_dropout_)
def _feature_alpha_dropout_(mode: Any, input: Tensor, p: float, train: bool) -> Tensor:
    return _alpha(mode, input, p, train, True, True)


@_handles(torch.rrelu_)
def _rrelu_(
    mode: Any, input: Tensor, lower: float = 1.0 / 8, upper: float = 1.0 / 3, training: bool = False
) -> Tensor:
    return _rrelu(mode, input, lower, upper, training, True)


# ---- in Python -----------------------------------------------------------------------------------

_opened: dict[Any, Any] = {}


def opened(function: Any, mode: Any) -> Callable[..., Any]:
    """A composed function whose parts are seen by the mode around it.

    torch asks once, at its beginning, whether somebody stands in for it. The copy is told that
    nobody does, so that it runs and asks for its parts.
    """
    if function not in _opened:
        told = {name: _nobody for name in function.__globals__ if name.startswith("has_torch_func")}
        copy = types.FunctionType(
            function.__code__,
            {**function.__globals__, **told},
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        copy.__kwdefaults__ = function.__kwdefaults__
        _opened[function] = copy
    copy = _opened[function]
    if function is not F.multi_head_attention_forward:
        return copy

    def folded(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        heads = kwargs["num_heads"] if "num_heads" in kwargs else args[1]
        before, mode.fold = mode.fold, heads
        try:
            return copy(query, key, value, *args, **kwargs)
        finally:
            mode.fold = before

    return folded


def _nobody(*_: Any) -> bool:
    return False
