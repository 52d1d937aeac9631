"""A second, plainer model of the clock: computes and messages of any cost; `simulate` must agree.

Place in the flow: an oracle of the tests; `whale.sim` does not know it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from whale.errors import ScheduleError
from whale.ir.schedule import Action, Schedule

Cost = Callable[[Action], float]
"""Seconds of a compute action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One compute of one device group, in seconds from the start of the step."""

    group: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """All computes of a step, in the order they start."""

    spans: tuple[Span, ...]
    num_groups: int

    @property
    def step_s(self) -> float:
        """When the last compute ends."""
        return max((span.end_s for span in self.spans), default=0.0)

    def busy_s(self, group: int) -> float:
        """How long one device group computes."""
        return sum(span.end_s - span.start_s for span in self.spans if span.group == group)

    @property
    def bubble(self) -> float:
        """Share of the device groups' time in which they wait."""
        total = self.num_groups * self.step_s
        busy = sum(self.busy_s(group) for group in range(self.num_groups))
        return 1.0 - busy / total if total else 0.0


def timeline(
    schedule: Schedule,
    orders: Mapping[int, Sequence[Action]],
    cost: Cost,
    message_s: float = 0.0,
) -> Timeline:
    """Runs every group's computes in their order on a clock.

    Args:
        schedule: Stages, device groups and the edges between stages.
        orders: The actions of each device group.
        cost: Seconds of a compute.
        message_s: Seconds of a message between groups, which begins when it is there and the group
            has come to its receive, one after another into a stage; sends are passed over.
    """
    queues = {g: [a for a in actions if not a.is_send] for g, actions in orders.items()}
    done: dict[tuple[str, int, int], float] = {}
    clock = dict.fromkeys(queues, 0.0)
    receives: dict[tuple[int, str, int, int], list[float]] = {}
    lines: dict[tuple[int, str, int], float] = {}
    spans: list[Span] = []
    position = dict.fromkeys(queues, 0)
    while any(position[g] < len(queue) for g, queue in queues.items()):
        moved = False
        for group, queue in queues.items():
            while position[group] < len(queue):
                action = queue[position[group]]
                if action.is_receive:
                    key = (group, action.kind[1], action.stage, action.micro_batch)
                    receives.setdefault(key, []).append(clock[group])
                else:
                    ready = _ready(schedule, action, done)
                    if ready is None:
                        break
                    start = max(clock[group], *ready)
                    key = (group, _key(action)[0], action.stage, action.micro_batch)
                    for posted in receives.get(key, []):
                        line = (group, key[1], action.stage)
                        arrival = max(posted, ready[1], lines.get(line, 0.0)) + message_s
                        lines[line] = arrival
                        start = max(start, arrival)
                    end = start + cost(action)
                    clock[group] = end
                    done[_key(action)] = end
                    spans.append(Span(group=group, action=action, start_s=start, end_s=end))
                position[group] += 1
                moved = True
        if not moved:
            stuck = {g: str(q[position[g]]) for g, q in queues.items() if position[g] < len(q)}
            raise ScheduleError(
                f"the schedule cannot go on: device groups wait at {stuck}",
                hint="check it with whale.ir.deadlock.check_schedule, which prints the grid",
            )
    ordered = tuple(sorted(spans, key=lambda span: (span.start_s, span.group)))
    return Timeline(spans=ordered, num_groups=len(queues))


def _key(action: Action) -> tuple[str, int, int]:
    # I and B both end in the input gradients that earlier stages wait for.
    kind = "B" if action.kind == "I" else action.kind
    return kind, action.stage, action.micro_batch


def _ready(
    schedule: Schedule, action: Action, done: Mapping[tuple[str, int, int], float]
) -> tuple[float, float] | None:
    """When a compute's inputs of its own group are there, and those of others; None: not yet."""
    stage, micro_batch = action.stage, action.micro_batch
    if action.kind == "F":
        needs = [("F", a, micro_batch) for a, b in schedule.edges if b == stage]
    elif action.kind == "W":
        needs = [("B", stage, micro_batch)]
    else:
        needs = [("F", stage, micro_batch)]
        needs += [("B", b, micro_batch) for a, b in schedule.edges if a == stage]
    if any(need not in done for need in needs):
        return None
    own = next(group for group in schedule.groups if stage in group)
    near = [done[need] for need in needs if need[1] in own]
    far = [done[need] for need in needs if need[1] not in own]
    return max(near, default=0.0), max(far, default=0.0)
