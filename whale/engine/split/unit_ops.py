"""Unit operations: what becomes of units in functions that `engine.split.heads` does not know.

Place in the flow: used by `engine.split.units`, whose follower each handler gets: it gives the cut
of what an operation makes, None in a list for a whole value, or None where units may mix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from whale.engine.split import heads
from whale.engine.split.heads import Cut, Cuts
from whale.engine.trace.program import Op, Ref, State
from whale.engine.trace.tracer import set_item

_REDUCTIONS = frozenset(("sum", "mean", "amax", "amin", "var", "std", "logsumexp", "norm"))


def name_of(op: Op) -> str:
    """The torch function an operation calls, or how attributes and items are got and set."""
    if op.target is getattr:
        return "getattr"
    return "set_item" if op.target is set_item else heads.name_of(op)


def _matmul(follower: Any, op: Op) -> Cuts:
    """Products whose units are in a batch dim of both sides."""
    sides = op.args[:2]
    cut_state = follower.cut_state
    if len(sides) != 2 or not all(
        isinstance(s, Ref) or (isinstance(s, State) and s.name in cut_state) for s in sides
    ):
        return None
    stacks = [s.name for s in sides if isinstance(s, State)]
    found = _product(follower, op, [s.index for s in sides if isinstance(s, Ref)])
    if found is None or found[0] is None:
        return None
    dims = len(follower.shape(op.outputs[0]))
    for name in stacks:
        cut, shape = cut_state[name], follower.inside.state[name].shape
        if (cut.dim - len(shape), cut.size) != (found[0].dim - dims, found[0].size):
            return None
    return found


def _product(follower: Any, op: Op, sides: list[int]) -> Cuts:
    (made,) = op.outputs
    dims = len(follower.shape(made))
    places: set[tuple[int, int]] = set()
    for value in sides:
        cut = follower.cuts.get(value)
        shape = follower.shape(value)
        if cut is not None:
            if cut.dim >= len(shape) - 2:
                return None
            places.add((cut.dim - len(shape), cut.size))
    if len(places) != 1:
        return None
    ((at, size),) = places
    for value in sides:
        shape = follower.shape(value)
        if value in follower.cuts:
            continue
        if follower.alike.get(value) == at + len(shape) and value in follower.entered:
            continue
        has_units = len(shape) + at >= 0 and shape[at] != 1
        if has_units or (follower.program.specs[value].grad and value not in follower.entered):
            return None
    return [Cut(dims + at, size)]


def _baddbmm(follower: Any, op: Op) -> Cuts:
    """A bias of every unit, which a member takes its part of, and a product."""
    refs = [heads._argument(op, i, n) for i, n in enumerate(("input", "batch1", "batch2"))]
    if not all(isinstance(r, Ref) for r in refs):
        return None
    bias, *sides = (r.index for r in refs)
    found = _product(follower, op, sides)
    if found is None or found[0] is None:
        return None
    (made,) = op.outputs
    dims = len(follower.shape(made))
    if bias in follower.cuts:
        return found if follower.cuts[bias] == found[0] else None
    grad = follower.program.specs[bias].grad
    met = follower.meets(op, bias, follower.shape(bias), grad, found[0], dims)
    return found if met else None


def reduce_dims(follower: Any, op: Op) -> Cuts:
    """A sum over dims other than the units'."""
    found = follower.first(op)
    if found is None:
        return None
    cut, shape = found
    dim = heads._argument(op, 2 if name_of(op) == "norm" else 1, "dim")
    over = [dim] if type(dim) is int else dim
    if not isinstance(over, (tuple, list)) or not all(type(d) is int for d in over):
        return None
    gone = {d % len(shape) for d in over}
    if cut.dim in gone:
        return follower.mean_of_all(op, cut) if gone == {cut.dim} else None
    kept = len(follower.shape(op.outputs[0])) == len(shape)
    left = cut if kept else Cut(cut.dim - sum(d < cut.dim for d in gone), cut.size)
    return [left] * len(op.outputs)


def _normalize(follower: Any, op: Op) -> Cuts:
    """A norm over dims other than the units'; its weights' gradients are summed."""
    value = op.args[0] if op.args else op.kwargs.get("input")
    if not isinstance(value, Ref) or value.index not in follower.cuts:
        return None
    cut, shape = follower.cuts[value.index], follower.shape(value.index)
    over = heads._argument(op, 1, "normalized_shape")
    if not isinstance(over, (tuple, list)) or cut.dim >= len(shape) - len(over):
        return None
    others = [v for v in op.inputs if v != value.index]
    if any(v in follower.cuts or v not in follower.of_state for v in others):
        return None
    follower.summed |= follower.trained(op.state)
    for other in others:
        follower.summed |= follower.of_state[other]
    return [cut]


