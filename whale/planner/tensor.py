"""Tensor: the candidates of `auto` that split Layers.

Place in the flow: beside `candidates` (pipelines) and `replicas`. A Layer that holds
much of the model is split over all devices while the rest is replicated on them (the paper's large
scale classification): its gradients need not be summed, and no device holds it whole. Capture says
which ones: an unannotated Layer that has options is one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from whale.config import Config
from whale.cost.compute import CostModel
from whale.ir.strategy import Scope, Tag
from whale.planner.candidate import Candidate, with_feed


def around_large(
    costs: CostModel, config: Config, num_micro_batches: Sequence[int]
) -> Iterator[Candidate]:
    """Large Layers split over all devices, the others replicated on them."""
    chosen = [i for i, layer in enumerate(costs.graph.layers) if layer.splits]
    # With all of them there is nothing to replicate: a model split as a whole is another thing.
    if costs.cluster.num_devices < 2 or not 0 < len(chosen) < len(costs.graph.layers):
        return
    names = " and ".join(costs.graph.layers[i].path for i in chosen)
    parts = _stretches(len(costs.graph.layers), chosen)
    for count in num_micro_batches:
        yield with_feed(
            f"data parallel with {names} split",
            costs.graph,
            parts,
            count,
            config.pipeline.schedule,
        )


def _stretches(num_layers: int, chosen: Sequence[int]) -> list[tuple[range, Tag]]:
    """The Layers in stretches, those chosen under `split`, the others under `replicate`."""
    parts: list[tuple[range, Tag]] = []
    runs = groupby(range(num_layers), key=set(chosen).__contains__)
    for number, (inside, run) in enumerate(runs):
        members = list(run)
        kind = "split" if inside else "replicate"
        scope = Scope(kind=kind, uid=-2 - number, where="auto")
        parts.append((range(members[0], members[-1] + 1), (scope,)))
    return parts
