"""Recorder: one real step as actions and sub-actions, beside what the Plan says.

Place in the flow: for tests and for looking at a run; a Step that is not being recorded carries
nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from whale.engine.program import tensors_in
from whale.engine.step import Step
from whale.ir.expand import SubAction, expand
from whale.ir.homes import sum_groups
from whale.ir.levels import all_level_groups
from whale.ir.schedule import Action
from whale.ir.updates import Update, completed_by
from whale.nn.column_shard import ColumnShard

Trace = list[Action | Update | SubAction]


def planned_trace(step: Step) -> Trace:
    """The rank's actions with their sub-actions, from the Plan alone."""
    planned = step.planned
    late = planned.late()
    found: Trace = []
    for index, action in enumerate(planned.actions):
        found.append(action)
        if isinstance(action, Update) and action.kind == "G" and action.number in late:
            ranks = planned.buckets[action.number].sync.ranks
            if len(ranks) > 1:
                found.append(SubAction(kind="reduce", name=str(action.number), ranks=ranks))
        elif isinstance(action, Action) and action.is_compute:
            numbers = completed_by(planned.actions, index)
            completed = {number: planned.buckets[number] for number in numbers}
            found += expand(step.plan, step.rank, action, completed)
    return found


def record_step(step: Step, batch: Any) -> tuple[Trace, Trace]:
    """Runs one step and returns (planned, recorded)."""
    seen: Trace = []
    lowered = step._lowered
    handles = []
    outputs: dict[int, tuple[torch.Tensor, list[str]]] = {}
    constant: set[str] = set()
    modules = dict(lowered.model.named_modules(remove_duplicate=False))
    paths = {
        layer.path for s in step.plan.stages_of(step.rank) for layer in step.plan.stages[s].layers
    }
    for path in paths:
        module = modules[path]

        def forward(_: nn.Module, args: Any, path: str = path) -> None:
            seen.append(SubAction(kind="forward", name=path))

        def watch(_: nn.Module, args: Any, out: Any, path: str = path) -> None:
            made = [t.local if isinstance(t, ColumnShard) else t for t in tensors_in(out)]
            if torch.is_grad_enabled() and not any(t.requires_grad for t in made):
                constant.add(path)
            for tensor in [t for t in made if t.requires_grad][:1]:
                # A Layer may return its input as it is (Identity): one hook, the later Layer first.
                names = outputs.setdefault(id(tensor), (tensor, []))[1]
                names.append(path)
                if len(names) == 1:
                    tensor.register_hook(
                        lambda _, n=names: seen.extend(map(_backward, reversed(n)))
                    )

        handles.append(module.register_forward_pre_hook(forward, prepend=True))
        handles.append(module.register_forward_hook(watch))
    watched = set(_layer_groups(step))
    for comm in lowered.groups.all():
        if comm.ranks in watched:
            comm.record = lambda kind, ranks: seen.append(
                SubAction(kind="collective", name=kind, ranks=ranks)
            )
    on_action = lowered.executor.on_action
    lowered.executor.on_action = lambda index, action: seen.append(action)
    filled = lowered.grads.filled
    lowered.grads.on_launch = lambda i: seen.append(
        SubAction(kind="reduce", name=str(i), ranks=filled[i].bucket.sync.ranks)
    )
    try:
        step(batch)
    finally:
        for handle in handles:
            handle.remove()
        for comm in lowered.groups.all():
            comm.record = None
        lowered.executor.on_action = on_action
        lowered.grads.on_launch = None
    # A Layer without parameters and without a gradient (rotary embeddings) has no backward.
    none = {_backward(path) for path in constant if not list(modules[path].parameters())}
    return [a for a in planned_trace(step) if a not in none], _ordered(seen)


def _backward(path: str) -> SubAction:
    return SubAction(kind="backward", name=path)


def _layer_groups(step: Step) -> Iterator[tuple[int, ...]]:
    """The groups that collectives inside Layers use: splits, and where replicas meet."""
    for taskgraph in step.plan.taskgraphs:
        if taskgraph.splits:
            for replica in taskgraph.virtual_device.replicas:
                yield replica.ranks
                for per_node in {s.per_node for s in taskgraph.splits if s.per_node}:
                    yield from all_level_groups(replica.ranks, per_node)
    for stage in step.plan.stages:
        if any(any(layer.meets) for layer in stage.layers):
            for sync in sum_groups([r.ranks for r in stage.virtual_device.replicas]):
                yield sync.ranks


def _ordered(seen: Trace) -> Trace:
    """Inside one Layer's backward, reductions after collectives.

    They run on communicators of their own, and a
    Layer's sub-actions are not ordered between communicators.
    """
    found: Trace = []
    held: Trace = []
    for item in seen:
        if isinstance(item, SubAction) and item.kind == "reduce":
            held.append(item)
            continue
        if not (isinstance(item, SubAction) and item.kind == "collective"):
            found += held
            held = []
        found.append(item)
    return found + held
