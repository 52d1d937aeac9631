"""Weights: this rank's pieces of the parameters, and its copy of the module tree.

Place in the flow: used by `engine.lower`. The user's module is never changed: the copy shares its
code and attributes, holds the pieces the plan gives this rank, and nothing (meta tensors) for the
rest. A model on the meta device is initialised here, each module from its own seed, so that every
layout starts alike.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from whale.engine.state.copies import cast_buffers, copied
from whale.errors import WhaleError
from whale.ir.keeping import Share, kept_pieces, shares_of
from whale.ir.plan import Home, Plan
from whale.ir.sharding import Piece, Span
from whale.nn.encoders import install_padding
from whale.runtime.compat import run_eagerly
from whale.runtime.masters import split
from whale.runtime.moving import HostMemory
from whale.runtime.store import Held
from whale.runtime.units import stand_in


def take(tensor: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The part of a whole tensor that `piece` names."""
    for dim, spans in piece.dims:
        parts = [tensor.narrow(dim, low, high - low) for low, high in spans]
        tensor = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return tensor


def local_copy(
    model: nn.Module, plan: Plan, rank: int, device: torch.device, seed: int
) -> tuple[nn.Module, Held]:
    """This rank's copy of the model, and its parameters by first name."""
    pieces = {h.name: piece for h in plan.homes if (piece := plan.piece(h, rank)) is not None}
    keeps = kept_pieces(plan, rank)
    homes = {home.name: home for home in plan.homes}
    memo: dict[int, Any] = {}
    memory = HostMemory(device)
    shares = shares_of(plan, rank)
    held = Held(params={}, pieces=pieces, kept={}, kept_pieces=keeps, lower={})
    given = {name: parameter for name, parameter in model.named_parameters()}
    fresh: dict[str, torch.Tensor] = {}
    for name, source in _values(model, set(pieces), seed):
        if name in given:
            _hold(
                held, plan, homes[name], given[name], source, device, memory, shares.get(name, ())
            )
        else:
            fresh[name] = source
    for name, parameter in given.items():
        if name not in pieces:
            empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            continue
        memo[id(parameter)] = held.params[name]
    held = _in_order(held, given)
    cast = cast_buffers(model, plan.precision)
    for name, buffer in model.named_buffers():
        source = fresh[name] if buffer.is_meta and name in fresh else buffer.detach()
        dtype = cast.get(name, source.dtype)
        memo[id(buffer)] = source.to(device, dtype, copy=True) if not source.is_meta else source
    local = copied(model, memo)
    run_eagerly(local)
    several = any(len(stage.virtual_device.replicas) > 1 for stage in plan.stages)
    install_padding(local, in_parts=several)
    for module in local.modules():
        if isinstance(module, nn.RNNBase) and not any(p.is_meta for p in module.parameters()):
            module.flatten_parameters()
    return local, held


def _hold(
    held: Held,
    plan: Plan,
    home: Home,
    parameter: nn.Parameter,
    source: torch.Tensor,
    device: torch.device,
    memory: HostMemory,
    shares: Sequence[Share],
) -> None:
    """Adds what this rank computes with and keeps of a parameter whose whole value is `source`."""

    def made(data: torch.Tensor) -> nn.Parameter:
        new = nn.Parameter(data, requires_grad=parameter.requires_grad)
        # Marks of the user's, for the optimizer's factory.
        new.__dict__.update(parameter.__dict__)
        return new

    name, piece = home.name, held.pieces[home.name]
    dtype = _dtype(home.dtype, source)
    wide = _dtype(plan.precision.kept(home.dtype), source)
    halves = plan.precision.master == "split" and plan.precision.parameters == home.dtype

    def here(held: Piece, dtype: torch.dtype) -> torch.Tensor:
        taken = take(source, held)
        taken = split(taken.float()).upper if halves else taken.to(dtype)
        return taken.to(device, copy=True).contiguous()

    def kept(held: Piece, dtype: torch.dtype) -> torch.Tensor:
        if not home.hosted:
            return here(held, dtype)
        taken = take(source, held)
        taken = split(taken.float()).upper if halves else taken.to(dtype)
        return memory.holding(taken)

    if home.resident:
        data = here(piece, dtype)
    else:
        data = stand_in(source.new_empty(0, device=device, dtype=dtype), piece.shape(home.shape))
    held.params[name] = made(data)
    if not plan.apart(home):
        held.kept[name] = held.params[name]
    elif name in held.kept_pieces:
        rows = _rows(shares) if home.resident and not home.hosted and wide == dtype else None
        # In the memory that is computed with, where it can be: an update is then in place at once.
        part = kept(held.kept_pieces[name], wide) if rows is None else data[rows[0] : rows[1]]
        held.kept[name] = made(part)
    if halves and name in held.kept:
        lower = split(take(source, held.kept_pieces[name]).float()).lower
        held.lower[name] = memory.holding(lower) if home.tier == "host" else lower.to(device)


def _dtype(name: str, source: torch.Tensor) -> torch.dtype:
    """By name; what the model's graph does not name is as it is."""
    found: torch.dtype = getattr(torch, name, source.dtype)
    return found


def _rows(shares: Sequence[Share]) -> Span | None:
    """The rows of a rank's piece that it keeps, if that is what it keeps."""
    if not shares:
        return None
    (how, member), *more = shares
    whole = not more and how.slice.span is None and bool(how.shape)
    return how.part(member) if whole and how.dim == 0 else None


def _in_order(held: Held, given: Iterable[str]) -> Held:
    """In the model's own order, which tensors that are initialised late do not have."""
    return Held(
        params={name: held.params[name] for name in given if name in held.params},
        pieces=held.pieces,
        kept={name: held.kept[name] for name in given if name in held.kept},
        kept_pieces=held.kept_pieces,
        lower=held.lower,
    )


def _values(model: nn.Module, wanted: set[str], seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Whole values of parameters and of meta buffers by first name, one module's at a time.

    Those on the meta device are initialised, module by module, each from a seed of its own.
    """
    first_names = {id(p): name for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        if name in wanted and not parameter.is_meta:
            yield name, parameter.detach()
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        own = {n: p for n, p in module.named_parameters(recurse=False) if p.is_meta}
        buffers = {n: b for n, b in module.named_buffers(recurse=False) if b.is_meta}
        # A tied parameter is drawn where it has its first name.
        names = {n: name for n, p in own.items() if (name := first_names[id(p)]) == f"{prefix}{n}"}
        if not any(name in wanted for name in names.values()) and not buffers:
            continue
        filled = copied(module).to_empty(device="cpu", recurse=False)
        generator_seed = (seed * 0x9E3779B1 + zlib.crc32(path.encode())) & 0x7FFFFFFF
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(generator_seed)
            _reset(model, path, filled)
        for local, name in names.items():
            if name in wanted:
                yield name, getattr(filled, local).detach()
        for local in buffers:
            yield f"{prefix}{local}", getattr(filled, local).detach()


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
