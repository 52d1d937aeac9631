"""Text form: the dict form of a value as lines that a person reads and diffs, and that parse back.

Place in the flow: beside JSON, for whatever has `to_dict`/`from_dict` (Plan, ModelGraph, Schedule,
Cluster, VirtualDevice); it knows none of them. Everything JSON can hold comes back exactly: types,
order of keys, every bit of a float.

    whale plan 1
    strategy: "replicate on 2"
    stages:
      - index: 0
        replicas:
          - ranks=[0, 1] weight=3

A block is a mapping (`key: value`) or a list (`- item`), indented by two spaces. What is short
stands on one line, at any depth the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from whale.errors import PlanError

FORMAT = 1
# The longest list (of numbers: any) and the longest item in pairs on one line, in characters.
LIST_WIDTH, PAIRS_WIDTH = 100, 180

_KEY = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./+<>@*-]*")
_WORD = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./+<>@*:-]*(?<!:)")
_TOKEN = re.compile(r'[^\s,\[\]{}="]*')
_INT = re.compile(r"-?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|-?inf|nan")
_NAMES: Mapping[str, Any] = {"null": None, "true": True, "false": False}
_HINT = 'a string with spaces, commas or other marks is quoted as in JSON: "a, b"'
_INDENT_HINT = "two spaces per level, no tabs; an empty list is [], an empty mapping {}"


def dumps(data: Mapping[str, Any], *, title: str) -> str:
    """The text form of plain JSON values, tuples as lists; `title` stands in the first line.

    Example:
        >>> print(dumps({"ranks": [0, 1], "name": None}, title="group"), end="")
        whale group 1
        ranks: [0, 1]
        name: null
    """
    return "".join(f"{line}\n" for line in (f"whale {title} {FORMAT}", *_block(data)))


def loads(text: str, *, title: str) -> dict[str, Any]:
    """The inverse of `dumps`; another title or a malformed line is refused by its number."""
    rows = [row.rstrip() for row in text.split("\n")]
    if rows[0] != f"whale {title} {FORMAT}":
        raise PlanError(
            f"line 1 is {rows[0][:60]!r}, expected 'whale {title} {FORMAT}'",
            hint="the first line names what was written, and the version of the text form",
        )
    numbered = [(number, row) for number, row in enumerate(rows, start=1) if row][1:]
    lines = [_Line(number, len(r) - len(r.lstrip(" ")), r.lstrip(" ")) for number, r in numbered]
    return _Reader(lines).mapping(0)


def _block(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            inline = _inline(item)
            yield f"{_key(key)}:" if inline is None else f"{_key(key)}: {inline}"
            if inline is None:
                yield from (f"  {line}" for line in _block(item))
        return
    for item in value:
        inline = _pairs(item) if isinstance(item, Mapping) and item else _inline(item)
        lines = iter(_block(item) if inline is None else [inline])
        yield f"- {next(lines)}"
        yield from (f"  {line}" for line in lines)


def _inline(value: Any) -> str | None:
    """One line, if `value` is a scalar, an empty mapping, or a short list of such and of lists."""
    if isinstance(value, Mapping):
        return None if value else "{}"
    if not isinstance(value, (list, tuple)):
        return _scalar(value)
    items = [_inline(item) for item in value]
    line = f"[{', '.join(item or '' for item in items)}]"
    short = len(line) <= LIST_WIDTH or all(type(item) in (int, float) for item in value)
    return line if short and None not in items else None


def _pairs(value: Mapping[str, Any]) -> str | None:
    """`key=value key=value`, if that is short."""
    items = {key: _inline(item) for key, item in value.items()}
    line = " ".join(f"{_key(key)}={item}" for key, item in items.items())
    return line if len(line) <= PAIRS_WIDTH and None not in items.values() else None


def _key(key: str) -> str:
    assert isinstance(key, str), f"key {key!r} of type {type(key)}"
    return key if _KEY.fullmatch(key) else json.dumps(key)


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        return value if _is_plain(value) else json.dumps(value)
    for name, named in _NAMES.items():
        if value is named:
            return name
    assert isinstance(value, (int, float)), f"{value!r} of type {type(value)} has no text form"
    # Not repr(): a subclass, such as numpy's float64, has its own.
    return int.__repr__(value) if isinstance(value, int) else float.__repr__(value)


def _is_plain(word: str) -> bool:
    """Whether a string needs no quotes: a word or path that nobody takes for anything else."""
    if not _WORD.fullmatch(word) or word.lower() in ("none", *_NAMES):
        return False
    try:
        float(word)
    except ValueError:
        return True
    return False


@dataclass(frozen=True, slots=True)
class _Line:
    """A line without its indentation; `at` in its methods is a position in `text`."""

    number: int
    indent: int
    text: str

    def fail(self, expected: str, at: int = 0, *, hint: str = _HINT) -> NoReturn:
        found = repr(self.text[at : at + 60]) if self.text[at:] else "the end of the line"
        where = f"line {self.number}, column {self.indent + at + 1}"
        raise PlanError(f"{where}: found {found}, expected {expected}", hint=hint)

    def key(self, mark: str, at: int = 0) -> tuple[str, int] | None:
        """The key at `at` and the position after its `mark`; None: there is no such key."""
        if self.text.startswith('"', at):
            key, end = self._quoted(at)
        else:
            match = _KEY.match(self.text, at)
            key, end = (match[0], match.end()) if match else ("", len(self.text))
        # In `a:b` the mark is part of a word.
        inside = mark == ":" and self.text[end + 1 : end + 2] not in ("", " ")
        return None if inside or self.text[end : end + 1] != mark else (key, end + 1)

    def value(self, at: int = 0) -> Any:
        """The value that fills the line from `at` on: a scalar, a list or an empty mapping."""
        value, end = self._value(at)
        return value if end == len(self.text) else self.fail("the end of the line", end)

    def pairs(self) -> dict[str, Any]:
        """The mapping that fills the line as `key=value key=value`."""
        data: dict[str, Any] = {}
        end = -1
        while end < len(self.text):
            if end >= 0 and self.text[end] != " ":
                self.fail("a space or the end of the line", end)
            found = self.key("=", end + 1)
            if found is None or found[0] in data:
                self.fail("`key=value`, each key once", end + 1)
            data[found[0]], end = self._value(found[1])
        return data

    def _value(self, at: int) -> tuple[Any, int]:
        if self.text.startswith('"', at):
            return self._quoted(at)
        if self.text.startswith("{}", at):
            return {}, at + 2
        if self.text.startswith("[", at):
            return self._list(at + 1)
        match = _TOKEN.match(self.text, at)
        word = match[0] if match else ""
        end = at + len(word)
        if word in _NAMES:
            return _NAMES[word], end
        if _FLOAT.fullmatch(word):
            return int(word) if _INT.fullmatch(word) else float(word), end
        if not _is_plain(word):
            self.fail("a number, true, false, null, a word, a quoted string, [...] or {}", at)
        return word, end

    def _list(self, at: int) -> tuple[list[Any], int]:
        items: list[Any] = []
        while not self.text.startswith("]", at):
            if items and not self.text.startswith(", ", at):
                self.fail("', ' or ']'", at)
            value, at = self._value(at + 2 if items else at)
            items.append(value)
        return items, at + 1

    def _quoted(self, at: int) -> tuple[str, int]:
        try:
            return json.JSONDecoder().raw_decode(self.text, at)
        except json.JSONDecodeError:
            self.fail("a quoted string as in JSON", at)


class _Reader:
    """Blocks of lines; `at` is the next line to read."""

    def __init__(self, lines: list[_Line]) -> None:
        self.lines = lines
        self.at = 0

    def mapping(self, indent: int) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for line in self._block(indent):
            found = line.key(":")
            if found is None or found[0] in data:
                line.fail("`key: value`, each key once")
            key, end = found
            nested = end == len(line.text)
            data[key] = self._nested(line, indent + 2) if nested else line.value(end + 1)
        return data

    def items(self, indent: int) -> list[Any]:
        items: list[Any] = []
        for line in self._block(indent):
            if not line.text.startswith("- "):
                line.fail("`- item`, like the lines before it")
            inner = _Line(line.number, indent + 2, line.text[2:])
            if inner.text.startswith("- ") or inner.key(":"):
                # What follows the dash is the first line of a block.
                self.at -= 1
                self.lines[self.at] = inner
                items.append(self._nested(line, indent + 2))
            else:
                items.append(inner.pairs() if inner.key("=") else inner.value())
        return items

    def _block(self, indent: int) -> Iterator[_Line]:
        while self.at < len(self.lines) and self.lines[self.at].indent >= indent:
            line = self.lines[self.at]
            if line.indent > indent:
                line.fail(f"an indentation of {indent} spaces", hint=_INDENT_HINT)
            self.at += 1
            yield line

    def _nested(self, parent: _Line, indent: int) -> Any:
        if self.at == len(self.lines) or self.lines[self.at].indent != indent:
            parent.fail(f"a value, or lines below it indented by {indent}", hint=_INDENT_HINT)
        is_list = self.lines[self.at].text.startswith("- ")
        return self.items(indent) if is_list else self.mapping(indent)
