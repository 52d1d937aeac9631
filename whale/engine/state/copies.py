"""Copies: modules copied whole, the tensors they hold, and both in another dtype.

Place in the flow: under all that runs the user's code on a copy.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from whale.ir.precision import Precision
from whale.runtime.masters import split


def plain_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    """Tensors in attributes of modules that are neither weights nor buffers."""
    for module in model.modules():
        for name, value in module.__dict__.items():
            if name not in ("_parameters", "_buffers", "_modules"):
                yield from reachable(value)


def own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Weights, buffers and tensors in attributes of a module and those in it, by name."""
    found: dict[str, torch.Tensor] = {}
    for path, each in module.named_modules():
        held = {**each._parameters, **each._buffers, **each.__dict__}
        for name, value in held.items():
            if isinstance(value, torch.Tensor):
                found[f"{path}.{name}" if path else name] = value
    return found


def reachable(value: Any, depth: int = 5) -> Iterator[torch.Tensor]:
    """Tensors in nested containers and in attributes of objects other than modules."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    if depth == 0 or isinstance(value, nn.Module | str | bytes | int | float | type):
        return
    items: Iterable[Any] = ()
    if isinstance(value, dict):
        items = list(value.values())
    elif isinstance(value, list | tuple | set | frozenset | deque):
        items = list(value)
    elif hasattr(value, "__dict__") and not callable(value):
        items = list(vars(value).values())
    for item in items:
        yield from reachable(item, depth - 1)


def copied(module: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A deep copy. Values of the last forward, computed anew by the next, lose their graph.

    Torch copies no tensor that has one. `memo`: what stands for a tensor in the copy, by its id.
    """
    known = {} if memo is None else memo
    for tensor in plain_tensors(module):
        if tensor.grad_fn is not None and id(tensor) not in known:
            known[id(tensor)] = tensor.detach().clone()
    return copy.deepcopy(module, known)


_COMPLEX = {torch.float64: torch.complex128, torch.float32: torch.complex64}


def in_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A floating tensor in `dtype`, a complex one in that of its parts, any other as it is."""
    if tensor.is_floating_point():
        return tensor.to(dtype)
    return tensor.to(_COMPLEX.get(dtype, tensor.dtype)) if tensor.is_complex() else tensor


def module_in(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The module with its tensors in `dtype`. `Module.to` drops what is imaginary."""
    module._apply(lambda tensor: in_dtype(tensor, dtype))  # type: ignore[no-untyped-call]
    return module


def in_precision(model: nn.Module, precision: Precision) -> nn.Module:
    """The model with parameters and buffers in the plan's dtype: itself where that is its own.

    Batch norms stay as they are: their statistics are sums over many.
    """
    if not precision.parameters:
        return model
    dtype = getattr(torch, precision.parameters)
    memo: dict[int, Any] = {}
    for parameter in _cast(model, nn.Module.named_parameters).values():
        value = parameter.detach()
        if precision.master == "split" and not value.is_meta:
            value = split(value.float()).upper
        made = nn.Parameter(value.to(dtype), requires_grad=parameter.requires_grad)
        made.__dict__.update(parameter.__dict__)
        memo[id(parameter)] = made
    for buffer in _cast(model, nn.Module.named_buffers).values():
        memo[id(buffer)] = buffer.detach().to(dtype)
    return copied(model, memo)


def cast_buffers(model: nn.Module, precision: Precision) -> dict[str, torch.dtype]:
    """By buffer that the plan has in another dtype, that."""
    if not precision.parameters:
        return {}
    dtype = getattr(torch, precision.parameters)
    return dict.fromkeys(_cast(model, nn.Module.named_buffers), dtype)


def _cast(model: nn.Module, named: Callable[..., Iterable[Any]]) -> dict[str, torch.Tensor]:
    """The floating tensors that are in no batch norm, by name."""
    norms = nn.modules.batchnorm._BatchNorm
    stay = {
        id(t)
        for module in model.modules()
        if isinstance(module, norms)
        for t in (*module.parameters(recurse=False), *module.buffers(recurse=False))
    }
    return {n: t for n, t in named(model) if t.is_floating_point() and id(t) not in stay}
