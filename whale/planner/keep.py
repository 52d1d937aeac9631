"""Keep: what of a plan's training state copies share out, and what of it waits on the host.

Place in the flow: a pass of `make_plan` after homes are known; `given` holds a plan that was made
before against the same rules.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from whale.config import Config
from whale.cost.compute import CostModel
from whale.cost.held import HeldParameters
from whale.cost.memory import HeldBytes, held_bytes
from whale.cost.roles import stages_by_rank
from whale.errors import PlanError
from whale.ir.homes import all_syncs
from whale.ir.model_graph import ModelGraph, Parameter
from whale.ir.patterns import matches
from whale.ir.plan import RECOMPUTE, Home, Plan, StageLayer
from whale.ir.precision import PLAIN, Precision
from whale.planner.precision import precision_of

LEVELS = {"": 0, "v0": 1, "v1": 2, "v2": 3}
"""What `zero.level` asks for, as `Home.zero` says it."""
TIERS = {"": "device", "state": "state", "stream": "weights", "update": "host", "weights": "host"}
"""What of a parameter waits on the host, as `Home.tier` says it: its optimizer's state, itself
without its update, its update and that state, or all of these."""
OFFLOAD = {"state": "state", "weights": "stream", "update": "update", "v0": "weights"}
"""What `offload.level` asks for."""
ALL = "*"
"""All Layers, and what is between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """How a model's parameters are to be kept, and what its code allows of that.

    Args:
        zero: How much copies share out, where they may.
        tiers: By parameter, what of it waits on the host (`TIERS`), where it may.
        parks: Layers whose kept tensors wait on the host.
        recomputes: Layers whose forward runs again in the backward, and what of it stays.
        num_groups: Apply groups.
        early: Whether these are updated inside the backward.
        precision: In which dtypes.
        own: Parameters that only the code of their Layer reads, while it runs.
        trainable: Those that train.
    """

    zero: int = 0
    tiers: Mapping[str, str] = field(default_factory=dict)
    parks: frozenset[str] = frozenset()
    recomputes: Mapping[str, str] = field(default_factory=dict)
    num_groups: int = 1
    early: bool = False
    precision: Precision = PLAIN
    own: frozenset[str]
    trainable: frozenset[str]

    @classmethod
    def of(cls, graph: ModelGraph, config: Config) -> Keeping:
        """As the settings ask for it."""
        level = config.offload.level
        return cls(
            zero=LEVELS[config.zero.level],
            tiers=dict.fromkeys(_inside(graph, config.offload.layers), OFFLOAD[level])
            if level
            else {},
            parks=layers_of(graph, config.offload.layers, "offload.layers")
            if config.offload.activations
            else frozenset(),
            recomputes=_recomputed(graph, config),
            num_groups=config.optimizer.num_apply_group,
            early=config.optimizer.apply_in_backward,
            precision=precision_of(config),
            own=own_of(graph),
            trainable=frozenset(p.name for p in graph.parameters if p.trainable),
        )

    @property
    def plain(self) -> bool:
        """Whether nothing is shared out, nor waits anywhere."""
        return not self.zero and not self.tiers

    def allowed(self, name: str, *, num_stages: int, copies: int) -> tuple[int, ...]:
        """The levels of ZeRO that a parameter may have: no rank gives away what nobody else has.

        What code outside of its Layer reads must be there all the time; the gradient of what
        several stages use is complete with the last micro-batch alone; what does not train has no
        gradient.
        """
        if copies < 2:
            return (0,)
        trains = name in self.trainable
        levels = {1: trains, 2: trains and num_stages == 1, 3: name in self.own and num_stages == 1}
        return (0, *(level for level, may in levels.items() if may))

    def level(self, name: str, *, num_stages: int, copies: int) -> int:
        """The level that it gets."""
        levels = self.allowed(name, num_stages=num_stages, copies=copies)
        return max(level for level in levels if level <= self.zero)

    def tier_of(self, name: str, *, num_stages: int, zero: int) -> str:
        """Where it waits: what is updated on the device may leave it only between its uses."""
        asked = self.tiers.get(name, "")
        if asked == "stream" and not self._alone(name, num_stages=num_stages, zero=zero):
            return "device"
        return TIERS[asked]

    def fetched(self, name: str, *, num_stages: int, zero: int) -> bool:
        """Whether it is brought from the host for each use, and nobody shares it."""
        return self.tiers.get(name) in ("stream", "weights") and self._alone(
            name, num_stages=num_stages, zero=zero
        )

    def _alone(self, name: str, *, num_stages: int, zero: int) -> bool:
        return name in self.own and num_stages == 1 and not zero

    def held(self, p: Parameter, part: float, *, num_stages: int, copies: int) -> HeldBytes:
        """What a rank holds of (a part of) a parameter that so many ranks have."""
        zero = self.level(p.name, num_stages=num_stages, copies=copies)
        return held_bytes(
            p.numel * part,
            p.dtype,
            trained=p.trainable,
            zero=zero,
            part=1.0 / copies,
            tier=self.tier_of(p.name, num_stages=num_stages, zero=zero),
            fetched=self.fetched(p.name, num_stages=num_stages, zero=zero),
            precision=self.precision,
        )


