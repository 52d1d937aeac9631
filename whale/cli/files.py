"""Files that commands read and write: plans in, reports and JSON out; a bad one is one clear error.

Place in the flow: below the commands, without torch, so that `whale plan` and `whale simulate`
start at once.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from whale.errors import ConfigError, PlanError, WhaleError
from whale.ir.plan import Plan

STANDARD = "-"
"""Standard input or output, where a file is named."""


def read_plan(path: str) -> Plan:
    """A plan from its JSON file; `-` is standard input."""
    try:
        text = sys.stdin.read() if path == STANDARD else Path(path).read_text(encoding="utf-8")
        return Plan.from_dict(json.loads(text))
    except OSError as error:
        raise PlanError(f"plan {path!r}: {error.strerror}", hint="name a JSON file") from error
    except WhaleError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise not_a_plan(path, error) from error


def not_a_plan(path: str, error: Exception) -> PlanError:
    """The error for a file that is JSON perhaps, but no plan."""
    return PlanError(
        f"plan {path!r} is not a plan: {type(error).__name__}: {error}",
        hint="write one with `whale plan MODEL --cluster SPEC --json F`",
    )


def check_target(flag: str, path: str | None, *, standard: bool = False) -> None:
    """Raises for a file that cannot be written: better known before the work than after it."""
    if path is None or (standard and path == STANDARD):
        return
    target = Path(path)
    also = " or -" if standard else ""
    problem = None
    if path == STANDARD:
        problem = "only --json can go to standard output"
    elif target.is_dir():
        problem = "is a folder"
    elif not target.resolve().parent.is_dir():
        problem = f"there is no folder {target.resolve().parent}"
    elif not os.access(target if target.exists() else target.resolve().parent, os.W_OK):
        problem = "not allowed to write there"
    if problem is not None:
        raise ConfigError(
            f"{flag} {path}: {problem}", hint=f"name a file in a folder that exists{also}"
        )


def write(flag: str, path: str, text: str) -> None:
    """A text file."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{flag} {path}: {error.strerror}", hint="name a file in a folder that exists"
        ) from error


def dumps(value: Any) -> str:
    """JSON as these commands print and write it."""
    return json.dumps(value, indent=2)
