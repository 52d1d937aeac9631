"""Unit marks: what a split by units does beside cutting weights, put on this rank's copy.

Place in the flow: called by `engine.split.rules` for the rules `attention` and `pair`. The marks of
a SplitOption are made by `engine.split.unit_options`, tried by `engine.split.rerun`, and travel in
the plan:

| mark | meaning |
|---|---|
| `row` path | a Linear that reads units: its input features are cut |
| `count` module:attribute | a number (or one of its `config`) of heads or their columns, inside |
| `cut` parameter | one of the module's own that is cut with the units |
| `summed` module:parameter | a whole parameter that meets units |
| `entry` path | a module whose whole output meets units |
| `inside` path | a column that reads what comes out of an entry |
| `operand` function:dim:size | whole operands of which the own units are taken |
| `mean` width | means over the columns of all units, of that width: summed over members |
| `returned` place:dim:result | an output that holds units, gathered (`without_unread`) |
| `spread` place:dim:size | an output that is alike for all units, given for all of them |
| `unread` result | one of those that nothing reads: it stays a part |
| `head dropout` path | a dropout that sees some heads, in dim 1; `()` for functional ones |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from whale.engine.trace.program import Program, Ref, visit
from whale.ir.model_graph import SplitOption
from whale.nn.forwards import replace_forward
from whale.nn.inside import Count, Inside
from whale.nn.own_heads import EnteredOutput, OwnHeads, SummedParameters
from whale.nn.shard import Shard
from whale.nn.sharded import Column, Row, SharedInput


class _Entered(SharedInput):
    """For columns behind an entry, where the gradient is summed already."""

    def __call__(self, x: object) -> object:  # type: ignore[override]
        return x


def marked(shard: Shard, what: str) -> list[str]:
    """Where a shard has this mark."""
    return [where for mark, where in shard.marks if mark == what]


def install_inside(path: str, shard: Shard, modules: Mapping[str, nn.Module]) -> None:
    """Where columns and rows run, and the attributes that count units there."""
    shard.inside = Inside(path, list(_counts(shard, modules)))


def install_units(parts: Mapping[str, nn.Module], shard: Shard) -> None:
    """The forwards of columns and rows; without marks, the last is the row."""
    rows = marked(shard, "row") or [list(parts)[-1]]
    behind = set(marked(shard, "inside"))
    shared = SharedInput(shard)
    for path, module in parts.items():
        if path in rows:
            replace_forward(module, Row(module, shard, shared))
        else:
            source = _Entered(shard) if path in behind else shared
            replace_forward(module, Column(module, source))


def install_marks(path: str, shard: Shard, modules: Mapping[str, nn.Module]) -> None:
    """All that is not columns and rows."""
    for entry in marked(shard, "entry"):
        replace_forward(modules[entry], EnteredOutput(modules[entry].forward, shard))
    summed: dict[str, list[str]] = {}
    for place in marked(shard, "summed"):
        module, _, name = place.rpartition(":")
        summed.setdefault(module, []).append(name)
    for place, names in summed.items():
        module_ = modules[place]
        replace_forward(module_, SummedParameters(module_, module_.forward, names, shard))
    operands: dict[tuple[str, int], list[int]] = {}
    for text in marked(shard, "operand"):
        function, dim, size = text.split(":")
        operands.setdefault((function, int(dim)), []).append(int(size))
    means = [int(width) for width in marked(shard, "mean")]
    gathered = {}
    for text in marked(shard, "returned"):
        place, dim, _ = text.split(":")
        gathered[int(place)] = int(dim)
    spread = {}
    for text in marked(shard, "spread"):
        place, dim, size = text.split(":")
        spread[int(place)] = int(dim), int(size)
    forward = OwnHeads(modules[path].forward, shard, operands, gathered, means, spread)
    replace_forward(modules[path], forward)


def without_unread(
    option: SplitOption, layer: str, program: Program | None, outputs: Any
) -> SplitOption:
    """The option without gathers of outputs that the glue after the Layer never reads.

    transformers' blocks return their attention's probabilities, which are dropped.
    """
    if program is None or not any(what == "returned" for what, _ in option.marks):
        return option
    read = {value for op in program.ops for value in op.inputs}
    visit(outputs, lambda ref: read.add(ref.index), Ref)
    calls = [op.outputs for op in program.ops if op.layer == layer]

    def is_read(mark: tuple[str, str]) -> bool:
        result = int(mark[1].rpartition(":")[2])
        return any(result >= len(made) or made[result] in read for made in calls)

    marks = tuple(
        m if m[0] != "returned" or is_read(m) else ("unread", m[1].rpartition(":")[2])
        for m in option.marks
    )
    return replace(option, marks=marks)


def _counts(shard: Shard, modules: Mapping[str, nn.Module]) -> Iterator[Count]:
    for place in marked(shard, "count"):
        path, _, attribute = place.rpartition(":")
        name = attribute.removeprefix("config.")
        holder = modules[path] if name == attribute else modules[path].__dict__["config"]
        where = f"{path}.{attribute}" if path else attribute
        yield Count(holder, name, shard.local(getattr(holder, name)), where)
