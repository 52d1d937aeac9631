"""Closures: the tensors that a loss holds beside what it is given.

Place in the flow: asked by `engine.trace` when a loss begins. Class weights in a closure, a global
or a loss module have values before anything is traced, and are constants of the glue.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from whale.engine.state.copies import plain_tensors, reachable

_DEPTH = 4
"""Functions that call functions."""


def held_tensors(thing: Any, depth: int = _DEPTH) -> Iterator[torch.Tensor]:
    """The tensors a function, a module or anything they hold can read by itself, in order."""
    if isinstance(thing, nn.Module):
        yield from thing.parameters()
        yield from thing.buffers()
        yield from plain_tensors(thing)
        for kind in {type(module) for module in thing.modules()} if depth else ():
            if not kind.__module__.startswith("torch."):
                yield from held_tensors(kind.forward, depth - 1)
        return
    if not callable(thing) and not isinstance(thing, ModuleType):
        yield from reachable(thing)
    if depth == 0 or isinstance(thing, type | ModuleType):
        return
    held: list[Any] = []
    if isinstance(thing, partial):
        held = [thing.func, *thing.args, *thing.keywords.values()]
    elif isinstance(thing, MethodType):
        held = [thing.__self__, thing.__func__]
    elif isinstance(thing, FunctionType):
        held = _variables(thing)
    elif callable(thing) and hasattr(thing, "__dict__"):
        held = [*vars(thing).values(), type(thing).__call__]
    for item in held:
        yield from held_tensors(item, depth - 1)


def _variables(function: FunctionType) -> list[Any]:
    """What the code of a function may name, without what torch's own code does."""
    if str(function.__module__).startswith("torch."):
        return []
    found: list[Any] = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # still empty
            continue
    names = _names(function.__code__)
    found += [function.__globals__[n] for n in names if n in function.__globals__]
    return [*found, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
