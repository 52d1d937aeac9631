"""Candidate: a way to run a model that is worth pricing, as the graph with the tags that say so.

Place in the flow: what `candidates`, `replicas` and `tensor` make and `make_plan` builds plans of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from whale.cost.compute import CostModel
from whale.ir.model_graph import ModelGraph, TaskGraph
from whale.ir.strategy import Scope, Tag


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A graph with its stages, and the order in which placement takes the devices."""

    about: str
    graph: ModelGraph
    order: tuple[int, ...] | None = None


def with_feed(
    about: str,
    graph: ModelGraph,
    parts: Sequence[tuple[range, Tag]],
    num_micro_batch: int,
    schedule: str,
) -> Candidate:
    """The Candidate with TaskGraphs of these Layers, in the order they run, and so many feeds."""
    if num_micro_batch > 1:
        about = f"{about}, {num_micro_batch} micro-batches"
        scope = Scope(
            kind="pipeline",
            uid=-1,
            where="auto",
            num_micro_batch=num_micro_batch,
            schedule=schedule,
        )
        parts = [(members, (scope, *tag)) for members, tag in parts]
    if not any(tag for _, tag in parts):
        return Candidate(about=about, graph=graph)
    return Candidate(about=about, graph=_tagged(graph, parts))


def _tagged(graph: ModelGraph, parts: Sequence[tuple[range, Tag]]) -> ModelGraph:
    taskgraphs, layers = [], list(graph.layers)
    for index, (members, tag) in enumerate(parts):
        taskgraphs.append(TaskGraph(index=index, tag=tag, layers=tuple(members)))
        for member in members:
            layers[member] = replace(layers[member], taskgraph=index)
    return replace(graph, layers=tuple(layers), taskgraphs=tuple(taskgraphs))


def kinds_of(costs: CostModel) -> list[list[int]]:
    """Ranks in groups of equal devices, each in order of rank."""
    found: dict[object, list[int]] = {}
    for rank in range(costs.cluster.num_devices):
        found.setdefault(costs.alike(rank), []).append(rank)
    return list(found.values())
