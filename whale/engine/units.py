"""Units: a follower of heads and columns that knows eager attention, norms and adapters.

Place in the flow: asked by `engine.unit_options` about a set of Linears (columns) and those that
read what becomes of them (rows). Beside `engine.heads.Follower`, whose walk through the trace it
shares, it follows products written out (matmul, softmax), values that are whole and meet units:

| a whole value that meets units | what a member does with it |
|---|---|
| has a dim as large as the units' | reads its own part there (ALiBi, a bias of each head) |
| is alike for all units, no gradient | reads it as it is (a mask, rotary tables) |
| is made of parameters alone | its gradient is summed over the members (norms of heads) |
| comes out of an entry | the entry's output is entered, so its gradient is summed there |

Everything else ends the walk with a reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import nn

from whale.engine import heads
from whale.engine.heads import ATTENTION, Cut, Cuts, Follower, Inside, is_elementwise, name_of
from whale.engine.program import Op, Ref, State

FITTED = frozenset(
    "add __add__ __radd__ __iadd__ add_ sub __sub__ __rsub__ mul __mul__ __rmul__ __imul__ mul_ "
    "div __truediv__ masked_fill masked_fill_ where baddbmm maximum minimum max min".split()
)
"""Functions in which `nn.own_heads` gives a member its part of a whole operand."""

_MORE = frozenset(
    "add_ sub_ mul_ div_ __iadd__ __isub__ __imul__ __itruediv__ masked_fill_ maximum minimum erf "
    "copy_ double float half bfloat16 to type_as contiguous clone detach softplus erf log1p".split()
)
ELEMENTWISE = heads._MORE_ELEMENTWISE | _MORE
"""Functions of which each element depends on the elements at its own place alone."""
_MADE_ALIKE = frozenset(("zeros", "ones", "full", "new_zeros", "new_ones", "new_full"))
_REDUCTIONS = frozenset(("sum", "mean", "amax", "amin", "var", "std", "logsumexp", "norm"))


class UnitFollower(Follower):
    """Follows units from columns, cut into sections, to the rows that read them."""

    def __init__(self, inside: Inside, path: str, units: int) -> None:
        super().__init__(inside, path, units)
        self.parts: dict[int, tuple[int, ...]] = {}
        """Values of several sections of unequal size, until they are taken apart."""
        self.alike: dict[int, int] = {}
        """Values that are the same along a dim, which has as many elements as there are units."""
        self.entered: set[int] = set()
        """Whole values behind an entry: their gradients are parts."""
        self.of_state: dict[int, frozenset[str]] = {}
        """Values made of parameters alone."""
        self.summed: set[str] = set()
        """Parameters that are whole and meet units: their gradients are summed."""
        self.cut_state: dict[str, Cut] = {}
        """Parameters that are cut with the units."""
        self.operands: dict[tuple[str, int], int] = {}
        """Whole operands of which a member takes its part: (function, dim from the end): size."""
        self.operand_grads: set[int] = set()
        self.head_dropouts: list[str] = []
        self.returned: list[tuple[int, int, int]] = []
        """Outputs that hold units: place among the module's, dim, place among the Layer's."""
        self.linears: set[str] = set()
        self.products = 0
        self.reason = ""
        self.progress = 0

    def follow(
        self, sections: Mapping[str, tuple[int, ...]], rows: set[str], entries: set[str]
    ) -> bool:
        """Whether units stay apart from the columns' sections to the rows."""
        met: set[str] = set()
        self.linears = {*sections, *rows, *entries}
        for place, op in enumerate(self.program.ops):
            self.progress = place
            touched = [v for v in op.inputs if v in self.cuts or v in self.parts]
            if op.layer in sections and not touched:
                self._begin(op, sections[op.layer])
                continue
            if op.layer in entries:
                self.entered.update(op.outputs)
                continue
            if not touched and not any(name in self.cut_state for name in op.state):
                self._whole(op)
                continue
            if op.layer in rows:
                if not self.is_last(op):
                    return self._end(op, "its rows are not the units in their order")
                met.add(str(op.layer))
                continue
            found = self._step(op)
            if found is None:
                return self._end(op, "may mix them")
            self.cuts.update((v, c) for v, c in zip(op.outputs, found, strict=True) if c)
        if met != rows:
            self.reason = self.reason or "its units do not reach one Linear"
            return False
        if "()" in self.head_dropouts and self._drops_whole():
            self.reason = "it drops out whole values of four dims too"
            return False
        if self._returns():
            return self._summed_once()
        self.reason = "a part of its units leaves the block"
        return False

    def _drops_whole(self) -> bool:
        """Whether a functional dropout sees a whole value of as many dims as attention's."""
        return any(
            name_of(op) == "dropout" and op.outputs[0] not in self.cuts
            for op in self.program.ops[self.call.first : self.call.last]
            if len(op.outputs) == 1 and len(self.shape(op.outputs[0])) == 4
        )

    def _returns(self) -> bool:
        """Whether units that leave the Layer leave the module too, where they are gathered."""
        for result, value in enumerate(self.program.result):
            if value in self.parts:
                return False
            if value not in self.cuts:
                continue
            cut = self.cuts[value]
            whole = cut.size * self.units == self.shape(value)[cut.dim]
            if value not in self.call.values or not whole:
                return False
            self.returned.append((self.call.values.index(value), cut.dim, result))
        return True

    def _end(self, op: Op, why: str) -> bool:
        name = op.layer if op.layer is not None else name_of(op)
        self.reason = f"{name} at {op.where.rpartition('/')[2]} {why}"
        return False

    def _begin(self, op: Op, sections: tuple[int, ...]) -> None:
        (made,) = op.outputs
        if len(set(sections)) == 1:
            self.cuts[made] = Cut(len(self.shape(made)) - 1, sections[0] // self.units)
        else:
            self.parts[made] = sections

    def _whole(self, op: Op) -> None:
        """An operation on whole values: what it makes is behind an entry, or of parameters."""
        made = op.outputs
        if any(v in self.entered for v in op.inputs):
            self.entered.update(made)
            # Parameters in between get the gradient of the own units only.
            self.summed.update(self._trained(op.state))
            if op.layer is not None:
                held = {id(p) for p in self.inside.modules[op.layer].parameters()}
                names = tuple(n for n, p in self.inside.state.items() if id(p) in held)
                self.summed.update(self._trained(names))
            for value in op.inputs:
                self.summed.update(self.of_state.get(value, ()))
        elif op.layer is None and all(v in self.of_state for v in op.inputs):
            names = frozenset(self._trained(op.state))
            for value in op.inputs:
                names |= self.of_state[value]
            if names:
                self.of_state.update(dict.fromkeys(made, names))
        if op.layer is None and len(made) == 1:
            self._note_alike(op, made[0])

    def _note_alike(self, op: Op, made: int) -> None:
        shape = self.shape(made)
        if name_of(op) in _MADE_ALIKE:
            found = [dim for dim, size in enumerate(shape) if size % self.units == 0 and size > 1]
            if len(found) == 1:
                self.alike[made] = found[0]
        elif name_of(op) == "expand" and isinstance(op.args[0], Ref):
            old = self.shape(op.args[0].index)
            grown = [
                dim
                for dim, size in enumerate(shape)
                if (at := dim - len(shape) + len(old)) >= 0
                and old[at] == 1
                and size > 1
                and size % self.units == 0
            ]
            if len(grown) == 1:
                self.alike[made] = grown[0]
        elif name_of(op) in ("to", "float", "double", "contiguous", "type_as"):
            source = op.args[0]
            if isinstance(source, Ref) and source.index in self.alike:
                self.alike[made] = self.alike[source.index]

    def _trained(self, names: tuple[str, ...]) -> set[str]:
        state = self.inside.state
        return {n for n in names if n in state and state[n].requires_grad}

    def _summed_once(self) -> bool:
        """Whether what is made of a summed parameter meets units or entered values, and no more."""
        for op in self.program.ops:
            read = set(op.state)
            if op.layer is not None and not {op.layer} & self.linears:
                held = {id(p) for p in self.inside.modules[op.layer].parameters()}
                read |= {n for n in self.summed if id(self.inside.state[n]) in held}
            for value in op.inputs:
                read |= self.of_state.get(value, frozenset())
            if not read & self.summed:
                continue
            inside = [
                v for v in (*op.inputs, *op.outputs) if v in self.cuts or v in self.entered
            ]
            if not inside and not all(v in self.of_state for v in op.outputs):
                self.reason = f"{sorted(read & self.summed)[0]} is read elsewhere too"
                return False
        return True

    def first(self, op: Op) -> tuple[Cut, tuple[int, ...]] | None:
        """The first argument's cut and shape, where no other has one; it may be a parameter."""
        value = op.args[0] if op.args else None
        if isinstance(value, State) and value.name in self.cut_state:
            if op.inputs:
                return None
            return self.cut_state[value.name], tuple(self.inside.state[value.name].shape)
        return super().first(op)

    # ---- one operation -------------------------------------------------------------------------

    def _step(self, op: Op) -> Cuts:
        name = name_of(op)
        if any(v in self.parts for v in op.inputs):
            return self._take_apart(op)
        if name == ATTENTION:
            self.products += 1
            return self._attention(op)
        if op.layer is not None and type(self.inside.modules[op.layer]) is nn.Dropout:
            return self._dropout_module(op)
        if op.layer is not None:
            known = is_elementwise(op, self.inside.modules)
            return self._elementwise(op) if known else None
        if name in ("softmax", "log_softmax"):
            self.products += 1
        if name == "dropout":
            return self._dropout(op)
        if name in ("max", "min") and len(op.inputs) == 1:
            return _reduce(self, op)
        if name in ELEMENTWISE or name in ("max", "min"):
            return self._elementwise(op)
        own = _OWN.get(name)
        if own is not None:
            return own(self, op)
        handler = heads._HANDLERS.get(name)
        return handler(self, op) if handler is not None else None

    def _take_apart(self, op: Op) -> Cuts:
        """A split or a slice at the borders of sections."""
        value = op.args[0]
        if not isinstance(value, Ref) or list(op.inputs) != [value.index]:
            return None
        sections, last = self.parts[value.index], len(self.shape(value.index)) - 1
        if name_of(op) in ELEMENTWISE and not op.state:
            self.parts.update(dict.fromkeys(op.outputs, sections))
            return [None] * len(op.outputs)
        borders = [0]
        for size in sections:
            borders.append(borders[-1] + size)
        if name_of(op) in ("split", "split_with_sizes", "chunk"):
            dim = heads._argument(op, 2, "dim", 0)
            sizes = tuple(self.shape(v)[last] for v in op.outputs)
            if type(dim) is not int or dim % (last + 1) != last or sizes != sections:
                return None
            return [Cut(last, size // self.units) for size in sections]
        if name_of(op) == "__getitem__":
            items = op.args[1] if isinstance(op.args[1], tuple) else (op.args[1],)
            if not items or type(items[-1]) is not slice or len(items) < 2:
                return None
            if any(i is not ... and i != slice(None) for i in items[:-1]):
                return None
            low, high, step = items[-1].indices(sum(sections))
            if step != 1 or (low, high) not in zip(borders, borders[1:], strict=False):
                return None
            return [Cut(last, (high - low) // self.units)]
        return None

    def _elementwise(self, op: Op) -> Cuts:
        """Same place in all that is cut; the rest is whole, and one of those in the table above."""
        if len(op.outputs) != 1:
            return None
        (made,) = op.outputs
        dims = len(self.shape(made))
        places = {
            Cut(cut.dim + dims - len(self.shape(value)), cut.size)
            for value in op.inputs
            if (cut := self.cuts.get(value)) is not None
        }
        places |= {
            Cut(cut.dim + dims - len(self.inside.state[name].shape), cut.size)
            for name in op.state
            if (cut := self.cut_state.get(name)) is not None
        }
        if len(places) != 1:
            return None
        (place,) = places
        whole: list[tuple[int | str, tuple[int, ...], bool]] = [
            (v, self.shape(v), self.program.specs[v].grad)
            for v in op.inputs
            if v not in self.cuts
        ]
        for name in op.state:
            if name in self.cut_state:
                continue
            if name not in self.inside.state:
                return None
            tensor = self.inside.state[name]
            whole.append((name, tuple(tensor.shape), tensor.requires_grad))
        for value, shape, grad in whole:
            if not self._meets(op, value, shape, grad, place, dims):
                return None
        return [place]

    def _meets(
        self,
        op: Op,
        value: int | str,
        shape: tuple[int, ...],
        grad: bool,
        place: Cut,
        dims: int,
    ) -> bool:
        """Whether a whole operand may meet units along `place`, of a result of `dims` dims."""
        at = place.dim - dims + len(shape)
        if isinstance(value, int) and value in self.alike and self.alike[value] == at:
            return not grad or value in self.entered
        if at >= 0 and shape[at] != 1:
            return self._takes_own(op, value, grad, (dims - place.dim, place.size))
        if not grad or (isinstance(value, int) and value in self.entered):
            return True
        names = frozenset([value]) if isinstance(value, str) else self.of_state.get(value)
        if names is None:
            return False
        self.summed |= names
        return True

    def _takes_own(self, op: Op, value: int | str, grad: bool, at: tuple[int, int]) -> bool:
        """A member takes its part of a whole operand, along a dim from the end."""
        dim, size = at
        if name_of(op) not in FITTED or (isinstance(value, int) and value in self.entered):
            return False
        if self.operands.setdefault((name_of(op), dim), size) != size:
            return False
        if grad:
            self.operand_grads.add(value if isinstance(value, int) else -1)
        return True

    def _made_whole(self, mask: int, heads: int) -> bool:
        """Anything goes: the trial compares every shape with fewer units."""
        return True

    def _dropout_module(self, op: Op) -> Cuts:
        assert op.layer is not None
        module = self.inside.modules[op.layer]
        if sum(1 for other in self.program.ops if other.layer == op.layer) != 1:
            return None
        if self.is_last(op):
            self.dropouts.append(op.layer)
            return self._elementwise(op)
        (value,) = op.inputs
        if getattr(module, "p", 0.0) and (
            self.cuts[value].dim != 1 or len(self.shape(value)) != 4
        ):
            return None
        self.head_dropouts.append(op.layer)
        return self._elementwise(op)

    def _dropout(self, op: Op) -> Cuts:
        """F.dropout, which draws by heads where dim 1 of four is the heads'."""
        found = self.first(op)
        if found is None:
            return None
        p = heads._argument(op, 1, "p", 0.5)
        training = heads._argument(op, 2, "training", True)
        if p and training:
            if found[0].dim != 1 or len(found[1]) != 4:
                return None
            if "()" not in self.head_dropouts:
                self.head_dropouts.append("()")
        return [found[0]]


def _matmul(follower: Follower, op: Op) -> Cuts:
    """Products whose units are in a batch dim of both sides."""
    assert isinstance(follower, UnitFollower)
    sides = op.args[:2]
    if len(sides) != 2 or not all(isinstance(s, Ref) for s in sides):
        return None
    return _product(follower, op, [s.index for s in sides])


def _product(follower: UnitFollower, op: Op, sides: list[int]) -> Cuts:
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


def _baddbmm(follower: Follower, op: Op) -> Cuts:
    """A bias of every unit, which a member takes its part of, and a product."""
    assert isinstance(follower, UnitFollower)
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
    met = follower._meets(op, bias, follower.shape(bias), grad, found[0], dims)
    return found if met else None


def _reduce(follower: Follower, op: Op) -> Cuts:
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
        return None
    kept = len(follower.shape(op.outputs[0])) == len(shape)
    left = cut if kept else Cut(cut.dim - sum(d < cut.dim for d in gone), cut.size)
    return [left] * len(op.outputs)


def _normalize(follower: Follower, op: Op) -> Cuts:
    """A norm over dims other than the units'; its weights' gradients are summed."""
    assert isinstance(follower, UnitFollower)
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
    follower.summed |= follower._trained(op.state)
    for other in others:
        follower.summed |= follower.of_state[other]
    return [cut]


def _join(follower: Follower, op: Op) -> Cuts:
    """Values that are all cut alike, or alike for all units, along another dim."""
    assert isinstance(follower, UnitFollower)
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


def _like(follower: Follower, op: Op) -> Cuts:
    found = follower.first(op)
    return None if found is None else [found[0]]


def _like_in(follower: Follower, op: Op) -> Cuts:
    """A new tensor with as many units in the same dim."""
    found = follower.first(op)
    if found is None:
        return None
    cut, shape = found
    new = follower.shape(op.outputs[0])
    same = len(new) == len(shape) and new[cut.dim] == shape[cut.dim]
    return [cut] if same else None


def _glu(follower: Follower, op: Op) -> Cuts:
    """Two halves multiplied, each with all units."""
    found = follower.first(op)
    dim = heads._dim(op, 1, "dim", len(found[1]), -1) if found is not None else None
    if found is None or dim is None:
        return None
    cut, shape = found
    if dim == cut.dim and (shape[dim] // 2) % (cut.size * follower.units):
        return None
    return [cut]


def _attribute(follower: Follower, op: Op) -> Cuts:
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


def _select(follower: Follower, op: Op) -> Cuts:
    found = follower.first(op)
    dim = heads._dim(op, 1, "dim", len(found[1])) if found is not None else None
    if found is None or dim is None or dim == found[0].dim:
        return None
    kept = len(follower.shape(op.outputs[0])) == len(found[1])
    return [found[0] if kept else Cut(found[0].dim - (dim < found[0].dim), found[0].size)]


def _index(follower: Follower, op: Op) -> Cuts:
    """As in `engine.heads`; a list of places along another dim than the units' is a slice."""
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


def _einsum(follower: Follower, op: Op) -> Cuts:
    """Units in one letter of every operand that has them, and of the result."""
    assert isinstance(follower, UnitFollower)
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
        if value not in follower.cuts and (
            letter in term or follower.program.specs[value].grad
        ):
            return None
    return [Cut(right.index(letter), size)] if right.count(letter) == 1 else None


_OWN: dict[str, Callable[[Follower, Op], Cuts]] = {
    **dict.fromkeys(("matmul", "__matmul__", "bmm"), _matmul),
    **dict.fromkeys(("layer_norm", "rms_norm"), _normalize),
    **dict.fromkeys(_REDUCTIONS, _reduce),
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


def local_shape(follower: UnitFollower, value: int, units: int) -> tuple[int, ...]:
    """The shape of a value on a member of so many units."""
    shape = list(follower.shape(value))
    if value in follower.parts:
        shape[-1] = shape[-1] // follower.units * units
    elif value in follower.cuts:
        dim = follower.cuts[value].dim
        shape[dim] = shape[dim] // follower.units * units
    return tuple(shape)


def alike_shape(follower: UnitFollower, value: int, units: int) -> tuple[int, ...] | None:
    """The same for a value that is alike for all units; None: it is not."""
    dim = follower.alike.get(value)
    if dim is None:
        return None
    shape = list(follower.shape(value))
    shape[dim] = shape[dim] // follower.units * units
    return tuple(shape)
