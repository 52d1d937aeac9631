"""Candidates: the ways to run a model on a cluster that are worth pricing.

Place in the flow: first pass of `make_plan`; each candidate becomes a plan, is priced and
simulated, and the fastest that fits wins. Annotations are constraints: where they fix the stages,
only the order of the devices is open; without any and with `auto`, everything is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from whale.config import Config
from whale.cost.compute import CostModel
from whale.cost.memory import HeldBytes, device_bytes, layer_bytes
from whale.errors import PlanError
from whale.ir.strategy import Scope, Tag
from whale.planner.candidate import Candidate, kinds_of, with_feed
from whale.planner.chain import Chain, GroupKind, partition
from whale.planner.keep import Keeping
from whale.planner.replicas import data_parallel, micro_batches
from whale.planner.span_memory import SpanMemory
from whale.planner.tensor import around_large

MAX_ORDERS = 120
MAX_GROUPS = 128
SEARCH_SECONDS = 3.0
SIMULATED = 12


# ---- annotated: which devices run which stage ----------------------------------------------------


def orders(costs: CostModel, num_groups: int, config: Config) -> Iterator[Candidate]:
    """Orders of unequal devices over the device groups of an annotated pipeline.

    The graph of a yielded Candidate is the cost model's own.
    """
    graph = costs.graph
    yield Candidate(about="devices in order of rank", graph=graph)
    kinds = kinds_of(costs)
    if len(kinds) == 1 or num_groups == 1 or config.cluster.balance == "equal":
        return
    ranks = range(costs.cluster.num_devices)
    everything = range(len(graph.layers))

    def seconds(rank: int) -> float:
        return sum(costs.step_s(i, rank, 1.0) for i in everything)

    seen = {tuple(ranks)}
    for about, order in (
        ("large memory first", sorted(ranks, key=lambda r: (-costs.capacity(r), r))),
        ("fast devices first", sorted(ranks, key=lambda r: (seconds(r), r))),
        ("slow devices first", sorted(ranks, key=lambda r: (-seconds(r), r))),
    ):
        if tuple(order) not in seen:
            seen.add(tuple(order))
            yield Candidate(about=about, graph=graph, order=tuple(order))
    for found in _interleavings([len(kind) for kind in kinds], num_groups):
        taken = [iter(kind) for kind in kinds]
        order = [next(taken[kind]) for kind in found]
        if tuple(order) not in seen:
            seen.add(tuple(order))
            yield Candidate(about=f"devices {order}", graph=graph, order=tuple(order))
        if len(seen) > MAX_ORDERS:
            return


def _interleavings(counts: Sequence[int], num_groups: int) -> Iterator[tuple[int, ...]]:
    """Sequences of kinds, block by block, that use every kind as often as there are devices."""
    total = sum(counts)
    if total % num_groups:
        return
    size = total // num_groups
    if any(count % size for count in counts):
        size = 1
    blocks = [count // size for count in counts]

    def fill(left: list[int], prefix: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if not any(left):
            yield tuple(kind for kind in prefix for _ in range(size))
            return
        for kind, count in enumerate(left):
            if count:
                rest = list(left)
                rest[kind] -= 1
                yield from fill(rest, (*prefix, kind))

    yield from fill(blocks, ())


# ---- auto: everything is open --------------------------------------------------------------------


def automatic(
    costs: CostModel, config: Config, batch_rows: int, rejected: list[str]
) -> Iterator[Candidate]:
    """Data parallel, large Layers split, and the best pipelines over groups of equal devices."""
    graph = costs.graph
    keeping = Keeping.of(graph, config)
    asked = config.pipeline.num_stages
    fixed = config.pipeline.num_micro_batch
    counts = micro_batches(config, batch_rows)
    if asked in (None, 1):
        yield from data_parallel(costs, config, batch_rows)
        yield from around_large(costs, config, counts)
        if asked == 1 or costs.cluster.num_devices == 1:
            return
    if not graph.nodes:
        rejected.append("pipelines: the glue between Layers could not be traced")
        return
    found: list[tuple[float, str, Chain, list[list[tuple[int, ...]]], int]] = []
    failures: list[str] = []
    for widths in _widths(costs):
        groups = _groups(costs, widths)
        sizes = f"groups of {' and '.join(map(str, dict.fromkeys(widths)))}"
        if sum(map(len, groups)) > MAX_GROUPS:
            continue
        most = min(sum(map(len, groups)), len(graph.layers))
        if most < (asked or 2):
            continue
        for count in counts:
            if count == 1 and fixed == 1 and len(counts) > 1:
                continue  # a pipeline of one micro-batch only waits
            rows = -(-batch_rows // count)
            table = [_kind(costs, keeping, ranks, rows) for ranks in groups]
            try:
                chain = partition(
                    table, count, num_stages=asked, tolerance=0.01, deadline_s=SEARCH_SECONDS
                )
            except PlanError as error:
                failures.append(f"{sizes}, {count} micro-batches: {error.message}")
                continue
            if len(chain.stages) > 1:
                text = f"{len(chain.stages)} stages, {sizes}"
                found.append((chain.seconds, text, chain, groups, count))
    found.sort(key=lambda item: item[0])
    for _, text, chain, groups, count in found[:SIMULATED]:
        yield with_feed(text, graph, _staged(chain, groups), count, config.pipeline.schedule)
    if not found:
        rejected += failures[:2]


def _widths(costs: CostModel) -> Iterator[tuple[int, ...]]:
    """Devices per group, by kind of device: powers of two and all of them."""
    choices = []
    for ranks in kinds_of(costs):
        sizes = [w for w in (1, 2, 4, 8, 16, 32, 64) if w < len(ranks)]
        choices.append([*sizes, len(ranks)])
    if len(choices) <= 2:
        yield from product(*choices)
        return
    for size in sorted({w for sizes in choices for w in sizes}):
        yield tuple(max(w for w in sizes if w <= max(size, sizes[0])) for sizes in choices)


def _groups(costs: CostModel, widths: Sequence[int]) -> list[list[tuple[int, ...]]]:
    """By kind of device, its groups: neighbours first, so that a group stays inside a node.

    Where a width leaves devices over, those that would reach out of their node.
    """
    found = []
    for ranks, width in zip(kinds_of(costs), widths, strict=True):
        ordered = sorted(ranks, key=lambda r: (costs.cluster.devices[r].node, r))
        if len(ordered) % width:
            nodes: dict[int, list[int]] = {}
            for rank in ordered:
                nodes.setdefault(costs.cluster.devices[rank].node, []).append(rank)
            inside = [r for own in nodes.values() for r in own[: len(own) // width * width]]
            ordered = inside or ordered[: len(ordered) // width * width]
        found.append([tuple(ordered[i : i + width]) for i in range(0, len(ordered), width)])
    return found


def _kind(
    costs: CostModel, keeping: Keeping, groups: list[tuple[int, ...]], rows: int
) -> GroupKind:
    rank, width = groups[0][0], len(groups[0])
    each = float(-(-rows // width))
    layers = range(len(costs.graph.layers))
    peer = groups[-1][-1] if len(groups) > 1 else (rank + 1) % costs.cluster.num_devices
    return GroupKind(
        name=costs.cluster.devices[rank].type,
        count=len(groups),
        capacity_bytes=float(costs.capacity(rank)),
        seconds=tuple(costs.step_s(i, rank, each) for i in layers),
        memory=_memory(costs, keeping, rank, each, width),
        edge_seconds=tuple(
            costs.fabric.send(peer, rank, sent.there.at(each))
            + costs.fabric.send(peer, rank, sent.back.at(each))
            for sent in costs.cut_bytes
        ),
    )


def _memory(costs: CostModel, keeping: Keeping, rank: int, rows: float, copies: int) -> SpanMemory:
    """Of a rank of a group of so many, each of which has a copy."""
    parameters = {p.name: p for p in costs.graph.parameters}
    held = []
    for layer in costs.graph.layers:
        names = (parameters[name] for name in layer.params)
        each = (keeping.held(p, 1.0, num_stages=1, copies=copies) for p in names)
        held.append(sum(each, HeldBytes()))
    found = [
        layer_bytes(
            costs,
            i,
            rank,
            (rows, 1.0),
            params=h,
            parked=layer.path in keeping.parks,
            recompute=keeping.recomputes.get(layer.path, ""),
        )
        for i, (h, layer) in enumerate(zip(held, costs.graph.layers, strict=True))
    ]
    own = [
        device_bytes(
            costs,
            rank,
            layer,
            workspace=0.0,
            num_groups=keeping.num_groups,
            early=keeping.early,
        )
        for layer in held
    ]
    return SpanMemory(
        static=tuple(item.static for item in own),
        scratch=tuple(item.scratch for item in own),
        # A Layer that is called again is one of the chain all the same.
        kept=tuple(b.kept * n for b, n in zip(found, costs.calls, strict=True)),
        passing=tuple(b.passing for b in found),
        received=tuple(sent.there.at(rows) for sent in costs.cut_bytes),
        driver=own[0].driver,
        gaps=own[0].gaps,
    )


def _staged(chain: Chain, groups: list[list[tuple[int, ...]]]) -> list[tuple[range, Tag]]:
    taken = [iter(kind) for kind in groups]
    parts: list[tuple[range, Tag]] = []
    for number, stage in enumerate(chain.stages):
        ranks = next(taken[stage.kind])
        scope = Scope(kind="stage", uid=-2 - number, where="auto", ranks=tuple(sorted(ranks)))
        parts.append((range(stage.start, stage.end), (scope,)))
    return parts
