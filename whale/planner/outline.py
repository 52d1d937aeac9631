"""Outline: all of a candidate that its shares depend on, and that does not depend on them.

Place in the flow: third pass of `make_plan`: which stage every Layer, node and parameter is in, and
what is split. `shares` then says how many rows and units everyone gets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from whale.cost.compute import CostModel
from whale.cost.crossing import Crossing, crossing_bytes
from whale.ir.model_graph import ModelGraph, SplitOption, assign_stages
from whale.ir.schedule import Schedule
from whale.planner.layout import Layout
from whale.planner.schedules import canonical_kind, held_states
from whale.planner.splits import choose_options, users_of


@dataclass(frozen=True, kw_only=True)
class Outline:
    """A candidate without shares."""

    graph: ModelGraph
    layout: Layout
    stage_of_layer: tuple[int, ...]
    stage_of_node: tuple[int | None, ...]
    users: Mapping[str, frozenset[int]]
    """By parameter, the stages that read it."""
    options: Mapping[int, tuple[SplitOption, ...]]
    """By TaskGraph, what of it is split and how."""
    schedule: Schedule
    rejected: tuple[str, ...]
    """What lost to the options, and why."""

    def layers_of(self, stage: int) -> tuple[int, ...]:
        """The Layers a stage runs, in execution order; one called again later runs there again."""
        return self._layers[stage]

    @cached_property
    def _layers(self) -> tuple[tuple[int, ...], ...]:
        return tuple(
            layers_of_stage(self.graph, self.stage_of_layer, self.stage_of_node, stage)
            for stage in range(len(self.layout.stages))
        )

    @cached_property
    def received(self) -> Mapping[int, tuple[Crossing, ...]]:
        """By stage, what it gets of others."""
        found: dict[int, tuple[Crossing, ...]] = dict.fromkeys(range(len(self.layout.stages)), ())
        crossing = crossing_bytes(self.graph, self.stage_of_node, self.schedule.edges)
        for (_, consumer), sent in crossing.items():
            found[consumer] = (*found[consumer], sent)
        return found

    @cached_property
    def held(self) -> tuple[tuple[Mapping[int, int], ...], ...]:
        """By device group, the micro-batches it holds of each stage, at its worst moments."""
        return tuple(held_states(self.schedule, g) for g in range(len(self.layout.groups)))


def layers_of_stage(
    graph: ModelGraph,
    stage_of_layer: Sequence[int],
    stage_of_node: Sequence[int | None],
    stage: int,
) -> tuple[int, ...]:
    """The Layers a stage runs, in execution order."""
    if not graph.nodes:
        return tuple(i for i, where in enumerate(stage_of_layer) if where == stage)
    return tuple(
        node.layer
        for node, where in zip(graph.nodes, stage_of_node, strict=True)
        if where == stage and node.layer is not None
    )


def outline(graph: ModelGraph, layout: Layout, costs: CostModel, rows: int) -> Outline:
    """The outline of a graph on its ranks, for micro-batches of so many rows."""
    stage_of_layer = tuple(layout.stage_of(layer.taskgraph) for layer in graph.layers)
    stage_of_node, edges = assign_stages(graph.nodes, stage_of_layer)
    users = users_of(graph, stage_of_layer, stage_of_node)
    rejected: list[str] = []
    options = {
        t.index: choose_options(graph, t, layout, stage_of_layer, costs, rows, rejected)
        for t in graph.taskgraphs
    }
    return Outline(
        graph=graph,
        layout=layout,
        stage_of_layer=stage_of_layer,
        stage_of_node=stage_of_node,
        users={name: frozenset(stages) for name, stages in users.items()},
        options=options,
        schedule=Schedule(
            kind=canonical_kind(layout.schedule),
            num_micro_batch=layout.num_micro_batch,
            groups=layout.groups,
            edges=edges,
        ),
        rejected=tuple(dict.fromkeys(rejected)),
    )
