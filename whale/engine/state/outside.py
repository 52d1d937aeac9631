"""Outside: what the user's code reads and changes beside the attributes of its modules.

Place in the flow: around every run of the user's code that is no step of training (`kept`), and
asked by Step before each batch (`Watch`). Counters in a global, a class, a closure or a default
argument, in an object that a module holds, or in a loss: one device's code changes them once per
forward, so runs that only look put them back; and where they lead to other code, a batch is of
another kind.
"""

from __future__ import annotations

import builtins
import dis
import functools
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from whale.engine.state.boxes import (
    GONE,
    PLAIN,
    Array,
    Box,
    Cell,
    Items,
    Kind,
    Plain,
    Values,
    Variables,
    box_of,
    changes,
    children,
    inside_of,
    is_own,
    with_iterators_copied,
)
from whale.engine.state.rarely import rarely
from whale.engine.state.tally import Tally

_MOST = 3000
"""Things that are looked at, nearest first."""
_ITEMS = 1000
"""Items of one container of which each is looked into."""
_SEARCHES = 8
"""Times that new objects are looked into; then the 16th, 32nd, ..."""
_OF_MODULES = frozenset(nn.Module().__dict__)
_BUILDERS = frozenset({"__init__", "__new__", "__init_subclass__"})


Place = tuple[int, str]
"""Who holds something, by id; and which variable of a file it is."""
Moved = Mapping[Place, str]
"""What code has changed, with what to call it."""


class _Search:
    """Goes from thing to thing, and collects boxes.

    Args:
        apart: Modules and tensors that others keep.
    """

    def __init__(self, apart: Iterable[Any]) -> None:
        self.boxes: list[Box] = []
        self._apart = {id(thing) for thing in apart}
        self._seen: dict[int, Any] = {}
        self._waiting: deque[tuple[Any, str]] = deque()
        self._variables: dict[int, tuple[dict[str, Any], str, set[str]]] = {}
        self._named: set[tuple[int, int]] = set()

    def add(self, thing: Any, name: str) -> None:
        """Something that code can reach."""
        if not isinstance(thing, PLAIN) and id(thing) not in self._seen:
            self._seen[id(thing)] = thing  # kept, so that nobody else gets its id
            self._waiting.append((thing, name))

    def add_classes(self, kinds: Iterable[type]) -> None:
        """Of modules: their code."""
        for kind in kinds:
            self.add(kind, kind.__qualname__)

    def found(self) -> list[Box]:
        """All boxes that can be reached from what was added."""
        count = 0
        while self._waiting and count < _MOST:
            count += 1
            self._look(*self._waiting.popleft())
        for variables, name, names in self._variables.values():
            self.boxes.append(Variables(variables, name, names))
        self._variables.clear()
        return self.boxes

    def _look(self, thing: Any, name: str) -> None:
        if id(thing) in self._apart or isinstance(thing, ModuleType):
            return
        if isinstance(thing, FunctionType):
            self._function(thing)
        elif isinstance(thing, type):
            self._class(thing)
        elif isinstance(thing, staticmethod | classmethod):
            self.add(thing.__func__, name)
        elif isinstance(thing, property):
            for function in (thing.fget, thing.fset):
                self.add(function, name)
        elif isinstance(getattr(thing, "__wrapped__", None), FunctionType):  # a cache, say
            self.add(thing.__wrapped__, name)
        elif isinstance(thing, nn.Module):
            self._module(thing, name)
        else:
            self._value(thing, name)

    def _value(self, thing: Any, name: str) -> None:
        box = box_of(thing, name)
        if box is not None:
            self.boxes.append(box)
        for _, (key, value) in zip(range(_ITEMS), children(thing), strict=False):
            self.add(value, f"{name}.{key}" if isinstance(key, str) else name)
        if not isinstance(thing, torch.Tensor):
            self.add(type(thing), type(thing).__qualname__)

    def _module(self, module: nn.Module, name: str) -> None:
        """One that is no part of the model: a loss, or a part of one."""
        self.boxes.append(Items(vars(module), name))
        for key, value in vars(module).items():
            if key not in _OF_MODULES or key in ("_parameters", "_buffers", "_modules"):
                self.add(value, f"{name}.{key}" if key not in _OF_MODULES else name)
        self.add(type(module), type(module).__qualname__)

    def _class(self, kind: type) -> None:
        for each in kind.__mro__:
            if each is not kind:
                self.add(each, each.__qualname__)
        if not is_own(kind.__module__):
            return
        self.boxes.append(Kind(kind, kind.__qualname__))
        for key, value in vars(kind).items():
            if key not in _BUILDERS and (not key.startswith("__") or callable(value)):
                self.add(value, f"{kind.__qualname__}.{key}")

    def _function(self, function: FunctionType) -> None:
        if not is_own(function.__module__):
            return
        name = function.__qualname__
        self.boxes.append(Items(vars(function), name))
        for key, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            if id(cell) not in self._seen:
                self._seen[id(cell)] = cell
                box = Cell(cell, f"{name}.{key}")
                self.boxes.append(box)
                for value in box.read():
                    self.add(value, key)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.add(value, f"the default of {name}")
        names, stored = _names(function.__code__)
        self._globals(function.__globals__, str(function.__module__), names, stored)

    def _globals(
        self,
        variables: dict[str, Any],
        name: str,
        names: frozenset[str],
        stored: frozenset[str] = frozenset(),
    ) -> None:
        """Variables of a file that code names; those of files it names, too."""
        if (id(variables), id(names)) in self._named:
            return
        self._named.add((id(variables), id(names)))
        known = self._variables.setdefault(id(variables), (variables, name, set()))[2]
        known.update(stored)
        for each in names & variables.keys():
            value = variables[each]
            if isinstance(value, ModuleType):
                if is_own(value.__name__):
                    self._globals(vars(value), value.__name__, names)
                continue
            known.add(each)
            self.add(value, each)


