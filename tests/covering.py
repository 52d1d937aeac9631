"""covering: a part of many cases in which every value of every axis still occurs.

Place in the flow: under the marker `covering` (`conftest`), and inside tests whose ranks run many
cases one after another. `make test` runs such parts, `make test-full` all of it.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, TypeVar

FULL = "TESTS_FULL"
"""Set in the environment, which ranks inherit, by `--full`."""

Case = TypeVar("Case", bound=Sequence[Any])


def covering(cases: Iterable[Case], size: int = 1) -> list[Case]:
    """Cases of which every `size` values at different places occur together, as in all of them.

    The case with most that no other has is taken first, then the one whose values have been taken
    least, so that values that must come often meet different others.
    """
    every = list(cases)
    met = [_tuples(case, size) for case in every]
    left = set().union(*met)
    often: Counter[Hashable] = Counter()
    taken: list[int] = []
    while left:
        best = max(
            range(len(every)),
            key=lambda i: (len(met[i] & left), -sum(often[x] for x in _tuples(every[i], 1)), -i),
        )
        taken.append(best)
        left -= met[best]
        often.update(_tuples(every[best], 1))
    return [every[i] for i in sorted(taken)]


def _tuples(case: Sequence[Any], size: int) -> set[Hashable]:
    values = [
        (place, value if isinstance(value, str) else repr(value))
        for place, value in enumerate(case)
    ]
    return set(itertools.combinations(values, min(size, len(values))))


def some(count: int) -> int:
    """So many random examples under `--full`, else a quarter of them."""
    return count if os.environ.get(FULL) else max(5, count // 4)


def part(cases: Iterable[Case], size: int = 1) -> list[Case]:
    """All cases under `--full`, else a covering part."""
    return list(cases) if os.environ.get(FULL) else covering(cases, size)