def _join(follower: Any, op: Op) -> Cuts:
    """Values that are all cut alike, or alike for all units, along another dim."""
    parts = op.args[0]
    if not isinstance(parts, (tuple, list)) or not all(isinstance(p, Ref) for p in parts):
        return None
    known = [p.index for p in parts if p.index in follower.cuts]
    if len(known) == len(parts):
        return heads._join(follower, op)
    cuts = {follower.cuts[v] for v in known}
    if len(cuts) != 1 or name_of(op) == "stack":
        return None
    (cut,) = cuts
    dim = heads._dim(op, 1, "dim", len(follower.shape(known[0])), 0)
    for part in parts:
        value = part.index
        if value in follower.cuts:
            continue
        needs = follower.program.specs[value].grad and value not in follower.entered
        if follower.alike.get(value) != cut.dim or needs:
            return None
    return [cut] if dim is not None and dim != cut.dim else None


def _like(follower: Any, op: Op) -> Cuts:
    found = follower.first(op)
    return None if found is None else [found[0]]


def _like_in(follower: Any, op: Op) -> Cuts:
    """A new tensor with as many units in the same dim."""
    found = follower.first(op)
    if found is None:
        return None
    cut, shape = found
    new = follower.shape(op.outputs[0])
    same = len(new) == len(shape) and new[cut.dim] == shape[cut.dim]
    return [cut] if same else None


def _glu(follower: Any, op: Op) -> Cuts:
    """Two halves multiplied, each with all units."""
    found = follower.first(op)
    dim = heads._dim(op, 1, "dim", len(found[1]), -1) if found is not None else None
    if found is None or dim is None:
        return None
    cut, shape = found
    if dim == cut.dim and (shape[dim] // 2) % (cut.size * follower.units):
        return None
    return [cut]


def _attribute(follower: Any, op: Op) -> Cuts:
    """`x.mT` and `x.T`."""
    found = follower.first(op)
    if found is None or op.args[1] not in ("mT", "T", "data"):
        return None
    cut, shape = found
    if op.args[1] == "data":
        return [cut]
    if op.args[1] == "T" and len(shape) != 2:
        return None
    a, b = len(shape) - 1, len(shape) - 2
    return [Cut({a: b, b: a}.get(cut.dim, cut.dim), cut.size)]


def _select(follower: Any, op: Op) -> Cuts:
    found = follower.first(op)
    dim = heads._dim(op, 1, "dim", len(found[1])) if found is not None else None
    if found is None or dim is None or dim == found[0].dim:
        return None
    kept = len(follower.shape(op.outputs[0])) == len(found[1])
    return [found[0] if kept else Cut(found[0].dim - (dim < found[0].dim), found[0].size)]


def _index(follower: Any, op: Op) -> Cuts:
    """As in `engine.split.heads`; a list of places along another dim than the units' is a slice."""
    items = op.args[1] if isinstance(op.args[1], tuple) else (op.args[1],)
    lists = [i for i in items if isinstance(i, list) and all(type(n) is int for n in i)]
    found = follower.first(op)
    if len(lists) != 1 or found is None:
        return heads._index(follower, op)
    shown = tuple(slice(None) if isinstance(i, list) else i for i in items)
    place = items.index(lists[0])
    named = [i for i in items if i is not None and i is not ...]
    if ... in items[:place]:
        dim = len(found[1]) - len([i for i in items[place:] if i is not None])
    else:
        dim = sum(i is not None for i in items[:place])
    if dim == found[0].dim or len(named) > len(found[1]) or any(type(i) is int for i in items):
        return None
    return heads._index(follower, replace(op, args=(op.args[0], shown)))


def _einsum(follower: Any, op: Op) -> Cuts:
    """Units in one letter of every operand that has them, and of the result."""
    equation, *operands = op.args
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    if not isinstance(equation, str) or "." in equation or "->" not in equation:
        return None
    if not all(isinstance(o, Ref) for o in operands):
        return None
    left, right = equation.replace(" ", "").split("->")
    letters: set[tuple[str, int]] = set()
    terms = list(zip(left.split(","), [o.index for o in operands], strict=True))
    for term, value in terms:
        if value in follower.cuts:
            cut = follower.cuts[value]
            letters.add((term[cut.dim], cut.size))
    if len(letters) != 1:
        return None
    ((letter, size),) = letters
    for term, value in terms:
        if value not in follower.cuts and (letter in term or follower.program.specs[value].grad):
            return None
    return [Cut(right.index(letter), size)] if right.count(letter) == 1 else None


UNIT_OPS: dict[str, Callable[[Any, Op], Cuts]] = {
    **dict.fromkeys(("matmul", "__matmul__", "bmm"), _matmul),
    **dict.fromkeys(("layer_norm", "rms_norm"), _normalize),
    **dict.fromkeys(_REDUCTIONS, reduce_dims),
    **dict.fromkeys(("cat", "stack", "concat"), _join),
    **dict.fromkeys(("zeros_like", "ones_like", "full_like", "empty_like"), _like),
    **dict.fromkeys(("select", "narrow"), _select),
    "baddbmm": _baddbmm,
    "glu": _glu,
    "getattr": _attribute,
    "einsum": _einsum,
    "__getitem__": _index,
    "new_empty": _like_in,
}
