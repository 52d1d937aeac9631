"""Loose ends: what a copy of a model cannot carry, and so is refused before one is made.

Place in the flow: asked by `wh.parallelize` after capture. What trains is a copy with tensors of
its own. It cannot keep hooks on the user's parameters, memory that two tensors share, or values
that were computed from weights outside of `forward`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm

from whale.engine.state.copies import plain_tensors
from whale.errors import WhaleError


def refuse_loose_ends(model: nn.Module, changes: Iterable[str] | None) -> None:
    """Raises WhaleError for the first one; `changes` is what a forward changes, if known."""
    _refuse_hooks(model)
    _refuse_shared_memory(model)
    _refuse_computed(model, frozenset(changes or ()))
    _refuse_views(model)


def hooked(tensor: torch.Tensor) -> bool:
    """Whether gradients of a tensor go through hooks of the user's."""
    return bool(tensor._backward_hooks) or bool(
        getattr(tensor, "_post_accumulate_grad_hooks", None)
    )


def _span(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Where it lies in memory; None if it does not."""
    if tensor.is_meta or not tensor.numel() or tensor.layout is not torch.strided:
        return None
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _refuse_views(model: nn.Module) -> None:
    """Attributes that are views of a weight: a copy of the model has old values there."""
    known = {id(p): span for p in model.parameters() if (span := _span(p)) is not None}
    computed = _made_before_forwards(model)
    for tensor in plain_tensors(model):
        span = _span(tensor)
        if span is None or id(tensor) in known or id(tensor) in computed:
            continue
        for name, parameter in model.named_parameters():
            low, high = known.get(id(parameter), (0, 0))
            if low < span[1] and span[0] < high:
                raise WhaleError(
                    f"an attribute of the model is a view of {name} (`{name}.detach()`, `.data`, a "
                    "slice): what trains is a copy, in which it would keep the first values",
                    hint=f"read {name} itself where it is needed",
                )


def _made_before_forwards(model: nn.Module) -> set[int]:
    """Attributes that a hook of `nn.utils.spectral_norm` makes anew before every forward."""
    return {
        id(getattr(module, hook.name))
        for module in model.modules()
        for hook in module._forward_pre_hooks.values()
        if isinstance(hook, SpectralNorm)
    }


def _refuse_hooks(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if hooked(parameter):
            raise WhaleError(
                f"{name} has a gradient hook, which would see a part of a sum, or a shard",
                hint="remove the hook (handle.remove()); change gradients in the optimizer, or in "
                "the model with an autograd.Function",
            )


def _refuse_shared_memory(model: nn.Module) -> None:
    """Tensors that are not one but share memory: copies of them would part."""
    own = [*model.named_parameters(), *model.named_buffers()]
    spans = [(*span, name) for name, tensor in own if (span := _span(tensor)) is not None]
    end, holder = 0, ""
    for low, high, name in sorted(spans):
        if low < end:
            raise WhaleError(
                f"{holder} and {name} share memory, but are two tensors: in a copy they would part",
                hint="tie weights by assigning the parameter itself (b.weight = a.weight)",
            )
        if high > end:
            end, holder = high, name


def _refuse_computed(model: nn.Module, changes: frozenset[str]) -> None:
    for path, module in model.named_modules():
        for name, value in module.__dict__.items():
            full = f"{path}.{name}" if path else name
            computed = isinstance(value, torch.Tensor) and value.grad_fn is not None
            if computed and full not in changes:
                raise WhaleError(
                    f"{full} was computed from weights outside of forward and keeps its graph, "
                    "which a copy cannot",
                    hint="compute it in forward, or detach it",
                )
