"""Plan: everything a rank needs to know to run, as one value.

Stages, shares, cuts, homes, groups, schedule.

Place in the flow: the planner's only output and the engine's only input; printable, diffable, JSON.
A plan names devices by rank. Sizes that depend on the batch are not stored: rows follow the
weights.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from whale.errors import PlanError
from whale.ir.codec import from_plain, to_plain
from whale.ir.model_graph import BatchDims, item_bytes
from whale.ir.precision import PLAIN, Precision
from whale.ir.prices import Prices
from whale.ir.reasons import grouped_reasons
from whale.ir.schedule import Schedule
from whale.ir.sharding import WHOLE, DimSharding, Piece
from whale.ir.text import dumps, loads
from whale.ir.virtual_device import VirtualDevice
from whale.ir.wire import Wire

SCHEMA = 1
PREDICTED = (
    "fits",
    "step_seconds",
    "samples_per_second",
    "joules_per_step",
    "lower_bound_seconds",
)
RECOMPUTE = ("", "inputs", "products")
LOW_SHARE = 0.5
"""A split TaskGraph of which less is truly split is warned about."""
TRAVELLING = frozenset({"experts", "stacked experts"})
"""Rules by which rows travel to the rank that has their expert, where replicas have their own."""
AROUND = ("attention", "multihead")
"""Rules whose module reads the batch size in its own code: a bridge goes around all of it."""


_OF_DEVICES = ("device_types", "peak_bytes")
"""Fields that stand in the list of devices in JSON."""
_SHOWN = ("schema", "num_micro_batch", "devices", *PREDICTED)
"""Keys of the JSON that are no fields."""
_DAMAGE = (AttributeError, LookupError, TypeError)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitLayer:
    """A sharded module: its rule and its unit cuts, one row per replica (or one for all)."""

    rule: str
    path: str
    modules: tuple[str, ...]
    unit: str
    cuts: tuple[tuple[int, ...], ...]
    params: tuple[tuple[str, DimSharding], ...]
    dims: BatchDims = ((0,), (0,))
    """Batch dims of what it reads and makes, for the bridge around it."""
    inside: tuple[str, ...] = ()
    """Dropout modules that see only a shard of the columns."""
    entered: int = 1
    """Distinct inputs that need a gradient."""
    joined: str = "gather"
    """What a lone column split's output meets: `gather` or `loss`."""
    meets_before: int = 0
    """How many of its Layer's `meets` come before it."""
    copies: int = 1
    """Rows that travel for each that comes in."""
    per_node: int = 0
    """Members in each node, where rows travel on two levels; 0: on one."""
    chunks: int = 1
    """Parts in which rows travel."""
    marks: tuple[tuple[str, str], ...] = ()
    """What else the rule does, as in the SplitOption."""

    def units(self, replica: int, shard: int) -> tuple[int, int]:
        """The units [low, high) of one shard."""
        row = self.cuts[replica if len(self.cuts) > 1 else 0]
        return row[shard], row[shard + 1]

    @property
    def around(self) -> bool:
        """Whether a bridge along rows goes around its whole module."""
        return self.rule in AROUND

    def is_in(self, called: Collection[str] | None) -> bool:
        """Whether one of its modules is among these; None are all."""
        return called is None or any(path in called for path in self.modules)

    def cuts_of(self, replica: int) -> tuple[int, ...]:
        """All cut points of one replica."""
        return self.cuts[replica if len(self.cuts) > 1 else 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGraphPlan:
    """A TaskGraph placed: its devices, its Layers by path, and what of it is sharded and how."""

    index: int
    name: str
    kind: str
    stage: int
    layers: tuple[str, ...]
    virtual_device: VirtualDevice = field(metadata={"key": "replicas"})
    splits: tuple[SplitLayer, ...] = ()
    whole: tuple[str, ...] = ()
    """Modules of a split TaskGraph that no rule covers.

    Computed whole on every rank of the group.
    """
    split_share: float = 0.0
    """Share of its parameters that is truly split."""
    reasons: tuple[tuple[str, str], ...] = ()
    """(module, why) of those that stay whole, and of attention not split by heads."""
    flops_share: float = 0.0

    @property
    def is_low(self) -> bool:
        """Whether much less of it is split than its annotation says."""
        return bool(self.splits) and self.split_share < LOW_SHARE

    def why_whole(self) -> list[str]:
        """Lines that say what stays whole and why."""
        low = [f"LOW: less than {LOW_SHARE:.0%} is split"] if self.is_low else []
        return low + grouped_reasons(self.reasons)

    def shard_share(self, replica: int, shard: int, sizes: Mapping[str, int]) -> float:
        """A shard's part of its replica's FLOPs; `sizes` are those of the parameters.

        Products go by the weights they multiply with; looking rows up takes none.
        """
        splits = [s for s in self.splits if s.rule != "embedding"] or list(self.splits)
        weights = [sum(sizes.get(name, 0) for name, _ in s.params) for s in splits]
        total = sum(weights)
        if not total:
            return 1.0 / len(self.virtual_device.replicas[replica].ranks)
        found = 0.0
        for s, weight in zip(splits, weights, strict=True):
            low, high = s.units(replica, shard)
            found += weight / total * (high - low) / s.cuts_of(replica)[-1]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLayer:
    """A Layer of a stage, in execution order.

    Its TaskGraph, the parameters it reads, its batch norms.
    """

    path: str
    taskgraph: int
    params: tuple[str, ...]
    meets: tuple[str, ...] = ()
    """Where replicas meet, as in the ModelGraph's Layer; "" where they could and do not."""
    parked: bool = False
    """Whether what it keeps for its backward waits on the host."""
    recompute: str = ""
    """What of a forward stays that runs again in the backward: its `inputs`, or what its `products`
    make beside them; empty: it does not run again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """TaskGraphs that share devices and run as one.

    `virtual_device` is the row layout of its glue.
    """

    index: int
    taskgraphs: tuple[int, ...]
    virtual_device: VirtualDevice = field(metadata={"key": "replicas"})
    layers: tuple[StageLayer, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """Where a parameter lives: the stages that use it, how it is cut, and how it is updated."""

    name: str
    shape: tuple[int, ...]
    stages: tuple[int, ...]
    splits: tuple[tuple[int, str], ...] = ()
    """(TaskGraph, module path) of each split that cuts it; empty: whole."""
    around: tuple[int, ...] = ()
    """TaskGraphs that see it whole, but with the rows of all members."""
    zero: int = 0
    """What its copies share out among each other: nothing (0), the update and its state (1), its
    gradient too (2), or itself, gathered for each use (3)."""
    tier: str = "device"
    """Where what is kept is between steps: on the `device`, on the `host` with its update, or on
    the device but for its optimizer's `state`, or but for the `weights` themselves."""
    fetched: bool = False
    """Whether it is brought from where it is kept for each use, though nobody else has a part."""
    dtype: str = "float32"
    apply_group: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the whole parameter."""
        return math.prod(self.shape) * item_bytes(self.dtype)

    @property
    def hosted(self) -> bool:
        """Whether what is kept is on the host between steps."""
        return self.tier in ("host", "weights")

    @property
    def resident(self) -> bool:
        """Whether it stays where it is computed with, or is brought there for each use."""
        return self.zero < 3 and not self.fetched


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A process group. Groups are created by all ranks in the plan's order.

    `channel` groups carry P2P.
    """

    name: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The whole plan. `to_dict` is the JSON contract.

    Keys the cost model fills are null without it.
    """

    model_hash: str
    num_ranks: int
    device_types: tuple[str, ...]
    batch_rows: int
    stages: tuple[StagePlan, ...]
    taskgraphs: tuple[TaskGraphPlan, ...]
    homes: tuple[Home, ...]
    groups: tuple[Group, ...]
    schedule: Schedule
    state_weights: tuple[int, ...] = ()
    """By rank, its weight in what copies share out; empty: equal ones."""
    precision: Precision = PLAIN
    wire: Wire = Wire()
    early: bool = False
    """Whether apply groups are updated while the backward runs, where their gradients are there."""
    bucket_bytes: int = 25_000_000
    num_communicators: int = 1
    strategy: str = ""
    rejected: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    """What runs again or waits on the host, Layer by Layer, what it saves and what it costs."""
    predicted: Mapping[str, Any] = field(default_factory=dict)
    """`fits`, `step_seconds` and the other keys of PREDICTED, once the plan is priced."""
    peak_bytes: tuple[int, ...] = ()
    """Predicted peak memory by rank, with what the driver and the allocator take: it fits where
    none is above its device's capacity."""
    prices: Prices | None = None

    @property
    def num_micro_batch(self) -> int:
        """Micro-batches per step."""
        return self.schedule.num_micro_batch

    @cached_property
    def away(self) -> frozenset[str]:
        """Parameters that are brought to where they are computed with for each use."""
        return frozenset(home.name for home in self.homes if not home.resident)

    def apart(self, home: Home) -> bool:
        """Whether what is kept of a parameter is another tensor than what is computed with."""
        other = home.zero or home.fetched or home.hosted
        return bool(other) or self.precision.kept(home.dtype) != home.dtype

    def home(self, name: str) -> Home:
        """The home of a parameter."""
        return next(home for home in self.homes if home.name == name)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages a rank runs, in order."""
        return tuple(s.index for s in self.stages if rank in s.virtual_device.ranks)

    def stages_apart(self) -> frozenset[int]:
        """Stages in which replicas do not wait for each other.

        No batch norm or experts over all of them, no split across replicas, nothing to gather.
        """
        joined = {
            t.stage
            for t in self.taskgraphs
            if t.splits and t.virtual_device != self.stages[t.stage].virtual_device
        }
        joined |= {s.index for s in self.stages if any(any(layer.meets) for layer in s.layers)}
        joined |= {stage for home in self.homes if home.zero > 2 for stage in home.stages}
        return frozenset(stage.index for stage in self.stages) - joined

    def split_of(self, taskgraph: int, path: str) -> SplitLayer:
        """The split of that module."""
        return next(s for s in self.taskgraphs[taskgraph].splits if s.path == path)

    def piece(self, home: Home, rank: int) -> Piece | None:
        """What `rank` holds of a parameter; None: nothing."""
        if not any(rank in self.stages[s].virtual_device.ranks for s in home.stages):
            return None
        for taskgraph, path in home.splits:
            device = self.taskgraphs[taskgraph].virtual_device
            if rank in device.ranks:
                split = self.split_of(taskgraph, path)
                sharding = dict(split.params)[home.name]
                low, high = split.units(*device.position(rank))
                return Piece(dims=((sharding.dim, sharding.spans(low, high)),))
        return WHOLE

    def __str__(self) -> str:
        lines = [f"Plan for model {self.model_hash} on {self.num_ranks} ranks: {self.strategy}"]
        for stage in self.stages:
            replicas = "  ".join(
                f"{list(r.ranks)} x{r.weight}" for r in stage.virtual_device.replicas
            )
            lines.append(f"  stage {stage.index}: replicas {replicas}")
            for index in stage.taskgraphs:
                t = self.taskgraphs[index]
                names = ", ".join(t.layers[:3]) + (", ..." if len(t.layers) > 3 else "")
                text = f"    {t.name} ({t.kind}): {len(t.layers)} Layers: {names}"
                if t.kind == "split":
                    text += f"; {t.split_share:.0%} of its parameters split"
                lines.append(text)
                lines += [f"      {line}" for line in t.why_whole()]
        lines += [f"  {line}" for line in self.kept]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain JSON values (design: "Keys of a plan")."""
        data: dict[str, Any] = to_plain(self)
        predicted = data.pop("predicted")
        shares = enumerate(self.flops_shares())
        return {
            "schema": SCHEMA,
            **{key: predicted.get(key) for key in PREDICTED},
            **{key: value for key, value in data.items() if key not in _OF_DEVICES},
            "num_micro_batch": self.num_micro_batch,
            "devices": [self._device_dict(rank, share) for rank, share in shares],
            "taskgraphs": [
                {**entry, "ranks": list(t.virtual_device.ranks)}
                for entry, t in zip(data["taskgraphs"], self.taskgraphs, strict=True)
            ],
        }

    def _device_dict(self, rank: int, share: float) -> dict[str, Any]:
        stages = self.stages_of(rank)
        return {
            "rank": rank,
            "type": self.device_types[rank],
            "share": share,
            "peak_bytes": self.peak_bytes[rank] if self.peak_bytes else None,
            "host_bytes": None
            if self.prices is None
            else int(self.prices.devices[rank].memory.host),
            "capacity_bytes": None
            if self.prices is None
            else self.prices.devices[rank].capacity_bytes,
            "stage": stages[0] if len(stages) == 1 else list(stages),
        }

    def flops_shares(self) -> list[float]:
        """By rank, its fraction of the step's FLOPs by rows and cuts; they sum to 1."""
        sizes = {home.name: math.prod(home.shape) for home in self.homes}
        found = [0.0] * self.num_ranks
        for t in self.taskgraphs:
            rows = t.virtual_device.all_rows(self.batch_rows, self.num_micro_batch)
            for index, replica in enumerate(t.virtual_device.replicas):
                part = t.flops_share * rows[index] / max(1, self.batch_rows)
                for shard, rank in enumerate(replica.ranks):
                    found[rank] += part * t.shard_share(index, shard, sizes)
        return found

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """The inverse of `to_dict`; a plan of another schema is refused."""
        if data.get("schema") != SCHEMA:
            raise PlanError(
                f"the plan has schema {data.get('schema')!r}, this Whale reads {SCHEMA}",
                hint="make the plan again with this version",
            )
        try:
            devices = data["devices"]
            peaks = [device["peak_bytes"] for device in devices]
            predicted = {key: data[key] for key in PREDICTED if data.get(key) is not None}
            fields = {key: value for key, value in data.items() if key not in _SHOWN}
            fields |= {
                "device_types": [device["type"] for device in devices],
                "peak_bytes": peaks if None not in peaks else [],
                "predicted": predicted,
                "taskgraphs": [
                    {key: value for key, value in t.items() if key != "ranks"}
                    for t in data["taskgraphs"]
                ],
            }
            found = from_plain(cls, fields, "the plan")
        except _DAMAGE as error:
            raise PlanError(
                f"the plan lacks a key or holds a value of a wrong kind: {error!r}",
                hint="make the plan again: `whale plan --json F`",
            ) from error

        if found.prices is not None:
            found.prices.check()
        return found

    def to_text(self) -> str:
        """The text form (`ir/text.py`); `from_text` gives an equal Plan back."""
        return dumps(self.to_dict(), title="plan")

    @classmethod
    def from_text(cls, text: str) -> Plan:
        """The inverse of `to_text`."""
        return cls.from_dict(loads(text, title="plan"))
