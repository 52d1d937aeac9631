"""Stage table: the least sum of stage seconds when no stage may take longer than a limit.

Place in the flow: the inner half of `chain`, which searches over limits. Arrays in, arrays out.
Stages are built from the last one backwards: a 1F1B stage with k stages from itself to the end
holds min(m, k) micro-batches, so its memory depends on how many groups were used so far, not on
which. A state says how many groups of each kind are used; all states with equally many groups are
one numpy column range, and a step from k - 1 to k groups is a few operations on whole arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Cut = tuple[int, int, int]  # kind, start, end of one stage


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTable:
    """One instance as arrays.

    `prefix[kind, layer]` sums seconds; `spans[kind, start, end]` are the stages' seconds, inf for
    empty ones; `room[kind, k - 1, start]` is the last end that fits into memory with k stages to
    the end. `sources[k][kind, state]` is the column, among the states of k - 1 groups, that has one
    group of that kind less; one past the last column when there is none.
    """

    prefix: Floats
    edge: Floats
    spans: Floats
    room: Ints
    sources: tuple[Ints, ...]

    @property
    def num_layers(self) -> int:
        """Layers in the chain."""
        return int(self.edge.shape[1])

    def seconds(self, cut: Cut) -> float:
        """Forward and backward of one micro-batch in one stage."""
        return float(self.spans[cut])

    def limits(self) -> Floats:
        """All times that a stage can take, ascending."""
        fits = np.arange(self.num_layers + 1) <= self.room[:, 0, :, None]
        return np.unique(self.spans[fits & (self.spans < np.inf)])

    def last_ends(self, limit: float) -> Ints:
        """The last end of a stage by [kind, k - 1, start]; the start itself when no layer fits."""
        by_time: Ints = np.arange(self.num_layers) + np.sum(self.spans <= limit, axis=2)
        return np.minimum(self.room, by_time[:, None, :])


def tabulate(
    *,
    seconds: Floats,
    edge: Floats,
    room: Ints,
    counts: Sequence[int],
) -> StageTable:
    """The table of [kind, layer] seconds, and of [kind, k - 1, start] last ends that fit."""
    num_layers = seconds.shape[1]
    prefix = _prefix(seconds)
    starts, ends = np.arange(num_layers)[:, None], np.arange(num_layers + 1)
    spans = (prefix[:, None, :] - prefix[:, :-1, None]) + edge[:, :, None]
    return StageTable(
        prefix=prefix,
        edge=edge,
        spans=np.where(ends > starts, spans, np.inf),
        room=room,
        sources=_sources(counts, room.shape[1]),
    )


def _prefix(values: Floats) -> Floats:
    return np.concatenate([np.zeros((len(values), 1)), np.cumsum(values, axis=1)], axis=1)


def num_states(counts: Sequence[int], longest: int) -> int:
    """In how many ways at most `longest` groups can be taken, equal groups not told apart."""
    ways = np.ones(1, np.int64)
    for count in counts:
        ways = np.convolve(ways, np.ones(min(count, longest) + 1, np.int64))[: longest + 1]
    return int(ways.sum())


def _sources(counts: Sequence[int], longest: int) -> tuple[Ints, ...]:
    """How the states of each number of groups follow from those with one group less."""
    used = np.zeros((1, 0), np.int64)
    for count in counts:
        more = np.arange(min(count, longest) + 1)
        used = np.column_stack([np.repeat(used, len(more), axis=0), np.tile(more, len(used))])
        used = used[used.sum(axis=1) <= longest]
    # States stand in the order of their codes, so that a column is found by bisection.
    strides = np.cumprod([1, *(min(count, longest) + 1 for count in counts[:0:-1])])[::-1]
    below = np.zeros(1, np.int64)
    sources = [np.empty((len(counts), 0), np.int64)]
    for level in range(1, longest + 1):
        states = used[used.sum(axis=1) == level]
        codes = states @ strides
        columns = np.searchsorted(below, codes - strides[:, None])
        sources.append(np.where(states.T > 0, columns, len(below)))
        below = codes
    return tuple(sources)


def reach(table: StageTable, limit: float) -> int:
    """The earliest layer from which on all can be covered with some groups; 0: a chain exists.

    Per state only the earliest start counts: whoever starts later, or used more groups, can do
    nothing that it cannot. This needs memory that never shrinks with more stages to the end.
    """
    size = table.num_layers
    last = np.maximum.accumulate(table.last_ends(limit), axis=2)
    ends = np.arange(size + 1)
    reached, earliest = np.array([size, size + 1]), size
    for level in range(1, len(table.sources)):
        sources = table.sources[level]
        starts = np.full(sources.shape[1] + 1, size + 1)
        for kind, columns in enumerate(sources):
            start = np.searchsorted(last[kind, level - 1], ends)
            start = np.append(np.where(start < ends, start, size + 1), size + 1)
            np.minimum(starts[:-1], start[reached[columns]], out=starts[:-1])
        reached, earliest = starts, min(earliest, int(starts.min()))
        if earliest == 0:
            break
    return earliest


def least_sum(
    table: StageTable, limit: float, *, num_stages: int | None = None, cutoff: float = np.inf
) -> tuple[float, list[Cut]]:
    """The least sum of stage seconds with none above `limit`, and its stages.

    Only sums below `cutoff` are looked for: without one, the answer is `cutoff` and no stages.
    """
    size, last = table.num_layers, table.last_ends(limit)
    # No sum for the layers before one is less than each of them on its fastest kind.
    before = np.concatenate(([0.0], np.cumsum(np.diff(table.prefix).min(axis=0))))[:, None]
    levels = [_Level.start(size)]
    low = size
    for number in range(1, len(table.sources)):
        below, high = levels[-1], size - number + 1
        columns = below.position[table.sources[number]]
        states = np.flatnonzero((columns < len(below.states)).any(axis=0))
        cost = np.full((size + 1, len(states) + 1), np.inf)
        lowest = high
        for kind, column in enumerate(columns[:, states]):
            # Over its ends, the cost of a stage is prefix[end] + costs[end] and a constant: a
            # minimum over a window. Only rows `low` to `high` of the level below can be finite.
            first = np.maximum(np.arange(high) + 1, low)
            until = np.minimum(last[kind, number - 1, :high], high)
            possible = np.flatnonzero(first <= until)
            if not possible.size:
                continue
            rows = slice(possible[0], possible[-1] + 1)
            lowest = min(lowest, int(possible[0]))
            values = np.take(below.cost[low : high + 1], column, axis=1)
            values += table.prefix[kind, low : high + 1, None]
            least = _window_minimum(values, first[rows] - low, until[rows] - low)
            least += (table.edge[kind, rows] - table.prefix[kind, rows])[:, None]
            np.minimum(cost[rows, :-1], least, out=cost[rows, :-1])
        useful = (cost[lowest:high] + before[lowest:high]).min(axis=0, initial=np.inf) < cutoff
        if not useful.any():
            break
        levels.append(_Level.of(states, cost, useful, table.sources[number].shape[1]))
        low = lowest
    chosen = range(1, len(levels)) if num_stages is None else range(num_stages, len(levels))
    least_of_all, number = min(
        ((float(levels[k].cost[0].min()), k) for k in chosen), default=(np.inf, 0)
    )
    if least_of_all >= cutoff:
        return cutoff, []
    return least_of_all, _cuts(table, last, levels[: number + 1])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Level:
    """The states with one number of groups that can still lead below the cutoff.

    `cost[layer, column]` is the least sum for the layers from `layer` on; `states` are the columns'
    states and `position` the states' columns. States that are gone have the last column, of inf.
    """

    cost: Floats
    states: Ints
    position: Ints

    @classmethod
    def start(cls, size: int) -> _Level:
        """No group used and no layer covered."""
        cost = np.full((size + 1, 2), np.inf)
        cost[size, 0] = 0.0
        return cls(cost=cost, states=np.zeros(1, np.int64), position=np.array([0, 1]))

    @classmethod
    def of(cls, states: Ints, cost: Floats, useful: NDArray[np.bool_], num_states: int) -> _Level:
        """Keeps the useful columns."""
        kept = np.flatnonzero(useful)
        position = np.full(num_states + 1, len(kept))
        position[states[kept]] = np.arange(len(kept))
        if len(kept) < len(states):
            cost = np.take(cost, np.append(kept, len(states)), axis=1)
        return cls(cost=cost, states=states[kept], position=position)


def _window_minimum(values: Floats, first: Ints, last: Ints) -> Floats:
    """Row i: the minimum of rows first[i] to last[i], from minima over powers of two."""
    power = np.frexp(np.maximum(last - first + 1, 0))[1] - 1
    out = np.full((len(first), values.shape[1]), np.inf)
    for exponent in range(int(power.max()) + 1):
        span, half = 2**exponent, 2**exponent // 2
        if half:
            values = np.minimum(values[:-half], values[half:])
        rows = np.flatnonzero(power == exponent)
        out[rows] = np.minimum(values[first[rows]], values[last[rows] - span + 1])
    return out


def _cuts(table: StageTable, last: Ints, levels: list[_Level]) -> list[Cut]:
    """The stages behind the least cost of the last level, found again from the costs alone."""
    cuts: list[Cut] = []
    start, column = 0, int(levels[-1].cost[0].argmin())
    for number in range(len(levels) - 1, 0, -1):
        below = levels[number - 1]
        sources = below.position[table.sources[number][:, levels[number].states[column]]]
        options = []
        for kind, source in enumerate(sources):
            ends = slice(start + 1, last[kind, number - 1, start] + 1)
            sums = table.spans[kind, start, ends] + below.cost[ends, source]
            if sums.size:
                options.append(
                    (float(sums.min()), kind, start + 1 + int(sums.argmin()), int(source))
                )
        _, kind, end, column = min(options)
        cuts.append((kind, start, end))
        start = end
    return cuts
