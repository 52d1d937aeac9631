"""Shares: how much each micro-batch counts in the loss of the global batch, found by trying.

Place in the flow: under the one-device run of `wh.verify`, where there are several micro-batches.
Nothing is counted here, neither rows nor labels: the loss of the whole batch, as the user wrote it,
is in most models a mean of the losses of its micro-batches, L = sum of w_m L_m. Both sides are
differentiated, and the w that make the derivatives equal are the shares. Where none do, it is none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from whale.nn.moe.layer import MoE
from whale.runtime import batch as batches

Span = tuple[int, int]
At = Callable[[int, Span], AbstractContextManager[Any]]
"""Around a forward: the random numbers of a micro-batch (its number, its rows)."""

_MOST = 200_000
"""Entries of the derivatives that are compared; more would not tell more."""


def cut(batch: Any, low: int, high: int) -> Any:
    """Rows [low, high) of every tensor whose dim 0 is the batch."""
    rows = batches.num_rows(batch)
    leaves = [
        leaf[low:high] if leaf.dim() and leaf.shape[0] == rows else leaf
        for leaf in batches.leaves(batch)
    ]
    return batches.rebuild(batch, leaves)


def shares(
    model: nn.Module, loss: batches.Loss | None, batch: Any, spans: Sequence[Span], at: At
) -> list[float] | None:
    """The share of each micro-batch; None where the loss is no mean of theirs.

    Args:
        model: A copy; it is run in eval mode, where rows do not meet.
        loss: The user's.
        batch: The global batch.
        spans: The rows of each micro-batch.
        at: The random numbers.
    """
    if len(spans) == 1:
        return [1.0]
    model.eval()
    room = {m: m.capacity_factor for m in model.modules() if isinstance(m, MoE)}
    try:
        for module in room:
            module.capacity_factor = None  # with limited room the rows of a batch would meet
        return _shares(model, loss, batch, spans, at)
    finally:
        for module, factor in room.items():
            module.capacity_factor = factor


def _shares(
    model: nn.Module, loss: batches.Loss | None, batch: Any, spans: Sequence[Span], at: At
) -> list[float] | None:
    rows = batches.num_rows(batch)
    parts = [cut(batch, low, high) for low, high in spans]
    guess = [(high - low) / rows for low, high in spans]
    systems: list[Callable[[], list[_System]]] = [
        lambda: _by_parameter(model, loss, batch, parts, spans, at)
    ]
    if loss is not None:
        systems.insert(0, lambda: _by_output(model, loss, batch, parts, spans, at))
    for make in systems:
        try:
            made = make()
        except Exception:  # noqa: S112 - outputs that cannot be joined, a loss that wants training
            continue
        found = made[0].solve(guess)
        if found is not None:
            return found
        if any(getattr(m, "rows_interact", False) for m in model.modules()):
            alone = [w for system in made[1:] if (w := system.solve(guess)) is not None]
            if alone and (torch.tensor(alone) - torch.tensor(alone[0])).abs().max() < 1e-6:
                return alone[0]
    return None


class _System:
    """Derivatives of the whole loss, and of each part's, by the same variables."""

    def __init__(
        self, whole: Tensor, parts: Sequence[Tensor | None], loose: bool, *, alone: bool = False
    ) -> None:
        self.whole, self.parts, self.loose = whole.double(), parts, loose
        self.alone = alone
        """Of one parameter among several, whose equations must leave no choice."""

    def solve(self, guess: Sequence[float]) -> list[float] | None:
        """The shares, if there are any; where several would do, those nearest to `guess`."""
        there = [m for m, part in enumerate(self.parts) if part is not None]
        if not there or not torch.isfinite(self.whole).all() or not self.whole.any():
            return None
        columns = torch.stack([p.double() for p in self.parts if p is not None], 1)
        target = self.whole
        if target.numel() > _MOST:
            chosen = torch.randperm(target.numel(), generator=torch.Generator().manual_seed(0))
            columns, target = columns[chosen[:_MOST]], target[chosen[:_MOST]]
        if self.alone and int(torch.linalg.matrix_rank(columns, rtol=1e-6)) < len(there):
            return None
        start = torch.tensor([guess[m] for m in there], dtype=torch.float64)
        rest = target - columns @ start
        shift = torch.linalg.lstsq(columns, rest.unsqueeze(1), driver="gelsd").solution.squeeze(1)
        found = start + shift
        error = float((columns @ found - target).norm() / target.norm())
        if not error <= (1e-4 if self.loose else 1e-10):
            return None
        result = [0.0] * len(self.parts)
        for m, share in zip(there, found.tolist(), strict=True):
            result[m] = share
        return result


