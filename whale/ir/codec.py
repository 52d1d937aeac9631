"""Codec: dataclasses as plain JSON values and back, by their fields' types.

Place in the flow: under every value that is written to a file or sent to other ranks (Plan,
ModelGraph, Prices, Schedule, Report, Profile). What is read is checked field by field, so that a
damaged or edited file is refused with the place where it is wrong. The training path runs on
machines that have torch and little else, which is why no library does this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from whale.errors import PlanError, WhaleError

T = TypeVar("T")
_NAMES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    NoneType: "null",
}
_LARGEST = 2**1000
"""Of the whole numbers that stand for a float."""
ONLY = "_only_field"
"""A dataclass with this class attribute is written as that field alone."""
_DOES_NOT_GO_TOGETHER = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)
"""What a dataclass may raise of values that are of the right types, each by itself."""


def to_plain(value: Any) -> Any:
    """Dataclasses and mappings as dicts, tuples as lists, all else as it is."""
    if isinstance(value, str | int | float | None):
        return value
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    assert is_dataclass(value), f"{value!r} of type {type(value)}"
    if only := getattr(value, ONLY, None):
        return to_plain(getattr(value, only))
    return {key: to_plain(getattr(value, name)) for name, key in _names(type(value)).items()}  # type: ignore[arg-type]


def from_plain(kind: type[T], data: Any, what: str) -> T:
    """The value of a dataclass that `to_plain` made `data` of.

    `what` says in errors what is read. Fields that are not there have their default; unknown ones
    are refused, for another version may mean something by them.
    """
    reader: Reader = _reader(kind)  # type: ignore[arg-type]
    found: T = reader(data, what)
    return found


Reader = Callable[[Any, str], Any]
"""Reads plain data; the second argument is its place."""


@cache
def _names(kind: Any) -> dict[str, str]:
    """By field, its key in the JSON: metadata may give it another name."""
    return {field.name: field.metadata.get("key", field.name) for field in fields(kind)}


@cache
def _reader(kind: Any) -> Reader:
    """What reads a type; made once for each."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda data, place: data
    if origin in (Union, UnionType):
        return _choice(args)
    if origin is tuple and len(args) == 2 and args[1] is ...:
        return _items(_reader(args[0]))
    if origin is tuple:
        return _pair(tuple(_reader(arg) for arg in args))
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(_reader(args[1]))
    if is_dataclass(kind):
        return _dataclass(kind)
    assert kind in _NAMES, f"no reader for {kind}"
    return _scalar(kind)


def _fail(place: str, data: Any, expected: str) -> PlanError:
    text = repr(data)
    return _damaged(
        f"{place} = {text if len(text) < 80 else text[:77] + '...'}, expected {expected}"
    )


def _damaged(message: str) -> PlanError:
    return PlanError(
        message, hint="the file is damaged, was edited by hand, or is from another version of Whale"
    )


def _scalar(kind: type) -> Reader:
    def read(data: Any, place: str) -> Any:
        if type(data) is kind:
            return data
        if kind is float and type(data) is int and abs(data) < _LARGEST:
            return float(data)
        raise _fail(place, data, _NAMES[kind])

    return read


def _choice(kinds: tuple[Any, ...]) -> Reader:
    plain = {kind for kind in kinds if kind in _NAMES}
    others = [_reader(kind) for kind in kinds if kind not in plain]
    expected = " or ".join(_NAMES[kind] for kind in kinds if kind in plain)

    def read(data: Any, place: str) -> Any:
        if type(data) in plain or (float in plain and type(data) is int):
            return data
        if len(others) != 1:
            raise _fail(place, data, expected)
        return others[0](data, place)

    return read


def _items(item: Reader) -> Reader:
    def read(data: Any, place: str) -> Any:
        if not isinstance(data, list | tuple):
            raise _fail(place, data, "a list")
        return tuple([item(each, f"{place}[{i}]") for i, each in enumerate(data)])

    return read


def _pair(readers: tuple[Reader, ...]) -> Reader:
    def read(data: Any, place: str) -> Any:
        if not isinstance(data, list | tuple) or len(data) != len(readers):
            raise _fail(place, data, f"a list of {len(readers)}")
        each = zip(readers, data, strict=True)
        return tuple([reader(item, f"{place}[{i}]") for i, (reader, item) in enumerate(each)])

    return read


def _mapping(item: Reader) -> Reader:
    def read(data: Any, place: str) -> Any:
        if not isinstance(data, Mapping) or not all(isinstance(key, str) for key in data):
            raise _fail(place, data, "a mapping")
        return {key: item(each, f"{place}.{key}") for key, each in data.items()}

    return read


def _dataclass(kind: Any) -> Reader:
    hints = get_type_hints(kind)
    if only := getattr(kind, ONLY, None):
        return lambda data, place: _made(kind, {only: _reader(hints[only])(data, place)}, place)
    names = {key: name for name, key in _names(kind).items()}
    needed = [
        _names(kind)[field.name]
        for field in fields(kind)
        if field.default is MISSING and field.default_factory is MISSING
    ]
    # Made on first use: a type may hold others of its own kind.
    readers: dict[str, Reader] = {}

    def read(data: Any, place: str) -> Any:
        if not isinstance(data, Mapping):
            raise _fail(place, data, "a mapping")
        if not readers:
            readers.update({key: _reader(hints[name]) for key, name in names.items()})
        if unknown := [key for key in data if key not in readers]:
            raise _damaged(
                f"{place} has the unknown key {unknown[0]!r}, allowed: {', '.join(readers)}"
            )
        if missing := [key for key in needed if key not in data]:
            raise _damaged(f"{place} has no key {missing[0]!r}")
        values = {names[key]: readers[key](item, f"{place}.{key}") for key, item in data.items()}
        return _made(kind, values, place)

    return read


def _made(kind: Any, values: dict[str, Any], place: str) -> Any:
    try:
        return kind(**values)
    except WhaleError:
        raise
    except _DOES_NOT_GO_TOGETHER as error:
        raise _fail(place, values, f"values that go together ({error!r})") from error
