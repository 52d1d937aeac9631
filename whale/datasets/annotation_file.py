"""JSON files of annotations, read with errors that name the file and the entry.

Place in the flow: under `coco` and `vqa`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from whale.errors import WhaleError


def read_json(path: Path, kind: type[dict[str, Any]] | type[list[Any]]) -> Any:
    """The content of a JSON file that must be an object or a list."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WhaleError(
            f"cannot read {path}: {error}", hint="it must be a JSON file in UTF-8, not an archive"
        ) from error
    if not isinstance(content, kind):
        raise WhaleError(
            f"{path} holds a {type(content).__name__}; a {kind.__name__} is needed",
            hint="annotation files are objects, files of results are lists",
        )
    return content


def list_in(content: Any, key: str, path: Path) -> list[Any]:
    """A list that the whole file must have."""
    entries = _field(content, key, str(path))
    if not isinstance(entries, list):
        raise WhaleError(
            f'"{key}" is a {type(entries).__name__}; a list is needed',
            where=str(path),
            hint="take the file as it was published",
        )
    return entries


def text_in(entry: Any, key: str, where: str) -> str:
    """A text that an entry must have; a number is taken as one (some answers are written so)."""
    return str(_field(entry, key, where))


def number_in(entry: Any, key: str, where: str) -> int:
    """A whole number that an entry must have."""
    value = _field(entry, key, where)
    if not isinstance(value, int) and not (isinstance(value, str) and value.isdecimal()):
        raise WhaleError(
            f'"{key}" is {value!r}; a whole number is needed',
            where=where,
            hint="number the entries; names belong to other fields",
        )
    return int(value)


def _field(entry: Any, key: str, where: str) -> Any:
    if not isinstance(entry, dict) or key not in entry:
        found = sorted(entry) if isinstance(entry, dict) else type(entry).__name__
        raise WhaleError(
            f'no "{key}" here, only {found}',
            where=where,
            hint="is it the right kind of file (captions, questions, annotations)?",
        )
    return entry[key]
