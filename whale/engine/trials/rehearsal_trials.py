"""Trials: which modules a rehearsal runs both ways, and with what.

Place in the flow: asked by `engine.trials.rehearsal`. Arguments are what the user's own model gives
its Layers for a few rows of the batch; stacked experts, which are known by their looks only, get
choices that reach all of them. Every rank finds the same trials in the same order.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from whale.engine.capture.captured import Captured
from whale.engine.trace.examples import Example, TensorShape
from whale.engine.trace.program import tensors_in, visit
from whale.engine.trace.tracer import is_cache
from whale.engine.trials.calls import calls_of
from whale.ir.plan import Plan, TaskGraphPlan
from whale.nn.moe.stacked import matrices, plain_activation
from whale.runtime import batch as batches

LARGEST = 1 << 30
"""Bytes of a Layer that is still tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A module to run both ways, and the arguments of all rows."""

    path: str
    taskgraph: TaskGraphPlan
    rules: str
    rows: int
    args: Any
    kwargs: Any
    shapes: list[TensorShape]
    unread: frozenset[int] = frozenset()
    """Outputs that nothing reads, of which a rank may have a part."""
    training: bool | None = None
    """The mode it is run in; None: as it is."""


def find_trials(
    model: nn.Module,
    plan: Plan,
    captured: Captured,
    batch: Any,
    loss: batches.Loss | None,
    device: torch.device,
    notes: list[str],
) -> list[Trial]:
    """One for each kind of Layer that is split; `notes` gets those that cannot be tried."""
    wanted: dict[str, tuple[TaskGraphPlan, str]] = {}
    kinds: dict[Any, list[str]] = {}
    signatures = {layer.path: layer.signature for layer in captured.graph.layers}
    for taskgraph in plan.taskgraphs:
        for path in taskgraph.layers:
            inside = [s for s in taskgraph.splits if _within(s.path, path)]
            rules = [(s.rule, s.path[len(path) :], s.cuts, s.per_node) for s in inside]
            code = captured.traces.get(path)
            kind = (
                *(taskgraph.virtual_device, signatures[path], tuple(rules), code),
                *(_unseen(model.get_submodule(s.path)) for s in inside if s.rule in _BY_LOOKS),
            )
            if inside:
                kinds.setdefault(kind, []).append(path)
            if inside and len(kinds[kind]) == 1:
                wanted[path] = taskgraph, ", ".join(f"{s.path} by {s.unit}" for s in inside)
    replicas = max(len(s.virtual_device.replicas) for s in plan.stages)
    rows = min(batches.num_rows(batch), 2 * replicas + 1)
    stacked = {s.path for t in plan.taskgraphs for s in t.splits if s.rule == "stacked experts"}
    calls = calls_of(model, set(wanted) | stacked, batch, loss, rows, notes)
    trials = []
    for paths, (path, (taskgraph, how)) in zip(kinds.values(), wanted.items(), strict=True):
        layer, example = model.get_submodule(path), captured.examples.get(path)
        why = _not_tried(layer, path, example, calls, rows, plan, taskgraph)
        if why:
            notes.append(f"{path} was not tried beside the whole module: {why}")
        elif example is not None:
            args, kwargs = calls[path]
            trials.append(
                Trial(
                    path=path,
                    taskgraph=taskgraph,
                    rules=how,
                    rows=rows,
                    args=args,
                    kwargs=kwargs,
                    shapes=_trained(example.shapes, paths, captured),
                    unread=_unread(path, taskgraph),
                )
            )
        trials += [] if why else _stacked_trials(model, path, taskgraph, calls)
    return trials


_BY_LOOKS = ("stacked experts", "stacked columns")
"""Rules for modules whose code no trace has seen."""


def _unseen(module: nn.Module) -> Hashable:
    """What the code of a module that no trace looks into may branch on."""
    return tuple(
        (path, name, value)
        for path, part in module.named_modules()
        for name, value in sorted(part.__dict__.items())
        if isinstance(value, bool | int | float | str)
    )


def _trained(shapes: list[TensorShape], paths: list[str], captured: Captured) -> list[TensorShape]:
    """Arguments need a gradient where those of any Layer of this kind do.

    A mask has none: what a rank's heads would give it is not added up.
    """
    every = [captured.examples[path].shapes for path in paths if path in captured.examples]
    alike = [found for found in every if len(found) == len(shapes)]
    return [
        replace(shape, requires_grad=any(found[i].requires_grad for found in alike))
        for i, shape in enumerate(shapes)
    ]


def _unread(path: str, taskgraph: TaskGraphPlan) -> frozenset[int]:
    marks = [m for s in taskgraph.splits if _within(s.path, path) for m in s.marks]
    return frozenset(int(where) for what, where in marks if what == "unread")


def _within(path: str, layer: str) -> bool:
    return path == layer or path.startswith(f"{layer}.") or not layer


def _not_tried(
    layer: nn.Module,
    path: str,
    example: Example | None,
    calls: dict[str, Any],
    rows: int,
    plan: Plan,
    taskgraph: TaskGraphPlan,
) -> str:
    state = [*layer.parameters(), *layer.buffers()]
    if any(t.is_meta for t in state):
        return "it has no values yet"
    size = sum(t.numel() * t.element_size() for t in state)
    if size > LARGEST:
        return f"it holds {size / 1e9:.1f} GB"
    if path not in calls or example is None:
        return "no call of it was seen"
    if _hides_tensors(calls[path]):
        return "its arguments hold tensors in objects"
    tensors = tensors_in(calls[path])
    if len(tensors) != len(example.shapes) or any(
        s.batch_dim is not None
        and (t.dim() <= s.batch_dim or t.shape[s.batch_dim] != rows * s.shape[s.batch_dim])
        for t, s in zip(tensors, example.shapes, strict=False)
    ):
        return "its arguments are not those of the trace"
    device = plan.stages[taskgraph.stage].virtual_device
    points = device.row_cuts(rows)
    if any(a == b for a, b in zip(points, points[1:], strict=False)):
        return f"{rows} rows are too few for {len(device.replicas)} replicas"
    return ""


def _hides_tensors(arguments: Any) -> bool:
    """Whether some are in objects, which no row can be taken of without knowing them."""
    objects: list[Any] = []
    visit(arguments, objects.append, object)
    held = [
        getattr(leaf, "__dict__", {})
        for leaf in objects
        if not isinstance(leaf, torch.Tensor | nn.Module) and not is_cache(leaf)
    ]
    return any(tensors_in(dict(attributes)) for attributes in held)


def _stacked_trials(
    model: nn.Module, path: str, taskgraph: TaskGraphPlan, calls: dict[str, tuple[Any, Any]]
) -> list[Trial]:
    """Stacked experts alone, with choices and weights that tell all of them apart."""
    trials = []
    for split in taskgraph.splits:
        if split.rule != "stacked experts" or not _within(split.path, path):
            continue
        module = model.get_submodule(split.path)
        given = tensors_in(calls.get(split.path, ()))
        found = matrices(module, given[0].shape[-1] if given else None)
        assert found is not None, split.path
        w_in, _ = found
        count, width = w_in.shape[:2]
        generator = torch.Generator().manual_seed(count)
        rows = 4 * count
        tokens = torch.randn(rows, width, generator=generator, dtype=torch.float64)
        choices = min(2, count)
        first = torch.arange(rows) % count
        step = 1 + torch.arange(rows) // count % max(1, count - 1)
        ids = torch.stack([(first + j * step) % count for j in range(choices)], 1)
        gates = torch.rand(rows, choices, generator=generator, dtype=torch.float64) + 0.1
        if not any(p.dim() == 3 for p in module.parameters()):
            tokens = tokens.unsqueeze(1)  # experts in one dim with their rows (DBRX) read a batch
        args = (tokens.to(w_in.dtype), ids, gates.to(w_in.dtype))
        shapes = [
            TensorShape(
                shape=(1, *a.shape[1:]), batch_dim=0, dtype=a.dtype, requires_grad=a is not ids
            )
            for a in args
        ]
        known = plain_activation(module) is not None
        trials += [
            Trial(
                path=split.path,
                taskgraph=taskgraph,
                rules=f"{split.path} by {split.unit}",
                rows=rows,
                args=args,
                kwargs={},
                shapes=shapes,
                training=training,
            )
            # Code of their own may be another in evaluation, and no trace of it was seen.
            for training in ((None,) if known else (True, False))
        ]
    return trials
