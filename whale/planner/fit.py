"""Fit: what of a plan that does not fit runs again, is shared out, or waits on the host.

Place in the flow: asked by `make_plan` for candidates that need more memory than there is. The
levels of ZeRO are tried one by one; on each, Layers are recomputed, and state, updates, weights and
activations are moved to the host, Layer by Layer, until every device has room. There is more than
one order in which to do so; the plan with the shortest step wins. What the settings say is kept.

[Note: Layer by Layer] What a choice saves on a device is its bytes times the micro-batches that the
device holds at its worst moment, what it costs are the seconds it adds to a step. The Layers that
save most for a second come first, and only as many as are needed. The finished plan is priced, for
these sums leave out what passes inside a Layer; where it still lacks bytes, more Layers follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from whale.config import Config
from whale.cost.compute import CostModel
from whale.cost.memory import layer_bytes
from whale.cost.parts import Part, parts_of
from whale.ir.model_graph import ModelGraph, item_bytes
from whale.ir.plan import Home, Plan, StageLayer, StagePlan
from whale.planner.keep import Keeping, again_allowed
from whale.planner.schedules import held_states
from whale.sim.report import HOST_SHARE

Build = Callable[[Keeping], Plan]
"""A candidate's priced plan, kept so."""

_ROUNDS = 4
"""In which Layers are added to a choice, before all of them are taken."""
_WAYS = (
    ("recompute", "state", "update", "weights", "activations"),
    ("state", "recompute", "update", "weights", "activations"),
    ("recompute", "activations", "state", "update", "weights"),
    ("recompute", "stream", "state", "activations"),
)
"""Orders in which memory is made, each until there is enough of it."""
LARGE = 64
"""Devices, from which on a plan takes long to price and fewer ways are tried."""


def overflow(plan: Plan) -> float:
    """Bytes over capacity on the worst device or host; 0: the plan fits."""
    return max(_over_devices(plan), _over_hosts(plan))


def _over_devices(plan: Plan) -> float:
    assert plan.prices is not None
    over = (
        peak - device.capacity_bytes
        for peak, device in zip(plan.peak_bytes, plan.prices.devices, strict=True)
    )
    return max(0.0, *over)


