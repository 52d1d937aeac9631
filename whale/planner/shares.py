"""Shares: how many rows every replica computes, and how many units every shard holds.

Place in the flow: asked by placement and splits for every TaskGraph. Three ways, by
`cluster.balance`: `time` (the default) finds the shares that end together and fit into memory, by
the cost model; `speed` follows the peak FLOPs, as the paper does; `equal` ignores what devices are.
Equal devices get equal shares in all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache, cached_property
from math import inf, lcm

from whale.config import Config
from whale.cost.compute import CostModel
from whale.cost.memory import ALLOCATOR_SLACK, backward_bytes
from whale.errors import PlanError
from whale.ir.cluster import Cluster
from whale.ir.device_types import device_type
from whale.ir.homes import ITEM_BYTES
from whale.ir.model_graph import ModelGraph, SplitOption
from whale.ir.plan import TRAVELLING
from whale.ir.sharding import apportion
from whale.planner.balance import Member, balance, balance_over


def speeds(cluster: Cluster) -> tuple[int, ...]:
    """Peak speeds of the devices as small whole numbers, 1 for each where all are equal."""
    peaks = [
        device.pace_flops or device.speed * device_type(device.type).flops_per_s["float32"]
        for device in cluster.devices
    ]
    exact = [Fraction(peak / min(peaks)).limit_denominator(64) for peak in peaks]
    scale = lcm(*(f.denominator for f in exact))
    whole = [int(f * scale) for f in exact]
    return (1,) * len(whole) if min(whole) == max(whole) else tuple(whole)


@dataclass(kw_only=True)
class Shares:
    """Chooses shares for one plan; keeps what bound them."""

    graph: ModelGraph
    config: Config
    costs: CostModel
    rows: int
    """Of the largest micro-batch."""
    in_flight: Callable[[int], int] = field(default=lambda stage: 1)
    """Micro-batches that a stage holds at once."""
    binds: dict[int, str] = field(default_factory=dict)
    shortages: list[str] = field(default_factory=list)
    corrections: Mapping[object, float] = field(default_factory=dict)
    """By kind of replica, bytes that an earlier plan turned out to need beside the estimate."""
    estimates: dict[object, dict[int, float]] = field(default_factory=dict)
    """By kind of replica and rank, the bytes that its rows were taken to need."""
    _weights: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)

    @property
    def mode(self) -> str:
        """`time`, `speed` or `equal`."""
        return self.config.cluster.balance

    # ---- rows -----------------------------------------------------------------------------------

    def row_weights(
        self,
        stage: int,
        layers: Sequence[int],
        replicas: Sequence[tuple[int, ...]],
        sharing: Mapping[int, int],
    ) -> tuple[int, ...]:
        """Weights of a stage's replicas; `sharing` is by Layer how many ranks hold it together."""
        if len(replicas) == 1:
            return (1,)
        if self.mode == "speed":
            weights = speeds(self.costs.cluster)
            return tuple(sum(weights[r] for r in ranks) for ranks in replicas)
        alike = {tuple(self.costs.alike(r) for r in ranks) for ranks in replicas}
        if self.mode == "equal" or len(alike) == 1:
            return tuple(len(ranks) for ranks in replicas)
        # Of hundreds of replicas most are alike: they share what is known of their time and memory.
        known: dict[object, Member] = {}
        members = []
        for ranks in replicas:
            kinds = tuple(self.costs.alike(r) for r in ranks)
            if kinds not in known:
                known[kinds] = self._rows_member(stage, layers, ranks, sharing)
            members.append(replace(known[kinds], name=self._name(ranks)))
        try:
            found = balance(members, self.rows, unit="rows")
        except PlanError as error:
            self.shortages.append(f"stage {stage}: {error}")
            found = balance_over(members, self.rows)
        for ranks, binds, units, member in zip(
            replicas, found.binds, found.units, members, strict=True
        ):
            self.binds.update(dict.fromkeys(ranks, binds))
            kinds = tuple(self.costs.alike(r) for r in ranks)
            self.estimates.setdefault(kinds, {})[ranks[0]] = member.bytes(units)
        return found.units

    def _rows_member(
        self,
        stage: int,
        layers: Sequence[int],
        ranks: tuple[int, ...],
        sharing: Mapping[int, int],
    ) -> Member:
        part = 1.0 / len(ranks)
        smallest = min(self.costs.capacity(r) for r in ranks)
        correction = self.corrections.get(tuple(self.costs.alike(r) for r in ranks), 0.0)

        def width(layer: int) -> float:
            return part if sharing[layer] > 1 else 1.0

        def held(layer: int) -> float:
            # Where they are more than a replica's ranks, each replica holds less than the whole.
            return 1.0 / sharing[layer]

        def seconds(rows: int) -> float:
            return sum(
                max(self.costs.step_s(i, r, float(rows), width(i)) for r in ranks) for i in layers
            )

        def nbytes(rows: int) -> float:
            need = self.stage_bytes(stage, layers, ranks[0], lambda i: (rows, width(i)), held)
            # A replica of unequal devices is as tight as its tightest.
            over = max(need + self._reserved(r) - self.costs.capacity(r) for r in ranks)
            return over + smallest + correction

        return Member(
            name=self._name(ranks),
            seconds=cache(seconds),
            bytes=cache(nbytes),
            capacity_bytes=smallest,
        )

    def _name(self, ranks: tuple[int, ...]) -> str:
        device = self.costs.cluster.devices[ranks[0]]
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} ({device.type})"

    def _reserved(self, rank: int) -> float:
        return float(self.costs.reserved(rank))

    def stage_bytes(
        self,
        stage: int,
        layers: Sequence[int],
        rank: int,
        share: Callable[[int], tuple[float, float]],
        held: Callable[[int], float],
    ) -> float:
        """Bytes a rank needs for some Layers, in execution order.

        Of a Layer it computes `share`, rows of a micro-batch and a part of the width, and has
        `held` of the weights.
        """
        num_alive = self.in_flight(stage)
        static = scratch = 0.0
        items = []
        seen: set[str] = set()
        for index in reversed(layers):
            layer, (rows, width) = self.graph.layers[index], share(index)
            # A weight that two Layers share is there once.
            for name in layer.params:
                if name not in seen:
                    seen.add(name)
                    weights = self._weight_bytes[name] * held(index)
                    trained = weights * self.costs.trainable[name]
                    static += weights + trained * (1.0 + self.costs.training.state_tensors)
                    scratch += trained * self.costs.training.scratch_tensors
            gradient = self.costs.gradient_bytes[index] * held(index)
            kept = self.costs.kept_bytes(index, rank, rows, width)
            items.append((layer.largest.at(rows), gradient, kept))
        largest, activations = backward_bytes(items)
        is_cpu = self.costs.cluster.devices[rank].type == "CPU"
        slack = 0.0 if is_cpu else ALLOCATOR_SLACK * (static + largest)
        return static + max(num_alive * activations + largest, scratch) + slack

    @cached_property
    def _weight_bytes(self) -> dict[str, float]:
        return {p.name: p.numel * ITEM_BYTES.get(p.dtype, 4) for p in self.graph.parameters}

    # ---- units of a split -----------------------------------------------------------------------

    def units(self, option: SplitOption, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Units of each shard of one replica, at least one each.

        They depend on the ranks and the number of units alone: a parameter that is tied between two
        splits is cut at the same points by both.
        """
        weights = self._shard_weights(ranks)

        def member(rank: int, weight: int) -> Member:
            return Member(
                name=f"rank {rank}",
                seconds=lambda units: units / weight,
                bytes=lambda units: 0.0,
                capacity_bytes=inf,
            )

        if len(set(weights)) == 1:
            return apportion(option.units, weights)
        members = [member(r, w) for r, w in zip(ranks, weights, strict=True)]
        return balance(members, option.units, unit=option.unit, minimum=1).units

    def _shard_weights(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Shares of a sharded model's width, in FINE parts of the whole."""
        found = self._weights.get(ranks)
        if found is None:
            found = self._weights[ranks] = self._balanced_width(ranks)
        return found

    def _balanced_width(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        if self.mode == "equal" or len({self.costs.alike(r) for r in ranks}) == 1:
            return (1,) * len(ranks)
        if self.mode == "speed":
            weights = speeds(self.costs.cluster)
            return tuple(weights[r] for r in ranks)
        layers = [i for i, layer in enumerate(self.graph.layers) if layer.splits]
        rows = float(self.rows)

        def share(layer: int, part: float) -> tuple[float, float]:
            # Few of all rows travel to a rank's experts.
            rules = {option.rule for option in self.graph.layers[layer].splits}
            return (rows * part, 1.0) if rules & TRAVELLING else (rows, part)

        def member(rank: int) -> Member:
            def seconds(parts: int) -> float:
                return sum(self.costs.step_s(i, rank, *share(i, parts / FINE)) for i in layers)

            def nbytes(parts: int) -> float:
                part = parts / FINE
                return self.stage_bytes(0, layers, rank, lambda i: share(i, part), lambda _: part)

            return Member(
                name=f"rank {rank} ({self.costs.cluster.devices[rank].type})",
                seconds=seconds,
                bytes=nbytes,
                capacity_bytes=self.costs.capacity(rank) - self._reserved(rank),
            )

        members = [member(r) for r in ranks]
        try:
            found = balance(members, FINE, unit="parts of the width", minimum=1)
        except PlanError as error:
            self.shortages.append(f"split over ranks {list(ranks)}: {error}")
            found = balance_over(members, FINE, unit="parts of the width", minimum=1)
        self.binds.update(zip(ranks, found.binds, strict=True))
        return found.units


FINE = 240
"""Parts in which the width of a sharded model is balanced before it is cut into its own units."""
