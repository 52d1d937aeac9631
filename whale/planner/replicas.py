"""Replicas: the candidates of `auto` that are data parallel, on all devices or on some of them.

Place in the flow: beside `candidates`, which has pipelines, and `tensor`.
"""

from __future__ import annotations

from collections.abc import Iterator

from whale.config import Config
from whale.cost.compute import CostModel
from whale.ir.homes import ITEM_BYTES
from whale.ir.model_graph import ModelGraph
from whale.ir.strategy import Scope, Tag
from whale.planner.candidate import Candidate, kinds_of, with_feed

MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)
SUBSETS = 2
"""Of the devices that are tried without the others, each with the fewest micro-batches."""
SUBSET_COUNTS = 3


def micro_batches(config: Config, batch_rows: int) -> list[int]:
    """Numbers of micro-batches to consider."""
    fixed = config.pipeline.num_micro_batch
    return [fixed] if fixed > 1 else [m for m in MICRO_BATCHES if m <= batch_rows]


def data_parallel(costs: CostModel, config: Config, batch_rows: int) -> Iterator[Candidate]:
    """On all devices, and on those that may be better without the others."""
    counts = micro_batches(config, batch_rows)
    for count in counts:
        yield _data(costs.graph, count, config)
    for ranks in subsets(costs, batch_rows, config.auto.objective):
        for count in counts[:SUBSET_COUNTS]:
            yield _data(costs.graph, count, config, ranks)


def smaller_micro_batches(costs: CostModel, config: Config, batch_rows: int) -> Iterator[Candidate]:
    """Ever more micro-batches than are worth trying otherwise, down to one row each."""
    if config.pipeline.num_micro_batch > 1 or config.pipeline.num_stages not in (None, 1):
        return
    count = 2 * MICRO_BATCHES[-1]
    while count <= batch_rows:
        yield _data(costs.graph, count, config)
        count *= 2


def _data(
    graph: ModelGraph, num_micro_batch: int, config: Config, ranks: tuple[int, ...] = ()
) -> Candidate:
    text, tag = "data parallel", Tag()
    if ranks:
        text += f" on {len(ranks)} device{'s' if len(ranks) > 1 else ''}"
        # A stage on these; the others have none.
        tag = (Scope(kind="stage", uid=-2, where="auto", ranks=ranks),)
    whole = range(len(graph.layers))
    return with_feed(text, graph, [(whole, tag)], num_micro_batch, config.pipeline.schedule)


def subsets(costs: CostModel, batch_rows: int, objective: str) -> list[tuple[int, ...]]:
    """Devices that may be better without the others.

    The fastest kinds, and of the fastest kind 1, 2, 4 ... neighbours: a slow device or a slow link
    may cost more in the sums of gradients than it computes. For time the best two by a rough
    estimate; energy is known once they are simulated.
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

    numel = {p.name: p.numel * ITEM_BYTES.get(p.dtype, 4) for p in costs.graph.parameters}
    gradients = float(sum(numel[name] for name, trained in costs.trainable.items() if trained))
    kinds = sorted(kinds_of(costs), key=lambda ranks: -speed(ranks[0], 1.0))
    found = [tuple(sorted(r for kind in kinds[:n] for r in kind)) for n in range(1, len(kinds))]
    fastest = sorted(kinds[0], key=lambda r: (costs.cluster.devices[r].node, r))
    width = 1
    while width < len(fastest):
        found.append(tuple(fastest[:width]))
        width *= 2
    if objective == "energy":
        return list(dict.fromkeys(found))
    everyone = estimate(tuple(range(costs.cluster.num_devices)))
    timed = sorted((estimate(ranks), ranks) for ranks in dict.fromkeys(found))
    return [ranks for seconds, ranks in timed if seconds < everyone][:SUBSETS]
