"""Boxes: things that hold values and can be written to, whatever they are.

Place in the flow: found by `engine.state.outside` and `engine.state.following` around the user's
code. A dict, a list, an object, a class, variables of a file, a closure's cell, an array, a plain
tensor: each is read into a tuple that can be compared and put back.
"""

from __future__ import annotations

import copy
import functools
import itertools
import sys
import warnings
from argparse import Namespace
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator
from operator import is_
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, range)
"""Values that nothing can change."""
Values = tuple[Any, ...]
_ABSENT = object()
_LARGE = 1_000_000
"""Elements of an array or a tensor that is not kept."""
_SYSTEM = frozenset(sys.stdlib_module_names) - {"__main__"} | {"torch", "numpy", "whale", "pytest"}
_LIBRARIES = frozenset(
    "transformers torchvision torchaudio timm diffusers peft accelerate einops safetensors".split()
)
"""On top of torch: objects of theirs are a model's, variables of their files are not."""
_ITERATORS: tuple[type, ...] = (
    itertools.count,
    itertools.cycle,
    itertools.repeat,
    itertools.chain,
    type(iter([])),
    type(iter(())),
    type(iter(range(1))),
    type(iter({})),
)


class Box:
    """Something that holds values, with what to call it."""

    def __init__(self, thing: Any, name: str) -> None:
        self.thing, self.name = thing, name

    def read(self) -> Values:
        """What it holds now."""
        raise NotImplementedError

    def write(self, values: Values) -> None:
        """It holds again what was read."""
        raise NotImplementedError

    def holds(self, values: Values) -> bool:
        """Whether nothing was put in, taken out or exchanged since."""
        now = self.read()
        return len(now) == len(values) and all(map(is_, now, values))

    def named(self, values: Values) -> dict[Any, Any]:
        """What was read, by key, attribute or place."""
        return dict(enumerate(values))


class Items(Box):
    """A dict, list, deque or set; past the methods of a subclass, which may refuse."""

    def __init__(self, thing: Any, name: str) -> None:
        super().__init__(thing, name)
        kinds: tuple[Any, ...] = (OrderedDict, dict, deque, list, set)
        self.kind = next(kind for kind in kinds if isinstance(thing, kind))

    def read(self) -> Values:
        """Of a dict the keys, then the values."""
        if isinstance(self.thing, dict):
            return (*self.kind.keys(self.thing), *self.kind.values(self.thing))
        return tuple(self.kind.__iter__(self.thing))

    def write(self, values: Values) -> None:
        """The same object, with what was in it."""
        self.kind.clear(self.thing)
        if isinstance(self.thing, dict):
            for key, value in _halves(values).items():
                self.kind.__setitem__(self.thing, key, value)
        elif isinstance(self.thing, set):
            self.kind.update(self.thing, values)
        else:
            self.kind.extend(self.thing, values)

    def named(self, values: Values) -> dict[Any, Any]:
        """Of a dict by key, of a set by item."""
        if isinstance(self.thing, dict):
            return _halves(values)
        return dict.fromkeys(values, True) if isinstance(self.thing, set) else super().named(values)


class Variables(Box):
    """Some variables of a file, or attributes of a module, by name."""

    def __init__(self, thing: dict[str, Any], name: str, names: Collection[str]) -> None:
        super().__init__(thing, name)
        self.names = tuple(sorted(names))

    def read(self) -> Values:
        """In the order of the names."""
        get = self.thing.get
        return tuple([get(name, _ABSENT) for name in self.names])

    def write(self, values: Values) -> None:
        """One that was not there is gone again."""
        for name, value in zip(self.names, values, strict=True):
            if value is _ABSENT:
                self.thing.pop(name, None)
            else:
                self.thing[name] = value

    def named(self, values: Values) -> dict[Any, Any]:
        """By name."""
        return {n: v for n, v in zip(self.names, values, strict=True) if v is not _ABSENT}


class Fields(Box):
    """The attributes of an object, in its dict and in slots."""

    def __init__(self, thing: Any, name: str) -> None:
        super().__init__(thing, name)
        self.slots = tuple(_slots(type(thing)))
        self.held = Items(vars(thing), name) if hasattr(thing, "__dict__") else None

    def read(self) -> Values:
        """Slots first."""
        slots = tuple(getattr(self.thing, slot, _ABSENT) for slot in self.slots)
        return slots + (self.held.read() if self.held is not None else ())

    def write(self, values: Values) -> None:
        """Past any `__setattr__`."""
        for slot, value in zip(self.slots, values, strict=False):
            if value is not _ABSENT:
                object.__setattr__(self.thing, slot, value)
            elif hasattr(self.thing, slot):
                object.__delattr__(self.thing, slot)
        if self.held is not None:
            self.held.write(values[len(self.slots) :])

    def named(self, values: Values) -> dict[Any, Any]:
        """By attribute."""
        slots = zip(self.slots, values, strict=False)
        found = {n: v for n, v in slots if v is not _ABSENT}
        return {**found, **_halves(values[len(self.slots) :])}


class Kind(Box):
    """The attributes of a class."""

    def read(self) -> Values:
        """Names, then values."""
        held = vars(self.thing)
        return (*held, *held.values())

    def write(self, values: Values) -> None:
        """Only what is another now."""
        before = _halves(values)
        for name in [n for n in vars(self.thing) if n not in before and not _special(n)]:
            delattr(self.thing, name)
        for name, value in before.items():
            if vars(self.thing).get(name, _ABSENT) is not value and not _special(name):
                setattr(self.thing, name, value)

    def named(self, values: Values) -> dict[Any, Any]:
        """Without what every class has."""
        return {n: v for n, v in _halves(values).items() if not _special(n)}


