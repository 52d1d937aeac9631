"""Recorder: one real step as actions and sub-actions, beside what the Plan says.

Place in the flow: for tests and for looking at a run; a Step that is not being recorded carries
nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from whale.engine.step import Step
from whale.engine.trace.program import tensors_in
from whale.ir.expand import SubAction, expand
from whale.ir.homes import sum_groups
from whale.ir.levels import all_level_groups
from whale.ir.schedule import Action
from whale.ir.updates import Update, completed_by
from whale.nn.column_shard import ColumnShard
from whale.runtime.units import Unit

Trace = list[Action | Update | SubAction]


def planned_trace(step: Step) -> Trace:
    """The rank's actions with their sub-actions, from the Plan alone."""
    planned = step.planned
    late = planned.late()
    early = planned.completing() if step.plan.early else {}
    found: Trace = []
    for index, action in enumerate(planned.actions):
        found.append(action)
        if isinstance(action, Action):
            if action.is_compute:
                numbers = completed_by(planned.actions, index)
                completed = {number: planned.buckets[number] for number in numbers}
                places = enumerate(numbers, start=index + 1)
                groups = {number: early[place] for place, number in places if place in early}
                found += expand(step.plan, step.rank, action, completed, groups)
        elif action.kind == "G" and action.number in late:
            ranks = planned.buckets[action.number].sync.ranks
            if len(ranks) > 1:
                found.append(SubAction(kind="reduce", name=str(action.number), ranks=ranks))
            if index in early:
                found.append(SubAction(kind="apply", name=str(early[index])))
        elif action.kind == "A" and action.number not in early.values():
            found.append(SubAction(kind="apply", name=str(action.number)))
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
    filled = lowered.store.grads.filled
    for unit in lowered.store.units.values():
        unit.on_fetch = lambda path: seen.append(SubAction(kind="gather", name=path))
    lowered.store.grads.on_launch = lambda i: seen.append(
        SubAction(kind="reduce", name=str(i), ranks=filled[i].bucket.sync.ranks)
    )
    lowered.store.updater.on_apply = lambda group: seen.append(
        SubAction(kind="apply", name=str(group))
    )
    try:
        step(batch)
    finally:
        lowered.store.updater.on_apply = None
        for handle in handles:
            handle.remove()
        for comm in lowered.groups.all():
            comm.record = None
        lowered.executor.on_action = on_action
        lowered.store.grads.on_launch = None
        for unit in lowered.store.units.values():
            unit.on_fetch = None
    # A Layer without parameters and without a gradient (rotary embeddings) has no backward.
    none = {_backward(path) for path in constant if not list(modules[path].parameters())}
    planned = [a for a in planned_trace(step) if a not in none]
    return _ordered(_asked_for(planned, lowered.store.units)), _ordered(seen)


def _asked_for(planned: Trace, units: Mapping[str, Unit]) -> Trace:
    """Without parameters that a backward does not need: an embedding's, say."""
    found: Trace = []
    for action in planned:
        last = found[-1] if found else None
        gathered = isinstance(action, SubAction) and action.kind == "gather"
        if gathered and isinstance(last, SubAction) and last.kind == "backward":
            assert isinstance(action, SubAction)
            if not units[action.name].asked:
                continue
        found.append(action)
    return found


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
    """Inside one Layer's backward, reductions after collectives, and updates after both.

    They run on communicators of their own or on none, and a Layer's sub-actions are ordered only
    where they share one.
    """
    found: Trace = []
    held: dict[str, Trace] = {"reduce": [], "apply": []}
    for item in [*seen, None]:
        if isinstance(item, SubAction) and item.kind in held:
            held[item.kind].append(item)
            continue
        if not (isinstance(item, SubAction) and item.kind == "collective"):
            found += [*held["reduce"], *sorted(held["apply"], key=str)]
            held = {"reduce": [], "apply": []}
        if item is not None:
            found.append(item)
    return found
