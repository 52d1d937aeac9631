"""Reasons: why modules of a split stay whole, as lines for people.

Place in the flow: below `ir.plan`, which prints them.
"""

from __future__ import annotations

from collections.abc import Sequence


def grouped_reasons(reasons: Sequence[tuple[str, str]], most: int = 6) -> list[str]:
    """Lines of (module, why), modules of one reason together, the most frequent first."""
    by_reason: dict[str, list[str]] = {}
    for path, why in reasons:
        by_reason.setdefault(why, []).append(path)
    lines = []
    for why, paths in sorted(by_reason.items(), key=lambda item: -len(item[1]))[:most]:
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        lines.append(f"{why}: {paths[0] or 'the Layer itself'}{more}")
    if len(by_reason) > most:
        lines.append(f"{len(by_reason) - most} more reasons in the plan's JSON")
    return lines
