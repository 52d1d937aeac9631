"""Which rows of a global batch a rank computes under a plan.

Place in the flow: read by `runtime.data`, so that a rank loads only those rows. It is the union of
what the executor takes, action by action; rows follow the weights, whatever the size of the batch.
"""

from __future__ import annotations

from collections.abc import Iterable

from whale.ir.plan import Plan
from whale.ir.sharding import Span
from whale.ir.virtual_device import micro_batch_cuts


def needed_rows(plan: Plan, rank: int, total_rows: int) -> tuple[Span, ...]:
    """The rows of a batch of `total_rows` that `rank` computes, over all its stages.

    Ascending, disjoint, and no two of them touch: a micro-batch's rows always lie in one span.
    """
    points = micro_batch_cuts(total_rows, plan.num_micro_batch)
    found: list[Span] = []
    for stage in plan.stages_of(rank):
        device = plan.stages[stage].virtual_device
        for first, end in zip(points, points[1:], strict=False):
            low, high = device.rows(rank, end - first)
            found.append((first + low, first + high))
    return union(found)


def union(spans: Iterable[Span]) -> tuple[Span, ...]:
    """The same rows as ascending spans that neither overlap nor touch; empty ones are left out."""
    merged: list[Span] = []
    for low, high in sorted(span for span in spans if span[0] < span[1]):
        if merged and low <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)
