"""What travels between the stages of a plan, in bytes per row.

Place in the flow: `cost.price` makes messages and held activations of it.
"""

from __future__ import annotations

from whale.ir.model_graph import ModelGraph, assign_stages
from whale.ir.plan import Plan


def crossing_bytes(graph: ModelGraph, plan: Plan) -> dict[tuple[int, int], float]:
    """Bytes per row of what every stage sends to every other."""
    stage_of_path = {x.path: s.index for s in plan.stages for x in reversed(s.layers)}
    stage_of_layer = [stage_of_path.get(layer.path, 0) for layer in graph.layers]
    found: dict[tuple[int, int], float] = {edge: 0.0 for edge in plan.schedule.edges}
    if not found:
        return found
    stages, _ = assign_stages(graph.nodes, stage_of_layer)
    made: list[float] = []
    for node in graph.nodes:
        # Glue makes about what the Layers it reads made.
        if node.layer is not None:
            made.append(graph.layers[node.layer].made.per_row)
        else:
            made.append(max((made[i] for i in node.inputs), default=0.0))
    sent: set[tuple[int, int]] = set()
    for target, node in enumerate(graph.nodes):
        for source in node.inputs:
            a, b = stages[source], stages[target]
            if a is None or b is None or a == b or (source, b) in sent or (a, b) not in found:
                continue
            sent.add((source, b))
            found[a, b] += made[source]
    return found
