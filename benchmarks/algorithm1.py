"""The simpler ways to divide work, to compare with: the paper's Algorithm 1 and plain proportion.

Algorithm 1 is taken from the paper's pseudo-code as printed, defects included: the largest load
that the lightest device can hold is moved to it, and the overflowing device counts as cured after
one move. `repaired` moves only what overflows and counts a device as cured when it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor

from whale.ir.sharding import apportion, cuts
from whale.planner.chain import Stage

MAX_STEPS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Load per device, and whether the algorithm came to an end within `MAX_STEPS`."""

    loads: tuple[float, ...]
    ended: bool


def algorithm1(
    speeds: Sequence[float],
    capacities: Sequence[float],
    load_bytes: Sequence[float],
    loads: Sequence[float],
    *,
    whole: bool,
    repaired: bool = False,
) -> Shares:
    """Shifts load until no device overflows, from `loads` in proportion to the speeds.

    `load_bytes` is memory per unit of load (the paper's TGmem, with the whole load as 1); `whole`:
    only whole units are moved.
    """
    loads, devices = list(loads), range(len(loads))

    def memory(i: int) -> float:
        return loads[i] * load_bytes[i] / capacities[i]

    def flops(i: int) -> float:
        # In proportion to the speeds all are equal: rounding must not decide, memory comes next.
        return float(f"{loads[i] / speeds[i]:.9g}")

    def units(amount: float) -> float:
        # A hair of rounding must not cost a whole unit.
        return floor(amount + 1e-9) if whole else amount

    overflowing = [i for i in devices if memory(i) > 1]
    free = [i for i in devices if memory(i) <= 1]
    steps = 0
    while overflowing and free and steps < MAX_STEPS:
        steps += 1
        peak = max(overflowing, key=memory)
        valley = min(free, key=lambda i: (flops(i), memory(i)))
        room = units(capacities[valley] / load_bytes[valley] - loads[valley])
        excess = loads[peak] - units(capacities[peak] / load_bytes[peak])
        shift = min(room, excess if repaired else loads[peak])
        if shift > 0:
            loads[peak] -= shift
            loads[valley] += shift
            if not repaired or memory(peak) <= 1 + 1e-12:
                overflowing.remove(peak)
        else:
            free.remove(valley)
    return Shares(loads=tuple(loads), ended=steps < MAX_STEPS)


def proportional(total: int, speeds: Sequence[int]) -> tuple[int, ...]:
    """Whole units in proportion to peak FLOP/s, blind to memory."""
    return apportion(total, speeds)


def cut_by_loads(
    flops: Sequence[float], loads: Sequence[float], kinds: Sequence[int]
) -> tuple[Stage, ...]:
    """Consecutive stages whose FLOPs come nearest to the loads; a load of no layer is dropped."""
    done = cuts(flops)
    targets = [done[-1] * share / sum(loads) for share in cuts(loads)]
    edges = [min(range(len(done)), key=lambda i: abs(done[i] - target)) for target in targets]
    edges[-1] = len(flops)
    return tuple(
        Stage(kind=kind, start=start, end=end)
        for kind, start, end in zip(kinds, edges, edges[1:], strict=False)
        if start < end
    )
