"""Tensor: the candidates of `auto` that split Layers.

Place in the flow: beside `candidates`, which has data parallel and pipelines. A Layer that holds
much of the model is split over all devices while the rest is replicated on them (the paper's large
scale classification): its gradients need not be summed, and no device holds it whole. Capture says
which ones: an unannotated Layer that has options is one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from whale.config import Config
from whale.cost.compute import CostModel
from whale.ir.model_graph import ModelGraph
from whale.ir.strategy import Scope, Tag
from whale.planner.candidates import Candidate, feed, tagged


def around_large(
    costs: CostModel, config: Config, num_micro_batches: Sequence[int]
) -> Iterator[Candidate]:
    """Large Layers split over all devices, the others replicated on them."""
    chosen = [i for i, layer in enumerate(costs.graph.layers) if layer.splits]
    # With all of them there is nothing to replicate: a model split as a whole is another thing.
    if costs.cluster.num_devices < 2 or not 0 < len(chosen) < len(costs.graph.layers):
        return
    names = " and ".join(costs.graph.layers[i].path for i in chosen)
    for count in num_micro_batches:
        text = f"data parallel with {names} split"
        yield Candidate(
            about=f"{text}, {count} micro-batches" if count > 1 else text,
            graph=_split(costs.graph, chosen, count, config.pipeline.schedule),
        )


def _split(
    graph: ModelGraph,
    chosen: Sequence[int],
    num_micro_batch: int,
    schedule: str,
) -> ModelGraph:
    """The Layers in stretches, those chosen under `split`, the others under `replicate`."""
    outer: Tag = (feed(num_micro_batch, schedule),) if num_micro_batch > 1 else ()
    stretches: list[tuple[bool, int, int]] = []
    members = set(chosen)
    for index in range(len(graph.layers)):
        inside = index in members
        if stretches and stretches[-1][0] == inside:
            stretches[-1] = (inside, stretches[-1][1], index + 1)
        else:
            stretches.append((inside, index, index + 1))
    parts: list[tuple[range, Tag]] = []
    for number, (inside, low, high) in enumerate(stretches):
        scope = Scope(
            kind="split" if inside else "replicate",
            uid=-2 - number,
            where="auto",
        )
        parts.append((range(low, high), (*outer, scope)))
    return tagged(graph, parts)
