"""price: a Plan and the cost model -> Prices: the seconds and bytes of everything its ranks do.

Place in the flow: after the plan's structure is chosen and before it is simulated. It walks the
same nested Schedule that runs (`ir.expand`), so a collective that runs has a price.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from whale.cost.bound import lower_bound_s
from whale.cost.cards import ROUNDS, neighbours, paces
from whale.cost.comm import Group
from whale.cost.compute import CostModel
from whale.cost.crossing import Crossing, crossing_bytes
from whale.cost.held import HeldParameters, Moved
from whale.cost.memory import LayerBytes, StageBytes, device_bytes, layer_bytes, stage_bytes
from whale.cost.messages import message_prices
from whale.cost.parts import NOTHING, Part, packed_share, parts_of
from whale.cost.roles import groups_inside, ranks_that_differ, roles, stages_by_rank
from whale.ir.expand import SubAction, layer_actions
from whale.ir.homes import Bucket
from whale.ir.model_graph import Layer, ModelGraph, assign_stages, item_bytes
from whale.ir.plan import TRAVELLING, Plan, StageLayer, StagePlan
from whale.ir.prices import CONTENTION, DevicePrice, Prices, ReducePrice, StagePrice
from whale.ir.schedule import Action
from whale.ir.updates import RankStep, completing_layers, rank_step

_NORM_BYTES = 8192
"""A batch norm's sums: two numbers per channel; what counts is the latency."""
_ROW_BYTES = 16.0
"""A vocabulary parallel loss: the largest logit, the sum of exponentials, the label's logit."""


def price(
    plan: Plan,
    graph: ModelGraph,
    costs: CostModel,
    orders: Mapping[int, Sequence[Action]],
    binds: Mapping[int, str] | None = None,
) -> Prices:
    """The prices of `plan`, which is for `graph` on the cost model's cluster.

    `orders` are the actions of its device groups.
    """
    return _Pricer(plan, graph, costs, orders).prices(binds or {})


