"""What travels between the stages of a plan, in bytes.

Place in the flow: `cost.price` makes messages and held activations of it, and the planner prices
the places where a model could be cut. A value without a batch dim (a position bias) travels whole
with every micro-batch: it is the fixed part. Back come gradients, of values that have one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from whale.ir.model_graph import Linear, ModelGraph, Value, assign_stages
from whale.ir.plan import Plan

_NOTHING = Linear()


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """Bytes of one micro-batch between two stages, by its rows."""

    there: Linear = _NOTHING
    back: Linear = _NOTHING

    def with_value(self, value: Value) -> Crossing:
        """The same and one value more."""
        back = _sum(self.back, value.nbytes) if value.grad else self.back
        return Crossing(there=_sum(self.there, value.nbytes), back=back)


def crossing_bytes(graph: ModelGraph, plan: Plan) -> dict[tuple[int, int], Crossing]:
    """Of every stage that sends to another."""
    found = dict.fromkeys(plan.schedule.edges, Crossing())
    if not found:
        return found
    stage_of_path = {path: t.stage for t in plan.taskgraphs for path in t.layers}
    stages, _ = assign_stages(graph.nodes, [stage_of_path[x.path] for x in graph.layers])
    values = _values(graph)
    seen: set[tuple[int, int, int]] = set()
    for node, place, reader in _reads(graph):
        a, b = stages[node], stages[reader]
        if a is not None and b is not None and a != b and (node, place, b) not in seen:
            seen.add((node, place, b))
            found[a, b] = found[a, b].with_value(values[node][place])
    return found


def cut_bytes(graph: ModelGraph) -> list[Crossing]:
    """What would be sent if the model were cut in two before each of its Layers.

    With more than two stages this counts a value that skips one at that stage too.
    """
    first = _first_cuts(graph)
    last: dict[tuple[int, int], int] = {}
    for node, place, reader in _reads(graph):
        last[node, place] = max(last.get((node, place), -1), first[reader])
    values = _values(graph)
    found = [Crossing()] * len(graph.layers)
    for (node, place), end in last.items():
        if first[node] >= 0:
            for cut in range(first[node] + 1, end + 1):
                found[cut] = found[cut].with_value(values[node][place])
    return found


def _first_cuts(graph: ModelGraph) -> list[int]:
    """Of every node the last Layer before which a cut leaves it on the far side; -1 for any.

    As `assign_stages` does it, for all cuts at once: with more than one stage a node is in the
    latest of what it needs.
    """
    found: list[int] = []
    readers: list[list[int]] = [[] for _ in graph.nodes]
    floating = []
    for index, node in enumerate(graph.nodes):
        for source in node.inputs:
            readers[source].append(index)
        read = [found[source] for source in node.inputs if found[source] >= 0]
        if node.layer is not None:
            found.append(max([node.layer, *read]))
        elif node.pure or not read:
            found.append(-1)
            if not node.pure:
                floating.append(index)
        else:
            found.append(max(read))
    for index in reversed(floating):
        found[index] = min((found[r] for r in readers[index] if found[r] >= 0), default=0)
    return found


def _reads(graph: ModelGraph) -> Iterator[tuple[int, int, int]]:
    """(node, which of its values, reader)."""
    for reader, node in enumerate(graph.nodes):
        for source, place in node.reads or [(i, 0) for i in node.inputs]:
            yield source, place, reader


def _values(graph: ModelGraph) -> list[Sequence[Value]]:
    """What every node makes; in a graph that does not say, a Layer's part of all its calls."""
    calls = Counter(node.layer for node in graph.nodes)
    found: list[Sequence[Value]] = []
    for node in graph.nodes:
        made, count = _NOTHING, 1
        if node.layer is not None:
            made, count = graph.layers[node.layer].made, calls[node.layer]
        part = Linear(fixed=made.fixed / count, per_row=made.per_row / count)
        found.append(node.made or [Value(nbytes=part)])
    return found


def _sum(a: Linear, b: Linear) -> Linear:
    return Linear(fixed=a.fixed + b.fixed, per_row=a.per_row + b.per_row)
