"""Rules: columns or rows for a Linear that is split alone, whichever communicates less.

Place in the flow: part of `planner.splits`. The paper's SP1 (columns: the outputs are gathered, the
input's gradients summed) against its SP2 (rows: the outputs are summed, the input's gradients
gathered). Across data parallel replicas the same choice is one between bridges: the rows of all are
gathered around the product, or exchanged for columns. Either way a device computes the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from whale.cost.comm import Fabric, Group
from whale.ir.expand import split_collectives
from whale.ir.model_graph import SplitOption
from whale.ir.virtual_device import VirtualDevice
from whale.planner.shares import Shares


def choose_rules(
    options: Iterable[SplitOption],
    device: VirtualDevice,
    shares: Shares,
    bridged: bool,
    rejected: list[str],
) -> list[SplitOption]:
    """One option per module: the cheaper of a Linear's two, columns where there is no saying.

    `rejected` gets one line per distinct decision.
    """
    by_path: dict[str, list[SplitOption]] = {}
    for option in options:
        by_path.setdefault(option.path, []).append(option)
    groups = _groups(device, shares)
    seconds: dict[object, float] = {}

    def price(option: SplitOption) -> float:
        key = (option.rule, option.read, option.made, option.entered)
        if key not in seconds:
            fabric = shares.costs.fabric
            seconds[key] = max(_seconds(option, r, n, bridged, fabric) for r, n in groups)
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


def _groups(device: VirtualDevice, shares: Shares) -> Sequence[tuple[tuple[int, ...], int]]:
    """The ranks and rows of each kind of replica."""
    points = device.row_cuts(shares.rows)
    found: dict[tuple[Group, int], tuple[int, ...]] = {}
    for replica, first, end in zip(device.replicas, points, points[1:], strict=False):
        key = (shares.costs.fabric.group(replica.ranks), end - first)
        found.setdefault(key, replica.ranks)
    return [(ranks, rows) for (_, rows), ranks in found.items()]


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
