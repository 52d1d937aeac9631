"""Rarely: which of many times a check looks again that costs too much to run at each.

Place in the flow: asked by the checks that run while training (kinds, drift, recheck, intake). What
can go wrong shows at once or much later: the first few times, then at 8, 16, 32, ...
"""

from __future__ import annotations


def rarely(number: int, first: int = 1) -> bool:
    """Whether the `number`th time (from 1) is one of the `first` few or a power of two."""
    return 0 < number <= first or (number > 0 and number & (number - 1) == 0)
