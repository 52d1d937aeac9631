"""A lower bound on a step: what no plan on these devices can beat.

Place in the flow: `cost.price` keeps it in a plan, so that a report can say how far above it is.
"""

from __future__ import annotations

from whale.cost.compute import CostModel


def lower_bound_s(costs: CostModel, batch_rows: int) -> float:
    """No assignment of Layers and rows to these devices is faster, communication for free.

    By duality: x_kl >= 0 is the share of Layer l on device k, each Layer is done, no device works
    longer than T. Any weights y_l >= 0 prove T >= sum(y) / sum_k max_l(y_l / t_kl). Rows are priced
    as in one micro-batch of all of them, where every device is at its best.
    """
    kinds: dict[object, tuple[int, int]] = {}
    for rank in range(costs.cluster.num_devices):
        first, count = kinds.get(costs.alike(rank), (rank, 0))
        kinds[costs.alike(rank)] = (first, count + 1)
    everything = range(len(costs.graph.layers))
    times = [[costs.step_s(i, rank, batch_rows) for i in everything] for rank, _ in kinds.values()]
    counts = [count for _, count in kinds.values()]
    layers = [i for i in everything if all(t[i] > 0.0 for t in times)]
    if not layers:
        return 0.0
    weights = {i: 1.0 / sum(n / t[i] for n, t in zip(counts, times, strict=True)) for i in layers}
    most = sum(
        n * max(weights[i] / t[i] for i in layers) for n, t in zip(counts, times, strict=True)
    )
    return sum(weights.values()) / most
