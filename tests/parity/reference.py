"""The truth that plans are held against: one process, plain torch, global micro-batches in order.

Place in the flow: beside it, and independent of it: nothing here is Whale's, and a case reaches it
as an argument. The loss of a step is the sum of the losses of all labels of the global batch over
their count, however the batch is cut; batch norm sees one global micro-batch at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, ...] | dict[str, Tensor]


class Trainable(Protocol):
    """What the reference needs of a case; see `zoo.Case`."""

    @property
    def build(self) -> Callable[[], nn.Module]: ...
    @property
    def loss(self) -> Callable[..., Tensor] | None: ...
    @property
    def count(self) -> Callable[[Any], int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What a run left behind.

    Attributes:
        losses: global mean loss of each step.
        gradients: of the first step, before clipping, by parameter name; a tied weight has one.
        gradient_norms: of each step, before clipping.
        state_dict: after the last step, tied names and buffers included.
    """

    losses: list[float]
    gradients: dict[str, Tensor]
    gradient_norms: list[float]
    state_dict: dict[str, Tensor]


def train_reference(
    case: Trainable,
    batches: Sequence[Batch],
    micro_batches: Sequence[Sequence[int]],
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    *,
    max_norm: float | None = None,
) -> Reference:
    """Trains the case's model for a step per batch.

    Args:
        case: the model and its loss.
        batches: one global batch per step.
        micro_batches: for each step the rows of each global micro-batch, in order.
        optimizer: makes the optimizer from the parameters.
        max_norm: clips the global gradient norm before the step.
    """
    model = case.build()
    optimize = optimizer(model.parameters())
    losses: list[float] = []
    norms: list[float] = []
    gradients: dict[str, Tensor] = {}
    for batch, sizes in zip(batches, micro_batches, strict=True):
        optimize.zero_grad()
        losses.append(_accumulate(case, model, batch, sizes))
        if not gradients:
            gradients = {
                name: p.grad.detach().clone()
                for name, p in model.named_parameters()
                if p.grad is not None
            }
        limit = float("inf") if max_norm is None else max_norm
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        optimize.step()
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return Reference(losses=losses, gradients=gradients, gradient_norms=norms, state_dict=state)


def relative_error(a: Tensor, b: Tensor, largest: float) -> float:
    """The greatest difference of `a` from the truth `b`, relative to the greatest entry of `b`.

    `largest` is the greatest entry of all tensors compared; an entry below a thousandth of it is
    measured against that thousandth, so that tensors that are zero but for rounding pass.
    """
    scale = max(_greatest(b), 1e-3 * largest)
    difference = _greatest(a - b)
    return difference / scale if scale else difference


def greatest_entry(tensors: Iterable[Tensor]) -> float:
    """The `largest` of `relative_error` for these tensors."""
    return max((_greatest(t) for t in tensors), default=0.0)


def split_batch(batch: Batch, sizes: Sequence[int]) -> list[Batch]:
    """Cuts a global batch into consecutive micro-batches of these rows."""
    if isinstance(batch, Mapping):
        columns = {key: value.split(list(sizes)) for key, value in batch.items()}
        return [{key: parts[m] for key, parts in columns.items()} for m in range(len(sizes))]
    return list(zip(*(value.split(list(sizes)) for value in batch), strict=True))


def _accumulate(case: Trainable, model: nn.Module, batch: Batch, sizes: Sequence[int]) -> float:
    """Runs the micro-batches of one step; leaves the gradient of the global mean, returns that."""
    total = case.count(batch)
    mean = 0.0
    for part in split_batch(batch, sizes):
        loss = _loss_sum(case, model, part) / total
        loss.backward()
        mean += loss.item()
    return mean


def _loss_sum(case: Trainable, model: nn.Module, part: Batch) -> Tensor:
    """The sum of the losses of a micro-batch's labels; a model's own mean is multiplied out."""
    if case.loss is None:
        assert isinstance(part, Mapping)
        return model(**part).loss * case.count(part)
    assert isinstance(part, tuple)
    return case.loss(model(*part[:-1]), part[-1], reduction="sum")


def _greatest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0
