"""Balance: whole units (rows, heads, columns, experts) over unequal devices, exactly.

Place in the flow: the intra-TaskGraph pass of `make_plan`. It knows nothing of models: each member
says how long it takes and how much memory it needs for x units, and gets its share. The paper's
Algorithm 1 moves load from devices that overflow to devices that do not, which can leave an
overflow and is not optimal; here the shortest time is searched for, so both follow.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from heapq import heapify, heappop, heappush
from itertools import accumulate

from whale.errors import PlanError

MAX_LISTED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One device, or group of devices, that takes a share.

    Both functions never decrease from 1 unit on. `seconds(0)` is never asked: a member without
    units is left out of the maximum. `bytes(0)` is what the member holds even then, and must fit; a
    member that can be left out altogether says 0.
    """

    name: str
    seconds: Callable[[int], float]
    bytes: Callable[[int], float]
    capacity_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """Units per member, the time of the slowest, and what keeps each from taking one unit more.

    `binds`: "memory" when the next unit would fit into the time but not into the memory, "time"
    when it would not fit into the time, "idle" without units.
    """

    units: tuple[int, ...]
    seconds: float
    binds: tuple[str, ...]


def balance(
    members: Sequence[Member], total: int, *, unit: str = "rows", minimum: int = 0
) -> Balance:
    """Divides `total` units so that the slowest member is as fast as can be, within every memory.

    Exact in whole units for any functions that never decrease. Each member gets at least `minimum`
    units: 1 for shards that must exist, 0 where a device may stay idle. Among equal optima as few
    members as possible are the slowest, and lower indices keep more.

    Raises:
        PlanError: not all units fit; with what fits, where, and how many bytes are missing.
    """
    assert members and total >= 0 and minimum >= 0, (members, total, minimum)
    most = total - minimum * (len(members) - 1)
    if most < minimum:
        raise PlanError(
            f"{total} {unit} cannot be divided over {len(members)} members with at least "
            f"{minimum} each",
            hint=f"take at most {total // minimum} devices for these {unit}",
        )
    # -1: even without units the member's memory overflows.
    caps = [bisect_right(range(most + 1), m.capacity_bytes, key=m.bytes) - 1 for m in members]
    if sum(caps) < total or min(caps) < minimum:
        raise _too_little_memory(members, caps, total, unit, minimum)
    under, upto, limit = _shortest_time(members, [minimum] * len(members), caps, total)
    units = _trim(members, under, upto, sum(upto) - total)
    slowest = [m.seconds(x) for m, x in zip(members, units, strict=True) if x]
    return Balance(
        units=tuple(units),
        seconds=max(slowest, default=0.0),
        binds=tuple(
            "idle"
            if not x
            else "memory"
            if x == cap < most and member.seconds(x + 1) <= limit
            else "time"
            for member, x, cap in zip(members, units, caps, strict=True)
        ),
    )


def balance_over(
    members: Sequence[Member], total: int, *, unit: str = "rows", minimum: int = 0
) -> Balance:
    """The same where not all units fit: no member overflows by more than need be."""
    most = total - minimum * (len(members) - 1)
    kinds: dict[tuple[Callable[[int], float], float], int] = {}
    for m in members:
        kinds[m.bytes, m.capacity_bytes] = kinds.get((m.bytes, m.capacity_bytes), 0) + 1

    def fits(over: float) -> bool:
        held = 0
        for (nbytes, capacity), count in kinds.items():
            cap = bisect_right(range(most + 1), capacity + over, key=nbytes) - 1
            if cap < minimum:
                return False
            held += count * cap
        return held >= total

    low = 0.0
    high = max(nbytes(most) - capacity for nbytes, capacity in kinds)
    while high - low > max(1.0, 1e-6 * high):
        middle = (low + high) / 2.0
        low, high = (low, middle) if fits(middle) else (middle, high)
    wider = [replace(m, capacity_bytes=m.capacity_bytes + high) for m in members]
    return balance(wider, total, unit=unit, minimum=minimum)