def own_of(graph: ModelGraph) -> frozenset[str]:
    """Parameters that only the code of their Layer reads, while it runs.

    Of a Layer that the batch did not lead to nobody knows who reads what.
    """
    ran = {node.layer for node in graph.nodes}
    layers = (x for i, x in enumerate(graph.layers) if i in ran or not graph.nodes)
    return frozenset(name for layer in layers for name in layer.own)


def layers_of(graph: ModelGraph, pattern: str, setting: str) -> frozenset[str]:
    """The Layers that a setting names."""
    paths = [layer.path for layer in graph.layers]
    found = frozenset(path for path in paths if pattern == ALL or matches(pattern, path))
    if not found:
        near = difflib.get_close_matches(pattern, paths, 3, 0.0)
        raise PlanError(
            f"{setting} = {pattern!r} matches none of the model's {len(paths)} Layers",
            hint=f"nearest are: {', '.join(near)}",
        )
    return found


def _inside(graph: ModelGraph, pattern: str) -> frozenset[str]:
    """The parameters that `offload.layers` names."""
    if pattern == ALL:
        return frozenset(p.name for p in graph.parameters)
    chosen = layers_of(graph, pattern, "offload.layers")
    return frozenset(n for layer in graph.layers if layer.path in chosen for n in layer.params)


def _recomputed(graph: ModelGraph, config: Config) -> dict[str, str]:
    """The Layers that the settings name; those named one by one must be able to run again."""
    settings = config.gradient_checkpoint
    if settings.type != "collection":
        return {}
    named = layers_of(graph, settings.layers, "gradient_checkpoint.layers")
    chosen = named & again_allowed(graph, settings.end_taskgraph)
    refused = [layer for layer in graph.layers if layer.path in named - chosen and layer.once]
    if refused and (settings.layers != ALL or not chosen):
        raise PlanError(
            f"gradient_checkpoint.layers = {settings.layers!r} names {refused[0].path}, which "
            f"cannot run again: {refused[0].once}",
            hint="leave it out of the pattern, or put the code that does so into a module that is "
            "not recomputed",
        )
    return dict.fromkeys(sorted(chosen), settings.keep)


def again_allowed(graph: ModelGraph, end_taskgraph: int = -1) -> frozenset[str]:
    """The Layers whose forward may run again, up to a TaskGraph."""
    return frozenset(
        layer.path
        for layer in graph.layers
        if not layer.once and (end_taskgraph < 0 or layer.taskgraph <= end_taskgraph)
    )


def kept_so(plan: Plan, keeping: Keeping) -> Plan:
    """The plan with its homes shared out, and waiting, as far as that is asked for and allowed."""
    # The loss is a part of a head whose output stays cut: it would have to run again, too.
    whole = {s.path for t in plan.taskgraphs for s in t.splits if s.joined == "loss"}

    def layer(found: StageLayer) -> StageLayer:
        again = keeping.recomputes.get(found.path, "") if found.path not in whole else ""
        return replace(found, parked=found.path in keeping.parks, recompute=again)

    stages = tuple(replace(s, layers=tuple(map(layer, s.layers))) for s in plan.stages)
    plan = replace(plan, stages=stages)
    if keeping.plain:
        return plan

    def moved(home: Home, copies: int) -> Home:
        if not home.nbytes:
            return home  # there is nothing to share out, and somebody must have it
        stages = len(home.stages)
        zero = keeping.level(home.name, num_stages=stages, copies=copies)
        return replace(
            home,
            zero=zero,
            tier=keeping.tier_of(home.name, num_stages=stages, zero=zero),
            fetched=keeping.fetched(home.name, num_stages=stages, zero=zero),
        )

    return replace(plan, homes=tuple(moved(home, copies) for home, copies in _copies(plan)))