class Cell(Box):
    """A variable of a closure."""

    def read(self) -> Values:
        """Empty until the variable is assigned."""
        try:
            return (self.thing.cell_contents,)
        except ValueError:
            return ()

    def write(self, values: Values) -> None:
        """What was in it."""
        if values:
            self.thing.cell_contents = values[0]
        else:
            del self.thing.cell_contents


class Array(Box):
    """A numpy array, by its elements."""

    def read(self) -> Values:
        """Its bytes."""
        return (self.thing.tobytes(),)

    def write(self, values: Values) -> None:
        """In place."""
        made = np.frombuffer(values[0], dtype=self.thing.dtype)
        np.copyto(self.thing, made.reshape(self.thing.shape))

    def holds(self, values: Values) -> bool:
        """By value."""
        return self.read() == values


class Plain(Box):
    """A tensor that is no weight and no buffer of the model, by its elements."""

    def read(self) -> Values:
        """A copy."""
        return (self.thing.detach().clone(),)

    def write(self, values: Values) -> None:
        """In place, unseen: a graph may have kept it."""
        self.thing.data.copy_(values[0])

    def holds(self, values: Values) -> bool:
        """By value."""
        return torch.equal(self.thing.detach(), values[0])


def box_of(value: Any, name: str) -> Box | None:
    """How a value can be read and written; None: it cannot be changed, or nobody knows."""
    if isinstance(value, dict | list | deque | set):
        return Items(value, name)
    if isinstance(value, np.ndarray):
        return Array(value, name) if value.size <= _LARGE and not value.dtype.hasobject else None
    if isinstance(value, torch.Tensor):
        keeps = type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided
        small = not value.is_meta and value.numel() <= _LARGE
        return Plain(value, name) if keeps and small else None
    return Fields(value, name) if is_object(value) else None


def is_object(value: Any) -> bool:
    """Whether it is an object of some class of the user's, or of a library on top of torch."""
    kind = type(value)
    if isinstance(value, type | functools.partial | MethodType | torch.Tensor | np.ndarray):
        return False
    if isinstance(value, nn.Module | SimpleNamespace | Namespace):
        return True
    return is_own(kind.__module__, libraries=True) and (
        hasattr(value, "__dict__") or any(True for _ in _slots(kind))
    )


def is_own(module: str | None, *, libraries: bool = False) -> bool:
    """Whether code of this name is the user's; `libraries`: or of a library on top of torch."""
    return _is_own(str(module).partition(".")[0], libraries)


@functools.cache
def _is_own(package: str, libraries: bool) -> bool:
    if package in _LIBRARIES:
        return libraries
    return package not in _SYSTEM


def children(value: Any) -> Iterable[tuple[Any, Any]]:
    """What a value holds, by key: items, attributes, what a method or a partial is bound to."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, list | tuple | deque):
        return list(enumerate(value))
    if isinstance(value, set | frozenset):
        return [(None, item) for item in value]
    if isinstance(value, MethodType):
        return [("__self__", value.__self__), ("__func__", value.__func__)]
    if isinstance(value, functools.partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    if is_object(value):
        held = getattr(value, "__dict__", {})
        slots = [(s, getattr(value, s, None)) for s in _slots(type(value))]
        return [*slots, *held.items()]
    return []


GONE = object()
"""In the place of a value that is not there any more."""


def changes(box: Box, before: Values, now: Values) -> dict[Any, tuple[Any, Any]]:
    """(old, new) by key, where it is another value; `GONE` where there is none."""
    olds, news = box.named(before), box.named(now)
    found = {}
    for key in (*news, *(k for k in olds if k not in news)):
        old, new = olds.get(key, GONE), news.get(key, GONE)
        if old is not new and not (plain(old, new) and old == new and type(old) is type(new)):
            found[key] = (old, new)
    return found


def plain(*values: Any) -> bool:
    """Whether nothing can change them."""
    return all(isinstance(value, PLAIN) for value in values)


def inside_of(name: str, key: Any, holder: Any) -> str:
    """What to call an item or an attribute."""
    if isinstance(holder, dict | list | tuple | deque):
        return f"{name}[{key!r}]"
    return f"{name}.{key}" if key is not None else name


def with_iterators_copied(values: Values, memo: dict[int, Any]) -> Values | None:
    """The same with iterators that run apart from these; None: there are none."""
    if not any(isinstance(value, _ITERATORS) for value in values):
        return None
    made = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of copies of itertools
        for value in values:
            made.append(copy.deepcopy(value, memo) if isinstance(value, _ITERATORS) else value)
    return tuple(made)


def _slots(kind: type) -> Iterator[str]:
    for each in kind.__mro__:
        slots = vars(each).get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if slot not in ("__dict__", "__weakref__"):
                hidden = slot.startswith("__") and not slot.endswith("__")
                yield f"_{each.__name__.lstrip('_')}{slot}" if hidden else slot


def _halves(values: Values) -> dict[Any, Any]:
    half = len(values) // 2
    return dict(zip(values[:half], values[half:], strict=True))


def _special(name: str) -> bool:
    return name.startswith("__") or name.startswith("_abc_")
