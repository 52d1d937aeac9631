"""simulate: a priced Plan on a clock: the very action lists that run -> a Report.

Place in the flow: the planner scores its candidates with it, `whale simulate` draws it. A *lane* is
one replica of a device group: its ranks work in step. A compute starts when its lane is free and
the rows it needs have arrived (`messages`); gradient buckets are summed as the last backward
completes them, one after another in a group of ranks (`finish`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from whale.cost.cards import ROUNDS, neighbours, paces, seconds_alone
from whale.cost.energy import step_joules
from whale.cost.roles import stages_by_rank
from whale.errors import PlanError, ScheduleError
from whale.ir.device_types import device_type
from whale.ir.plan import Plan
from whale.ir.prices import Prices, StagePrice
from whale.ir.schedule import Action
from whale.ir.updates import last_backwards
from whale.sim.finish import Runner, Sum, finish
from whale.sim.messages import Messages
from whale.sim.report import DeviceReport, Event, HostReport, Report

Orders = Mapping[int, Sequence[Action]]
"""The actions of each device group (`planner.schedules.rank_actions`)."""


@dataclass(slots=True)
class _Lane:
    """One replica of a device group, or several that do the same."""

    group: int
    replica: int
    ranks: tuple[int, ...]
    queue: list[Action]
    pace: float = 1.0
    """Its seconds over those with all neighbours on its card at work."""
    position: int = 0
    clock: float = 0.0
    ends: list[float] = field(default_factory=lambda: [0.0])
    """Of its computes, after the step's begin."""
    free_s: float = 0.0
    """From here on it waits for no other lane."""
    compute_s: float = 0.0
    held: float = 0.0
    curve: list[tuple[float, float]] = field(default_factory=list)
    last: dict[int, int] = field(init=False)
    """By stage, the place of the compute that makes the last of its gradients."""
    last_backward: dict[int, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.last = last_backwards(self.queue)


def simulate(plan: Plan, orders: Orders, *, title: str = "", events: bool = True) -> Report:
    """Runs one step of a priced plan.

    Args:
        plan: A plan with prices.
        orders: The actions of each device group.
        title: Goes into the Report.
        events: Whether to keep every event; the planner does not need them.
    """
    if plan.prices is None:
        raise PlanError(
            "the plan has no prices, so nothing can be said of its time",
            hint="make it with this version: `whale plan MODEL --cluster SPEC --json F`",
        )
    return _Simulation(plan, plan.prices, orders, events).report(title)


class _Simulation:
    def __init__(self, plan: Plan, prices: Prices, orders: Orders, events: bool) -> None:
        self.plan, self.prices, self.keep = plan, prices, events
        self.price = {(p.stage, p.replica): p for p in prices.stages}
        self.messages = Messages(prices.messages, orders)
        self.rows = -(-plan.batch_rows // plan.num_micro_batch)
        self.stages, self.shares = stages_by_rank(plan), plan.flops_shares()
        self.links = plan.schedule.links()
        self.events: list[Event] = []
        self._feeds = {(a, b): _overlaps(plan, a, b, self.rows) for a, b in plan.schedule.edges}
        self.lanes: list[_Lane] = []
        for group, stages in enumerate(plan.schedule.groups):
            device = plan.stages[stages[0]].virtual_device
            computes = [a for a in orders[group] if a.is_compute]
            for same in self._alike(len(device.replicas)):
                ranks = tuple(rank for index in same for rank in device.replicas[index].ranks)
                self.lanes.append(_Lane(group, same[0], ranks, computes))
        self.done: dict[tuple[str, int, int, int], float] = {}
        self.of_rank = {rank: i for i, lane in enumerate(self.lanes) for rank in lane.ranks}
        self.neighbours = neighbours(
            [d.card for d in prices.devices], [lane.ranks for lane in self.lanes]
        )
        self.waits = len(plan.schedule.groups) > 1
        """Whether lanes wait for each other before the step's end."""

    def _alone(self, lane: _Lane) -> float:
        stages = self.plan.schedule.groups[lane.group]
        return seconds_alone(
            [self.price[s, lane.replica] for s in stages if (s, lane.replica) in self.price]
        )

    def _alike(self, num_replicas: int) -> list[list[int]]:
        """Replicas in groups that do the same at the same time, so that each is a lane once.

        Only where every replica talks to the one of its own number, if to any.
        """
        sides = [side for feeds in self._feeds.values() for side in feeds]
        if any(peers not in ((), (i,)) for side in sides for i, peers in enumerate(side)):
            return [[index] for index in range(num_replicas)]
        found: dict[object, list[int]] = {}
        for index in range(num_replicas):
            prices = [self.price.get((stage.index, index)) for stage in self.plan.stages]
            linked = [side[index] == () for side in sides if index < len(side)]
            key = (*(p and replace(p, replica=0) for p in prices), *linked)
            found.setdefault(key, []).append(index)
        return list(found.values())

    # ---- the computes ---------------------------------------------------------------------------

    def run(self) -> None:
        """Puts the computes on the clock.

        Where lanes that wait for each other share a card, one is faster while the others wait, who
        wait less if it is: a few rounds settle that, with the mean of a step. (Lanes that never
        wait are `finish`'s, which knows when each ends.)
        """
        self._play()
        if not self.waits or not any(self.neighbours):
            return
        for _ in range(ROUNDS):
            end = max(lane.clock for lane in self.lanes) or 1.0
            rests = [1.0 - lane.compute_s / end for lane in self.lanes]
            alone = [self._alone(lane) for lane in self.lanes]
            self.lanes = [
                _Lane(lane.group, lane.replica, lane.ranks, lane.queue, pace)
                for lane, pace in zip(self.lanes, paces(alone, rests, self.neighbours), strict=True)
            ]
            self.done.clear()
            self.messages.clear()
            self.events.clear()
            self._play()

    def _play(self) -> None:
        waiting = True
        while waiting:
            waiting = moved = False
            for lane in self.lanes:
                while lane.position < len(lane.queue):
                    if not self._advance(lane, lane.queue[lane.position]):
                        waiting = True
                        break
                    lane.position += 1
                    moved = True
            if waiting and not moved:
                stuck = [
                    f"ranks {list(x.ranks)} at {x.queue[x.position]}"
                    for x in self.lanes
                    if x.position < len(x.queue)
                ]
                raise ScheduleError(
                    f"the schedule cannot go on: {'; '.join(stuck[:4])}",
                    hint="check it with whale.ir.deadlock.check_schedule, which prints the grid",
                )

    def _advance(self, lane: _Lane, action: Action) -> bool:
        price = self.price[action.stage, lane.replica]
        arrival = self._arrival(lane, action)
        if arrival is None:
            return False
        start = max(lane.clock, arrival)
        if self._listens(action):
            lane.free_s = start
        seconds = lane.pace * _seconds(price, action)
        end = start + seconds
        lane.compute_s += seconds * (1.0 - _communicated(price))
        lane.clock = end
        lane.ends.append(end)
        kind = "B" if action.kind == "I" else action.kind
        self.done[kind, action.stage, action.micro_batch, lane.replica] = end
        self._hold(lane, action, price, start, end)
        if lane.position == lane.last.get(action.stage):
            lane.last_backward[action.stage] = (start, end)
        if self.keep and seconds:
            self._event(lane.ranks, action.kind, str(action), start, end, action)
        return True

    def _arrival(self, lane: _Lane, action: Action) -> float | None:
        stage, batch = action.stage, action.micro_batch
        if action.kind == "W":
            return self.done[("B", stage, batch, lane.replica)]
        if action.kind == "F":
            after, peers = "F", [(p, (p, stage)) for p in self.links.producers[stage]]
        else:
            after, peers = "B", [(c, (stage, c)) for c in self.links.consumers[stage]]
        latest = 0.0 if action.kind == "F" else self.done[("F", stage, batch, lane.replica)]
        found = []
        for peer, edge in peers:
            feeds = self._feeds[edge]
            others = feeds[1][lane.replica] if after == "F" else feeds[0][lane.replica]
            for other in others:
                ready = self.done.get((after, peer, batch, other))
                if ready is None:
                    return None
                found.append((ready, edge, other))
        # Only when all are known: a line is taken once.
        for ready, edge, other in found:
            latest = max(latest, self._delivered(ready, edge, lane, action, other))
        return latest

    def _listens(self, action: Action) -> bool:
        """Whether it waits for a message from other ranks."""
        if action.kind == "W":
            return False
        peers = self.links.producers if action.kind == "F" else self.links.consumers
        own = self.links.group[action.stage]
        return any(self.links.group[peer] != own for peer in peers[action.stage])

    def _delivered(
        self, ready: float, edge: tuple[int, int], lane: _Lane, action: Action, other: int
    ) -> float:
        """When a message of a replica of the other stage that was ready has arrived."""
        if self.links.group[edge[0]] == self.links.group[edge[1]]:
            return ready
        kind, peer = ("RF", edge[0]) if action.kind == "F" else ("RB", edge[1])
        receive = (kind, action.stage, action.micro_batch, peer)
        posted = self.messages.posted_after(lane.group, receive, lane.position)
        begin = max(ready, lane.ends[posted])
        return self.messages.arrival(edge, receive, (other, lane.replica), begin)

    # ---- memory ---------------------------------------------------------------------------------

    def _hold(
        self, lane: _Lane, action: Action, price: StagePrice, start: float, end: float
    ) -> None:
        if action.kind == "F":
            lane.held += price.kept_bytes
            lane.curve.append((start, lane.held))
        elif action.kind in ("B", "W"):
            lane.held -= price.kept_bytes
            lane.curve.append((end, lane.held))

    # ---- gradients, update ----------------------------------------------------------------------

    def _reduce(self) -> dict[int, float]:
        """When every rank has all its gradients; lanes that are slowed by sums end later."""
        of_rank = self.of_rank
        found = []
        for reduce in self.prices.reduces:
            users = sorted({of_rank[rank] for rank in reduce.ranks if rank in of_rank})
            released = tuple(
                (i, self._released(self.lanes[i], reduce.stage, reduce.after)) for i in users
            )
            item = Sum(ranks=reduce.ranks, seconds=reduce.seconds, released=released)
            found.append((max((t for _, t in released), default=0.0), reduce.nbytes, item))
        found.sort(key=lambda entry: entry[0])
        runners = self._runners()
        finish(runners, [item for _, _, item in found], self.prices.contention)
        self._retime(runners)
        ready = {rank: self.lanes[i].clock for rank, i in of_rank.items()}
        for number, (_, nbytes, item) in enumerate(found):
            for rank in item.ranks:
                ready[rank] = max(ready.get(rank, 0.0), item.end_s)
            if self.keep:
                name = f"sum of {nbytes / 1e6:.1f} MB over {len(item.ranks)} ({number})"
                self._event(item.ranks, "reduce", name, item.begin_s, item.end_s, None)
        return ready

    def _runners(self) -> list[Runner]:
        """The lanes as `finish` sees them."""
        return [
            Runner(
                ranks=lane.ranks,
                free_s=lane.free_s,
                end_s=lane.clock,
                lost=max(self.prices.devices[rank].lost for rank in lane.ranks),
                # Of lanes that wait for each other, `run` has counted it.
                alone=1.0 if self.waits else self._alone(lane),
                neighbours=others,
            )
            for lane, others in zip(self.lanes, self.neighbours, strict=True)
        ]

    def _retime(self, runners: Sequence[Runner]) -> None:
        """What was put on the clock before the others' work was known, moved to where it is."""
        moved: dict[int, Runner] = {}
        for lane, runner in zip(self.lanes, runners, strict=True):
            if len(runner.path) > 1:
                end = runner.real(lane.clock)
                lane.compute_s += end - lane.clock
                lane.clock = end
                lane.curve = [(runner.real(t), held) for t, held in lane.curve]
                moved |= dict.fromkeys(lane.ranks, runner)
        self.events = [
            replace(e, start_s=moved[e.rank].real(e.start_s), end_s=moved[e.rank].real(e.end_s))
            if e.rank in moved
            else e
            for e in self.events
        ]

    def _released(self, lane: _Lane, stage: int, after: float) -> float:
        found = lane.last_backward.get(stage)
        if found is None:
            return lane.clock
        start, end = found
        return start + after * (end - start)

    # ---- the report -----------------------------------------------------------------------------

    def report(self, title: str) -> Report:
        self.run()
        ready = self._reduce()
        # The loss and its count are summed over all ranks before the update.
        begin = max(ready.values(), default=0.0)
        step = begin
        lanes = {rank: lane for lane in self.lanes for rank in lane.ranks}
        for device in self.prices.devices:
            end = begin + (device.apply_s if device.rank in lanes else 0.0)
            step = max(step, end)
            if self.keep and end > begin:
                self._event((device.rank,), "apply", "optimizer", begin, end, None)
        devices = tuple(
            self._device(rank, lanes.get(rank), begin, ready, step)
            for rank in range(self.plan.num_ranks)
        )
        busy = sum(d.compute_s + d.communicate_s for d in devices)
        applied = sum(d.apply_s for d in self.prices.devices if d.rank in lanes)
        total = step * len(devices)
        return Report(
            title=title or f"model {self.plan.model_hash}",
            strategy=self.plan.strategy,
            cluster=self.prices.cluster,
            batch_rows=self.plan.batch_rows,
            num_micro_batch=self.plan.num_micro_batch,
            schedule=self.plan.schedule.kind,
            step_seconds=step,
            lower_bound_seconds=self.prices.lower_bound_s,
            joules_per_step=self._joules(devices, step),
            bubble=max(0.0, 1.0 - (busy + applied) / total) if total else 0.0,
            devices=devices,
            hosts=tuple(
                HostReport(
                    node=node,
                    nbytes=int(nbytes),
                    capacity_bytes=self.prices.host_capacity_bytes[node],
                )
                for node, nbytes in self.prices.host_bytes().items()
                if nbytes
            ),
            events=tuple(sorted(self.events, key=lambda e: (e.rank, e.start_s))),
            where_time_goes=_where(devices, applied, step),
            notes=(
                *(f"stage {s.index}: {len(s.layers)} layers" for s in self.plan.stages),
                *self.prices.sources,
                *self.plan.kept,
                *self.plan.rejected,
            ),
        )

    def _device(
        self,
        rank: int,
        lane: _Lane | None,
        begin: float,
        ready: Mapping[int, float],
        step: float,
    ) -> DeviceReport:
        price = self.prices.devices[rank]
        held = [h for _, h in lane.curve] if lane is not None else []
        inside = 0.0
        if lane is not None:
            inside = sum(
                self.price[a.stage, lane.replica].collective_s * 0.5
                for a in lane.queue
                if a.kind in ("F", "B", "I")
            )
        exposed = max(0.0, ready.get(rank, 0.0) - lane.clock) if lane is not None else 0.0
        static = int(price.memory.static)
        curve: list[tuple[float, int]] = [(0.0, static)]
        curve += [(t, int(static + h)) for t, h in (lane.curve if lane is not None else [])]
        curve += [(begin, int(static + price.memory.scratch)), (step, static)]
        return DeviceReport(
            rank=rank,
            type=self.plan.device_types[rank],
            node=price.node,
            stages=self.stages[rank],
            share=self.shares[rank],
            rows=price.rows,
            compute_s=lane.compute_s if lane is not None else 0.0,
            communicate_s=inside + exposed,
            memory=price.memory.parts(max(held, default=0.0)),
            capacity_bytes=price.capacity_bytes,
            memory_curve=tuple(curve) if self.keep else (),
            binds=price.binds,
        )

    def _joules(self, devices: Sequence[DeviceReport], step: float) -> float:
        flops = self.prices.step_flops
        used = [
            min(1.0, flops * d.share / d.compute_s / self.prices.devices[d.rank].peak_flops)
            if d.compute_s
            else 0.0
            for d in devices
        ]
        return step_joules(
            [
                replace(device_type(d.type), tdp_watts=self.prices.devices[d.rank].power_watts)
                for d in devices
            ],
            [d.compute_s for d in devices],
            [d.communicate_s for d in devices],
            [max(0.0, step - d.compute_s - d.communicate_s) for d in devices],
            used,
        )

    def _event(
        self,
        ranks: Sequence[int],
        kind: str,
        name: str,
        start: float,
        end: float,
        action: Action | None,
    ) -> None:
        for rank in ranks:
            self.events.append(
                Event(
                    rank=rank,
                    kind=kind,
                    name=name,
                    start_s=start,
                    end_s=end,
                    stage=action.stage if action is not None else None,
                    micro_batch=action.micro_batch if action is not None else None,
                )
            )


def _seconds(price: StagePrice, action: Action) -> float:
    if action.kind == "F":
        return price.forward_s
    if action.kind == "B":
        return price.backward_s
    return price.weight_s if action.kind == "W" else price.backward_s - price.weight_s


def _communicated(price: StagePrice) -> float:
    """The share of a lane's time inside a stage that is communication."""
    total = price.forward_s + price.backward_s
    return price.collective_s / total if total else 0.0


def _overlaps(
    plan: Plan, producer: int, consumer: int, rows: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Replicas that share rows: of the consumer by producer replica, and the other way round."""
    left = plan.stages[producer].virtual_device.row_cuts(rows)
    right = plan.stages[consumer].virtual_device.row_cuts(rows)

    if left == right:
        same = tuple((i,) if left[i] < left[i + 1] else () for i in range(len(left) - 1))
        return same, same

    def meet(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(j for j in range(len(b) - 1) if max(a[i], b[j]) < min(a[i + 1], b[j + 1]))
            for i in range(len(a) - 1)
        )

    return meet(left, right), meet(right, left)


def _where(devices: Sequence[DeviceReport], applied: float, step: float) -> dict[str, float]:
    count = len(devices) or 1
    compute = sum(d.compute_s for d in devices) / count
    communicate = sum(d.communicate_s for d in devices) / count
    update = applied / count
    return {
        "compute": compute,
        "communication": communicate,
        "update": update,
        "waiting": max(0.0, step - compute - communicate - update),
    }
