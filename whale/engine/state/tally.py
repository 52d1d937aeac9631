"""Tally: values that move while training, by name, as far as they may lead to other code.

Place in the flow: filled by `engine.watch.face`, `engine.state.following` and
`engine.state.outside`; its key is a part of what `engine.watch.kinds` tells kinds of batches apart
by. A flag or a mode makes a kind of its own. A number that moves all the time does not: then it
counts how often, roughly.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

_FIRST = 8
"""Numbers of one name each of which makes a kind of its own."""
_MOST = 64
"""Other values of one name that do."""


class Tally:
    """The last value of every name that has changed."""

    def __init__(self) -> None:
        self._said: dict[str, Hashable] = {}
        self._times: dict[str, int] = {}
        self._values: dict[str, set[str]] = {}

    def note(self, name: str, value: Any) -> None:
        """Another value than before."""
        times = self._times[name] = self._times.get(name, 0) + 1
        known = self._values.setdefault(name, set())
        shown = repr(value)[:200]
        number = isinstance(value, int) and not isinstance(value, bool)
        if shown not in known and len(known) < (_FIRST if number else _MOST):
            known.add(shown)
        moving = isinstance(value, float) or shown not in known
        self._said[name] = times.bit_length() if moving else shown

    def key(self) -> Hashable:
        """Alike where nothing has changed that may lead to other code."""
        return tuple(self._said.items())
