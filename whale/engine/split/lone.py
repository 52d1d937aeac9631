"""Lone Linears: what becomes of the output of one that is split by itself.

Place in the flow: asked by `engine.split.match` for the inside of a Layer and by
`engine.capture.graph` for the glue. By columns, the output stays sharded (`nn.column_shard`) only
where the trace shows that all that reads it works on shards and ends in a cross-entropy or an
argmax; there nothing is as cheap as columns. Anywhere else, and where there is no trace, it is
gathered at once; rows may be cheaper then, and capture offers both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from whale.engine.trace.program import Op, Program, Ref, Rows, State, tree_map
from whale.ir.model_graph import SplitOption
from whale.nn.column_shard import outcome
from whale.nn.forwards import has_hooks, runs
from whale.runtime.compat import is_torch_function


def joined(
    option: SplitOption,
    path: str,
    program: Program | None,
    layers: Mapping[str, nn.Module],
    rows: int,
) -> str:
    """What the glue makes of the output of the Layer at `path`, which is that of a lone Linear.

    `loss`: it stays sharded; `gather`: it is put together at once. `rows` are those of the trace.
    """
    if option.joined != "returned" or option.rule != "column":
        return "gather" if option.joined == "returned" else option.joined
    if program is None or any(has_hooks(layers[p]) for p in {path} & layers.keys()):
        return "gather"
    return "loss" if works_on_shards(program, path, layers, rows) else "gather"


def works_on_shards(
    program: Program, path: str, modules: Mapping[str, nn.Module], rows: int
) -> bool:
    """Whether all that reads the output of the module at `path` works on its shards, to an end."""
    values = set(outputs(program, path))
    asked = {a.value for a in program.asked if a.hangs}
    finished = False
    for op in program.ops:
        if not values.intersection(op.inputs):
            continue
        found = _outcome(op, program, modules, rows, values)
        if found == "whole":
            return False
        if found == "sharded":
            values.update(op.outputs)
        finished = finished or found == "finished"
    return finished and not values & asked


def _outcome(
    op: Op, program: Program, modules: Mapping[str, nn.Module], rows: int, values: set[int]
) -> str:
    if op.layer is not None:
        module = modules.get(op.layer)
        if not isinstance(module, nn.CrossEntropyLoss) or has_hooks(module):
            return "whole"
        plain = module.weight is None and not module.label_smoothing
        if not plain or not runs(module, nn.CrossEntropyLoss) or op.kwargs:
            return "whole"
        name = "cross_entropy"
    else:
        name = getattr(op.target, "__name__", "")
        if not is_torch_function(op.target):
            return "whole"
    first = op.args[0] if op.args else None
    others = set(op.inputs) - ({first.index} if isinstance(first, Ref) else set())
    if not isinstance(first, Ref) or values & others:
        return "whole"

    def shape(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            spec = program.specs[leaf.index]
            return torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        if isinstance(leaf, State):
            return torch.empty((), device="meta")
        return leaf.slope * rows + leaf.offset if isinstance(leaf, Rows) else leaf

    return outcome(name, tree_map(op.args, shape), tree_map(op.kwargs, shape))


def allows_rows(
    option: SplitOption,
    path: str,
    program: Program | None,
    layers: Mapping[str, nn.Module],
    rows: int,
) -> bool:
    """Whether rows are an alternative, seen from the glue after the Layer at `path`."""
    if option.joined != "returned":
        return option.joined != "loss"
    return program is not None and not works_on_shards(program, path, layers, rows)


def is_returned(program: Program, path: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether the output of the module at `path` leaves the program, still sharded by columns."""
    values = set(outputs(program, path))
    for op in program.ops:
        if values.intersection(op.inputs):
            if _outcome(op, program, modules, 0, values) != "sharded":
                return False
            values.update(op.outputs)
    asked = any(a.value in values for a in program.asked if a.hangs)
    return not asked and not values.isdisjoint(program.result)


def outputs(program: Program, path: str) -> Iterable[int]:
    """What the module at `path` makes."""
    return (value for op in program.ops if op.layer == path for value in op.outputs)
