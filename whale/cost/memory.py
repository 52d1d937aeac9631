"""Memory beside weights, gradients, optimizer state and activations: what comes and goes.

Place in the flow: `cost.price` adds it per device; checked against measured peaks in
benchmarks/results/heterogeneous-gpu.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from whale.cost.compute import CostModel
from whale.cost.parts import Part
from whale.ir.plan import Plan

ALLOCATOR_SLACK = 0.05
"""What PyTorch's caching allocator loses to gaps and rounding: 2 to 8 % in training runs."""


def backward_bytes(layers: Iterable[tuple[float, float, float]]) -> tuple[float, float]:
    """The most a backward holds beside what the forward kept, and all that this kept.

    The gradient that arrives and the one that leaves are as large as the largest tensor made; a
    weight's gradient is made beside the one it is added to. By then, what the Layers after it kept
    is free again.

    Args:
        layers: From the last to the first: bytes of the largest tensor made, of the largest
            weight's gradient, and of what is kept.
    """
    most = kept = 0.0
    for largest, gradient, own in layers:
        most = max(most, 2.0 * largest + gradient - kept)
        kept += own
    return most, kept


def workspace_bytes(
    plan: Plan,
    costs: CostModel,
    index: Mapping[str, int],
    rank: int,
    part: Callable[[int, int], Part],
) -> float:
    """What of `backward_bytes` a rank needs, in the stage of its that needs most."""
    most, calls = 0.0, costs.graph.calls
    rules_of = {s.path: s.rule for t in plan.taskgraphs for s in t.splits}
    for stage in plan.stages_of(rank):
        items = []
        for layer in reversed(plan.stages[stage].layers):
            found = costs.graph.layers[index[layer.path]]
            mine = part(layer.taskgraph, rank)
            rows, width = mine.share(found)
            rules = {rules_of.get(o.path, o.rule) for o in found.splits}
            # Only columns leave the output cut; rows make all of it, to be summed.
            scale = mine.width if rules == {"column"} else 1.0
            made = costs.gradient_bytes[index[layer.path]] * (mine.width if found.splits else 1.0)
            kept = costs.kept_bytes(index[layer.path], rank, rows, width)
            kept /= calls[index[layer.path]]
            items.append((found.largest.at(rows) * scale, made, kept))
        most = max(most, backward_bytes(items)[0])
    return most
