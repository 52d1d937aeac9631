"""Patterns: globs on module paths.

Place in the flow: what users name modules with, in `wh.annotate` and in settings.
"""

from __future__ import annotations

import fnmatch


def matches(pattern: str, path: str) -> bool:
    """Whether one of a pattern's alternatives, joined by `|`, is a glob of the path.

    `*` does not cross a dot, `[...]` is a set, and the empty pattern is the root.
    """
    parts = path.split(".") if path else []
    for alternative in pattern.split("|"):
        globs = alternative.strip().split(".") if alternative.strip() else []
        if len(globs) == len(parts) and all(
            fnmatch.fnmatchcase(part, glob) for part, glob in zip(parts, globs, strict=True)
        ):
            return True
    return False