@functools.lru_cache(4096)
def _names(code: CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """What code may name outside of itself, and which variables of its file it sets."""
    names = set(code.co_names) - set(vars(builtins))
    stored = {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_GLOBAL"}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            more, set_there = _names(constant)
            names |= more
            stored |= set_there
    return frozenset(names), frozenset(stored)


class Outside:
    """Boxes around the code of a model and a loss.

    Args:
        model: Its modules are others' to keep, with their weights and buffers; what their
            attributes hold is kept here.
        loss: A function, a module, any callable; None: the model's own.
        objects: Whether what attributes of modules hold is among it; else only its code.
        layers: Only the code of these parts.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Any = None,
        *,
        objects: bool = True,
        layers: Collection[str] = ("",),
    ) -> None:
        modules = dict(model.named_modules())
        search = _Search([*modules.values(), *model.parameters(), *model.buffers()])
        search.add(loss, "the loss")
        if "" not in layers:
            inside = [model.get_submodule(path).named_modules(prefix=path) for path in layers]
            modules = {path: module for each in inside for path, module in each}
        for path, module in modules.items():
            if not type(module).__module__.startswith("torch."):
                held = {k: v for k, v in vars(module).items() if k not in _OF_MODULES}
                if objects:
                    search.boxes.append(Variables(module.__dict__, path, _iterators(held)))
                for key, value in held.items():
                    if objects or isinstance(value, FunctionType | functools.partial):
                        search.add(value, f"{path}.{key}" if path else key)
                    elif not isinstance(value, PLAIN):
                        search.add(type(value), type(value).__qualname__)
        search.add_classes(dict.fromkeys(type(module) for module in modules.values()))
        self.boxes = search.found()

    @contextmanager
    def kept(self) -> Iterator[Callable[[], Moved]]:
        """Inside, code may change what it likes; afterwards it is what it was.

        Gives a function that says what has changed.
        """
        memo: dict[int, Any] = {}
        before = [(box, _taken(box, memo)) for box in self.boxes]
        try:
            yield lambda: _moved(before)
        finally:
            for box, values in before:
                if not box.holds(values):
                    box.write(values)

    def holds(self, place: Place) -> bool:
        """Whether this code reaches a place."""
        thing, name = place
        return any(
            id(box.thing) == thing and (not isinstance(box, Variables) or name in box.names)
            for box in self.boxes
        )

    def state(self) -> dict[str, list[Any]]:
        """What is in the boxes, by name."""
        found: dict[str, list[Any]] = {}
        for box in self.boxes:
            for key, value in box.named(box.read()).items():
                name = box.name if isinstance(box, Plain | Array | Cell) else f"{box.name}.{key}"
                found.setdefault(name, []).append(value)
        return found


def _moved(before: Iterable[tuple[Box, Values]]) -> Moved:
    found: dict[Place, str] = {}
    for box, values in before:
        if box.holds(values):
            continue
        if isinstance(box, Variables):
            keys = changes(box, values, box.read())
            found.update({(id(box.thing), key): f"{box.name}.{key}" for key in keys})
        else:
            found[id(box.thing), ""] = box.name
    return found


def _iterators(held: dict[str, Any]) -> list[str]:
    """Attributes that are used up: the modules' own are put back as they are, not as they were."""
    return [k for k, v in held.items() if with_iterators_copied((v,), {}) is not None]


def _taken(box: Box, memo: dict[int, Any]) -> Values:
    values = box.read()
    apart = with_iterators_copied(values, memo)
    if apart is not None:
        box.write(apart)  # these are used up in their place
    return values


@contextmanager
def as_it_was(model: nn.Module, loss: Any = None) -> Iterator[Callable[[], Moved]]:
    """Around runs of the user's code that only look; gives a function that says what they moved."""
    with Outside(model, loss).kept() as moved:
        yield moved


@dataclass(slots=True)
class _Held:
    """A box, and what was in it."""

    box: Box
    values: Values


class Watch:
    """Flags and numbers that the code of a model and a loss reads, and that move while it trains.

    Variables of files, attributes of classes, closures and defaults: a script that turns one leads
    to code that was not seen at build.
    """

    def __init__(self, model: nn.Module, loss: Any) -> None:
        self._model, self._loss = model, loss
        self._tally = Tally()
        self._calls = self._searches = 0
        self.moving: list[Box] = []
        """Those that have changed while training."""
        self._search()

    def _search(self) -> None:
        self._searches += 1
        boxes = Outside(self._model, self._loss, objects=False).boxes
        boxes = [b for b in boxes if not isinstance(b, Plain) and (b.thing or b.read())]
        every = [_Held(box, box.read()) for box in boxes]
        self._small = [each for each in every if len(each.values) <= _ITEMS]
        self._large = [each for each in every if len(each.values) > _ITEMS]

    def settings(self) -> Hashable:
        """Alike where nothing has changed that may lead to other code."""
        self._calls += 1
        moved = [each for each in self._small if not each.box.holds(each.values)]
        if self._large and rarely(self._calls):
            moved += [each for each in self._large if not each.box.holds(each.values)]
        more = False
        for each in moved:
            box, before, now = each.box, each.values, each.box.read()
            each.values = now
            if not any(box.thing is known.thing for known in self.moving):
                self.moving.append(box)
            for key, (_, new) in changes(box, before, now).items():
                self._tally.note(inside_of(box.name, key, box.thing), new)
                more |= not isinstance(new, PLAIN) and new is not GONE
        if more and rarely(self._searches, _SEARCHES):
            self._search()
        elif more:
            self._searches += 1
        return self._tally.key()
