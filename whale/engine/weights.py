"""Weights: this rank's pieces of the parameters, and its copy of the module tree.

Place in the flow: used by `engine.lower`. The user's module is never changed: the copy shares its
code and attributes, holds the pieces the plan gives this rank, and nothing (meta tensors) for the
rest. A model on the meta device is initialised here, each module from its own seed, so that every
layout starts alike.
"""

from __future__ import annotations

import copy
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from whale.errors import WhaleError
from whale.ir.plan import Plan
from whale.ir.sharding import Piece
from whale.nn.encoders import install_padding
from whale.runtime.compat import run_eagerly


def take(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The part of a whole tensor that `piece` names."""
    for dim, spans in piece.dims:
        parts = [tensor.narrow(dim, low, high - low) for low, high in spans]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return tensor


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


def local_copy(
    model: nn.Module, plan: Plan, rank: int, device: torch.device, seed: int
) -> tuple[nn.Module, dict[str, nn.Parameter], dict[str, Piece]]:
    """This rank's copy of the model, its parameters by first name, and the piece each one is."""
    pieces: dict[str, Piece] = {}
    for home in plan.homes:
        piece = plan.piece(home, rank)
        if piece is not None:
            pieces[home.name] = piece
    memo: dict[int, Any] = {}
    params: dict[str, nn.Parameter] = {}
    fresh = _initialise(model, set(pieces), seed)
    for name, parameter in model.named_parameters():
        if name not in pieces:
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            continue
        source = fresh[name] if parameter.is_meta else parameter.detach()
        data = take(source, pieces[name]).to(device, copy=True).contiguous()
        params[name] = nn.Parameter(data, requires_grad=parameter.requires_grad)
        # Marks of the user's, for the optimizer's factory.
        params[name].__dict__.update(parameter.__dict__)
        memo[id(parameter)] = params[name]
        fresh.pop(name, None)
    for name, buffer in model.named_buffers():
        source = fresh[name] if buffer.is_meta and name in fresh else buffer.detach()
        memo[id(buffer)] = source.to(device, copy=True) if not source.is_meta else source
    local = copied(model, memo)
    run_eagerly(local)
    several = any(len(stage.virtual_device.replicas) > 1 for stage in plan.stages)
    install_padding(local, in_parts=several)
    for module in local.modules():
        if isinstance(module, nn.RNNBase) and not any(p.is_meta for p in module.parameters()):
            module.flatten_parameters()
    return local, params, pieces


def _initialise(model: nn.Module, wanted: set[str], seed: int) -> dict[str, torch.Tensor]:
    """Values of meta parameters and buffers, module by module, each from a seed of its own."""
    values: dict[str, torch.Tensor] = {}
    first_names = {id(p): name for name, p in model.named_parameters()}
    for path, module in model.named_modules():
        own = {n: p for n, p in module.named_parameters(recurse=False) if p.is_meta}
        buffers = {n: b for n, b in module.named_buffers(recurse=False) if b.is_meta}
        names = {n: first_names[id(p)] for n, p in own.items()}
        if not any(name in wanted for name in names.values()) and not buffers:
            continue
        filled = copied(module).to_empty(device="cpu", recurse=False)
        generator_seed = (seed * 0x9E3779B1 + zlib.crc32(path.encode())) & 0x7FFFFFFF
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator_seed)
            _reset(model, path, filled)
        prefix = f"{path}." if path else ""
        for local, name in names.items():
            if name in wanted and name not in values and name == f"{prefix}{local}":
                values[name] = getattr(filled, local).detach()
        for local in buffers:
            values[f"{prefix}{local}"] = getattr(filled, local).detach()
    return values


def _reset(model: nn.Module, path: str, module: nn.Module) -> None:
    with torch.no_grad():
        if hasattr(model, "_init_weights"):
            model._init_weights(module)  # type: ignore[operator]
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()  # type: ignore[operator]
        else:
            raise WhaleError(
                f"{path or 'the root'} ({type(module).__name__}) is on the meta device and has no "
                "`reset_parameters`, so its parameters have no values",
                hint="give it a reset_parameters() method, or build the model with real weights",
            )
