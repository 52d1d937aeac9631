"""Footprints: the calls of torch that the running code makes, and whether one is new.

Place in the flow: around the forwards of a Step (`engine.watch.kinds`). The trials at build saw the
code of one moment. Counters, schedules and values may turn on other code later, anywhere: an
operation over columns that are split by then, a mean over rows, a count of heads. Such code makes a
call that was not made before: from another line, of another function, with other sizes or weights,
or with another number. Then that very batch is looked at as the first one was, before anything is
updated.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from whale.engine.state.boxes import PLAIN
from whale.engine.state.rarely import rarely

_CALLS = 64
"""Forwards with a call never made before of which each is looked at; then the 128th, ..."""
_FORMS = 8
"""Sizes and weights of one call of which each is looked at; then the 16th, 32nd, ..."""
_NUMBERS = 4
"""Numbers given to one call of which each is looked at; then the 8th, 16th, ..."""
_MOST = 4096
"""Forms or numbers of one call that are kept."""
_WHALE = str(Path(__file__).resolve().parents[2])
_MACHINERY = (_WHALE, os.path.dirname(str(torch.__file__)))
_START = os.path.join("runtime", "executor.py")
_EXPERTS = os.path.join(_WHALE, "nn", "moe", "")
_DRAWS = tuple(
    os.path.join(_WHALE, *parts)
    for parts in (("nn", "draws.py"), ("nn", "dropout.py"), ("runtime", "hashing.py"))
)
_DEPTH = 3


@dataclass(slots=True)
class _Call:
    """One function, called from one place."""

    forms: set[Any] = field(default_factory=set)
    numbers: set[Any] = field(default_factory=set)


class _Whose(Enum):
    """Whose code a call comes from."""

    USERS = auto()
    EXPERTS = auto()
    """Whale's own: sizes follow the routing of each batch, and only weights tell what runs."""
    DRAWS = auto()
    """Whale's own: numbers are those of the step."""
    MACHINERY = auto()
    """Other code of Whale's or torch's, which does what the user's asked for."""
    START = auto()
    """Where stages are called from."""


class Footprints(TorchFunctionMode):
    """Keeps the calls that were made inside it.

    Attributes:
        news: What to say of the first call inside that is to be looked at; None: there is none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.news: str | None = None
        self._calls: dict[Any, _Call] = {}
        self._made = 0
        self._counted = False
        self._foreign: dict[int, _Whose] = {}

    def start(self) -> None:
        """From here on, of the next forward."""
        self.news, self._counted = None, False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") != "__get__":
            self._note(func, args, kwargs)
        return func(*args, **kwargs)

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        whose, place = self._place()
        if whose is _Whose.DRAWS:
            return
        form: list[Any] = []
        numbers: list[Any] = []
        if whose is _Whose.EXPERTS:
            func = None
            form += sorted(id(p) for p in (*args, *kwargs.values()) if isinstance(p, nn.Parameter))
        else:
            for value in args:
                _describe(value, form, numbers, _DEPTH)
            for key, value in kwargs.items():
                form.append(key)
                _describe(value, form, numbers, _DEPTH)
        call = self._calls.get((func, place))
        new = call is None
        if call is None:
            call = self._calls[func, place] = _Call()
            if not self._counted:
                self._counted, self._made = True, self._made + 1
        new_form = _added(call.forms, tuple(form), _FORMS)
        new_number = _added(call.numbers, tuple(numbers), _NUMBERS)
        if self.news is None and (
            (new and rarely(self._made, _CALLS)) or (not new and (new_form or new_number))
        ):
            name = getattr(func, "__name__", "wh.nn.MoE")
            what = "a call" if new else "other sizes or weights" if new_form else "another number"
            self.news = f"{what} of `{name}` at {_line()}"

    def _place(self) -> tuple[_Whose, tuple[int, int]]:
        """Where in the user's code this call is made, or in what calls a stage; and who makes it.

        That is who is nearest to it.
        """
        frame = sys._getframe(2)
        known = self._foreign
        nearest = _Whose.USERS
        for _ in range(60):
            code = frame.f_code
            whose = known.get(id(code))
            if whose is None:
                whose = known[id(code)] = _whose(code.co_filename)
            if whose is _Whose.USERS:
                return nearest, (id(code), frame.f_lasti)
            if whose is _Whose.DRAWS:
                return whose, (0, 0)
            if whose is _Whose.EXPERTS:
                nearest = whose
            if whose is _Whose.START or frame.f_back is None:
                break
            frame = frame.f_back
        return nearest, (0, 0)


def _whose(filename: str) -> _Whose:
    path = os.path.abspath(filename)
    if not path.startswith(_MACHINERY):
        return _Whose.USERS
    if path.startswith(_EXPERTS):
        return _Whose.EXPERTS
    if path in _DRAWS:
        return _Whose.DRAWS
    return _Whose.START if path.endswith(_START) else _Whose.MACHINERY


_ENDS = (_Whose.USERS, _Whose.START)


def _line() -> str:
    frame: Any = sys._getframe(3)
    while frame.f_back is not None and _whose(frame.f_code.co_filename) not in _ENDS:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _added(known: set[Any], value: Any, first: int) -> bool:
    """Adds a value; whether it is new, and one of those that are looked at."""
    if value in known or len(known) >= _MOST:
        return False
    known.add(value)
    return rarely(len(known), first)


def _describe(value: Any, form: list[Any], numbers: list[Any], depth: int) -> None:
    if isinstance(value, torch.Tensor):
        form.append(value.shape)
        form.append(value.dtype)
        if isinstance(value, nn.Parameter):
            form.append(id(value))
    elif isinstance(value, float):
        numbers.append(value if value == value else "nan")  # noqa: PLR0124
    elif isinstance(value, PLAIN):
        numbers.append(value)
        form.append(type(value))
    elif isinstance(value, list | tuple) and depth:
        form.append(len(value))
        for item in value:
            _describe(item, form, numbers, depth - 1)
    elif isinstance(value, slice):
        _describe((value.start, value.stop, value.step), form, numbers, depth)
    else:
        form.append(type(value))
