"""Auto stages: Layers cut into consecutive stages of balanced cost.

Place in the flow: first pass of `make_plan` when the user asked for `auto` with
`pipeline.num_stages`.
"""

from __future__ import annotations

from collections.abc import Sequence


def balanced_cuts(costs: Sequence[float], num_parts: int) -> tuple[int, ...]:
    """Cut points of `num_parts` consecutive, non-empty parts with the smallest largest sum (exact).

    Dynamic programming over (parts, prefix); among equal maxima the earliest cuts win.
    """
    count = len(costs)
    assert 1 <= num_parts <= count, (num_parts, count)
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)
    best: list[float] = prefix[:]
    choice: list[list[int]] = [[0] * (count + 1)]
    for part in range(2, num_parts + 1):
        new = [float("inf")] * (count + 1)
        where = [0] * (count + 1)
        for end in range(part, count + 1):
            for start in range(part - 1, end):
                value = max(best[start], prefix[end] - prefix[start])
                if value < new[end]:
                    new[end], where[end] = value, start
        best = new
        choice.append(where)
    cuts = [count]
    for part in range(num_parts - 1, 0, -1):
        cuts.append(choice[part][cuts[-1]])
    cuts.append(0)
    return tuple(reversed(cuts))
