"""Placement: the row layout of every stage, and every TaskGraph's VirtualDevice.

Place in the flow: after `shares`, which says how many rows each replica takes.
"""

from __future__ import annotations

from dataclasses import dataclass

from whale.ir.virtual_device import VirtualDevice
from whale.planner.layout import Layout
from whale.planner.shares import Shares


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The row layout of every stage, and the VirtualDevice of every TaskGraph."""

    stage_devices: tuple[VirtualDevice, ...]
    taskgraph_devices: tuple[VirtualDevice, ...]


def place(layout: Layout, shares: Shares) -> Placement:
    """Gives every replica its share of the rows."""
    stage_devices: list[VirtualDevice] = []
    taskgraph_devices: dict[int, VirtualDevice] = {}
    for stage, members in enumerate(layout.stages):
        base_width = layout.base_width(stage)
        replicas = layout.replicas(stage, base_width)
        weights = shares.row_weights(stage)
        base = VirtualDevice.of(replicas, weights)
        stage_devices.append(base)
        row_weight = {ranks[0]: w for ranks, w in zip(replicas, weights, strict=True)}
        for t in members:
            if layout.widths[t] == base_width:
                taskgraph_devices[t] = base
                continue
            # A wider TaskGraph takes the rows of all the replicas it spans.
            spans = layout.replicas(stage, layout.widths[t])
            taskgraph_devices[t] = VirtualDevice.of(
                spans, [sum(row_weight[rank] for rank in ranks) for ranks in spans]
            )
    return Placement(
        stage_devices=tuple(stage_devices),
        taskgraph_devices=tuple(taskgraph_devices[t] for t in sorted(taskgraph_devices)),
    )
