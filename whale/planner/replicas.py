"""Replicas: the candidates of `auto` that are data parallel, on all devices or on some of them.

Place in the flow: beside `candidates`, which has pipelines, and `tensor`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from whale.config import Config
from whale.cost.compute import CostModel
from whale.ir.model_graph import ModelGraph
from whale.ir.strategy import Scope, Tag
from whale.planner.candidate import Candidate, kinds_of, with_feed

MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
SUBSETS, FEW_SUBSETS = 8, 3
"""Of the devices that are tried without the others; few on large clusters, where a candidate takes
long to price."""
FEW_COUNTS = 3
"""Of micro-batches that are tried with those there."""
_LARGE = 64
_NEAR = 1.5
"""The estimate is rough: devices that seem so much slower than all of them are still tried."""
_MOST_KINDS, _MOST_NODES = 5, 8
"""Of which every mix is looked at."""
_RESTING = 0.4
"""Watts of a device and its host that wait, over those at work, roughly."""


def micro_batches(config: Config, batch_rows: int) -> list[int]:
    """Numbers of micro-batches to consider."""
    fixed = config.pipeline.num_micro_batch
    return [fixed] if fixed > 1 else [m for m in MICRO_BATCHES if m <= batch_rows]


def data_parallel(costs: CostModel, config: Config, batch_rows: int) -> Iterator[Candidate]:
    """On all devices, and on those that may be better without the others."""
    counts = micro_batches(config, batch_rows)
    for count in _even(config, batch_rows, counts, costs.cluster.num_devices):
        yield _data(costs.graph, count)
    few = costs.cluster.num_devices > _LARGE
    for ranks in subsets(costs, batch_rows, config.auto.objective):
        own = counts[:FEW_COUNTS] if few else _even(config, batch_rows, counts, len(ranks))
        for count in own:
            yield _data(costs.graph, count, ranks)


def _even(config: Config, batch_rows: int, counts: list[int], num_devices: int) -> list[int]:
    """The same numbers and those near them whose micro-batches so many devices can share evenly."""
    if config.pipeline.num_micro_batch > 1:
        return counts
    found = list(counts)
    for count in counts:
        rows = -(-batch_rows // count)
        found.append(-(-batch_rows // (-(-rows // num_devices) * num_devices)))
    return list(dict.fromkeys(found))


def smaller_micro_batches(costs: CostModel, config: Config, batch_rows: int) -> Iterator[Candidate]:
    """Ever more micro-batches than are worth trying otherwise, down to one row each."""
    if config.pipeline.num_micro_batch > 1 or config.pipeline.num_stages not in (None, 1):
        return
    count = 2 * MICRO_BATCHES[-1]
    while count <= batch_rows:
        yield _data(costs.graph, count)
        count *= 2


def _data(graph: ModelGraph, num_micro_batch: int, ranks: tuple[int, ...] = ()) -> Candidate:
    text, tag = "data parallel", Tag()
    if ranks:
        text += f" on {len(ranks)} device{'s' if len(ranks) > 1 else ''}"
        # A stage on these; the others have none.
        tag = (Scope(kind="stage", uid=-2, where="auto", ranks=ranks),)
    whole = range(len(graph.layers))
    # One stage: whatever schedule pipelines are to have, a micro-batch is freed before the next.
    return with_feed(text, graph, [(whole, tag)], num_micro_batch, "1f1b")


def subsets(costs: CostModel, batch_rows: int, objective: str) -> list[tuple[int, ...]]:
    """Devices that may be better without the others.

    Some kinds, and of each kind 1, 2, 4 ... neighbours and those of each number of nodes: a slow
    device or a slow link may cost more in the sums of gradients than it computes. The best by a
    rough estimate.
    """
    layers = range(len(costs.graph.layers))

    def speed(rank: int, rows: float) -> float:
        return rows / max(sum(costs.step_s(i, rank, rows) for i in layers), 1e-12)

    def estimate(ranks: tuple[int, ...]) -> float:
        rows = max(1.0, batch_rows / len(ranks))
        speeds = {costs.alike(rank): speed(rank, rows) for rank in ranks}
        compute = batch_rows / sum(speeds[costs.alike(rank)] for rank in ranks)
        sums = costs.fabric.all_reduce(ranks, gradients) if len(ranks) > 1 else 0.0
        # Two thirds of the compute is backward, beside which sums are hidden.
        return compute + max(0.0, sums - compute * 2.0 / 3.0) + costs.apply_s(ranks[0], gradients)

    gradients = float(sum(p.nbytes for p in costs.graph.parameters if p.trainable))
    kinds = sorted(kinds_of(costs), key=lambda ranks: -speed(ranks[0], 1.0))
    found = [
        tuple(sorted(r for kind in chosen for r in kind))
        for count in range(1, len(kinds))
        for chosen in (combinations(kinds, count) if len(kinds) <= _MOST_KINDS else [kinds[:count]])
    ]
    for kind in kinds[:_MOST_KINDS]:
        found += _neighbours(costs, kind)
    watts = [costs.cluster.type_of(r).tdp_watts for r in range(costs.cluster.num_devices)]

    def value(ranks: tuple[int, ...]) -> float:
        seconds = estimate(ranks)
        if objective == "time":
            return seconds
        mine = sum(watts[r] for r in ranks)
        return seconds * (mine + _RESTING * (sum(watts) - mine))

    most = FEW_SUBSETS if costs.cluster.num_devices > _LARGE else SUBSETS
    everyone = value(tuple(range(costs.cluster.num_devices)))
    valued = sorted((value(ranks), ranks) for ranks in dict.fromkeys(found))
    return [ranks for total, ranks in valued if total < _NEAR * everyone][:most]


def _neighbours(costs: CostModel, kind: list[int]) -> list[tuple[int, ...]]:
    """1, 2, 4 ... devices of a kind, and those of 1, 2 ... nodes, the fullest nodes first."""
    nodes: dict[int, list[int]] = {}
    for rank in kind:
        nodes.setdefault(costs.cluster.devices[rank].node, []).append(rank)
    fullest = sorted(nodes.values(), key=lambda ranks: (-len(ranks), ranks))
    ordered = [rank for ranks in fullest for rank in ranks]
    widths = set()
    width = 1
    while width < len(kind):
        widths.add(width)
        width *= 2
    total = 0
    for ranks in fullest[:_MOST_NODES]:
        total += len(ranks)
        widths.add(total)
    return [tuple(sorted(ordered[:w])) for w in sorted(widths) if w < len(kind)]
