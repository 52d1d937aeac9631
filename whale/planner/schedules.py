"""Pipeline schedules: from a Schedule to the actions of every device group, as pure functions.

Place in the flow: the planner names a kind, `compute_order` says in which order a device group runs
its forwards and backwards, `rank_actions` adds the messages. `ir/deadlock.py` checks the result;
executor, simulator and viewer read it.

All kinds come from one list scheduler over unit costs (F=1, B=2, I=1, W=1): at every tick each idle
device group takes the best action that is ready, so any number of groups, chunks and micro-batches
works, whether or not they divide each other, and the orders of all groups fit together by
construction. A kind is only a limit on micro-batches in flight and a preference (`SCHEDULES`).
Sources: GPipe (arXiv 1811.06965), 1F1B (PipeDream-Flush, 2006.09503), interleaved 1F1B
(Megatron-LM, 2104.04473), zero bubble (2401.10241).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from whale.errors import ScheduleError
from whale.ir.schedule import Action, Schedule
from whale.planner.receives import with_messages

COSTS = {"F": 1, "B": 2, "I": 1, "W": 1}
"""Ticks per action, the usual ratio: a backward computes two gradients, so twice a forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What makes one kind of schedule different from another."""

    summary: str
    """One line for people."""
    limited: bool = True
    """Whether micro-batches in flight are limited; if not, all forwards come before a backward."""
    chunked: bool = False
    """Whether several stages per group are limited together, as interleaved 1F1B does."""
    split_backward: bool = False
    """Whether B is split into I and W."""


SCHEDULES: dict[str, Policy] = {
    "gpipe": Policy(summary="all forwards, then all backwards", limited=False),
    "1f1b": Policy(summary="stage s of n keeps at most n - s micro-batches in flight"),
    "interleaved": Policy(summary="1F1B over several smaller stages per group", chunked=True),
    "zero-bubble": Policy(
        summary="1F1B with weight gradients put off into the bubbles",
        chunked=True,
        split_backward=True,
    ),
}

_EPL_NAMES = {"preferforward": "gpipe", "preferbackward": "1f1b"}


def canonical_kind(name: str) -> str:
    """The key of `SCHEDULES` that `name` means; case does not matter, EPL's names are known."""
    key = name.lower()
    key = _EPL_NAMES.get(key, key)
    if key in SCHEDULES:
        return key
    near = difflib.get_close_matches(key, [*SCHEDULES, *_EPL_NAMES], n=1, cutoff=0.0)
    raise ScheduleError(
        f"unknown schedule {name!r}, allowed: {', '.join(SCHEDULES)}",
        hint=f"did you mean {_EPL_NAMES.get(near[0], near[0])!r}?",
    )


def compute_order(schedule: Schedule, group: int) -> list[Action]:
    """The F, B, I and W of one device group, in the order it runs them."""
    return list(_orders(schedule)[group])


def rank_actions(schedule: Schedule, group: int) -> list[Action]:
    """Everything one device group does: its computes with sends and receives around them.

    A send stands right after the compute that makes it due, a receive before the compute that needs
    it or, where that is safe, one compute earlier (`planner.receives`). On each ordered channel
    (source group to destination group) the receives stand in exactly the order of the sends,
    activations and gradients alike, because NCCL matches by order alone; where the sender's order
    is not ours, the messages in between are posted too.
    """
    return list(_actions(schedule)[group])


def peak_in_flight(schedule: Schedule, group: int) -> int:
    """The most (stage, micro-batch) pairs a device group holds activations of at one time.

    A pair counts from its F to its B, or to its W where the backward is split.
    """
    now = peak = 0
    for action in _orders(schedule)[group]:
        now += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
        peak = max(peak, now)
    return peak


def held_states(schedule: Schedule, group: int) -> tuple[dict[int, int], ...]:
    """What a device group holds at its worst moments: by stage, how many micro-batches.

    Counted as `peak_in_flight` does. A moment at which another holds no less of any stage is left
    out: whatever the stages' sizes, it is not the worst.
    """
    now = dict.fromkeys(schedule.groups[group], 0)
    found: list[dict[int, int]] = []
    for action in _orders(schedule)[group]:
        now[action.stage] += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
        if action.kind == "F" and not any(_covers(other, now) for other in found):
            found = [other for other in found if not _covers(now, other)]
            found.append(dict(now))
    return tuple(found)


def _covers(more: Mapping[int, int], less: Mapping[int, int]) -> bool:
    return all(more[stage] >= count for stage, count in less.items())


