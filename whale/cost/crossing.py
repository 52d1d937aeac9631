"""What travels between the stages of a plan, in bytes.

Place in the flow: `cost.price` makes messages and held activations of it, and the planner prices
the places where a model could be cut. A value without a batch dim (a position bias) travels whole
with every micro-batch: it is the fixed part. Back come gradients, of values that have one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from whale.ir.model_graph import Linear, ModelGraph, Value, assign_stages

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


def crossing_bytes(
    graph: ModelGraph, stages: Sequence[int | None], edges: Iterable[tuple[int, int]]
) -> dict[tuple[int, int], Crossing]:
    """Of every edge between stages; `stages` are those of the nodes (`assign_stages`)."""
    found = dict.fromkeys(edges, Crossing())
    if not found:
        return found
    seen: set[tuple[int, int, int]] = set()
    for node, place, reader in _reads(graph):
        a, b = stages[node], stages[reader]
        if a is not None and b is not None and a != b and (node, place, b) not in seen:
            seen.add((node, place, b))
            found[a, b] = found[a, b].with_value(graph.nodes[node].made[place])
    return found


def cut_bytes(graph: ModelGraph) -> list[Crossing]:
    """What would be sent if the model were cut in two before each of its Layers.

    With more than two stages this counts a value that skips one at that stage too.
    """
    # With a stage for each Layer, a node is on the far side of the cuts up to its own stage.
    stages, _ = assign_stages(graph.nodes, range(len(graph.layers)))
    last: dict[tuple[int, int], int] = {}
    for node, place, reader in _reads(graph):
        end = stages[reader]
        if end is not None:
            last[node, place] = max(last.get((node, place), 0), end)
    found = [Crossing()] * len(graph.layers)
    for (node, place), end in last.items():
        start = stages[node]
        if start is not None:
            for cut in range(start + 1, end + 1):
                found[cut] = found[cut].with_value(graph.nodes[node].made[place])
    return found


def _reads(graph: ModelGraph) -> Iterator[tuple[int, int, int]]:
    """(node, which of its values, reader)."""
    for reader, node in enumerate(graph.nodes):
        for source, place in node.reads:
            yield source, place, reader


def _sum(a: Linear, b: Linear) -> Linear:
    return Linear(fixed=a.fixed + b.fixed, per_row=a.per_row + b.per_row)
