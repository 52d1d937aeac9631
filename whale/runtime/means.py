"""Means seen as sums: a loss averaged in parts is still the mean of the global batch.

Place in the flow: wraps the code that computes the loss. A mean-reducing loss returns the same
value as before; beside it the mode keeps *how many* elements it averaged, so that the executor can
weigh each part by its count and divide once by the global count (design, decision 5). Means of
different counts in one loss cannot be weighed by one number and are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from whale.errors import WhaleError
from whale.runtime.recompute import RerunMode

Count = tuple[torch.Tensor, tuple[Any, ...]]
"""Number of averaged elements, and what it was counted from: equal origins are equal counts."""


def _labels(input: Any, target: Any, weight: Any, ignore_index: int) -> Count:
    if target.is_floating_point():
        rows = input.numel() // max(1, input.shape[1] if input.dim() > 1 else 1)
        return torch.full((), float(rows), device=target.device), ("rows", rows)
    valid = target != ignore_index
    origin = ("labels", target.data_ptr(), tuple(target.shape), ignore_index, weight is None)
    if weight is None:
        return valid.sum(), origin
    picked = weight[torch.where(valid, target, torch.zeros_like(target))]
    return (picked * valid).sum(), (*origin, weight.data_ptr())


def _cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> tuple[Any, Count] | None:
    if reduction != "mean" or size_average is not None or reduce is not None:
        return None
    total = F.cross_entropy(
        input,
        target,
        weight,
        ignore_index=ignore_index,
        reduction="sum",
        label_smoothing=label_smoothing,
    )
    return total, _labels(input, target, weight, ignore_index)


def _nll_loss(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> tuple[Any, Count] | None:
    if reduction != "mean" or size_average is not None or reduce is not None:
        return None
    total = F.nll_loss(input, target, weight, ignore_index=ignore_index, reduction="sum")
    return total, _labels(input, target, weight, ignore_index)


def _elements(function: Callable[..., Any]) -> Callable[..., tuple[Any, Count] | None]:
    def counted(input: Any, target: Any, *args: Any, **kwargs: Any) -> tuple[Any, Count] | None:
        if args or kwargs.get("reduction", "mean") != "mean" or kwargs.get("weight") is not None:
            return None
        if kwargs.get("size_average") is not None or kwargs.get("reduce") is not None:
            return None
        total = function(input, target, **{**kwargs, "reduction": "sum"})
        size = torch.broadcast_shapes(input.shape, target.shape).numel()
        return total, (torch.full((), float(size), device=input.device), ("elements", size))

    return counted


def _mean(input: Any, *args: Any, **kwargs: Any) -> tuple[Any, Count] | None:
    if args or kwargs or not input.is_floating_point():
        return None
    size = input.numel()
    return input.sum(), (torch.full((), float(size), device=input.device), ("elements", size))


_MEANS: dict[Any, Callable[..., tuple[Any, Count] | None]] = {
    F.cross_entropy: _cross_entropy,
    F.nll_loss: _nll_loss,
    F.mse_loss: _elements(F.mse_loss),
    F.l1_loss: _elements(F.l1_loss),
    F.smooth_l1_loss: _elements(F.smooth_l1_loss),
    F.huber_loss: _elements(F.huber_loss),
    F.binary_cross_entropy: _elements(F.binary_cross_entropy),
    F.binary_cross_entropy_with_logits: _elements(F.binary_cross_entropy_with_logits),
    torch.mean: _mean,
    torch.Tensor.mean: _mean,
}
# What a loss may go through and still be weighed by its count.
_LINEAR = frozenset(
    "mul __mul__ __rmul__ div __truediv__ neg __neg__ add __add__ __radd__ sub __sub__ __rsub__ "
    "__iadd__ add_ float double to clone view reshape squeeze".split()
)


class MeanTracker(RerunMode):
    """Follows means to the loss.

    After the code ran, `count(loss)` says how many elements it averaged.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[int, Count] = {}
        self.keep: list[torch.Tensor] = []
        self.clash: list[int] = []

    def again(self) -> MeanTracker:
        """Computes means the same way, and counts nothing twice."""
        return MeanTracker()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        mean = _MEANS.get(func)
        if mean is not None:
            found = mean(*args, **kwargs)
            if found is not None:
                total, count = found
                # An empty part (no valid label, no row) averages to 0, not to nan; its weight is 0.
                return self._track(total / count[0].clamp(min=1).to(total.dtype), count)
        out = func(*args, **kwargs)
        if self.counts and getattr(func, "__name__", "") in _LINEAR:
            known = [c for a in args if (c := self.counts.get(id(a))) is not None]
            if known and isinstance(out, torch.Tensor) and out.dim() == 0:
                self._track(out, known[0])
                if any(c[1] != known[0][1] for c in known) or any(
                    id(a) in self.clash for a in args
                ):
                    self.clash.append(id(out))
        return out

    def _track(self, out: torch.Tensor, count: Count) -> torch.Tensor:
        self.keep.append(out)
        self.counts[id(out)] = count
        return out

    def count(self, loss: torch.Tensor, rows: int) -> torch.Tensor:
        """The weight of a part: its count, or its rows for a loss that is no known mean."""
        if id(loss) in self.clash:
            raise WhaleError(
                "the loss adds means over different numbers of elements, which no single weight "
                "makes exact",
                hint="return one mean, or give every term the same count",
            )
        found = self.counts.get(id(loss))
        if found is None:
            return torch.full((), float(rows), device=loss.device)
        return found[0].detach()