@lru_cache(maxsize=32)
def _actions(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """Everything all device groups do."""
    return with_messages(schedule, _orders(schedule))


@lru_cache(maxsize=32)
def _orders(schedule: Schedule) -> tuple[tuple[Action, ...], ...]:
    """The compute orders of all device groups: they are only ever right together."""
    if schedule.orders is None:
        return _ListScheduler(schedule).run()
    orders = tuple(tuple(Action.parse(text) for text in order) for order in schedule.orders)
    for action in (action for order in orders for action in order):
        if not action.is_compute:
            raise ScheduleError(
                f"explicit order holds the message {action}, allowed: F, B, I and W only",
                hint="leave sends and receives out: they follow from the edges",
            )
    return orders


class _ListScheduler:
    """One run of the greedy scheduler: the mutable state of `_orders`, and of nothing else.

    It always ends. Each stage takes its micro-batches in order, so with limits per stage (at least
    1 each) the earliest unfinished micro-batch is never held up by later ones. A limit per group
    (`chunked`) counts on round-robin chains; where groups or edges are others and every group is
    held up, `_force` lets one forward exceed it.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.links = schedule.links()
        self.policy = SCHEDULES[canonical_kind(schedule.kind)]
        self.chunked = self.policy.chunked and max(map(len, schedule.groups)) > 1
        self.chunk_of = {s: chunk for group in schedule.groups for chunk, s in enumerate(group)}
        self.backward = "I" if self.policy.split_backward else "B"
        self.last_kind = "W" if self.policy.split_backward else "B"
        # Micro-batches begun per kind and stage: each stage takes them in order.
        self.begun = {(kind, s): 0 for kind in COSTS for s in range(schedule.num_stages)}
        # The tick at which (kind, stage, micro-batch) is finished, once begun.
        self.finish: dict[tuple[str, int, int], int] = {}
        self.orders: list[list[Action]] = [[] for _ in schedule.groups]
        self.free_at = [0] * len(schedule.groups)

    def run(self) -> tuple[tuple[Action, ...], ...]:
        num_pairs = self.schedule.num_stages * self.schedule.num_micro_batch
        left = num_pairs * (3 if self.policy.split_backward else 2)
        tick = 0
        while left:
            idle = [group for group, free_at in enumerate(self.free_at) if free_at <= tick]
            picks = [action for group in idle if (action := self._pick(group, tick))]
            if not picks and len(idle) == len(self.orders):
                picks = [self._force(tick)]
            for action in picks:
                self._begin(action, tick)
            left -= len(picks)
            tick += 1
        return tuple(tuple(order) for order in self.orders)

    def _pick(self, group: int, tick: int) -> Action | None:
        """The best ready action; at the limit, forward first means one forward per backward."""
        forwards = self._next("F", group)
        if not self.policy.limited and forwards:
            return self._first_ready("F", forwards, tick)
        allowed = [forward for forward in forwards if self._has_room(forward[-1])]
        return (
            self._first_ready("F", allowed, tick)
            or self._first_ready(self.backward, self._next(self.backward, group), tick)
            or self._first_ready("W", self._next("W", group), tick)
        )

    def _next(self, kind: str, group: int) -> list[tuple[int, int, int, int]]:
        """(round, chunk, micro-batch, stage) of the next `kind` of each stage, best first.

        A round is as many micro-batches as there are groups; each goes through all chunks before
        the next, forwards up and backwards down.
        """
        num_groups, sign = len(self.orders), 1 if kind == "F" else -1
        return sorted(
            (at // num_groups, sign * self.chunk_of[s], at, s)
            for s in self.schedule.groups[group]
            if (at := self.begun[kind, s]) < self.schedule.num_micro_batch
        )

    def _first_ready(
        self, kind: str, candidates: list[tuple[int, int, int, int]], tick: int
    ) -> Action | None:
        for _, _, micro_batch, stage in candidates:
            if self._is_ready(kind, stage, micro_batch, tick):
                return Action(kind=kind, stage=stage, micro_batch=micro_batch)
        return None

    def _is_ready(self, kind: str, stage: int, micro_batch: int, tick: int) -> bool:
        if kind == "W":
            return self.finish.get(("I", stage, micro_batch), tick + 1) <= tick
        if kind == "F":
            after, peers = "F", self.links.producers[stage]
        else:
            after, peers = self.backward, self.links.consumers[stage]
            if self.finish.get(("F", stage, micro_batch), tick + 1) > tick:
                return False
        return all(self.finish.get((after, s, micro_batch), tick + 1) <= tick for s in peers)

    def _has_room(self, stage: int) -> bool:
        """Whether the limit on micro-batches in flight lets `stage` begin a forward."""
        if not self.chunked:
            return self._in_flight(stage) < self.schedule.num_stages - stage
        group, num_groups = self.links.group[stage], len(self.orders)
        num_chunks = max(map(len, self.schedule.groups))
        # Megatron-LM's warm-up, and the one forward that follows it before each backward.
        limit = 2 * (num_groups - group - 1) + (num_chunks - 1) * num_groups + 1
        return sum(self._in_flight(s) for s in self.schedule.groups[group]) < limit

    def _in_flight(self, stage: int) -> int:
        return self.begun["F", stage] - self.begun[self.last_kind, stage]

    def _begin(self, action: Action, tick: int) -> None:
        group = self.links.group[action.stage]
        end = tick + COSTS[action.kind]
        self.begun[action.kind, action.stage] += 1
        self.finish[action.kind, action.stage, action.micro_batch] = end
        self.free_at[group] = end
        self.orders[group].append(action)

    def _force(self, tick: int) -> Action:
        forwards = [f for group in range(len(self.orders)) for f in self._next("F", group)]
        forward = self._first_ready("F", sorted(forwards), tick)
        assert forward is not None, "the edges go up, so some forward is ready"
        return forward
