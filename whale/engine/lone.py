"""Lone Linears: what becomes of the output of one that is split by itself.

Place in the flow: asked by `engine.match` for the inside of a Layer and by `engine.graph` for the
glue. By columns, the output stays sharded (`nn.column_shard`) until something needs it whole; a
loss or an argmax never does, and there nothing is as cheap as columns. Anywhere else rows may be
cheaper, and capture offers both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from whale.engine.program import Op, Program
from whale.ir.model_graph import SplitOption

_KEEPS_COLUMNS = {
    "view",
    "reshape",
    "flatten",
    "float",
    "double",
    "to",
    "contiguous",
    "__getitem__",
}
_WORKS_ON_SHARDS = ("cross_entropy", "argmax")


def joined(option: SplitOption, path: str, program: Program | None) -> str:
    """Whether a lone column split's output, its Layer's, goes straight into a cross-entropy."""
    if option.joined != "returned" or option.rule != "column" or program is None:
        return "gather"
    values = set(_outputs(program, path))
    for op in program.ops:
        if not values.intersection(op.inputs):
            continue
        name = _name(op)
        if name == "cross_entropy":
            return "loss"
        if name not in _KEEPS_COLUMNS:
            return "gather"
        values.update(op.outputs)
    return "gather"


def allows_rows(
    option: SplitOption, path: str, program: Program | None, layers: Mapping[str, nn.Module]
) -> bool:
    """Whether rows are an alternative, seen from the glue after the Layer at `path`."""
    if option.joined != "returned":
        return True
    return program is not None and not stays_sharded(program, path, layers)


def stays_sharded(program: Program, path: str, modules: Mapping[str, nn.Module]) -> bool:
    """Whether something that reads the output of the module at `path` works on its shards."""
    values = _followed(program, path)
    for op in program.ops:
        loss = op.layer is not None and isinstance(modules[op.layer], nn.CrossEntropyLoss)
        if values.intersection(op.inputs) and (loss or _name(op) in _WORKS_ON_SHARDS):
            return True
    return False


def is_returned(program: Program, path: str) -> bool:
    """Whether the output of the module at `path` leaves the program, still sharded by columns."""
    return not _followed(program, path).isdisjoint(program.result)


def _followed(program: Program, path: str) -> set[int | None]:
    """What the module at `path` makes, and what keeps its columns apart."""
    values: set[int | None] = set(_outputs(program, path))
    for op in program.ops:
        if values.intersection(op.inputs) and _name(op) in _KEEPS_COLUMNS:
            values.update(op.outputs)
    return values


def _outputs(program: Program, path: str) -> Iterable[int]:
    return (value for op in program.ops if op.layer == path for value in op.outputs)


def _name(op: Op) -> str:
    return getattr(op.target, "__name__", "")
