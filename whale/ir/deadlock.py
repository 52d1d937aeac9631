"""The law of a Schedule: whether the actions of all device groups do all the work and never hang.

Place in the flow: run after `planner/schedules.py` made the actions and before anything runs them.
It asks of each device group that every stage runs every micro-batch exactly once and in order,
with its inputs at hand, and that every message is sent and received exactly once; then it plays
the groups against each other.

The model of communication: sends and receives are asynchronous posts on one FIFO channel per
ordered pair of device groups. A message arrives when its send and its receive are both at the head
of their queues; a compute waits for its receives. Nothing is buffered, so a rendezvous back-end
(NCCL) is safe with what passes here, if each ordered pair has a communicator of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

from whale.errors import ScheduleError
from whale.ir.schedule import Action, Links, Schedule, grid

Columns = Mapping[int, Sequence[Action]]


def check_schedule(schedule: Schedule, actions: Columns) -> None:
    """Raises ScheduleError, with the grid and arrows at the failing steps, unless all is well.

    Args:
        schedule: names the stages, micro-batches and edges.
        actions: for every device group, what it does in order (`planner.schedules.rank_actions`).
    """
    if sorted(actions) != list(range(len(schedule.groups))):
        raise ScheduleError(
            f"actions of the groups {sorted(actions)} for {len(schedule.groups)} device groups",
            hint="give the actions of every device group, counted from 0",
        )
    links = schedule.links()
    for group in actions:
        _check_belongs(schedule, links, actions, group)
    for group in actions:
        _check_complete(schedule, actions, group)
    for group in actions:
        _check_order(links, actions, group)
    for group in actions:
        _check_messages(links, actions, group)
    _Simulation(links, actions).run()


def safe_from_device_waits(schedule: Schedule, actions: Columns) -> dict[int, list[Action]] | None:
    """The same actions, with as few receives moved up as it takes to survive waits for a device.

    A compute that waits for its whole device (an allocation, a library's workspace, a user's
    synchronize) waits for all messages posted before it, because they occupy it. Any compute may,
    so here every one does. None where no place of the receives helps: computes wait in a circle.
    """
    columns = {group: list(column) for group, column in actions.items()}
    simulation = _Simulation(schedule.links(), columns, device_waits=True)
    try:
        while stuck := simulation.stuck():
            if not any([simulation.receive_now(group) for group in stuck]):
                return None
    except ScheduleError:  # It hangs without such waits too: `check_schedule` says why.
        return None
    return columns


def _fail(what: str, actions: Columns, arrows: Mapping[int, int], *, hint: str) -> NoReturn:
    raise ScheduleError(f"{what}\n{grid(actions, arrows)}", hint=hint)


def _check_belongs(schedule: Schedule, links: Links, actions: Columns, group: int) -> None:
    """Every action is of a stage of this group, a known micro-batch, an edge to another group."""
    seen: set[Action] = set()
    for at, action in enumerate(actions[group]):
        stage, peer = action.stage, action.peer
        what = None
        if stage not in schedule.groups[group]:
            what = f"group {group} runs {action}, but only has the stages {schedule.groups[group]}"
        elif not 0 <= action.micro_batch < schedule.num_micro_batch:
            what = (
                f"group {group} runs {action}, but the micro-batches are 0 to "
                f"{schedule.num_micro_batch - 1}"
            )
        elif action in seen:
            what = f"group {group} runs {action} twice: work or a message would be duplicated"
        elif peer is not None:
            forward = action.kind in ("SF", "RB")
            peers = (links.consumers if forward else links.producers)[stage]
            if peer not in peers or links.group[peer] == group:
                what = f"group {group} posts {action}, but no edge to another group carries it"
        if what:
            _fail(what, actions, {group: at}, hint="take the marked action out, or correct it")
        seen.add(action)


def _check_complete(schedule: Schedule, actions: Columns, group: int) -> None:
    """F and either B, or I and W, of every stage and micro-batch."""
    done = {(a.stage, a.micro_batch, a.kind) for a in actions[group]}
    end = {group: len(actions[group])}
    for stage in schedule.groups[group]:
        for micro_batch in range(schedule.num_micro_batch):
            kinds = "".join(kind for kind in "FBIW" if (stage, micro_batch, kind) in done)
            if kinds not in ("FB", "FIW"):
                _fail(
                    f"group {group} runs {' '.join(kinds) or 'nothing'} of stage {stage}, "
                    f"micro-batch {micro_batch}; allowed: F B, or F I W",
                    actions,
                    end,
                    hint="every stage runs every micro-batch forward and backward exactly once",
                )


def _check_order(links: Links, actions: Columns, group: int) -> None:
    """What an action needs of its own group comes before it: a group never overtakes itself."""
    done: set[Action] = set()
    for at, action in enumerate(actions[group]):
        for options in _needs(links, action):
            if done.isdisjoint(options):
                _fail(
                    f"group {group} is stuck at {action}: it needs {options[0]}, which is not "
                    "before it",
                    actions,
                    {group: at},
                    hint=f"put {options[0]} before {action} on group {group}",
                )
        done.add(action)


def _needs(links: Links, action: Action) -> Iterator[list[Action]]:
    """For each thing that has to stand before `action` in its group, the actions that are it."""
    group, stage = links.group[action.stage], action.stage

    def computes(kinds: str, of: int) -> list[Action]:
        return [Action(kind=k, stage=of, micro_batch=action.micro_batch) for k in kinds]

    if action.kind in ("B", "I", "SF"):
        yield computes("F", stage)
    if action.kind == "W":
        yield computes("I", stage)
    if action.kind == "SB":
        yield computes("BI", stage)
    if action.kind == "F":
        yield from (computes("F", p) for p in links.producers[stage] if links.group[p] == group)
    if action.kind in ("B", "I"):
        yield from (computes("BI", c) for c in links.consumers[stage] if links.group[c] == group)
    yield from ([receive] for receive in links.receives_before(action))


def _check_messages(links: Links, actions: Columns, group: int) -> None:
    """Every message that is due is sent. Its receive stands before its use: `_check_order`."""
    posted = set(actions[group])
    for at, action in enumerate(actions[group]):
        missing = [send for send in links.sends_after(action) if send not in posted]
        if missing:
            _fail(
                f"group {group} never posts {missing[0]}: the message is lost",
                actions,
                {group: at},
                hint=f"put {missing[0]} after {action} on group {group}",
            )


class _Simulation:
    """The groups, each at a position of its list, and the channels between them."""

    def __init__(self, links: Links, actions: Columns, *, device_waits: bool = False) -> None:
        self.links = links
        self.actions = actions
        self.device_waits = device_waits
        self.at = dict.fromkeys(actions, 0)
        self.sends: dict[tuple[int, int], deque[tuple[Action, int]]] = {}
        self.receives: dict[tuple[int, int], deque[tuple[Action, int]]] = {}
        self.arrived: set[Action] = set()
        self.under_way = dict.fromkeys(actions, 0)

    def stuck(self) -> dict[int, int]:
        """Plays until nobody moves; where each group that is not done then stands."""
        moved = True
        while moved:
            # A list, not any(): every group moves as far as it can in each turn.
            moved = any([self._advance(group) for group in self.actions])
        return {group: at for group, at in self.at.items() if at < len(self.actions[group])}

    def run(self) -> None:
        stuck = self.stuck()
        if stuck:
            lines = "; ".join(self._waits(group, at) for group, at in stuck.items())
            _fail(
                f"deadlock: {lines}",
                self.actions,
                stuck,
                hint="each marked step waits for another: move one of them later in its group",
            )

    def receive_now(self, group: int) -> bool:
        """Moves the receives of what is sent to a group that is stuck to where it stands.

        They do not need the compute it is stuck at, or they would not have been sent.
        """
        column, moved = self.actions[group], False
        assert isinstance(column, list)
        for (_, target), sends in self.sends.items():
            if target == group and sends:
                receive = sends[0][0].mate
                if receive in column[self.at[group] :]:
                    column.remove(receive)
                    column.insert(self.at[group], receive)
                    moved = True
        return moved

    def _waits(self, group: int, at: int) -> str:
        action = self.actions[group][at]
        missing = [r for r in self.links.receives_before(action) if r not in self.arrived]
        assert missing[0].peer is not None, f"{action} waits for nothing"
        source = self.links.group[missing[0].peer]
        return f"group {group} is stuck at {action}, waits for {missing[0].mate} of group {source}"

    def _advance(self, group: int) -> bool:
        start = self.at[group]
        column = self.actions[group]
        while self.at[group] < len(column):
            action = column[self.at[group]]
            if action.peer is not None:
                self._post(action, group)
            elif not self._may_run(action, group):
                break
            self.at[group] += 1
        return self.at[group] > start

    def _may_run(self, action: Action, group: int) -> bool:
        if not self.arrived.issuperset(self.links.receives_before(action)):
            return False
        # Messages that this group has posted and that have not found their other end.
        return not (self.device_waits and self.under_way[group])

    def _post(self, action: Action, group: int) -> None:
        assert action.peer is not None
        other = self.links.group[action.peer]
        channel = (group, other) if action.is_send else (other, group)
        queues = self.sends if action.is_send else self.receives
        queues.setdefault(channel, deque()).append((action, self.at[group]))
        self.under_way[group] += 1
        sends = self.sends.setdefault(channel, deque())
        receives = self.receives.setdefault(channel, deque())
        while sends and receives:
            (send, send_at), (receive, receive_at) = sends.popleft(), receives.popleft()
            if send.mate != receive:
                source, destination = channel
                _fail(
                    f"deadlock: group {source} sends {send} where group {destination} receives "
                    f"{receive}: a channel keeps its order",
                    self.actions,
                    {source: send_at, destination: receive_at},
                    hint=f"let group {destination} receive in the order group {source} sends",
                )
            self.arrived.add(receive)
            for end in channel:
                self.under_way[end] -= 1
