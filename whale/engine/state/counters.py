"""Counters: numbers, words and lists of them that modules keep in Python, and forwards move.

Place in the flow: read by `engine.watch.kinds` from the copy that trains, and lent to the user's
model for a look, so that the code that is looked at is the code that runs now. A counter may sit in
an attribute, in a buffer of one element, or anywhere inside a list, a dict or an object that a
module holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from whale.engine.state.boxes import PLAIN, Box, Fields, Items, children, is_object
from whale.engine.state.changes import attributes

Place = tuple[Any, ...]
"""Path of a module, attribute, and keys inside what it holds."""
_DEPTH = 4
_ITEMS = 1000
"""Items of one container that are looked at."""


@dataclass(frozen=True, slots=True)
class _Row:
    """A container with nothing in it but numbers and words."""

    kind: type
    items: Any


def read(
    model: nn.Module, apart: Collection[str], paths: Collection[str] | None = None
) -> dict[Place, Any]:
    """What modules count, by place; of these `paths` only.

    `apart`: buffers that others keep.
    """
    found: dict[Place, Any] = {}
    modules = model.named_modules() if paths is None else _some(model, paths)
    for path, module in modules:
        for name, value in attributes(module).items():
            _collect(found, (path, name), value, _DEPTH)
        for name, buffer in module._buffers.items():
            full = f"{path}.{name}" if path else name
            if buffer is not None and is_number(buffer) and full not in apart:
                found[path, name] = buffer.item()
    return found


def is_number(buffer: torch.Tensor) -> bool:
    """Whether a buffer is as good as a number."""
    return buffer.numel() == 1 and not buffer.is_meta


def _some(model: nn.Module, paths: Collection[str]) -> Iterator[tuple[str, nn.Module]]:
    for path in paths:
        yield path, model.get_submodule(path)


def _collect(found: dict[Place, Any], place: Place, value: Any, depth: int) -> None:
    if isinstance(value, PLAIN):
        found[place] = value
    elif isinstance(value, tuple | list | deque | set | frozenset):
        items = list(value)[:_ITEMS]
        if all(isinstance(item, PLAIN) for item in items):
            unordered = isinstance(value, set | frozenset)
            found[place] = _Row(type(value), frozenset(items) if unordered else tuple(items))
        elif depth and not isinstance(value, set | frozenset):
            found[*place, len] = len(value)
            for key, item in enumerate(items):
                _collect(found, (*place, key), item, depth - 1)
    elif (
        depth and not isinstance(value, nn.Module) and (isinstance(value, dict) or is_object(value))
    ):
        for _, (key, item) in zip(range(_ITEMS), children(value), strict=False):
            _collect(found, (*place, key), item, depth - 1)


def moved(before: Mapping[Place, Any], now: Mapping[Place, Any]) -> dict[Place, Any]:
    """What is another now. What is new counts inside of containers alone.

    A split sets attributes of its own when it is installed; those are no news.
    """
    missing = object()
    return {
        place: value
        for place, value in now.items()
        if (place in before or len(place) > 2) and not _same(before.get(place, missing), value)
    }


def _same(old: Any, new: Any) -> bool:
    return type(old) is type(new) and (old == new or (old != old and new != new))  # noqa: PLR0124


def name_of(place: Place) -> str:
    """What to call it."""
    path, name, *keys = place
    inside = "".join(f"[{key!r}]" for key in keys if key is not len)
    return f"{path}.{name}{inside}" if path else f"{name}{inside}"


@contextmanager
def lent(model: nn.Module, values: Mapping[Place, Any]) -> Iterator[None]:
    """Inside, the model counts from here; afterwards as it did."""
    modules = dict(model.named_modules(remove_duplicate=False))
    undo: list[Callable[[], None]] = []
    try:
        for place, value in values.items():
            path, *keys = place
            module = modules.get(path)
            if module is not None and keys[-1] is not len:
                undo.extend(_put(module, keys, value))
        yield
    finally:
        for back in reversed(undo):
            back()


def _put(module: nn.Module, keys: list[Any], value: Any) -> list[Callable[[], None]]:
    """Writes one value; gives how to take it back. Nothing where the model has no such place."""
    holder: Any = module.__dict__
    buffer = module._buffers.get(keys[0])
    if buffer is not None:
        if len(keys) > 1:
            return []
        module._buffers[keys[0]] = torch.full_like(buffer, value)
        return [lambda: module._buffers.__setitem__(keys[0], buffer)]
    for key in keys[:-1]:
        holder = _get(holder, key)
    return _set(holder, keys[-1], value)


def _inside(holder: Any, key: Any) -> Any:
    return holder[key] if isinstance(holder, dict | list | deque | tuple) else getattr(holder, key)


def _set(holder: Any, key: Any, value: Any) -> list[Callable[[], None]]:
    if isinstance(value, _Row):
        old = _get(holder, key)
        if type(old) is value.kind and isinstance(old, list | deque | set):
            return [_refilled(old, value.items)]  # in place: others may hold it too
        if value.kind not in (tuple, list, deque, set, frozenset):
            return []
        value = value.kind(value.items)
    if isinstance(holder, dict):
        box: Box = Items(holder, "")
    elif isinstance(holder, list | deque) and isinstance(key, int) and key < len(holder):
        box = Items(holder, "")
    elif is_object(holder) and isinstance(key, str):
        box = Fields(holder, "")
    else:
        return []
    before = box.read()
    if isinstance(holder, dict | list | deque):
        holder[key] = value
    else:
        object.__setattr__(holder, key, value)
    return [lambda: box.write(before)]


def _get(holder: Any, key: Any) -> Any:
    try:
        return _inside(holder, key)
    except (KeyError, IndexError, TypeError, AttributeError):
        return None


def _refilled(holder: Any, items: Any) -> Callable[[], None]:
    box = Items(holder, "")
    before = box.read()
    box.write(tuple(items))
    return lambda: box.write(before)
