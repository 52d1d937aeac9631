"""Writes the table of `docs/reference/config.md` from the settings themselves.

    PYTHONPATH=. python scripts/settings_page.py

Place in the flow: outside it; run after a setting has changed. A test holds the page against it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import whale.config
import whale.config_groups
from whale.config import Config
from whale.config_groups import types_of

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "config.md"
HEAD = "| key | allowed | default | meaning |\n|---|---|---|---|\n"


def meanings() -> dict[tuple[str, str], str]:
    """The line below each field, by class and field."""
    found = {}
    for module in (whale.config, whale.config_groups):
        for node in ast.parse(Path(str(module.__file__)).read_text()).body:
            body = node.body if isinstance(node, ast.ClassDef) else []
            for field, after in zip(body, body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
                    assert isinstance(node, ast.ClassDef)
                    found[node.name, ast.unparse(field.target)] = ast.literal_eval(after.value)
    return found


def rows() -> Iterator[str]:
    """A line of the table for each key."""
    said, config = meanings(), Config()
    for key, default in config.to_dict().items():
        group, _, name = key.rpartition(".")
        owner = getattr(config, group) if group else config
        allowed = types_of(get_type_hints(type(owner))[name])
        types = " or ".join("None" if t is type(None) else t.__name__ for t in allowed)
        rule = next(f.metadata["rule"] for f in fields(owner) if f.name == name)
        if rule.choices is not None:
            types = ", ".join(f"`{choice!r}`" for choice in rule.choices)
        yield f"| `{key}` | {types} | `{default!r}` | {said[type(owner).__name__, name]} |"


def table() -> str:
    """All of them."""
    return HEAD + "\n".join(rows()) + "\n"


def main() -> None:
    """The command."""
    before, _, rest = PAGE.read_text().partition(HEAD)
    after = rest.partition("\n\n")[2]
    PAGE.write_text(f"{before}{table()}\n{after}")


if __name__ == "__main__":
    main()
