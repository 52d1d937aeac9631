"""How two tensors are compared: exact where they are counts, relative to a fair scale elsewhere.

Place in the flow: under both halves of `wh.verify`. Every kind of tensor has a scale of its own, so
that neither a mask of -1e38 nor a step counter can hide what happens to its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

SMALL = 1e-3
"""An entry below this share of the greatest one of its kind is measured against that share."""

ROUNDING = {torch.float64: 1e-6, torch.float32: 1e-2}
"""A buffer that is zero but for rounding is measured against this."""


def greatest(tensor: Tensor) -> float:
    """The greatest finite entry by size."""
    values = dense(tensor)
    values = values.abs().double() if values.is_complex() else values.double().abs()
    values = values[torch.isfinite(values)]
    return float(values.max()) if values.numel() else 0.0


def dense(tensor: Tensor) -> Tensor:
    """The values of a tensor, whatever its layout."""
    tensor = tensor.detach()
    return (tensor if tensor.layout == torch.strided else tensor.to_dense()).resolve_conj()


def error_of(got: Tensor, want: Tensor, scale: float) -> tuple[float, tuple[int, ...]]:
    """The greatest difference relative to `scale`, and where it is.

    Equal infinities, and a nan on both sides, are equal; one on one side only is infinitely wrong.
    Whole numbers and truth values differ by what they differ, whatever the scale.
    """
    got, want = dense(got), dense(want)
    if got.shape != want.shape or _sort(got) != _sort(want):
        return float("inf"), ()
    if not got.numel():
        return 0.0, ()
    if _sort(want) == "whole":
        apart = torch.where(got == want, 0.0, (got.double() - want.double()).abs().clamp(min=1.0))
        scale = 1.0
    elif got.is_complex():
        parts = [_apart(a, b) for a, b in ((got.real, want.real), (got.imag, want.imag))]
        apart = torch.hypot(*parts)
    else:
        apart = _apart(got, want)
    worst = int(apart.argmax())
    location = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), apart.shape))
    difference = float(apart.flatten()[worst])
    return (difference / scale if scale else difference), location


def _apart(got: Tensor, want: Tensor) -> Tensor:
    got, want = got.double(), want.double()
    same = (got == want) | (got.isnan() & want.isnan())
    apart = torch.where(same, 0.0, (got - want).abs())
    return torch.where(apart.isnan(), torch.inf, apart)


def _sort(tensor: Tensor) -> str:
    if tensor.is_complex():
        return "complex"
    return "real" if tensor.is_floating_point() else "whole"


def scales(kind: str, truth: Mapping[str, Tensor | None], rounding: float) -> dict[str, float]:
    """By what the error of each tensor of a kind is divided.

    Its own greatest entry, or more where what it holds may be nothing but rounding: a gradient is
    the rest of sums as great as its neighbours, a weight that begins at zero moves by such a rest,
    and a running mean is one of numbers as great as their deviation.
    """
    own = {name: greatest(t) if t is not None else 0.0 for name, t in truth.items()}
    largest = max(own.values(), default=0.0)
    if kind == "gradient":
        return {name: max(value, SMALL * largest) for name, value in own.items()}
    if kind == "weight":
        return {name: max(value, SMALL * min(largest, 1.0)) for name, value in own.items()}
    if kind == "state":
        return {name: max(v, SMALL * _of_slot(name, own)) for name, v in own.items()}
    if kind == "buffer":
        return {name: max(value, rounding, _deviation(name, own)) for name, value in own.items()}
    return own


def _of_slot(name: str, own: Mapping[str, float]) -> float:
    """The greatest entry of the same slot (`exp_avg of`) of any parameter."""
    slot = name.partition(" of ")[0]
    return max(value for other, value in own.items() if other.partition(" of ")[0] == slot)


def _deviation(name: str, own: Mapping[str, float]) -> float:
    if not name.endswith("running_mean"):
        return 0.0
    return float(own.get(name.removesuffix("mean") + "var", 0.0) ** 0.5)
