"""Shares: how many rows every replica computes, and how many units every shard holds.

Place in the flow: asked by placement and splits for every TaskGraph. Three ways, by
`cluster.balance`: `time` (the default) finds the shares that end together and fit into memory, by
the cost model; `speed` follows the peak FLOPs, as the paper does; `equal` ignores what devices are.
Equal devices get equal shares in all of them.

Width comes first, for it does not depend on the rows of unequal replicas; then, stage by stage, the
rows. What a share needs of memory is what `cost.memory` will say of the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from math import inf, lcm

from whale.cost.compute import CostModel
from whale.cost.memory import (
    HeldBytes,
    LayerBytes,
    device_bytes,
    layer_bytes,
    most_kept,
    stage_bytes,
)
from whale.cost.parts import Part
from whale.errors import PlanError
from whale.ir.cluster import Cluster
from whale.ir.device_types import device_type
from whale.ir.model_graph import Parameter, SplitOption
from whale.ir.plan import TRAVELLING
from whale.ir.sharding import apportion
from whale.planner.balance import Member, balance, balance_over
from whale.planner.keep import Keeping
from whale.planner.outline import Outline


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


Cut = Callable[[int, SplitOption], float]
"""By TaskGraph and split, the part of its units that a rank has."""


@dataclass(kw_only=True)
class Shares:
    """Chooses shares for one plan; keeps what bound them."""

    outline: Outline
    costs: CostModel
    rows: int
    """Of the largest micro-batch."""
    keeping: Keeping
    mode: str = "time"
    """`time`, `speed` or `equal`."""
    binds: dict[int, str] = field(default_factory=dict)
    shortages: list[str] = field(default_factory=list)
    _weights: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    _units: dict[tuple[int, tuple[int, ...]], tuple[int, ...]] = field(default_factory=dict)
    _facts: dict[frozenset[int], dict[str, tuple[Parameter, object, int, int]]] = field(
        default_factory=dict
    )

    # ---- rows -----------------------------------------------------------------------------------

    def row_weights(self, stage: int) -> tuple[int, ...]:
        """Weights of the replicas of a stage's rows."""
        layout = self.outline.layout
        replicas = layout.replicas(stage, layout.base_width(stage))
        if len(replicas) == 1:
            return (1,)
        if self.mode == "speed":
            weights = speeds(self.costs.cluster)
            return tuple(sum(weights[r] for r in ranks) for ranks in replicas)
        kinds = [tuple(self.costs.alike(r) for r in ranks) for ranks in replicas]
        if self.mode == "equal" or len(set(kinds)) == 1:
            return tuple(len(ranks) for ranks in replicas)
        # Of hundreds of replicas most are alike: they share what is known of their time and memory.
        known: dict[object, Member] = {}
        for ranks, kind in zip(replicas, kinds, strict=True):
            if kind not in known:
                known[kind] = self._rows_member(stage, ranks)
        members = [
            replace(known[kind], name=self._name(ranks))
            for ranks, kind in zip(replicas, kinds, strict=True)
        ]
        try:
            found = balance(members, self.rows, unit="rows")
        except PlanError as error:
            self.shortages.append(f"stage {stage}: {error}")
            found = balance_over(members, self.rows)
        for ranks, binds in zip(replicas, found.binds, strict=True):
            self.binds.update(dict.fromkeys(ranks, binds))
        return found.units

    def _rows_member(self, stage: int, ranks: tuple[int, ...]) -> Member:
        smallest = min(self.costs.capacity(r) for r in ranks)
        cuts = {rank: self._cut_of(rank) for rank in ranks}
        each = {s: float(len(ranks)) for s in self._beside(stage)}
        layout = self.outline.layout

        def seconds(rows: int) -> float:
            return sum(
                self._seconds(stage, i, ranks, rows, cuts) for i in self.outline.layers_of(stage)
            )

        def nbytes(rows: int) -> float:
            # The other stages of these ranks have replicas of other widths, maybe.
            own = {s: rows * layout.base_width(s) / width for s, width in each.items()}
            peaks = [self._peak(r, own, cuts[r]) for r in ranks]
            # A replica of unequal devices is as tight as its tightest.
            over = [peak - self.costs.capacity(r) for peak, r in zip(peaks, ranks, strict=True)]
            return max(over) + smallest

        return Member(
            name=self._name(ranks),
            seconds=cache(seconds),
            bytes=cache(nbytes),
            capacity_bytes=smallest,
        )

    def _name(self, ranks: tuple[int, ...]) -> str:
        device = self.costs.cluster.devices[ranks[0]]
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} ({device.type})"

    # ---- what a rank computes and holds ---------------------------------------------------------

    def _beside(self, stage: int) -> tuple[int, ...]:
        """The stages that the ranks of a stage run, itself among them."""
        layout = self.outline.layout
        return layout.groups[layout.group_of(stage)]

    def _replica(self, taskgraph: int, rank: int) -> tuple[int, ...]:
        """The ranks that share a TaskGraph's weights with a rank."""
        layout = self.outline.layout
        spans = layout.replicas(layout.stage_of(taskgraph), layout.widths[taskgraph])
        return next(ranks for ranks in spans if rank in ranks)

    def _cut_of(self, rank: int) -> Cut:
        """As `units` cuts it."""

        @cache
        def cut(taskgraph: int, option: SplitOption) -> float:
            ranks = self._replica(taskgraph, rank)
            return self.units(option, ranks)[ranks.index(rank)] / option.units

        return cut

    def _part(self, taskgraph: int, rows: float, cut: Cut) -> Part:
        """What a rank with so many rows of the stage has of a TaskGraph."""
        layout, options = self.outline.layout, self.outline.options[taskgraph]
        travelling: frozenset[str] = frozenset()
        if layout.bridged(taskgraph):
            stage = layout.stage_of(taskgraph)
            rows = self.rows / len(layout.replicas(stage, layout.widths[taskgraph]))
            travelling = frozenset(o.path for o in options if o.rule in TRAVELLING)
        return Part(rows, cut(taskgraph, options[0]) if options else 1.0, travelling)

    def _seconds(
        self, stage: int, index: int, ranks: tuple[int, ...], rows: float, cuts: Mapping[int, Cut]
    ) -> float:
        """A call of a Layer, which all ranks of a replica make together."""
        layer, costs = self.outline.graph.layers[index], self.costs
        parts = ((r, self._part(layer.taskgraph, rows, cuts[r]).share(layer)) for r in ranks)
        return max(costs.step_s(index, r, *share) for r, share in parts) / costs.calls[index]

    def _layer(self, index: int, rank: int, rows: float, cut: Cut) -> LayerBytes:
        layer = self.outline.graph.layers[index]
        part = self._part(layer.taskgraph, rows, cut)
        rules = {o.path: o.rule for o in self.outline.options[layer.taskgraph]}
        return layer_bytes(
            self.costs,
            index,
            rank,
            part.share(layer),
            held=part.width if layer.splits else 1.0,
            rules={rules.get(o.path, o.rule) for o in layer.splits},
            params=None if self.keeping.plain else self._held(layer.params, self._mine(rank), cut),
            parked=layer.path in self.keeping.parks,
            recompute=self.keeping.recomputes.get(layer.path, ""),
        )

    def _peak(self, rank: int, rows: Mapping[int, float], cut: Cut) -> float:
        """The bytes a rank must have that has so many rows of each of its stages."""
        outline = self.outline
        stages = {
            stage: stage_bytes(
                (self._layer(i, rank, own, cut) for i in reversed(outline.layers_of(stage))),
                sum(sent.there.at(own) for sent in outline.received[stage]),
            )
            for stage, own in rows.items()
        }
        mine = frozenset(stages)
        names = [n for n, users in outline.users.items() if not mine.isdisjoint(users)]
        device = device_bytes(
            self.costs,
            rank,
            self._held(names, mine, cut),
            workspace=max(s.workspace for s in stages.values()),
            num_groups=self.keeping.num_groups,
            early=self.keeping.early,
        )
        held = outline.held[outline.layout.group_of(next(iter(stages)))]
        return device.peak(most_kept({s: b.kept for s, b in stages.items()}, held))

    def _mine(self, rank: int) -> frozenset[int]:
        """The stages of a rank."""
        layout = self.outline.layout
        here = (g for g, copies in enumerate(layout.copies) if any(rank in c for c in copies))
        return frozenset(layout.groups[next(here)])

    def _held(self, names: Iterable[str], stages: frozenset[int], cut: Cut) -> HeldBytes:
        """What a rank of these stages holds of some parameters."""
        taken, known = self._taken(stages, cut), self._known(stages)
        # Of hundreds of parameters most are alike, and stand for as many elements together.
        alike: dict[object, tuple[Parameter, int, int, float]] = {}
        for name in names:
            p, key, users, copies = known[name]
            part = p.numel * taken.get(name, 1.0)
            before = alike.get(key)
            alike[key] = (p, users, copies, part + (before[3] if before else 0.0))
        return sum(
            (
                self.keeping.held(p, numel / p.numel, num_stages=users, copies=copies)
                for p, users, copies, numel in alike.values()
                if p.numel
            ),
            HeldBytes(),
        )

    def _known(self, stages: frozenset[int]) -> dict[str, tuple[Parameter, object, int, int]]:
        """By parameter of these stages: what it is alike with, its users, its copies."""
        if stages not in self._facts:
            keeping, users = self.keeping, self.outline.users
            found: dict[str, tuple[Parameter, object, int, int]] = {}
            for p in self.outline.graph.parameters:
                if stages.isdisjoint(users[p.name]):
                    continue
                num, copies = len(users[p.name]), self._copies(p.name, stages)
                zero = keeping.level(p.name, num_stages=num, copies=copies)
                fetched = keeping.fetched(p.name, num_stages=num, zero=zero)
                tier = keeping.tier_of(p.name, num_stages=num, zero=zero)
                key = (p.dtype, p.trainable, zero, copies, fetched, tier)
                found[p.name] = (p, key, num, copies)
            self._facts[stages] = found
        return self._facts[stages]

    def _copies(self, name: str, stages: frozenset[int]) -> int:
        """How many ranks have what one of these stages has of a parameter."""
        outline = self.outline
        layout = outline.layout
        for stage in stages & outline.users[name]:
            for t in layout.stages[stage]:
                if any(name == n for option in outline.options[t] for n, _ in option.params):
                    return len(layout.replicas(stage, layout.widths[t]))
            return len(layout.replicas(stage, layout.base_width(stage)))
        return 1

    def _taken(self, stages: frozenset[int], cut: Cut) -> dict[str, float]:
        """By parameter that is cut, the part of it that a rank of these stages has."""
        outline = self.outline
        return {
            name: cut(t, option)
            for stage in stages
            for t in outline.layout.stages[stage]
            for option in outline.options[t]
            for name, _ in option.params
        }

    # ---- units of a split -----------------------------------------------------------------------

    def units(self, option: SplitOption, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Units of each shard of one replica, at least one each.

        They depend on the ranks and the number of units alone: a parameter that is tied between two
        splits is cut at the same points by both.
        """
        key = (option.units, ranks)
        if key not in self._units:
            self._units[key] = self._cut(option, ranks)
        return self._units[key]

    def _cut(self, option: SplitOption, ranks: tuple[int, ...]) -> tuple[int, ...]:
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
        members = [self._width_member(rank, ranks) for rank in ranks]
        try:
            found = balance(members, FINE, unit="parts of the width", minimum=1)
        except PlanError as error:
            self.shortages.append(f"split over ranks {list(ranks)}: {error}")
            found = balance_over(members, FINE, unit="parts of the width", minimum=1)
        self.binds.update(zip(ranks, found.binds, strict=True))
        return found.units

    def _width_member(self, rank: int, ranks: tuple[int, ...]) -> Member:
        outline = self.outline
        layout = outline.layout
        here = next(g for g, copies in enumerate(layout.copies) if any(rank in c for c in copies))
        stages = layout.groups[here]
        # Before anything is known of unequal rows, all replicas have as many.
        rows = {s: self.rows / len(layout.replicas(s, layout.base_width(s))) for s in stages}
        together = {
            t
            for stage in stages
            for t in layout.stages[stage]
            if outline.options[t] and self._replica(t, rank) == ranks
        }
        layers = [
            (stage, i)
            for stage in stages
            for i in outline.layers_of(stage)
            if outline.graph.layers[i].taskgraph in together
        ]

        def cut(parts: int) -> Cut:
            def of(taskgraph: int, _: SplitOption) -> float:
                return parts / FINE if taskgraph in together else 1.0 / layout.widths[taskgraph]

            return of

        return Member(
            name=f"rank {rank} ({self.costs.cluster.devices[rank].type})",
            seconds=lambda parts: sum(
                self._seconds(stage, i, (rank,), rows[stage], {rank: cut(parts)})
                for stage, i in layers
            ),
            bytes=lambda parts: self._peak(rank, rows, cut(parts)),
            capacity_bytes=self.costs.capacity(rank),
        )


FINE = 240
"""Parts in which the width of a sharded model is balanced before it is cut into its own units."""
