"""Units: a follower of heads and columns that knows eager attention, norms and adapters.

Place in the flow: asked by `engine.split.unit_options` about a set of Linears (columns) and those
that read what becomes of them (rows). Beside `engine.split.heads.Follower`, whose walk through the
trace it shares, it follows products written out (matmul, softmax), values that are whole and meet
units:

| a whole value that meets units | what a member does with it |
|---|---|
| has a dim as large as the units' | reads its own part there (ALiBi, a bias of each head) |
| is alike for all units, no gradient | reads it as it is (a mask, rotary tables) |
| is made of parameters alone | its gradient is summed over the members (norms of heads) |
| comes out of an entry | the entry's output is entered, so its gradient is summed there |

Everything else ends the walk with a reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from whale.engine.split import heads
from whale.engine.split.heads import ATTENTION, Cut, Cuts, Follower, Inside, is_elementwise
from whale.engine.split.unit_ops import UNIT_OPS, name_of, reduce_dims
from whale.engine.trace.program import Op, Ref, State
from whale.nn.forwards import has_hooks

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
        self.operands: dict[tuple[str, int], set[int]] = {}
        """Whole operands of which a member takes its part: (function, dim from the end): sizes."""
        self.means: dict[int, int] = {}
        """Means over the columns of all units, which members sum: value, and their width."""
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
        prefix = f"{self.path}." if self.path else ""
        below = [
            m for p, m in self.inside.modules.items() if p.startswith(prefix) and p != self.path
        ]
        if any(map(has_hooks, below)):
            self.reason = "a hook would see a part of its values"
            return False
        self.linears = {*sections, *rows, *entries}
        for place, op in enumerate(self.program.ops):
            self.progress = place
            touched = [v for v in op.inputs if v in self.cuts or v in self.parts]
            if op.layer is not None and op.layer in sections and not touched:
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
        if self.means and not self._means_are_told_apart():
            self.reason = "it has means of several kinds"
            return False
        if any(
            a.hangs and (a.value in self.cuts or a.value in self.parts) for a in self.program.asked
        ):
            self.reason = "a hook on a tensor would see a part of it"
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

    def follow_rows(self) -> bool:
        """Whether units stay apart from the module's one input to its one output, in their order.

        Units are along dim 0 of both, and of all `cut_state`.
        """
        (read, *more), (made, *others) = self.call.reads or (None,), self.call.values or (None,)
        if read is None or made is None or more or others:
            return False
        if self.shape(read)[0] % self.units:
            return False
        self.cuts[read] = Cut(0, self.shape(read)[0] // self.units)
        for op in self.program.ops[self.call.first : self.call.last]:
            touched = any(v in self.cuts for v in op.inputs)
            if not touched and not any(name in self.cut_state for name in op.state):
                continue
            found = self._step(op)
            if found is None:
                return False
            self.cuts.update((v, c) for v, c in zip(op.outputs, found, strict=True) if c)
        self.returned.append((0, 0, 0))
        cut = self.cuts.get(made)
        in_order = cut is not None and cut.dim == 0
        more_marks = self.summed or self.operands or self.means or self.head_dropouts
        return bool(
            in_order
            and cut is not None
            and cut.size * self.units == self.shape(made)[0]
            and not more_marks
            and not self.dropouts
        )

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
            self.summed.update(self.trained(op.state))
            if op.layer is not None:
                held = {id(p) for p in self.inside.modules[op.layer].parameters()}
                own = [n for n, p in self.inside.state.items() if id(p) in held]
                self.summed.update(self.trained(own))
            for value in op.inputs:
                self.summed.update(self.of_state.get(value, ()))
        elif op.layer is None and all(v in self.of_state for v in op.inputs):
            names = frozenset(self.trained(op.state))
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
        elif name_of(op) in ELEMENTWISE and not op.state:
            # Others in it have one element there, or as many that are alike too.
            dims = {
                dim + len(shape) - len(self.shape(value))
                for value in op.inputs
                if (dim := self.alike.get(value)) is not None
            }
            if len(dims) == 1 and all(
                value in self.alike or self._has_one(value, len(shape) - min(dims))
                for value in op.inputs
            ):
                self.alike[made] = dims.pop()

    def _has_one(self, value: int, dim: int) -> bool:
        """Whether a value has one element, or no dim, at that dim from the end."""
        shape = self.shape(value)
        return len(shape) < dim or shape[-dim] == 1

    def trained(self, names: Iterable[str]) -> set[str]:
        """Those of these that are trainable parameters."""
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
            inside = [v for v in (*op.inputs, *op.outputs) if v in self.cuts or v in self.entered]
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
            return reduce_dims(self, op)
        if name in ELEMENTWISE or name in ("max", "min"):
            return self._elementwise(op)
        own = UNIT_OPS.get(name)
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
        subject = op.args[0] if op.args else None
        if name_of(op) in ("to", "type_as") and isinstance(subject, Ref):
            # The other tensor only says which dtype and device.
            return [self.cuts.get(subject.index)]
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
            (v, self.shape(v), self.program.specs[v].grad) for v in op.inputs if v not in self.cuts
        ]
        for name in op.state:
            if name in self.cut_state:
                continue
            if name not in self.inside.state:
                return None
            tensor = self.inside.state[name]
            whole.append((name, tuple(tensor.shape), tensor.requires_grad))
        for value, shape, grad in whole:
            if not self.meets(op, value, shape, grad, place, dims):
                return None
        return [place]

    def meets(
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
        self.operands.setdefault((name_of(op), dim), set()).add(size)
        if grad:
            self.operand_grads.add(value if isinstance(value, int) else -1)
        return True

    def mean_of_all(self, op: Op, cut: Cut) -> Cuts:
        """A mean over the last dim, which is all units' in order: members sum their parts of it."""
        value, made = op.args[0], op.outputs
        shape = self.shape(value.index)
        in_order = cut.dim == len(shape) - 1 and cut.size * self.units == shape[-1]
        kept = len(made) == 1 and len(self.shape(made[0])) == len(shape)
        if name_of(op) != "mean" or op.kwargs.get("dtype") is not None or not in_order or not kept:
            return None
        self.means[made[0]] = shape[-1]
        self.entered.update(made)
        return [None]

    def _means_are_told_apart(self) -> bool:
        """Whether no other mean has as many columns as a member might have of those."""
        local = {w // self.units * n for w in self.means.values() for n in range(1, self.units + 1)}
        return not any(
            name_of(op) == "mean"
            and op.outputs[0] not in self.means
            and isinstance(op.args[0], Ref)
            and self.shape(op.args[0].index)[-1] in local
            for op in self.program.ops[self.call.first : self.call.last]
        )

    def _attention(self, op: Op) -> Cuts:
        mask = heads._argument(op, 3, "attn_mask")
        if (
            isinstance(mask, Ref)
            and mask.index in self.alike
            and self.program.specs[mask.index].grad
        ):
            return None  # its gradient would be that of the own heads only
        return super()._attention(op)

    def _dropout_module(self, op: Op) -> Cuts:
        assert op.layer is not None
        module = self.inside.modules[op.layer]
        if sum(1 for other in self.program.ops if other.layer == op.layer) != 1:
            return None
        if self.is_last(op):
            self.dropouts.append(op.layer)
            return self._elementwise(op)
        (value,) = op.inputs
        if getattr(module, "p", 0.0) and (self.cuts[value].dim != 1 or len(self.shape(value)) != 4):
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
