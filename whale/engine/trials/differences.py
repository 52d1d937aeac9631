"""Differences: how far what parts give is from what the whole gives.

Place in the flow: used by what tries a model at build and while it trains
(`engine.trials.trial_rows`, `engine.trials.replay`, `engine.trials.borders`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from whale.errors import WhaleError
from whale.runtime.outputs import Merge, Part, merge_one


class OutputsError(WhaleError):
    """A named output of parts is not that of the whole."""


_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_COARSE = 2e-2
GRADIENT = 20.0
"""Times as far may gradients be apart."""


def allowed(dtype: torch.dtype) -> float:
    """How far two values of one computation may be apart, of their size."""
    return _TOLERANCE.get(dtype, _COARSE)


def one_number(a: float, b: float) -> bool:
    """Whether two divisors are the same; of a sum that is multiplied by zero it is infinite."""
    return a == b or abs(a - b) <= 1e-6 * max(abs(a), abs(b), 1e-12)


def close(want: Tensor, got: Tensor, allowed: float) -> bool:
    """Whether two tensors are the same, but for `allowed` of their size."""
    if want.shape != got.shape or want.dtype != got.dtype:
        return False
    if not (want.is_floating_point() or want.is_complex()):
        return torch.equal(want, got)
    if want.is_complex():
        want, got = torch.view_as_real(want), torch.view_as_real(got)
    want, got = want.detach().double(), got.detach().double()
    finite = want.isfinite()
    if not torch.equal(finite, got.isfinite()):
        return False
    want, got = want[finite], got[finite]
    if not want.numel():
        return True
    size = want.abs().max().clamp(min=1e-12)
    return bool((want - got).abs().max() <= allowed * size)


def gradients_of(value: Tensor, tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradient of a value for each of some leaves, dense; their own `.grad` is kept.

    Not by `autograd.grad`, which a reentrant checkpoint does not take part in.
    """
    before = [tensor.grad for tensor in tensors]
    for tensor in tensors:
        tensor.grad = None
    try:
        if value.requires_grad:
            torch.autograd.backward(value)
        # Those of a sparse embedding are summed dense in training too.
        return [None if t.grad is None else t.grad.to_dense() for t in tensors]
    finally:
        for tensor, old in zip(tensors, before, strict=True):
            tensor.grad = old


def finite(gradients: list[Tensor | None]) -> bool:
    """Whether all gradients that there are can be compared."""
    return all(g is None or bool(g.isfinite().all()) for g in gradients)


def distance(want: list[Tensor | None], got: list[Tensor | None]) -> float:
    """How far gradients are apart, of their size; none is zero."""
    apart = size = 0.0
    for a, b in zip(want, got, strict=True):
        if a is None and b is None:
            continue
        a = torch.zeros_like(b) if a is None and b is not None else a
        b = torch.zeros_like(a) if b is None and a is not None else b
        assert a is not None and b is not None
        apart += float((a - b).abs().double().square().sum())
        size += float(a.abs().double().square().sum())
    return float((apart / max(size, 1e-24)) ** 0.5)


def detached(value: Any) -> Any:
    """A tensor without its graph, anything else as it is."""
    return value.detach() if isinstance(value, Tensor) else value


def refuse_other_outputs(
    outputs: Mapping[str, Merge], whole: Part, parts: list[Part], tolerance: float, about: str
) -> None:
    """Named outputs of parts, merged, must be those of the whole."""
    for name, how in outputs.items():
        value = whole[2].get(name)
        # Of one number each, `concat` is a list of the parts' own.
        if not isinstance(value, Tensor) or (how.name == "concat" and not value.dim()):
            continue
        try:
            want = merge_one(name, how, [whole]).double()
            got = merge_one(name, how, parts).double()
        except Exception:  # noqa: BLE001, S112 - loud in training too
            continue
        far = tolerance * max(float(want.abs().max()) if want.numel() else 0.0, 1e-12)
        if want.shape == got.shape and torch.allclose(
            want, got, rtol=0.0, atol=far, equal_nan=True
        ):
            continue
        raise OutputsError(
            f"the output {name!r} of {whole[1]} rows is {_short(want)} computed at once and "
            f"{_short(got)} in two parts, put together by {how!r}{about}",
            hint="wh.mean weighs each part by its rows: return what is averaged over something "
            "else as its sum and its count, each with wh.sum, or as a value for every row with "
            "wh.concat",
        )


def _short(value: Tensor) -> str:
    few = ", ".join(f"{number:.6g}" for number in value.flatten()[:4].tolist())
    return few if not value.dim() else f"[{few}{', ...' if value.numel() > 4 else ''}]"
