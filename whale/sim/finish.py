"""finish: the end of a step on a clock, where ranks that compute, sum and rest slow each other.

Place in the flow: `simulate` puts the computes of a step on a clock as if every device had itself
to itself; this says what becomes of that where gradients are summed beside them (a sum takes
multiprocessors, memory and host threads from the computes, and they from it) and where neighbours
on the same card are done (what is left has its memory alone).

A lane's own clock is its *nominal* time. From `free_s` on it waits for no other lane, so its
nominal time may run slower or faster than the real one; before that, both are the same. A message
that a slowed backward sends late is not carried on to the lane that waits for it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

_EPSILON = 1e-12


@dataclass(slots=True, kw_only=True)
class Runner:
    """One lane of the simulation."""

    ranks: tuple[int, ...]
    free_s: float
    end_s: float
    """Nominal: when its last compute is done."""
    lost: float = 0.0
    """The share of its speed that a sum beside it takes."""
    alone: float = 1.0
    """Its seconds while all neighbours rest, over those with all of them at work."""
    neighbours: Mapping[int, float] = field(default_factory=dict)
    """Other lanes whose devices are parts of the same cards (`cost.cards`)."""
    path: list[tuple[float, float]] = field(default_factory=lambda: [(0.0, 0.0)])
    """Nominal and real time, where the one's speed against the other changes."""

    def real(self, nominal: float) -> float:
        """When a nominal moment really is."""
        index = bisect_right(self.path, (nominal, float("inf"))) - 1
        near = self.path[max(index, 0)]
        if index + 1 >= len(self.path):
            return near[1] + nominal - near[0]
        far = self.path[index + 1]
        return near[1] + (nominal - near[0]) * (far[1] - near[1]) / (far[0] - near[0])


@dataclass(slots=True, kw_only=True)
class Sum:
    """One gradient bucket."""

    ranks: tuple[int, ...]
    seconds: float
    released: tuple[tuple[int, float], ...]
    """Lanes that complete it, each with the nominal moment."""
    begin_s: float = 0.0
    end_s: float = 0.0


def finish(runners: Sequence[Runner], sums: Sequence[Sum], contention: float) -> None:
    """Fills in every Runner's path and every Sum's begin and end.

    Args:
        runners: The lanes.
        sums: In the order in which ranks start them; those of one rank run one after the other.
        contention: The share of its speed that a sum loses while all its ranks compute.
    """
    for lanes, members in _components(runners, sums):
        _Finish({i: runners[i] for i in lanes}, members, contention).run()


class _Finish:
    """Lanes and sums that touch each other."""

    def __init__(self, lanes: Mapping[int, Runner], sums: Sequence[Sum], contention: float) -> None:
        self.lanes, self.contention = lanes, contention
        self.waiting = list(sums)
        self.going: list[tuple[Sum, float]] = []
        """Sums under way and the seconds left of each."""
        self.now = 0.0
        self.nominal = dict.fromkeys(lanes, 0.0)
        self.stops = {
            i: sorted(
                {runner.free_s, runner.end_s}
                | {moment for item in sums for lane, moment in item.released if lane == i}
            )
            for i, runner in lanes.items()
        }
        """Nominal moments at which something may change."""
        self.lane_of = {rank: i for i, runner in lanes.items() for rank in runner.ranks}
        self.ranks = set(self.lane_of) | {rank for item in sums for rank in item.ranks}

    def run(self) -> None:
        while True:
            self._start()
            speeds = {i: self._speed(i) for i in self.lanes if self._computes(i)}
            rates = [self._rate(item) for item, _ in self.going]
            spans = [(self._next(i) - self.nominal[i]) / speed for i, speed in speeds.items()]
            spans += [left / rate for (_, left), rate in zip(self.going, rates, strict=True)]
            if not spans:
                return
            span = min(spans)
            self.now += span
            for i, speed in speeds.items():
                self._move(i, speed, span)
            going, self.going = self.going, []
            for (item, left), rate in zip(going, rates, strict=True):
                if left - span * rate > _EPSILON:
                    self.going.append((item, left - span * rate))
                else:
                    item.end_s = self.now

    def _start(self) -> None:
        """Starts what is complete and whose ranks have no earlier sum before it."""
        taken = {rank for item, _ in self.going for rank in item.ranks}
        started = []
        for place, item in enumerate(self.waiting):
            if taken >= self.ranks:
                break
            complete = all(self.nominal[i] >= moment - _EPSILON for i, moment in item.released)
            if complete and taken.isdisjoint(item.ranks):
                item.begin_s = self.now
                self.going.append((item, item.seconds))
                started.append(place)
            taken.update(item.ranks)
        for place in reversed(started):
            del self.waiting[place]

    def _computes(self, lane: int) -> bool:
        return self.nominal[lane] < self.lanes[lane].end_s - _EPSILON

    def _next(self, lane: int) -> float:
        """The next moment at which something may change; its end at the latest."""
        stops, nominal = self.stops[lane], self.nominal[lane]
        while stops and stops[0] <= nominal + _EPSILON:
            stops.pop(0)
        return stops[0] if stops else self.lanes[lane].end_s

    def _move(self, lane: int, speed: float, span: float) -> None:
        runner = self.lanes[lane]
        target = self.nominal[lane] + span * speed
        stop = self._next(lane)
        # Exactly there, and not a rounding before it.
        self.nominal[lane] = stop if abs(stop - target) <= 1e-9 * max(1.0, stop) else target
        if self.nominal[lane] > runner.path[-1][0]:
            runner.path.append((self.nominal[lane], self.now))

    def _speed(self, lane: int) -> float:
        runner = self.lanes[lane]
        if self.nominal[lane] < runner.free_s - _EPSILON:
            return 1.0
        speed = 1.0
        if runner.neighbours:
            rest = sum(w for i, w in runner.neighbours.items() if not self._computes(i))
            speed /= 1.0 - (1.0 - runner.alone) * rest
        mine = set(runner.ranks)
        if any(not mine.isdisjoint(item.ranks) for item, _ in self.going):
            speed *= 1.0 - runner.lost
        return speed

    def _rate(self, item: Sum) -> float:
        lanes = [self.lane_of[rank] for rank in item.ranks if rank in self.lane_of]
        busy = sum(self._computes(lane) for lane in lanes) / len(item.ranks)
        return 1.0 - self.contention * busy


def _components(
    runners: Sequence[Runner], sums: Sequence[Sum]
) -> Iterable[tuple[list[int], list[Sum]]]:
    """Lanes and sums in groups that have nothing to do with each other."""
    root = list(range(len(runners)))

    def find(i: int) -> int:
        while root[i] != i:
            root[i] = i = root[root[i]]
        return i

    lane_of = {rank: i for i, runner in enumerate(runners) for rank in runner.ranks}
    touching: list[list[int]] = [
        sorted({lane_of[rank] for rank in item.ranks if rank in lane_of}) for item in sums
    ]
    for group in [*touching, *([i, *r.neighbours] for i, r in enumerate(runners))]:
        for other in group[1:]:
            root[find(other)] = find(group[0])
    members: dict[int, list[Sum]] = {}
    for item, group in zip(sums, touching, strict=True):
        # Of ranks that compute nothing: it is over before anything else.
        members.setdefault(find(group[0]) if group else -1, []).append(item)
    lanes: dict[int, list[int]] = {-1: []}
    for i in range(len(runners)):
        lanes.setdefault(find(i), []).append(i)
    for key, found in lanes.items():
        if members.get(key) or any(runners[i].neighbours for i in found):
            yield found, members.get(key, [])
