"""Part: what a rank has of a TaskGraph's Layers, and what that costs it.

Place in the flow: under `cost.price` and `cost.memory`, which price a Layer by rows and width.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from whale.ir.model_graph import Layer, item_bytes
from whale.ir.plan import TRAVELLING, Plan, StageLayer


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a micro-batch that its group has together, and this rank's share of the width."""

    rows: float
    width: float
    travelling: frozenset[str] = frozenset()
    """Splits, by path, to which rows travel from replicas that each have rows of their own."""

    def share(self, layer: Layer) -> tuple[float, float]:
        """(rows, width) of what a rank computes and keeps of a Layer.

        Experts get the rows that travel to them and no others: of all rows, about their share of
        the experts. Every other split sees all rows.
        """
        if layer.splits and all(option.path in self.travelling for option in layer.splits):
            return self.rows * self.width, 1.0
        return self.rows, self.width


NOTHING = Part(0.0, 0.0)


def parts_of(plan: Plan, taskgraph: int, rows: int) -> dict[int, Part]:
    """By rank, what it has of a TaskGraph; `rows` are those of a micro-batch."""
    t = plan.taskgraphs[taskgraph]
    across = t.virtual_device != plan.stages[t.stage].virtual_device
    travelling = frozenset(s.path for s in t.splits if across and s.rule in TRAVELLING)
    found: dict[int, Part] = {}
    spans = pairwise(t.virtual_device.row_cuts(rows))
    for index, (replica, (first, end)) in enumerate(
        zip(t.virtual_device.replicas, spans, strict=True)
    ):
        for shard, rank in enumerate(replica.ranks):
            width = 1.0
            if t.splits:
                low, high = t.splits[0].units(index, shard)
                width = (high - low) / t.splits[0].cuts_of(index)[-1]
            found[rank] = Part(float(end - first), width, travelling)
    return found


def packed_share(plan: Plan, layer: StageLayer) -> float:
    """Bytes in which a byte of a token travels to its expert."""
    tokens = plan.wire.tokens
    if not tokens:
        return 1.0
    own = {home.dtype for home in plan.homes if home.name in layer.params}
    computed = plan.precision.half or max(own, key=item_bytes, default=tokens)
    return min(1.0, item_bytes(tokens) / item_bytes(computed))