def _by_output(
    model: nn.Module,
    loss: batches.Loss,
    batch: Any,
    parts: Sequence[Any],
    spans: Sequence[Span],
    at: At,
) -> list[_System]:
    """Derivatives by the model's outputs: the loss alone is tried, whatever the model does."""
    outputs: list[list[Tensor]] = []
    example: Any = None
    losses: list[Tensor | None] = []
    for number, (part, span) in enumerate(zip(parts, spans, strict=True)):
        inputs, target = batches.split_target(part)
        with torch.no_grad(), at(number, span):
            out = batches.run_model(model, inputs)
        leaves = [t.detach().clone() for t in batches.leaves(out)]
        outputs.append([t.requires_grad_(t.is_floating_point()) for t in leaves])
        example = out
        losses.append(_finite(value_of(loss(batches.rebuild(out, outputs[-1]), target))))
    joined = [
        torch.cat(same) if same[0].dim() else torch.stack(same).mean()
        for same in zip(*outputs, strict=True)
    ]
    whole = value_of(loss(batches.rebuild(example, joined), batches.split_target(batch)[1]))
    variables = [[t for t in leaves if t.requires_grad and t.dim()] for leaves in outputs]
    every = [t for leaves in variables for t in leaves]
    columns = [None if value is None else _gradient(value, every) for value in losses]
    return [_System(_gradient(whole, every), columns, whole.dtype != torch.float64)]


def _by_parameter(
    model: nn.Module,
    loss: batches.Loss | None,
    batch: Any,
    parts: Sequence[Any],
    spans: Sequence[Span],
    at: At,
) -> list[_System]:
    """Derivatives by all parameters; then by each one alone, for terms in which rows meet.

    A term that balances experts has none by the output layer, say.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    with at(0, (0, batches.num_rows(batch))):
        whole = value_of(batches.call_model(model, loss, batch)["loss"])
    columns: list[list[Tensor] | None] = []
    for number, (part, span) in enumerate(zip(parts, spans, strict=True)):
        with at(number, span):
            value = _finite(value_of(batches.call_model(model, loss, part)["loss"]))
        columns.append(None if value is None else _gradients(value, params))
    wholes = _gradients(whole, params)
    loose = whole.dtype != torch.float64
    joined = [None if c is None else torch.cat(c) for c in columns]
    made = [_System(torch.cat(wholes), joined, loose)]
    if all(c is not None for c in columns):
        for index, one in enumerate(wholes):
            if one.numel() > len(parts):
                each = [c[index] for c in columns if c is not None]
                made.append(_System(one, each, loose, alone=True))
    return made


def value_of(result: Any) -> Tensor:
    """The loss in what the user's loss or model returned."""
    value: Tensor = result if isinstance(result, Tensor) else batches.named_outputs(result)["loss"]
    return value


def _finite(value: Tensor) -> Tensor | None:
    """None for a micro-batch without any label: its mean is nan, and its share 0."""
    return value if torch.isfinite(value) else None


def _gradient(value: Tensor, variables: Sequence[Tensor]) -> Tensor:
    return torch.cat(_gradients(value, variables))


def _gradients(value: Tensor, variables: Sequence[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(value, variables, allow_unused=True)
    return [
        _real(torch.zeros_like(v) if g is None else g)
        for v, g in zip(variables, found, strict=True)
    ]


def _real(gradient: Tensor) -> Tensor:
    gradient = gradient if gradient.layout == torch.strided else gradient.to_dense()
    gradient = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    return gradient.flatten().double()
