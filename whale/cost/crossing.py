"""What travels between the stages of a plan, in bytes.

Place in the flow: `cost.price` makes messages and held activations of it, and the planner prices
the places where a model could be cut. A value without a batch dim (a position bias) travels whole
with every micro-batch: it is the fixed part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from whale.ir.model_graph import Linear, ModelGraph, assign_stages
from whale.ir.plan import Plan

_NOTHING = Linear()


def crossing_bytes(graph: ModelGraph, plan: Plan) -> dict[tuple[int, int], Linear]:
    """Of every stage that sends to another: bytes of one micro-batch, by its rows."""
    found = dict.fromkeys(plan.schedule.edges, _NOTHING)
    if not found:
        return found
    stage_of_path = {x.path: s.index for s in plan.stages for x in reversed(s.layers)}
    stages, _ = assign_stages(graph.nodes, [stage_of_path.get(x.path, 0) for x in graph.layers])
    made = _made(graph)
    for source, edge in _sent(graph, stages):
        if edge in found:
            found[edge] = _sum(found[edge], made[source])
    return found


def cut_bytes(graph: ModelGraph) -> list[Linear]:
    """What would be sent if the model were cut in two before each of its Layers."""
    made = _made(graph)
    found = []
    for cut in range(len(graph.layers)):
        stages, _ = assign_stages(graph.nodes, [int(i >= cut) for i in range(len(graph.layers))])
        total = _NOTHING
        for source, _ in _sent(graph, stages):
            total = _sum(total, made[source])
        found.append(total)
    return found


def _made(graph: ModelGraph) -> list[Linear]:
    """Bytes every node makes. Glue makes about what the largest of the values it reads has."""
    calls = Counter(node.layer for node in graph.nodes)
    found: list[Linear] = []
    for node in graph.nodes:
        if node.layer is not None:
            # A Layer's are those of all its calls.
            made, count = graph.layers[node.layer].made, calls[node.layer]
            found.append(Linear(fixed=made.fixed / count, per_row=made.per_row / count))
        else:
            read = (found[i] for i in node.inputs)
            found.append(max(read, key=lambda x: (x.per_row, x.fixed), default=_NOTHING))
    return found


def _sent(graph: ModelGraph, stages: Sequence[int | None]) -> Iterator[tuple[int, tuple[int, int]]]:
    """Nodes whose value another stage reads, with both stages, each once."""
    seen: set[tuple[int, int]] = set()
    for target, node in enumerate(graph.nodes):
        for source in node.inputs:
            a, b = stages[source], stages[target]
            if a is not None and b is not None and a != b and (source, b) not in seen:
                seen.add((source, b))
                yield source, (a, b)


def _sum(a: Linear, b: Linear) -> Linear:
    return Linear(fixed=a.fixed + b.fixed, per_row=a.per_row + b.per_row)
