"""Messages between stages: what a micro-batch's activations and gradients take.

Place in the flow: under `price`. What crosses is `crossing`'s, whose rows go to whom is as in
`runtime.transfers`.
"""

from __future__ import annotations

from collections.abc import Iterable

from whale.cost.compute import CostModel
from whale.cost.crossing import Crossing
from whale.ir.model_graph import Linear
from whale.ir.plan import Plan
from whale.ir.prices import MessagePrice
from whale.ir.virtual_device import VirtualDevice


def message_prices(
    plan: Plan, costs: CostModel, crossing: dict[tuple[int, int], Crossing], rows: int
) -> Iterable[MessagePrice]:
    """Of every edge, for a micro-batch of so many rows."""
    nodes = [device.node for device in costs.cluster.devices]
    for (producer, consumer), made in crossing.items():
        source = plan.stages[producer].virtual_device
        target = plan.stages[consumer].virtual_device
        pairs = _pairs(source, target, rows)
        # Of the ranks that talk, two that do not share a node, if there are any.
        sender, receiver = max(
            ((source.replicas[a].ranks[0], target.replicas[b].ranks[0]) for a, b, _ in pairs),
            key=lambda pair: nodes[pair[0]] != nodes[pair[1]],
        )
        there, back = (_busiest(pairs, len(source.replicas), x) for x in (made.there, made.back))
        yield MessagePrice(
            producer=producer,
            consumer=consumer,
            seconds=costs.fabric.send(sender, receiver, there),
            nbytes=int(there),
            back_s=costs.fabric.send(sender, receiver, back),
        )


def _pairs(source: VirtualDevice, target: VirtualDevice, rows: int) -> list[tuple[int, int, int]]:
    """Replicas that talk, and the rows they share; none where only whole values go."""
    left, right = source.row_cuts(rows), target.row_cuts(rows)
    found = []
    start = 0
    for b in range(len(right) - 1):
        # A value without a batch dim comes from one replica.
        whole = b % (len(left) - 1)
        while start + 1 < len(left) - 1 and left[start + 1] <= right[b]:
            start += 1
        shared = {whole: 0}
        a = start
        while a < len(left) - 1 and left[a] < right[b + 1]:
            count = min(left[a + 1], right[b + 1]) - max(left[a], right[b])
            if count > 0:
                shared[a] = count
            a += 1
        found += [(a, b, count) for a, count in sorted(shared.items())]
    return found


def _busiest(pairs: Iterable[tuple[int, int, int]], num_sources: int, made: Linear) -> float:
    """Bytes of the replica that has most to send or to hear: it does so one after the other."""
    sent: dict[int, float] = {}
    heard: dict[int, float] = {}
    for a, b, rows in pairs:
        nbytes = rows * made.per_row + (made.fixed if a == b % num_sources else 0.0)
        sent[a] = sent.get(a, 0.0) + nbytes
        heard[b] = heard.get(b, 0.0) + nbytes
    return max(*sent.values(), *heard.values())
