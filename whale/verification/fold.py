"""Fold: the smallest world that keeps every axis, nesting and uneven ratio of a plan.

Place in the flow: between planning and running in `wh.verify`, for plans of more ranks than one
machine can run. The Plan is not edited: the same annotations, with their device counts scaled, are
planned again on fewer devices, taken from the cluster so that unequal ones stay unequal.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from whale.config import Config
from whale.errors import CaptureError, PlanError, WhaleError
from whale.ir.cluster import Cluster, Device, Node
from whale.ir.model_graph import ModelGraph, SplitOption
from whale.ir.plan import Plan
from whale.ir.strategy import Tag
from whale.ir.virtual_device import VirtualDevice
from whale.planner.make_plan import make_plan

MAX_RANKS = 8

T = TypeVar("T")
Counts = Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """A smaller world: its devices, what each device count became, its plan, and all in words."""

    cluster: Cluster
    counts: Counts
    plan: Plan
    text: str


def fold(
    plan: Plan,
    graph: ModelGraph,
    cluster: Cluster | None,
    config: Config,
    *,
    refusal: CaptureError | None,
) -> Fold:
    """The smallest world of at most 8 ranks with the axes of `plan`."""
    if cluster is not None:
        check_size(plan, cluster)
    devices = cluster.devices if cluster is not None else _devices_of(plan)
    graph = _with_rules_of(plan, graph)
    counts = sorted({s.count for t in graph.taskgraphs for s in t.tag if s.count is not None})
    for strict in (True, False):
        wanted = _axes(plan, devices, strict)
        for size in range(1, MAX_RANKS + 1):
            for mapping in _mappings(counts, size):
                small = scaled(graph, mapping)
                chosen = _choose(plan, small, devices, size, config, refusal)
                if chosen is None:
                    continue
                made = _try(small, chosen, config, plan, refusal)
                if made is not None and _axes(made, chosen.devices, strict) == wanted:
                    return Fold(
                        cluster=chosen, counts=mapping, plan=made, text=_describe(plan, made)
                    )
    raise PlanError(
        f"the plan for {plan.num_ranks} ranks cannot be folded to {MAX_RANKS} or fewer and keep "
        f"its axes: {plan.strategy}",
        hint="verify a model with fewer stages, or with annotations of smaller device counts",
    )


def _with_rules_of(plan: Plan, graph: ModelGraph) -> ModelGraph:
    """The graph with the rules that the plan chose: on fewer devices another might be cheaper."""
    chosen = {s.path: s.rule for t in plan.taskgraphs for s in t.splits}

    def taken(option: SplitOption) -> tuple[SplitOption, ...]:
        # With more devices than units, others were taken in its place.
        if any(chosen.get(o.path) == o.rule for o in option.instead):
            return option.instead
        return (option,) if chosen.get(option.path, option.rule) == option.rule else ()

    layers = (
        replace(layer, splits=tuple(way for o in layer.splits for way in taken(o)))
        for layer in graph.layers
    )
    return replace(graph, layers=tuple(layers))


def check_size(plan: Plan, cluster: Cluster) -> None:
    """Refuses a cluster that cannot be the plan's."""
    if cluster.num_devices != plan.num_ranks:
        raise PlanError(
            f"the plan is for {plan.num_ranks} ranks, the cluster has {cluster.num_devices} "
            "devices",
            hint="pass the cluster the plan was made for, or none",
        )


def scaled(graph: ModelGraph, counts: Counts) -> ModelGraph:
    """The same annotations with other device counts."""
    tags = scaled_tags([t.tag for t in graph.taskgraphs], counts)
    return replace(
        graph,
        taskgraphs=tuple(replace(t, tag=tags[t.tag]) for t in graph.taskgraphs),
    )


def scaled_tags(tags: Iterable[Tag], counts: Counts) -> dict[Tag, Tag]:
    """Each tag with its device counts replaced; devices given by name become consecutive ones."""
    distinct = list(dict.fromkeys(tags))
    slices = sorted({s.ranks for tag in distinct for s in tag if s.ranks is not None})
    named: dict[tuple[int, ...], tuple[int, ...]] = {}
    start = 0
    for ranks in slices:
        named[ranks] = tuple(range(start, start + counts[len(ranks)]))
        start += counts[len(ranks)]
    return {
        tag: tuple(
            replace(s, ranks=named[s.ranks])
            if s.ranks is not None
            else replace(s, device_count=counts[s.device_count])
            if s.device_count is not None
            else s
            for s in tag
        )
        for tag in distinct
    }


def _mappings(counts: Sequence[int], size: int) -> Iterator[Counts]:
    """Smaller counts in the same order, of which one divides another where it did before."""
    choices = [range(1, min(count, size) + 1) for count in counts]
    for values in itertools.product(*choices):
        pairs = list(zip(counts, values, strict=True))
        if all(
            (a[1] < b[1]) and (b[0] % a[0] or b[1] % a[1] == 0)
            for a, b in itertools.combinations(pairs, 2)
        ):
            yield dict(pairs)