class _Pricer:
    def __init__(
        self,
        plan: Plan,
        graph: ModelGraph,
        costs: CostModel,
        orders: Mapping[int, Sequence[Action]],
    ) -> None:
        self.plan, self.graph, self.costs, self.orders = plan, graph, costs, orders
        self.index = {layer.path: i for i, layer in enumerate(graph.layers)}
        self.calls = graph.calls
        # The largest micro-batch: sizes differ by at most one row.
        self.rows = -(-plan.batch_rows // plan.num_micro_batch)
        self._parts: dict[int, dict[int, Part]] = {}
        self._shapes: dict[tuple[int, ...], Group] = {}
        self._stages = stages_by_rank(plan)
        self._roles = roles(plan)
        self._held = HeldParameters(plan, costs, self._roles, self._stages)
        self._spaces: dict[object, StageBytes] = {}

    def prices(self, binds: Mapping[int, str]) -> Prices:
        stages = [p for stage in self.plan.stages for p in self._stage(stage)]
        devices = tuple(self._device(r, binds.get(r, "")) for r in range(self.plan.num_ranks))
        profile = self.costs.profile
        measured = profile.contention if profile is not None else None
        return Prices(
            stages=tuple(stages),
            messages=tuple(message_prices(self.plan, self.costs, self._crossing, self.rows)),
            reduces=tuple(self._reduces()),
            devices=devices,
            step_flops=self._step_flops(),
            lower_bound_s=lower_bound_s(self.costs, self.plan.batch_rows),
            cluster=str(self.costs.cluster),
            sources=(
                f"profile: {profile.about or 'measured'}; its speeds, links and memory count, not "
                "the cluster's"
                if profile is not None
                else "data sheets (no profile)",
            ),
            host_capacity_bytes=tuple(
                self.costs.cluster.host_memory_of(node.index) for node in self.costs.cluster.nodes
            ),
            contention=CONTENTION if measured is None else measured,
        )

    # ---- compute --------------------------------------------------------------------------------

    def part(self, taskgraph: int, rank: int) -> Part:
        """What a rank has of a TaskGraph's Layers."""
        if taskgraph not in self._parts:
            self._parts[taskgraph] = parts_of(self.plan, taskgraph, self.rows)
        return self._parts[taskgraph].get(rank, NOTHING)

    def _stage(self, stage: StagePlan) -> Iterable[StagePrice]:
        # Of hundreds of replicas most are alike: each kind is priced once.
        found: dict[object, StagePrice] = {}
        members: dict[object, tuple[int, ...]] = {}
        lanes = []
        groups = groups_inside(self.plan, stage)
        for index, replica in enumerate(stage.virtual_device.replicas):
            role = self._lane_role(stage, replica.ranks, groups)
            if role not in found:
                found[role] = self._lane(stage, index, replica.ranks)
                members[role] = replica.ranks
            lanes.append(replace(found[role], replica=index))
        if self._in_step(stage):
            return self._in_step_lanes(stage, lanes, list(members.values()))
        return lanes

    def _in_step_lanes(
        self, stage: StagePlan, lanes: Sequence[StagePrice], kinds: Sequence[tuple[int, ...]]
    ) -> list[StagePrice]:
        """Replicas that meet inside Layers: all wait for the slowest, Layer by Layer.

        One without rows waits too. On a card that replicas share, one is faster while the others
        wait for it.
        """
        replicas = [r.ranks for r in stage.virtual_device.replicas]
        near = neighbours(self._cards, replicas)
        own = [lane.forward_s + lane.backward_s - lane.collective_s for lane in lanes]
        alone = [
            (lane.alone * (lane.forward_s + lane.backward_s) - lane.collective_s) / seconds
            if seconds
            else 1.0
            for lane, seconds in zip(lanes, own, strict=True)
        ]
        pace = [1.0] * len(replicas)
        if any(near):
            kinds = replicas
            for _ in range(ROUNDS):
                forward, backward, met = self._in_step_seconds(stage, kinds, pace)
                busy = (forward + backward - met) or 1.0
                rests = [max(0.0, 1.0 - p * s / busy) for p, s in zip(pace, own, strict=True)]
                pace = paces(alone, rests, near)
        forward, backward, _ = self._in_step_seconds(stage, kinds, pace)
        return [
            replace(
                lane,
                forward_s=forward,
                backward_s=backward,
                collective_s=max(0.0, forward + backward - p * s),
                alone=1.0,  # counted
            )
            for lane, p, s in zip(lanes, pace, own, strict=True)
        ]

    def _in_step_seconds(
        self, stage: StagePlan, replicas: Sequence[tuple[int, ...]], pace: Sequence[float]
    ) -> tuple[float, float, float]:
        """Forward, backward, and what of both is collectives; compute goes by each one's pace."""
        totals = [0.0, 0.0]
        met = 0.0
        for backward in (False, True):
            since = [0.0] * len(replicas)
            for layer in stage.layers:
                index = self.index[layer.path]
                found = self.graph.layers[index]
                for i, ranks in enumerate(replicas):
                    parts = [(rank, self.part(layer.taskgraph, rank)) for rank in ranks]
                    seconds = max(
                        self._backward_s(layer, index, r, part.share(found))
                        if backward
                        else self.costs.forward_s(index, r, *part.share(found))
                        for r, part in parts
                    )
                    since[i] += pace[i] * seconds / self.calls[index]
                taskgraph = self.plan.taskgraphs[layer.taskgraph]
                bridged = taskgraph.virtual_device != stage.virtual_device
                if any(layer.meets) or (bridged and taskgraph.splits):
                    there = self._collectives(
                        stage, layer, found, replicas[0][0], backward=backward
                    )
                    met += there
                    totals[backward] += max(since) + there
                    since = [0.0] * len(replicas)
            totals[backward] += max(since)
        return totals[0], totals[1], met

    def _backward_s(
        self, layer: StageLayer, index: int, rank: int, share: tuple[float, float]
    ) -> float:
        """All calls of a Layer, with what runs again."""
        again = self.costs.again_s(index, rank, *share, keep=layer.recompute)
        return self.costs.backward_s(index, rank, *share) + again

    @cached_property
    def _cards(self) -> list[str]:
        """Of every rank; empty where it has one to itself."""
        profile = self.costs.profile
        ranks = range(self.plan.num_ranks)
        return [profile.device(r).card if profile is not None else "" for r in ranks]

    def _lane_role(
        self, stage: StagePlan, ranks: tuple[int, ...], groups: Mapping[int, list[tuple[int, ...]]]
    ) -> object:
        """Equal for replicas that take the same time and memory."""
        taskgraphs = {layer.taskgraph for layer in stage.layers} | set(stage.taskgraphs)
        return (
            tuple(self.costs.alike(rank) for rank in ranks),
            tuple(self.part(t, rank) for t in sorted(taskgraphs) for rank in ranks),
            tuple(self._shape(group) for rank in ranks for group in groups[rank]),
        )

    def _shape(self, ranks: tuple[int, ...]) -> Group:
        if ranks not in self._shapes:
            self._shapes[ranks] = self.costs.fabric.group(ranks)
        return self._shapes[ranks]

    def _in_step(self, stage: StagePlan) -> bool:
        if len(stage.virtual_device.replicas) == 1:
            return False
        if any(any(layer.meets) for layer in stage.layers):
            return True
        return any(
            self.plan.taskgraphs[t].virtual_device != stage.virtual_device
            and self.plan.taskgraphs[t].splits
            for t in stage.taskgraphs
        )

    def _lane(self, stage: StagePlan, replica: int, ranks: tuple[int, ...]) -> StagePrice:
        forward = backward = weight = collective = alone = 0.0
        moved = Moved(any(layer.parked for layer in stage.layers) or not self._held.plain)
        has_rows = any(self.part(layer.taskgraph, r).rows for layer in stage.layers for r in ranks)
        for layer in stage.layers if has_rows else ():
            index = self.index[layer.path]
            found = self.graph.layers[index]
            parts = {rank: self.part(layer.taskgraph, rank).share(found) for rank in ranks}
            calls = self.calls[index]
            times = [
                (
                    self.costs.forward_s(index, rank, *part) / calls,
                    self._backward_s(layer, index, rank, part) / calls,
                )
                for rank, part in parts.items()
            ]
            forward += max(t[0] for t in times)
            backward += max(t[1] for t in times)
            if moved.any:
                computes = max(t[0] for t in times), max(t[1] for t in times)
                park = max(self._park_s(layer, r) for r in ranks) if layer.parked else 0.0
                moved.layer(self._held.moves(layer, ranks, *computes), park)
            weight += _weight_share(found) * max(
                self.costs.backward_s(index, rank, *part) / calls for rank, part in parts.items()
            )
            alone += max(sum(t) for t in times) * self.costs.alone(index, ranks[0])
            there = self._collectives(stage, layer, found, ranks[0], backward=False)
            back = self._collectives(stage, layer, found, ranks[0], backward=True)
            forward += there
            backward += back
            collective += there + back
        # Of several micro-batches all but the last: its sums go on after the backward. Where
        # parameters are gathered too, both want the same links.
        early = 1.0 if self.plan.away else 1.0 - 1.0 / self.plan.num_micro_batch
        forward, backward = forward + moved.forward_s(), backward + moved.backward_s(early)
        collective += moved.forward_s() + moved.backward_s(early)
        return StagePrice(
            stage=stage.index,
            replica=replica,
            forward_s=forward,
            backward_s=backward,
            weight_s=weight,
            collective_s=collective,
            kept_bytes=int(max(self._stage_bytes(stage, rank).kept for rank in ranks)),
            alone=(alone + collective) / (forward + backward) if forward else 1.0,
        )

    def _stage_bytes(self, stage: StagePlan, rank: int) -> StageBytes:
        held = None if self._held.plain else self._held.of(rank)
        parts = tuple(self.part(t.index, rank) for t in self.plan.taskgraphs)
        key = (stage.index, self.costs.alike(rank), parts, held)
        if key not in self._spaces:
            self._spaces[key] = self._all_layers(stage, rank)
        return self._spaces[key]

    def _all_layers(self, stage: StagePlan, rank: int) -> StageBytes:
        return stage_bytes(
            (self._layer_bytes(layer, rank) for layer in reversed(stage.layers)),
            sum(
                sent.there.at(self._stage_rows(stage, rank))
                for (_, consumer), sent in self._crossing.items()
                if consumer == stage.index
            ),
        )

    def _stage_rows(self, stage: StagePlan, rank: int) -> int:
        low, high = stage.virtual_device.rows(rank, self.rows)
        return high - low

    def _layer_bytes(self, layer: StageLayer, rank: int) -> LayerBytes:
        index = self.index[layer.path]
        found, part = self.graph.layers[index], self.part(layer.taskgraph, rank)
        return layer_bytes(
            self.costs,
            index,
            rank,
            part.share(found),
            held=part.width if found.splits else 1.0,
            rules={self._rules.get(o.path, o.rule) for o in found.splits},
            params=self._held.of_layer(layer, rank),
            parked=layer.parked,
            recompute=layer.recompute,
        )

    def _park_s(self, layer: StageLayer, rank: int) -> float:
        """What a Layer keeps, to the host; and as long back."""
        return self._layer_bytes(layer, rank).parked / self.costs.host_rate(rank)

    @cached_property
    def _rules(self) -> dict[str, str]:
        return {s.path: s.rule for t in self.plan.taskgraphs for s in t.splits}

    def _collectives(
        self, stage: StagePlan, layer: StageLayer, found: Layer, rank: int, *, backward: bool
    ) -> float:
        if not any(layer.meets) and not self.plan.taskgraphs[layer.taskgraph].splits:
            return 0.0
        rows = self.part(layer.taskgraph, rank).rows
        alone = {option.path: option for option in found.splits if option.made.per_row}

        def nbytes(action: SubAction) -> float:
            own = alone.get(action.split, found)
            # A Layer's are of all its calls, a single module's of one.
            calls = self.calls[self.index[found.path]] if own is found else 1
            travels = self._rules.get(action.split) in TRAVELLING
            return (
                action.share
                * (packed_share(self.plan, layer) if travels else 1.0)
                * {
                    "input": own.read.at(rows) / calls,
                    "output": own.made.at(rows) / calls,
                    "row": _ROW_BYTES * rows,
                    "statistics": float(_NORM_BYTES),
                }[action.carries]
            )

        return sum(
            self.costs.fabric.collective(action.name, action.ranks, nbytes(action))
            for action in layer_actions(self.plan, rank, stage, layer, backward=backward)
            if action.kind == "collective"
        )

    # ---- between stages -------------------------------------------------------------------------

    @cached_property
    def _crossing(self) -> dict[tuple[int, int], Crossing]:
        """Bytes of every edge between stages, by the rows of a micro-batch."""
        stage_of_path = {path: t.stage for t in self.plan.taskgraphs for path in t.layers}
        where = [stage_of_path[layer.path] for layer in self.graph.layers]
        stages, _ = assign_stages(self.graph.nodes, where)
        return crossing_bytes(self.graph, stages, self.plan.schedule.edges)

    # ---- gradients and update -------------------------------------------------------------------

    def _reduces(self) -> Iterable[ReducePrice]:
        trainable = frozenset(p.name for p in self.graph.parameters if p.trainable)
        seen: set[tuple[tuple[int, ...], tuple[int, tuple[int, ...]]]] = set()
        # What one rank alone has is not summed, and expert weights are mostly that.
        known = [
            (home, stretches)
            for home, stretches in self._held.syncs
            if any(len(sync.ranks) > 1 for _, _, groups in stretches for sync in groups)
        ]
        for rank in ranks_that_differ(known):
            actions = self._actions(rank)
            step = rank_step(self.plan, rank, actions, trainable, known)
            for stage, bucket, place in self._completions(step, actions):
                key = (bucket.sync.ranks, bucket.position)
                if len(bucket.sync.ranks) < 2 or key in seen:
                    continue
                seen.add(key)
                travels = self.plan.wire.gradients or bucket.dtype
                nbytes = sum(s.numel for s in bucket.slices) * item_bytes(travels)
                fabric = self.costs.fabric
                reduce = fabric.reduce_scatter if bucket.zero else fabric.all_reduce
                if bucket.zero > 2:
                    continue  # counted beside what is gathered
                yield ReducePrice(
                    ranks=bucket.sync.ranks,
                    stage=stage.index,
                    after=self._done(stage, rank, place),
                    seconds=reduce(
                        bucket.sync.ranks, nbytes, num_sharing=self._sharing(stage.index)
                    ),
                    nbytes=nbytes,
                )

    def _completions(
        self, step: RankStep, actions: Sequence[Action]
    ) -> Iterable[tuple[StagePlan, Bucket, int]]:
        """The stage whose backward completes each bucket, and the Layer whose backward does."""
        for action, numbers in step.completed():
            stage, buckets = self.plan.stages[action.stage], [step.buckets[n] for n in numbers]
            for bucket, place in zip(buckets, completing_layers(stage, buckets), strict=True):
                yield stage, bucket, place
        computes = [action for action in actions if action.is_compute]
        for number in step.late() if computes else ():
            yield self.plan.stages[computes[-1].stage], step.buckets[number], -1

    def _actions(self, rank: int) -> Sequence[Action]:
        """Those of its device group."""
        groups = enumerate(self.plan.schedule.groups)
        mine = set(self._stages[rank])
        return next((self.orders[g] for g, stages in groups if mine & set(stages)), ())

    def _sharing(self, stage: int) -> int:
        """Gradient groups that use the same network at once: one per shard of a replica."""
        return len(self.plan.stages[stage].virtual_device.replicas[0].ranks)

    def _done(self, stage: StagePlan, rank: int, place: int) -> float:
        """How much of a stage's backward is done with the Layer at `place`."""
        part = self.part(stage.layers[0].taskgraph, rank) if stage.layers else NOTHING
        times = [
            self.costs.backward_s(self.index[x.path], rank, part.rows or 1.0) for x in stage.layers
        ]
        total = sum(times)
        return sum(times[max(place, 0) :]) / total if total else 1.0

    def _device(self, rank: int, binds: str) -> DevicePrice:
        held = self._held.of(rank)
        profile = self.costs.profile
        measured = profile.device(rank) if profile is not None else None
        return DevicePrice(
            rank=rank,
            node=self.costs.cluster.devices[rank].node,
            rows=self._all_rows[rank],
            apply_s=self._held.apply_s(rank),
            memory=device_bytes(
                self.costs,
                rank,
                held,
                workspace=self._workspace(rank),
                num_groups=len({home.apply_group for home in self.plan.homes}),
                early=self.plan.early,
                parked=self._parked(rank),
            ),
            capacity_bytes=self.costs.capacity(rank),
            peak_flops=self.costs.peak_flops(rank),
            power_watts=self.costs.cluster.type_of(rank).tdp_watts,
            paced=self.costs.cluster.devices[rank].pace_flops is not None,
            binds=binds,
            card=self._cards[rank],
            lost=measured.lost if measured is not None else 0.0,
        )

    def _parked(self, rank: int) -> float:
        """Activations on the host at the worst moment."""
        each = {n: self._stage_bytes(self.plan.stages[n], rank).parked for n in self._stages[rank]}
        most = now = 0.0
        for action in self._actions(rank) if any(each.values()) else ():
            now += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0) * each[action.stage]
            most = max(most, now)
        return most

    def _workspace(self, rank: int) -> float:
        found = (self._stage_bytes(self.plan.stages[s], rank) for s in self._stages[rank])
        return max((stage.workspace for stage in found), default=0.0)

    @cached_property
    def _all_rows(self) -> list[int]:
        """By rank, the rows of the global batch it computes."""
        found = [0] * self.plan.num_ranks
        for stage in self.plan.stages:
            device = stage.virtual_device
            rows = device.all_rows(self.plan.batch_rows, self.plan.num_micro_batch)
            for replica, own in zip(device.replicas, rows, strict=True):
                for rank in replica.ranks:
                    found[rank] = max(found[rank], own)
        return found

    def _step_flops(self) -> float:
        return sum(
            3.0
            * (layer.flops * self.plan.num_micro_batch + layer.flops_per_row * self.plan.batch_rows)
            for layer in self.graph.layers
        )


def _weight_share(layer: Layer) -> float:
    """Of a backward, the part that only weight gradients need: half of the products."""
    total = sum(work.flops.per_row + work.flops.fixed for work in layer.work)
    if not total:
        return 0.0
    products = sum(
        work.flops.per_row + work.flops.fixed
        for work in layer.work
        if work.kind in ("matmul", "conv")
    )
    return 0.5 * products / total