def _over_hosts(plan: Plan) -> float:
    assert plan.prices is not None
    capacity = plan.prices.host_capacity_bytes
    hosts = plan.prices.host_bytes().items()
    return max([0.0, *(held - HOST_SHARE * capacity[node] for node, held in hosts)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Free:
    """What the settings leave open."""

    recompute: bool
    zero: bool
    tier: bool
    activations: bool
    last_taskgraph: int
    keep: str

    @classmethod
    def of(cls, config: Config) -> Free:
        """Of a Config: what it does not say, `auto.fit` may choose."""
        chooses, again = config.auto.fit, config.gradient_checkpoint
        return cls(
            recompute=again.type == "auto" or (chooses and not again.type),
            zero=chooses and not config.zero.level,
            tier=chooses and not config.offload.level,
            activations=chooses and not config.offload.activations,
            last_taskgraph=again.end_taskgraph,
            keep=again.keep,
        )

    @property
    def nothing(self) -> bool:
        """Whether there is no choice."""
        return not (self.recompute or self.zero or self.tier or self.activations)


def fitted(
    plan: Plan, keeping: Keeping, build: Build, graph: ModelGraph, costs: CostModel, free: Free
) -> Plan | None:
    """The fastest plan that fits of those that keep less; None: none does, or no choice is free."""
    if free.nothing:
        return None
    homes = {home.name: home for home in plan.homes}
    fit = _Fit(build=build, graph=graph, costs=costs, free=free, homes=homes)
    large = plan.num_ranks > LARGE
    best: Plan | None = None
    if _over_devices(fit.least(replace(keeping, zero=3) if free.zero else keeping)):
        return None
    for level in range(keeping.zero, 4 if free.zero else keeping.zero + 1):
        own = replace(keeping, zero=level)
        begin = plan if level == keeping.zero else build(own)
        if level > keeping.zero and not any(home.zero == level for home in begin.homes):
            break
        if overflow(begin) and _over_devices(fit.least(own)):
            continue
        for way in _WAYS[:1] if large else _WAYS:
            found = fit.follow(way, begin, own)
            if found is not None and (best is None or _seconds(found) < _seconds(best)):
                best = found
        if large and best is not None:
            break
    return best


def _seconds(plan: Plan) -> float:
    return float(plan.predicted["step_seconds"])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    build: Build
    graph: ModelGraph
    costs: CostModel
    free: Free
    homes: Mapping[str, Home]

    def least(self, keeping: Keeping) -> Plan:
        """With all that can be made: where this does not fit, nothing does."""
        for choice in ("recompute", "weights", "activations"):
            keeping = self._with(choice, keeping, self._offers(choice, keeping))
        return self.build(keeping)

    def follow(self, way: Sequence[str], plan: Plan, keeping: Keeping) -> Plan | None:
        """Makes memory in this order until the plan fits."""
        for choice in way:
            if not overflow(plan):
                break
            plan, keeping = self._make(choice, plan, keeping)
        return None if overflow(plan) else plan

    def _make(self, choice: str, plan: Plan, keeping: Keeping) -> tuple[Plan, Keeping]:
        """As many Layers as are needed, or all that can, are kept so: as far as hosts have room."""
        offers = self._offers(choice, keeping)
        found, taken = plan, list[str]()
        for round_number in range(_ROUNDS if offers else 0):
            wanted, enough = self._needed(choice, found, offers.difference(taken))
            if not wanted:
                break
            if round_number == _ROUNDS - 1 or not enough:
                wanted += sorted(offers.difference(taken, wanted))
            taken += wanted
            found = self.build(self._with(choice, keeping, taken))
            if not _over_devices(found):
                break
        while _over_hosts(found) > _over_hosts(plan) and taken:
            taken = taken[: len(taken) // 2]
            found = self.build(self._with(choice, keeping, taken)) if taken else plan
        return found, self._with(choice, keeping, taken)

    def _offers(self, choice: str, keeping: Keeping) -> frozenset[str]:
        every = frozenset(layer.path for layer in self.graph.layers)
        if choice == "recompute":
            if not self.free.recompute:
                return frozenset()
            return again_allowed(self.graph, self.free.last_taskgraph) - set(keeping.recomputes)
        if choice == "activations":
            return every - keeping.parks if self.free.activations else frozenset()
        return every if self.free.tier else frozenset()

    def _with(self, choice: str, keeping: Keeping, paths: Collection[str]) -> Keeping:
        if choice == "recompute":
            again = {**keeping.recomputes, **dict.fromkeys(paths, self.free.keep)}
            return replace(keeping, recomputes=again)
        if choice == "activations":
            return replace(keeping, parks=keeping.parks.union(paths))
        params = {n for layer in self.graph.layers if layer.path in paths for n in layer.params}
        tiers = dict(keeping.tiers)
        for name in params:
            if _DEPTH[choice] > _DEPTH.get(tiers.get(name, ""), 0):
                tiers[name] = choice
        return replace(keeping, tiers=tiers)

    # ---- which Layers ---------------------------------------------------------------------------

    def _needed(self, choice: str, plan: Plan, offers: Collection[str]) -> tuple[list[str], bool]:
        """The Layers that make up for what the devices lack, those that cost least first.

        And whether they do.
        """
        assert plan.prices is not None
        enough = True
        wanted: dict[str, None] = {}
        seen: set[object] = set()
        for device, peak in zip(plan.prices.devices, plan.peak_bytes, strict=True):
            lacking = peak - device.capacity_bytes
            kind = plan.stages_of(device.rank), self.costs.alike(device.rank), lacking
            if lacking <= 0 or kind in seen:
                continue
            seen.add(kind)
            for path, saved in self._ranked(choice, plan, device.rank, offers):
                if lacking <= 0:
                    break
                wanted[path] = None
                lacking -= int(saved * (1.0 + device.memory.gaps))
            enough = enough and lacking <= 0
        return list(wanted), enough

    def _ranked(
        self, choice: str, plan: Plan, rank: int, offers: Collection[str]
    ) -> list[tuple[str, float]]:
        """Layers of a rank, those that save most for a second first: (path, bytes)."""
        found: dict[str, tuple[float, float]] = {}
        for stage in (plan.stages[s] for s in plan.stages_of(rank)):
            held = _held(plan, stage)
            for layer in stage.layers:
                if layer.path in offers and layer.path not in found:
                    found[layer.path] = self._worth(choice, plan, stage, layer, rank, held)
        useful = {path: own for path, own in found.items() if own[0] > 0}

        def first(path: str) -> tuple[float, float, str]:
            saved, seconds = useful[path]
            return float(f"{seconds / saved:.2g}"), -saved, path

        order = sorted(useful, key=first)
        return [(path, useful[path][0]) for path in order]

    def _worth(
        self, choice: str, plan: Plan, stage: StagePlan, layer: StageLayer, rank: int, held: int
    ) -> tuple[float, float]:
        """What keeping a Layer so saves on a rank, and the seconds of a step that it takes."""
        index = next(i for i, x in enumerate(self.graph.layers) if x.path == layer.path)
        rows = -(-plan.batch_rows // plan.num_micro_batch)
        part = parts_of(plan, layer.taskgraph, rows).get(rank, Part(0, 1.0))
        share = part.share(self.graph.layers[index])
        now = layer_bytes(self.costs, index, rank, share, recompute=layer.recompute)
        moved = self.costs.host_rate(rank)
        if choice == "recompute":
            then = layer_bytes(self.costs, index, rank, share, recompute=self.free.keep)
            again = self.costs.again_s(index, rank, *share, keep=self.free.keep)
            return held * (now.kept - then.kept), plan.num_micro_batch * again
        if choice == "activations":
            return held * now.kept, 2.0 * plan.num_micro_batch * now.kept / moved
        owned = sum(
            math.prod(piece.shape(home.shape)) * item_bytes(home.dtype)
            for home in (self.homes[name] for name in layer.params)
            if self.costs.trainable[home.name] and (piece := plan.piece(home, rank)) is not None
        )
        state = self.costs.training.state_tensors
        if choice == "stream":
            passes = (1.0 if plan.early else 3.0) + 2.0 * plan.num_micro_batch
            return owned, passes * owned / moved
        if choice == "state":
            return owned * state, 2.0 * owned * state / moved
        if choice == "update":
            return owned * (state + 1.0), 2.0 * owned / moved
        return owned * (state + 2.0), (3.0 + 2.0 * plan.num_micro_batch) * owned / moved


_DEPTH = {"": 0, "state": 1, "stream": 2, "update": 2, "weights": 3}
"""How far from the device each choice puts a parameter."""


def _held(plan: Plan, stage: StagePlan) -> int:
    """The micro-batches of a stage that its devices hold at the worst moment, at most."""
    group = next(g for g, stages in enumerate(plan.schedule.groups) if stage.index in stages)
    return max((now.get(stage.index, 0) for now in held_states(plan.schedule, group)), default=1)


# ---- in words ------------------------------------------------------------------------------------


def explained(plan: Plan, graph: ModelGraph, costs: CostModel) -> Iterator[str]:
    """A line for each choice: what it saves on a device and what it costs in a step."""
    if not any(x.recompute or x.parked for s in plan.stages for x in s.layers) and all(
        home.tier == "device" for home in plan.homes
    ):
        return
    free = Free(
        recompute=True, zero=True, tier=True, activations=True, last_taskgraph=-1, keep="inputs"
    )
    homes = {home.name: home for home in plan.homes}
    plain = _Fit(build=lambda _: plan, graph=graph, costs=costs, free=free, homes=homes)
    tiers: Mapping[str, str] = {h.name: _said_tier(h.tier, h.fetched) for h in plan.homes}
    for stage in plan.stages:
        rank, held = stage.virtual_device.ranks[0], _held(plan, stage)
        lines = []
        for layer in stage.layers:
            choices = {"recompute": layer.recompute, "activations": layer.parked}
            choices |= {tiers.get(name, ""): True for name in layer.params if tiers.get(name)}
            for choice, how in choices.items():
                if how:
                    bare = replace(layer, recompute="", parked=False)
                    own = replace(plain, free=replace(free, keep=layer.recompute or "inputs"))
                    worth = own._worth(choice, plan, stage, bare, rank, held)
                    lines.append((choice, worth, layer.path))
        lines.sort(key=lambda line: line[0])
        for (choice, (saved, seconds)), group in groupby(lines, key=lambda line: line[:2]):
            paths = [path for _, _, path in group]
            names = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} like it"
            each = "" if len(paths) == 1 else "each "
            yield (
                f"{names} {_SAID[choice]}: {each}saves {_amount(saved)}, costs "
                f"{seconds:.3g} s a step on rank {rank} where nothing hides it"
            )


_SAID = {
    "recompute": "recomputed",
    "activations": "with activations on the host",
    "state": "with optimizer state on the host",
    "update": "updated on the host",
    "stream": "with weights on the host and updated here",
    "weights": "with weights on the host",
}


def _said_tier(tier: str, fetched: bool) -> str:
    if tier == "host":
        return "weights" if fetched else "update"
    return {"state": "state", "weights": "stream"}.get(tier, "")


def _amount(nbytes: float) -> str:
    return f"{nbytes / 1e9:.3g} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.3g} MB"