def _try(
    graph: ModelGraph, cluster: Cluster, config: Config, plan: Plan, refusal: CaptureError | None
) -> Plan | None:
    try:
        return make_plan(graph, cluster, config, batch_rows=plan.batch_rows, refusal=refusal)
    except WhaleError:
        return None


def _axes(plan: Plan, devices: Sequence[Device], strict: bool) -> tuple[Hashable, ...]:
    """What a fold must keep. `strict`: an uneven axis of three or more stays at three."""

    def measure(number: int, uneven: bool) -> int:
        return min(number, 3 if uneven and strict else 2)

    def shape(device: VirtualDevice) -> tuple[Hashable, ...]:
        weights = device.weights
        width = max(len(replica.ranks) for replica in device.replicas)
        mixed = any(
            len({_kind(devices[rank]) for rank in replica.ranks}) > 1 for replica in device.replicas
        )
        rows = len(set(weights)) > 1
        return (measure(len(weights), rows), rows, measure(width, mixed), mixed)

    return (
        plan.schedule.kind,
        plan.schedule.num_micro_batch,
        plan.schedule.groups,
        plan.schedule.edges,
        tuple(shape(stage.virtual_device) for stage in plan.stages),
        tuple((t.kind, t.stage, *shape(t.virtual_device)) for t in plan.taskgraphs),
    )


def _kind(device: Device) -> Hashable:
    return device.speed


def _choose(
    plan: Plan,
    small: ModelGraph,
    devices: Sequence[Device],
    size: int,
    config: Config,
    refusal: CaptureError | None,
) -> Cluster | None:
    """Devices for a world of `size`: each place goes to one with the same place in the plan."""
    equal = _cluster([replace(devices[0], speed=1.0)] * size)
    made = _try(small, equal, config, plan, refusal)
    if made is None or len(made.taskgraphs) != len(plan.taskgraphs):
        return None
    found: dict[int, Device] = {}
    for new, old in zip(made.taskgraphs, plan.taskgraphs, strict=True):
        wide = max(len(replica.ranks) for replica in new.virtual_device.replicas)
        if wide == 1 and any(rank in found for rank in new.virtual_device.ranks):
            continue
        sources = [
            tuple(devices[rank] for rank in replica.ranks)
            for replica in old.virtual_device.replicas
        ]
        targets = [replica.ranks for replica in new.virtual_device.replicas]
        picked = _pick(sources, len(targets), [tuple(map(_kind, s)) for s in sources])
        for ranks, source in zip(targets, picked, strict=False):
            inside = _pick(source, len(ranks), [_kind(device) for device in source])
            found.update(zip(ranks, inside, strict=False))
    if len(found) != size:
        return None
    return _cluster([found[rank] for rank in range(size)])


def _pick(items: Sequence[T], number: int, keys: Sequence[Hashable]) -> list[T]:
    """`number` of the items in their order, with as many different keys as possible."""
    firsts = [i for i, key in enumerate(keys) if key not in keys[:i]]
    rest = [i for i in range(len(items)) if i not in firsts]
    return [items[i] for i in sorted((firsts + rest)[:number])]


def _cluster(devices: Sequence[Device]) -> Cluster:
    return Cluster(
        devices=tuple(replace(d, rank=rank, node=0) for rank, d in enumerate(devices)),
        nodes=(Node(index=0),),
    )


def _devices_of(plan: Plan) -> tuple[Device, ...]:
    """Devices as the plan treats them: its row weights, shared out by its cuts."""
    speeds = [1.0] * plan.num_ranks
    for t in plan.taskgraphs:
        for index, replica in enumerate(t.virtual_device.replicas):
            for shard, rank in enumerate(replica.ranks):
                share = 1.0 / len(replica.ranks)
                if t.splits:
                    widest = max(t.splits, key=lambda split: split.cuts_of(0)[-1])
                    low, high = widest.units(index, shard)
                    share = (high - low) / widest.cuts_of(index)[-1]
                speeds[rank] = replica.weight * share
    return tuple(
        # A rank without rows stays as good as without.
        Device(rank=rank, node=0, type="CPU", memory_bytes=1 << 40, speed=max(round(s, 2), 0.01))
        for rank, s in enumerate(speeds)
    )


def _describe(plan: Plan, made: Plan) -> str:
    parts = []
    for old, new in zip(plan.taskgraphs, made.taskgraphs, strict=True):
        before, after = _size(old.virtual_device), _size(new.virtual_device)
        parts.append(f"{old.name} from {before} to {after}")
    return f"{plan.num_ranks} ranks to {made.num_ranks}: " + "; ".join(dict.fromkeys(parts))


def _size(device: VirtualDevice) -> str:
    width = max(len(replica.ranks) for replica in device.replicas)
    replicas = len(device.replicas)
    if width == 1:
        return f"{replicas} replicas"
    return f"{replicas} x {width} shards" if replicas > 1 else f"{width} shards"
