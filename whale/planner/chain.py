"""Chain: consecutive layers over pipeline stages of unequal device groups, order included.

Place in the flow: the inter-TaskGraph pass of `make_plan` when the stages are left to the planner.
It sees seconds and bytes per layer and kind of group, nothing of models. One step of a pipeline
with m micro-batches takes sum(t) + (m - 1) * max(t) over its stages. For a limit on every stage's
seconds, `stage_table` finds the least sum exactly; here the limits are searched by branch and
bound. The least sum falls as the limit grows, so between two limits a < b no step is shorter than
sum(b) + (m - 1) * a: most limits are ruled out unseen, and what is left open when the search stops
is the proven bound. Sweeping a grid of limits, as the literature does, takes many more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import combinations

import numpy as np

from whale.errors import PlanError
from whale.planner.balance import format_bytes
from whale.planner.span_memory import SpanMemory
from whale.planner.stage_table import Floats, StageTable, least_sum, num_states, reach, tabulate

# Numbers in the table of one limit, 8 bytes each. Beyond it, kinds that are alike are merged.
MAX_CELLS = 50_000_000
# The same stage times added up in another order differ by less.
ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupKind:
    """Device groups that are alike, and what each layer costs on one of them.

    Per layer: `seconds` is forward and backward of one micro-batch; `edge_seconds` is added to a
    stage that starts with this layer (receive, and send the gradient back). `memory` is that of
    each device.
    """

    name: str
    count: int
    capacity_bytes: float
    seconds: tuple[float, ...]
    memory: SpanMemory
    edge_seconds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        assert self.memory.num_layers == len(self.seconds), self.name
        assert len(self.edge_seconds) in (0, len(self.seconds)), self.name
        assert all(min(cost, default=0.0) >= 0 for cost in (self.seconds, self.edge_seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Layers [start, end) on one group of kind number `kind`."""

    kind: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Stages in the order of execution, the step's seconds, and seconds that no chain can beat."""

    stages: tuple[Stage, ...]
    seconds: float
    bound_seconds: float


