"""Memory beside weights, gradients, optimizer state and activations: what comes and goes.

Place in the flow: `cost.price` adds it per device; checked against measured peaks in
benchmarks/results/heterogeneous-gpu.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from whale.cost.compute import CostModel
from whale.cost.parts import Part
from whale.ir.plan import Plan

ALLOCATOR_SLACK = 0.05
"""What PyTorch's caching allocator loses to gaps and rounding: 2 to 8 % in training runs."""


def workspace_bytes(
    plan: Plan,
    costs: CostModel,
    index: Mapping[str, int],
    rank: int,
    part: Callable[[int, int], Part],
) -> float:
    """The most a Layer's backward holds at once beside what the forward kept.

    The gradient that arrives and the one that leaves are as large as the largest tensor made; a
    weight's gradient is made beside the one it is added to. By then, what the Layers after it kept
    is free again.
    """
    most = 0.0
    rules_of = {s.path: s.rule for t in plan.taskgraphs for s in t.splits}
    for stage in plan.stages_of(rank):
        freed = 0.0
        for layer in reversed(plan.stages[stage].layers):
            found = costs.graph.layers[index[layer.path]]
            mine = part(layer.taskgraph, rank)
            rows, width = mine.share(found)
            rules = {rules_of.get(o.path, o.rule) for o in found.splits}
            # Only columns leave the output cut; rows make all of it, to be summed.
            scale = mine.width if rules == {"column"} else 1.0
            made = costs.gradient_bytes[index[layer.path]] * (mine.width if found.splits else 1.0)
            most = max(most, 2.0 * found.largest.at(rows) * scale + made - freed)
            freed += costs.kept_bytes(index[layer.path], rank, rows, width)
    return most
