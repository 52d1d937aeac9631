"""Rules: columns or rows for a Linear that is split alone, whichever communicates less.

Place in the flow: part of `planner.splits`. The paper's SP1 (columns: the outputs are gathered, the
input's gradients summed) against its SP2 (rows: the outputs are summed, the input's gradients
gathered). Across data parallel replicas the same choice is one between bridges: the rows of all are
gathered around the product, or exchanged for columns. Either way a device computes the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from whale.cost.comm import Fabric
from whale.cost.compute import CostModel
from whale.ir.expand import split_collectives
from whale.ir.model_graph import SplitOption


def choose_rules(
    options: Iterable[SplitOption],
    replicas: Sequence[tuple[int, ...]],
    costs: CostModel,
    rows: int,
    bridged: bool,
    rejected: list[str],
) -> list[SplitOption]:
    """One option per module: the cheaper of a Linear's two, columns where there is no saying.

    For micro-batches of so many rows over all `replicas`. `rejected` gets one line per distinct
    decision.
    """
    by_path: dict[str, list[SplitOption]] = {}
    for option in options:
        by_path.setdefault(option.path, []).append(option)
    groups = list({costs.fabric.group(ranks): ranks for ranks in reversed(replicas)}.values())
    each = -(-rows // len(replicas))
    seconds: dict[object, float] = {}

    def price(option: SplitOption) -> float:
        key = (option.rule, option.read, option.made, option.entered)
        if key not in seconds:
            found = [_seconds(option, ranks, each, bridged, costs.fabric) for ranks in groups]
            seconds[key] = max(found)
        return seconds[key]

    found: list[SplitOption] = []
    lines: list[str] = []
    for ways in by_path.values():
        if len(ways) == 1 or not all(_is_known(way) for way in ways):
            found.append(ways[0])
            continue
        column, row = ways
        taken, left = (row, column) if price(row) < price(column) else (column, row)
        found.append(taken)
        lines.append(
            f"Linear {row.units} -> {column.units} split by {left.unit}: collectives of "
            f"{1e6 * price(left):.4g} us per micro-batch, {1e6 * price(taken):.4g} us by "
            f"{taken.unit}"
        )
    rejected += dict.fromkeys(lines)
    return found


def _is_known(option: SplitOption) -> bool:
    """Whether its collectives have a price: it was seen to run, and its output is gathered."""
    return bool(option.read.per_row and option.made.per_row) and option.joined == "gather"


def _seconds(
    option: SplitOption, ranks: tuple[int, ...], rows: int, bridged: bool, fabric: Fabric
) -> float:
    """Of its collectives, forward and backward."""
    nbytes = {"input": option.read.at(rows), "output": option.made.at(rows)}
    return sum(
        fabric.collective(action.name, ranks, nbytes[action.carries])
        for backward in (False, True)
        for action in split_collectives(option, ranks, bridged=bridged, backward=backward)
    )


def choose_levels(
    option: SplitOption,
    replicas: Sequence[tuple[int, ...]],
    costs: CostModel,
    rows: int,
    asked: str,
    rejected: list[str],
) -> int:
    """Members per node of a two-level all-to-all, or 0 for one level: by cost, unless asked for.

    Two levels need as many members in every node, and several of both.
    """
    per_node = {_per_node(ranks, costs) for ranks in replicas}
    size = per_node.pop() if len(per_node) == 1 else 0
    if asked == "flat" or not size:
        if asked == "two-level" and not size:
            rejected.append(
                f"{option.path}: no two-level all-to-all, its devices are not several in each of "
                "several nodes"
            )
        return 0
    if asked == "two-level":
        return size
    ranks = replicas[0]
    nbytes = option.copies * option.read.at(rows) / len(ranks)
    flat, two = (
        costs.fabric.all_to_all(ranks, nbytes, two_level=levels) for levels in (False, True)
    )
    lost, won = ("flat", "two-level") if two < flat else ("two-level", "flat")
    line = (
        f"{lost} all-to-all over {len(ranks)} devices: {1e6 * max(flat, two):.4g} us, "
        f"{1e6 * min(flat, two):.4g} us {won}"
    )
    if line not in rejected:
        rejected.append(line)
    return size if two < flat else 0


def _per_node(ranks: tuple[int, ...], costs: CostModel) -> int:
    """How many of a group stand in each of its nodes; 0 where that differs or means nothing."""
    nodes = [costs.cluster.devices[rank].node for rank in ranks]
    counts = {node: nodes.count(node) for node in nodes}
    size = counts[nodes[0]]
    together = nodes == [node for node in counts for _ in range(size)]
    return size if together and size > 1 and len(counts) > 1 else 0