def partition(
    kinds: Sequence[GroupKind],
    num_micro_batch: int,
    *,
    num_stages: int | None = None,
    in_flight: Callable[[int], int] | None = None,
    tolerance: float = 0.01,
    deadline_s: float | None = None,
) -> Chain:
    """Cuts the layers into stages and gives each a group, for the shortest step that fits.

    Groups may stay unused unless `num_stages` fixes how many are taken. `in_flight` gives the
    micro-batches that a stage holds from the number of stages from itself to the end; it must not
    decrease, and never counts beyond `num_micro_batch`. The default is 1F1B's: that number itself.
    The search stops when the result is proven to be within `tolerance` of the optimum (0: exact),
    or after `deadline_s`, with the bound proven until then.

    Raises:
        PlanError: no partition fits; with what is missing.
    """
    assert kinds and num_micro_batch >= 1 and tolerance >= 0, (kinds, num_micro_batch, tolerance)
    num_layers = len(kinds[0].seconds)
    assert num_layers and all(len(kind.seconds) == num_layers for kind in kinds), num_layers
    num_groups = sum(kind.count for kind in kinds)
    if num_stages is not None and not 1 <= num_stages <= min(num_groups, num_layers):
        raise PlanError(
            f"{num_stages} stages asked for {num_layers} layers on {num_groups} device groups",
            hint=f"take 1 to {min(num_groups, num_layers)} stages",
        )
    longest = num_stages or min(num_groups, num_layers)
    request = _Request(
        num_micro_batch=num_micro_batch,
        held=tuple(
            min(num_micro_batch, in_flight(k) if in_flight else k) for k in range(1, longest + 1)
        ),
        num_stages=num_stages,
        tolerance=tolerance,
        deadline=None if deadline_s is None else time.monotonic() + deadline_s,
    )
    return _search(kinds, request) if _fits_table(kinds, longest) else _merged(kinds, request)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What was asked for; `held[k - 1]`: micro-batches in flight with k stages to the end."""

    num_micro_batch: int
    held: tuple[int, ...]
    num_stages: int | None
    tolerance: float
    deadline: float | None

    def step(self, total: float, slowest: float) -> float:
        """Seconds of one step whose stages take `total` together."""
        return total + (self.num_micro_batch - 1) * slowest

    def closed(self, bound: float, best: float) -> bool:
        """Whether nothing that takes `bound` at least is worth looking for."""
        return bound * (1 + self.tolerance) >= best * (1 - ROUNDING)


def _search(kinds: Sequence[GroupKind], request: _Request) -> Chain:
    """Branch and bound over the limit, which is one of the times that a stage can take."""
    table = _tabulate(kinds, request)
    limits = table.limits()
    first = _shortest_limit(kinds, request, table, limits)
    best = Chain(stages=(), seconds=np.inf, bound_seconds=0.0)
    ruled_out = np.inf
    heap: list[tuple[float, int, int, float]] = []

    def evaluate(at: int, low: int) -> tuple[float, int]:
        """At least what sum limit `at` allows, and which limit the stages found really need.

        With limits from `low` on, sums beyond the cutoff make a longer step than the best.
        """
        nonlocal best
        cutoff = best.seconds - request.step(0.0, limits[low])
        total, cuts = least_sum(table, limits[at], num_stages=request.num_stages, cutoff=cutoff)
        if not cuts:
            return total, at
        times = [table.seconds(cut) for cut in cuts]
        seconds = request.step(sum(times), max(times))
        if seconds < best.seconds:
            stages = tuple(Stage(kind=kind, start=start, end=end) for kind, start, end in cuts)
            best = Chain(stages=stages, seconds=seconds, bound_seconds=0.0)
        return total, int(np.searchsorted(limits, max(times)))

    def leave_open(low: int, high: int, total: float) -> None:
        """Limits `low` to `high` stay open; with none of them is the sum less than `total`."""
        if low <= high and total < np.inf:
            heappush(heap, (request.step(total, limits[low]), low, high, total))

    evaluate(first, first)
    # With every layer on its fastest kind the sum is least, which rules out the longest limits.
    floor = float(np.diff(table.prefix).min(axis=0).sum())
    top = _last_open(limits, first, len(limits) - 1, floor, request, best.seconds)
    if top < len(limits) - 1:
        ruled_out = request.step(floor, limits[top + 1])
    if top > first:
        total, needed = evaluate(top, first + 1)
        leave_open(first + 1, needed - 1, total)
    if not best.stages:
        raise PlanError(
            f"no partition into exactly {request.num_stages} stages fits into memory, though one "
            "into fewer does",
            hint="leave the number of stages to the planner, or free memory: fewer rows per "
            "micro-batch, recompute",
        )
    while heap and not request.closed(heap[0][0], best.seconds):
        if request.deadline is not None and time.monotonic() > request.deadline:
            break
        _, low, high, total = heappop(heap)
        top = _last_open(limits, low, high, total, request, best.seconds)
        if top < high:
            ruled_out = min(ruled_out, request.step(total, limits[top + 1]))
        middle = low + int(np.searchsorted(limits[low:top], (limits[low] + limits[top]) / 2))
        total_there, needed = evaluate(middle, low)
        leave_open(low, needed - 1, total_there)
        leave_open(middle + 1, top, total)
    bound = min(best.seconds, ruled_out, heap[0][0] if heap else np.inf)
    return replace(best, bound_seconds=float(bound))


def _last_open(
    limits: Floats, low: int, high: int, total: float, request: _Request, best: float
) -> int:
    """The last of the limits `low` to `high` that a sum of `total` does not rule out; or `low`."""
    while low < high:
        middle = (low + high + 1) // 2
        if request.closed(request.step(total, limits[middle]), best):
            high = middle - 1
        else:
            low = middle
    return low


def _tabulate(kinds: Sequence[GroupKind], request: _Request) -> StageTable:
    no_edges = (0.0,) * len(kinds[0].seconds)
    return tabulate(
        seconds=np.array([kind.seconds for kind in kinds], dtype=np.float64),
        edge=np.array([kind.edge_seconds or no_edges for kind in kinds], dtype=np.float64),
        room=np.array(
            [
                [kind.memory.last_ends(kind.capacity_bytes, number) for number in request.held]
                for kind in kinds
            ]
        ),
        counts=[kind.count for kind in kinds],
    )


def _shortest_limit(
    kinds: Sequence[GroupKind], request: _Request, table: StageTable, limits: Floats
) -> int:
    """The first limit under which the layers can be covered at all, by bisection."""
    earliest = reach(table, np.inf)
    if earliest:
        raise _too_little_memory(kinds, request, earliest)
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if reach(table, limits[middle]) == 0 else (middle + 1, high)
    return low


def _too_little_memory(kinds: Sequence[GroupKind], request: _Request, earliest: int) -> PlanError:
    """Says the first of these that explains it: one layer, the total, or where the groups end."""
    kinds = [kind for kind in kinds if kind.count]
    layers = range(len(kinds[0].seconds))

    def needs(kind: GroupKind, layer: int) -> float:
        return kind.memory.peak(layer, layer + 1, request.held[0]) - kind.memory.driver

    def free(kind: GroupKind) -> float:
        return kind.capacity_bytes - kind.memory.driver

    home = [min(kinds, key=lambda kind: needs(kind, layer) - free(kind)) for layer in layers]
    short = [needs(kind, layer) - free(kind) for layer, kind in zip(layers, home, strict=True)]
    worst = max(layers, key=short.__getitem__)
    least = [min(kind.memory.stays(layer, request.held[0]) for kind in kinds) for layer in layers]
    have = sum(kind.count * max(free(kind), 0.0) for kind in kinds)
    if short[worst] > 0:
        why = (
            f"layer {worst} alone needs {format_bytes(needs(home[worst], worst))} on "
            f"{home[worst].name}, which has {format_bytes(max(free(home[worst]), 0.0))} free: "
            f"{format_bytes(short[worst])} too little"
        )
    elif sum(least) > have:
        why = (
            f"they need at least {format_bytes(sum(least))}, and one device of each group has "
            f"{format_bytes(have)} free in all: {format_bytes(sum(least) - have)} too little"
        )
    else:
        why = (
            f"at best the last {len(layers) - earliest} layers do; the first {earliest} need at "
            f"least {format_bytes(sum(least[:earliest]))} more, and early stages hold the most "
            "micro-batches"
        )
    return PlanError(
        f"no cut of {len(layers)} layers over {sum(kind.count for kind in kinds)} device groups "
        f"fits into memory: {why}",
        hint="fewer rows per micro-batch, recompute, sharded or offloaded optimizer state, more "
        "devices per group (split), or more groups",
    )


def _fits_table(kinds: Sequence[GroupKind], longest: int) -> bool:
    states = num_states([kind.count for kind in kinds], longest)
    return states * (len(kinds[0].seconds) + 1) <= MAX_CELLS


def _merged(kinds: Sequence[GroupKind], request: _Request) -> Chain:
    """Too many kinds to tell apart: the most alike become one, until the table is small enough.

    A merged kind as bad as its worst member gives a chain that works on any member, one as good as
    its best gives the bound.
    """
    members = [[number] for number in range(len(kinds))]
    worst, best = list(kinds), list(kinds)
    while len(worst) > 1 and not _fits_table(worst, len(request.held)):
        a, b = min(combinations(range(len(worst)), 2), key=lambda pair: _distance(worst, *pair))
        members[a] += members.pop(b)
        worst[a] = _merge(worst[a], worst.pop(b), max, min)
        best[a] = _merge(best[a], best.pop(b), min, max)
    try:
        found = _search(worst, request)
    except PlanError:
        _search(best, request)  # raises, with what is missing, when it is proven that nothing fits
        raise PlanError(
            f"no partition found: {len(kinds)} kinds of groups are too many to search exactly, and "
            f"merged into {len(worst)} they do not fit",
            hint="describe the cluster with fewer kinds of groups, or free memory: fewer rows per "
            "micro-batch, recompute",
        ) from None
    bound = _search(best, request).bound_seconds
    stages, times = list(found.stages), [0.0] * len(found.stages)
    for merged, numbers in enumerate(members):
        # The longest stages go to the fastest members.
        numbers.sort(key=lambda number: sum(kinds[number].seconds))
        groups = [number for number in numbers for _ in range(kinds[number].count)]
        mine = [at for at, stage in enumerate(found.stages) if stage.kind == merged]
        mine.sort(key=lambda at: -_seconds(worst[merged], found.stages[at]))
        for at, number in zip(mine, groups, strict=False):
            stages[at] = replace(found.stages[at], kind=number)
            times[at] = _seconds(kinds[number], stages[at])
    seconds = request.step(sum(times), max(times))
    return Chain(stages=tuple(stages), seconds=seconds, bound_seconds=min(bound, seconds))


def _seconds(kind: GroupKind, stage: Stage) -> float:
    edge = kind.edge_seconds[stage.start] if kind.edge_seconds else 0.0
    return sum(kind.seconds[stage.start : stage.end]) + edge


def _distance(kinds: Sequence[GroupKind], a: int, b: int) -> float:
    """How much is lost by not telling two kinds apart, as a ratio of times and of capacities."""
    times = sorted(sum(kinds[number].seconds) for number in (a, b))
    sizes = sorted(kinds[number].capacity_bytes for number in (a, b))
    return (times[1] + 1e-30) / (times[0] + 1e-30) + (sizes[1] + 1) / (sizes[0] + 1)


def _merge(
    a: GroupKind, b: GroupKind, cost: Callable[..., float], gain: Callable[..., float]
) -> GroupKind:
    none = (0.0,) * len(a.seconds)
    return GroupKind(
        name=f"{a.name} or {b.name}",
        count=a.count + b.count,
        capacity_bytes=gain(a.capacity_bytes, b.capacity_bytes),
        seconds=tuple(map(cost, a.seconds, b.seconds)),
        memory=a.memory.merged(b.memory, cost),
        edge_seconds=tuple(map(cost, a.edge_seconds or none, b.edge_seconds or none)),
    )