def _copies(plan: Plan) -> Iterator[tuple[Home, int]]:
    """Every home, and how many ranks have a copy of (a part of) it, at most."""
    for home, stretches in all_syncs(plan):
        yield home, max(len(sync.ranks) for _, _, syncs in stretches for sync in syncs)


_PARTS = 1000
"""In which shares are counted."""


def weights_by_room(plan: Plan, costs: CostModel) -> tuple[int, ...]:
    """By rank, shares that follow the memory left when nothing shared is kept; empty: all alike.

    For a plan whose shares are equal, with its prices.
    """
    assert plan.prices is not None
    capacities = [device.capacity_bytes for device in plan.prices.devices]
    here = any(home.zero and home.tier == "device" for home in plan.homes)
    if len(set(capacities)) == 1 or not here:
        return ()
    held = HeldParameters(plan, costs, range(plan.num_ranks), stages_by_rank(plan))
    training, room = costs.training, []
    for device, peak in zip(plan.prices.devices, plan.peak_bytes, strict=True):
        own = held.shared(device.rank)
        # What the update makes is there when activations are gone: only what is more than they.
        tensors = own.updated * (1.0 + training.state_tensors) + own.parameters
        room.append(max(0.0, device.capacity_bytes - peak + tensors * (1.0 + device.memory.gaps)))
    largest = max(room)
    weights = tuple(round(_PARTS * each / largest) if largest else 1 for each in room)
    groups = {sync.ranks for _, found in all_syncs(plan) for _, _, s in found for sync in s}
    if any(not sum(weights[rank] for rank in ranks) for ranks in groups):
        return ()
    return weights


def check_kept(plan: Plan, graph: ModelGraph) -> None:
    """Refuses a plan that shares out what must be whole, or keeps it where it cannot be."""
    once = {layer.path: layer.once for layer in graph.layers}
    for found in (layer for stage in plan.stages for layer in stage.layers):
        if found.recompute not in RECOMPUTE or (found.recompute and once[found.path]):
            raise PlanError(
                f"the plan recomputes {found.path} ({found.recompute!r}), allowed: "
                f"{', '.join(map(repr, RECOMPUTE))}, and only what can run again "
                f"({once[found.path] or 'it can'})",
                hint="make the plan again with gradient_checkpoint.layers",
            )
    sharing = Keeping(
        own=own_of(graph),
        trainable=frozenset(p.name for p in graph.parameters if p.trainable),
        tiers={home.name: "weights" for home in plan.homes},
    )
    for home, copies in _copies(plan):
        allowed = sharing.allowed(home.name, num_stages=len(home.stages), copies=copies)
        if home.zero not in allowed:
            raise PlanError(
                f"the plan shares out {home.name} (zero = {home.zero}), allowed: {allowed}: other "
                "code reads it, several stages use it, or no rank has a copy of it",
                hint="make the plan again: wh.plan(model, ...), or `whale plan --json F`",
            )
        alone = sharing.fetched(home.name, num_stages=len(home.stages), zero=home.zero)
        if (
            home.tier not in TIERS.values()
            or (home.fetched and not (alone and home.hosted))
            or (home.tier == "weights" and not home.fetched)
        ):
            raise PlanError(
                f"the plan keeps {home.name} on {home.tier!r}, brought for each use: "
                f"{home.fetched}; allowed: {', '.join(dict.fromkeys(TIERS.values()))}, and brought "
                "only from the host, by its Layer alone, where nobody shares it",
                hint="make the plan again with offload.level",
            )
    if plan.state_weights and (
        len(plan.state_weights) != plan.num_ranks
        or min(plan.state_weights) < 0
        or any(
            not sum(plan.state_weights[rank] for rank in sync.ranks)
            for home, stretches in all_syncs(plan)
            for _, _, syncs in stretches
            for sync in syncs
            if home.zero
        )
    ):
        raise PlanError(
            f"state_weights = {plan.state_weights}; allowed: for each of {plan.num_ranks} ranks a "
            "whole number from 0 on, not 0 for all that share a parameter",
            hint="leave them out for equal shares",
        )