def _shortest_time(
    members: Sequence[Member], low: list[int], high: list[int], total: int
) -> tuple[list[int], list[int], float]:
    """The shortest time in which `total` units get done: units before it, units at it, the time.

    The answer is one of the values seconds_i(x), low_i < x <= high_i. They are searched as
    quickselect does: the weighted median of the members' middle values takes at least a quarter of
    the candidates away each time, so no value is listed and no tolerance is needed. Units of `low`
    count whatever they take: a member that must have them does not slow the others' search down.
    """
    if sum(low) == total:
        times = (m.seconds(x) for m, x in zip(members, low, strict=True) if x)
        return low, low, max(times, default=0.0)
    while True:
        middles = sorted(
            (members[i].seconds((a + b + 1) // 2), i, b - a)
            for i, (a, b) in enumerate(zip(low, high, strict=True))
            if a < b
        )
        weights = list(accumulate(weight for _, _, weight in middles))
        time, pivot, _ = middles[bisect_left(weights, weights[-1] / 2)]
        under, upto = [], []
        for i, (member, a, b) in enumerate(zip(members, low, high, strict=True)):
            # The pivot's own middle is known; using that makes every round end with fewer
            # candidates even if a measured function is not quite monotone.
            middle = (a + b + 1) // 2
            end, start = (middle - 1, middle) if i == pivot else (b, a)
            before = a + bisect_left(range(a + 1, end + 1), time, key=member.seconds)
            start = max(start, before)
            under.append(before)
            upto.append(start + bisect_right(range(start + 1, b + 1), time, key=member.seconds))
        if sum(under) >= total:
            high = under
        elif sum(upto) < total:
            low = upto
        else:
            return under, upto, time


def _trim(members: Sequence[Member], under: list[int], upto: list[int], surplus: int) -> list[int]:
    """Takes `surplus` units from the members that need the whole time: `under` < `upto`.

    Members are freed of the longest time where that takes the fewest units, then where it leaves
    the least work; the rest comes off the last of those that stay slowest.
    """
    units = list(upto)
    tied = [i for i in range(len(units)) if under[i] < upto[i]]

    def effort(i: int) -> tuple[int, float, int]:
        rest = members[i].seconds(under[i]) if under[i] else 0.0
        return upto[i] - under[i], rest, -i

    for i in sorted(tied, key=effort):
        if upto[i] - under[i] > surplus:
            break
        surplus -= upto[i] - under[i]
        units[i] = under[i]
    if surplus:
        # Fewer than any remaining member holds at the longest time, so one of them gives all.
        last = max(i for i in tied if units[i] > under[i])
        units[last] -= surplus
    return units


def balance_shards(
    total_bytes: int, caps: Sequence[int], speeds: Sequence[float]
) -> tuple[int, ...]:
    """Shards of optimizer state in whole bytes: the smallest max(shard / speed) within the caps.

    Water-filling: members at their cap drop out, the others share in proportion to their speed;
    then the bytes lost to rounding go one by one to whoever is done first. Rational arithmetic, so
    that nothing is lost to floats.

    Raises:
        PlanError: the caps together are smaller than `total_bytes`.
    """
    assert total_bytes >= 0 and len(caps) == len(speeds) > 0, (total_bytes, caps, speeds)
    assert min(caps) >= 0 and min(speeds) > 0, (caps, speeds)
    if sum(caps) < total_bytes:
        raise PlanError(
            f"{format_bytes(total_bytes)} of optimizer state do not fit: {len(caps)} shards have "
            f"{format_bytes(sum(caps))} free, {format_bytes(total_bytes - sum(caps))} too little",
            hint="offload the optimizer state to host memory, shard it over more devices, or take "
            "an optimizer with less state (Adafactor, 8-bit)",
        )
    rates = [Fraction(speed) for speed in speeds]
    full_at = [Fraction(cap) / rate for cap, rate in zip(caps, rates, strict=True)]
    rest, rate = Fraction(total_bytes), sum(rates, Fraction(0))
    level = Fraction(0)
    for i in sorted(range(len(caps)), key=full_at.__getitem__):
        level = rest / rate
        if full_at[i] >= level:
            break
        rest, rate = rest - caps[i], rate - rates[i]
    shards = [min(cap, int(r * level)) for cap, r in zip(caps, rates, strict=True)]
    # Less than one byte per member is lost to rounding: each goes to whoever is done with it first.
    heap = [
        (Fraction(shard + 1) / r, i) for i, (shard, r) in enumerate(zip(shards, rates, strict=True))
    ]
    heapify(heap)
    left = total_bytes - sum(shards)
    while left:
        _, i = heappop(heap)
        if shards[i] < caps[i]:
            shards[i] += 1
            left -= 1
            heappush(heap, (Fraction(shards[i] + 1) / rates[i], i))
    return tuple(shards)


def format_bytes(count: float) -> str:
    """Decimal units, as data sheets print memory: `16.0 GB`."""
    for size, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(count) >= size:
            return f"{count / size:.1f} {name}"
    return f"{count:.0f} B"


def _too_little_memory(
    members: Sequence[Member], caps: list[int], total: int, unit: str, minimum: int
) -> PlanError:
    """What fits, where, and what is missing."""
    over = [i for i, cap in enumerate(caps) if cap < minimum]
    if over:
        lines = [
            f"{members[i].name} needs {format_bytes(members[i].bytes(minimum))} for {minimum} "
            f"{unit} and has {format_bytes(members[i].capacity_bytes)}"
            for i in over[:MAX_LISTED]
        ]
        more = f"; and {len(over) - MAX_LISTED} more" if len(over) > MAX_LISTED else ""
        short = sum(members[i].bytes(minimum) - members[i].capacity_bytes for i in over)
        return PlanError(
            f"{total} {unit} cannot be placed: {'; '.join(lines)}{more}; "
            f"short of {format_bytes(short)}",
            hint="leave these devices out, or make what they hold besides the units smaller: "
            "shard or offload the optimizer state, split the TaskGraph",
        )
    fit = sum(caps)
    missing = total - fit
    short, cheapest = min(
        (member.bytes(cap + missing) - member.capacity_bytes, i)
        for i, (member, cap) in enumerate(zip(members, caps, strict=True))
    )
    return PlanError(
        f"{total} {unit} do not fit: the devices hold {fit} ({_list_caps(members, caps)}); the "
        f"other {missing} need at least {format_bytes(short)} more, on {members[cheapest].name}",
        hint=f"fewer {unit} at a time (a smaller batch or more micro-batches), recompute, sharded "
        "or offloaded optimizer state, or more devices",
    )


def _list_caps(members: Sequence[Member], caps: list[int]) -> str:
    """Every member with its cap; beyond `MAX_LISTED` members, equal caps together."""
    if len(members) <= MAX_LISTED:
        return ", ".join(f"{m.name}: {cap}" for m, cap in zip(members, caps, strict=True))
    groups: dict[int, list[str]] = {}
    for member, cap in zip(members, caps, strict=True):
        groups.setdefault(cap, []).append(member.name)
    parts = [
        f"{names[0]}: {cap}" if len(names) == 1 else f"{len(names)} like {names[0]}: {cap} each"
        for cap, names in groups.items()
    ]
    if len(parts) > MAX_LISTED:
        parts[MAX_LISTED:] = [f"{len(parts) - MAX_LISTED} more sizes"]
    return ", ".join(parts)
