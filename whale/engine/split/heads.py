"""Heads: where the units of a value are, and what views, joins and attention make of them.

Place in the flow: the ground under `engine.split.units`, which follows heads and columns through
the trace of a Layer. Each handler gives the place of the units in what an operation makes; an
operation not known to keep them apart ends the walk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from whale.engine.trace.program import Op, Program, Ref, State
from whale.nn.forwards import has_hooks, has_own_call
from whale.runtime.compat import is_torch_function

ATTENTION = "scaled_dot_product_attention"

_ELEMENTWISE = frozenset(
    "gelu relu relu_ silu sigmoid tanh leaky_relu elu softplus mish hardswish mul __mul__ __rmul__ "
    "add __add__ __radd__ sub __sub__ __rsub__ div __truediv__ pow __pow__ square neg __neg__ exp "
    "to float type_as contiguous clone".split()
)
_ELEMENTWISE_MODULES = (
    nn.GELU, nn.ReLU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.LeakyReLU, nn.ELU, nn.Softplus, nn.Mish,
    nn.Hardswish, nn.ReLU6, nn.SELU, nn.CELU, nn.Dropout, nn.Identity,
)  # fmt: skip


def is_elementwise(op: Op, modules: dict[str, nn.Module]) -> bool:
    """Whether each element of the result depends on the elements at its own place alone."""
    if op.layer is None:
        return name_of(op) in _ELEMENTWISE
    # Not their subclasses, which may compute anything (and draw a dropout that is not keyed), nor
    # those with parameters, whose gradient would be that of the own columns only.
    module = modules[op.layer]
    kind = type(module)
    known = kind in _ELEMENTWISE_MODULES or kind.__module__ == "transformers.activations"
    plain = not has_own_call(module) and not has_hooks(module)
    return known and plain and not any(True for _ in module.parameters())


def name_of(op: Op) -> str:
    """The torch function an operation calls; empty for any other (a user's own of that name)."""
    return getattr(op.target, "__name__", "") if is_torch_function(op.target) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A module's run in a trace: its operations [first, last), what it got, the shapes it gave."""

    first: int
    last: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: tuple[tuple[int, ...], ...]
    values: tuple[int | None, ...] = ()
    """Which values of the trace it gave."""
    reads: tuple[int | None, ...] = ()
    """Which it got."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """The trace of a Layer whose leaf modules are opaque."""

    program: Program
    modules: dict[str, nn.Module]
    state: dict[str, torch.Tensor]
    """Its parameters and buffers by name."""
    calls: dict[str, list[Call]]
    """Of the modules that are not leaves."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Where the units of a value are: along `dim`, element i is of unit `(i // size) % units`."""

    dim: int
    size: int


Cuts = list[Cut | None] | None
"""Of what an operation makes (None: a whole value); None where it may mix units."""


def _argument(op: Op, position: int, name: str, default: Any = None) -> Any:
    return op.args[position] if len(op.args) > position else op.kwargs.get(name, default)


class Follower:
    """Follows the units of some projections through a trace, up to the Linear after attention."""

    def __init__(self, inside: Inside, path: str, units: int) -> None:
        self.inside, self.program, self.units = inside, inside.program, units
        self.path = path
        (self.call,) = inside.calls[path]
        self.cuts: dict[int, Cut] = {}
        self.dropouts: list[str] = []
        """Dropout modules that see columns of some units only."""
        self.mask_grads = 0
        """Masks that need a gradient."""

    def shape(self, value: int) -> tuple[int, ...]:
        """Of a value of the trace."""
        return self.program.specs[value].shape

    def is_last(self, op: Op) -> bool:
        """Whether an operation reads one value, whose last dim is the units in their order."""
        cuts = [(value, self.cuts.get(value)) for value in op.inputs]
        return len(cuts) == 1 and all(
            cut is not None
            and cut.dim == len(self.shape(value)) - 1
            and cut.size * self.units == self.shape(value)[-1]
            for value, cut in cuts
        )

    def first(self, op: Op) -> tuple[Cut, tuple[int, ...]] | None:
        """The first argument's cut and shape, where no other has one."""
        value = op.args[0] if op.args else None
        if not isinstance(value, Ref) or any(
            i in self.cuts and i != value.index for i in op.inputs
        ):
            return None
        cut = self.cuts.get(value.index)
        return None if cut is None else (cut, self.shape(value.index))

    def _attention(self, op: Op) -> Cuts:
        query, *others = (_argument(op, i, n) for i, n in enumerate(("query", "key", "value")))
        mask = _argument(op, 3, "attn_mask")
        for read in (query, *others):
            cut = self.cuts.get(read.index) if isinstance(read, Ref) else None
            shape = self.shape(read.index) if isinstance(read, Ref) else ()
            if cut is None or len(shape) != 4 or cut.dim != 1 or cut.size * self.units != shape[1]:
                return None
        if isinstance(mask, Ref):
            if mask.index in self.cuts:
                return None
            self.mask_grads += self.program.specs[mask.index].grad
        elif isinstance(mask, State):
            if mask.name not in self.inside.state:
                return None
            self.mask_grads += self.inside.state[mask.name].requires_grad
        return [self.cuts[query.index]]


_MORE_ELEMENTWISE = _ELEMENTWISE - {"to", "float", "type_as"} | frozenset(
    "abs clamp cos sin sqrt rsqrt log masked_fill where half double bfloat16".split()
)
SIZES = frozenset(
    "view reshape flatten unflatten expand repeat broadcast_to split chunk tensor_split narrow "
    "__getitem__ repeat_interleave size shape numel stride set_item __get__ getattr".split()
)
"""Functions whose numbers are sizes and places; those of all others are what they compute with."""


def _dim(op: Op, position: int, name: str, dims: int, default: int | None = None) -> int | None:
    """A dim among an operation's arguments, from the front."""
    found = _argument(op, position, name, default)
    return found % dims if type(found) is int else None


def _cast(follower: Follower, op: Op) -> Cuts:
    """The first argument in another dtype; others only say which."""
    value = op.args[0]
    return [follower.cuts.get(value.index) if isinstance(value, Ref) else None]


def _reshape(follower: Follower, op: Op) -> Cuts:
    """Row-major order stays: the units are where the stride from one to the next leads."""
    found = follower.first(op)
    (made,) = op.outputs
    new = follower.shape(made)
    if found is None or prod(new) != prod(found[1]):
        return None
    cut, old = found
    stride = cut.size * prod(old[cut.dim + 1 :])
    for dim, count in enumerate(new):
        inner = prod(new[dim + 1 :])
        size = stride // inner
        if size and stride % inner == 0 and count >= 2 and count % (size * follower.units) == 0:
            return [Cut(dim, size)]
    return None


def _transpose(follower: Follower, op: Op) -> Cuts:
    found = follower.first(op)
    if found is None:
        return None
    cut, shape = found
    a, b = _dim(op, 1, "dim0", len(shape)), _dim(op, 2, "dim1", len(shape))
    if a is None or b is None:
        return None
    return [Cut({a: b, b: a}.get(cut.dim, cut.dim), cut.size)]


def _permute(follower: Follower, op: Op) -> Cuts:
    found = follower.first(op)
    dims = _argument(op, 1, "dims")
    order = list(dims) if isinstance(dims, (tuple, list)) else list(op.args[1:])
    if found is None or not order or not all(type(d) is int for d in order):
        return None
    cut, shape = found
    return [Cut([d % len(shape) for d in order].index(cut.dim), cut.size)]


def _split(follower: Follower, op: Op) -> Cuts:
    """Pieces along another dim, or pieces that hold a part of each unit."""
    found = follower.first(op)
    dim = _dim(op, 2, "dim", len(found[1]), 0) if found is not None else None
    if found is None or dim is None:
        return None
    cut, _ = found
    sizes = [follower.shape(value)[dim] for value in op.outputs]
    if dim == cut.dim and any(size % (cut.size * follower.units) for size in sizes):
        return None
    return [cut] * len(sizes)


def _unbind(follower: Follower, op: Op) -> Cuts:
    found = follower.first(op)
    dim = _dim(op, 1, "dim", len(found[1]), 0) if found is not None else None
    if found is None or dim is None or dim == found[0].dim:
        return None
    cut, _ = found
    return [Cut(cut.dim - (dim < cut.dim), cut.size)] * len(op.outputs)


def _index(follower: Follower, op: Op) -> Cuts:
    """Slices, single elements and new dims; of the units' dim, slices with a part of each unit."""
    found = follower.first(op)
    items = list(op.args[1]) if isinstance(op.args[1], tuple) else [op.args[1]]
    if found is None or not all(i is None or i is ... or type(i) in (int, slice) for i in items):
        return None
    cut, shape = found
    if ... not in items:
        items.append(...)
    at = items.index(...)
    named = sum(1 for i in items if i is not None) - 1
    items[at : at + 1] = [slice(None)] * (len(shape) - named)
    source, target = -1, -1
    for item in items:
        source += item is not None
        target += type(item) is not int
        if item is not None and source == cut.dim:
            if type(item) is int:
                return None
            low, high, step = item.indices(shape[source])
            block = cut.size * follower.units
            return (
                [Cut(target, cut.size)] if (step, low % block, high % block) == (1, 0, 0) else None
            )
    return None


def _expand(follower: Follower, op: Op) -> Cuts:
    """Dims in front, and dims of one element; the units' dim as it is."""
    found = follower.first(op)
    (made,) = op.outputs
    if found is None:
        return None
    cut, shape = found
    new = follower.shape(made)
    place = cut.dim + len(new) - len(shape)
    return [Cut(place, cut.size)] if new[place] == shape[cut.dim] else None


def _repeat_interleave(follower: Follower, op: Op) -> Cuts:
    found = follower.first(op)
    dim = _dim(op, 2, "dim", len(found[1])) if found is not None else None
    times = _argument(op, 1, "repeats")
    if found is None or dim is None or type(times) is not int:
        return None
    cut, _ = found
    return [Cut(cut.dim, cut.size * times if dim == cut.dim else cut.size)]


def _join(follower: Follower, op: Op) -> Cuts:
    """Of values that are all cut alike, along another dim."""
    parts = op.args[0]
    if not isinstance(parts, (tuple, list)) or not all(isinstance(p, Ref) for p in parts):
        return None
    cuts = {follower.cuts.get(part.index) for part in parts}
    cut = cuts.pop()
    new = name_of(op) == "stack"
    dim = _dim(op, 1, "dim", len(follower.shape(parts[0].index)) + new, 0)
    if cuts or cut is None or dim is None or (dim == cut.dim and not new):
        return None
    return [Cut(cut.dim + (new and dim <= cut.dim), cut.size)]


def _complex(follower: Follower, op: Op) -> Cuts:
    """Pairs of the last dim as complex numbers, or back: the dims before it stay."""
    found = follower.first(op)
    if found is None or (name_of(op) == "view_as_complex" and found[0].dim == len(found[1]) - 1):
        return None
    return [found[0]]


def _normalize(follower: Follower, op: Op) -> Cuts:
    """Over dims other than the units'; a weight would get the gradient of the own units only."""
    found = follower.first(op)
    if found is None or op.state or len(op.inputs) != 1:
        return None
    cut, shape = found
    if name_of(op) in ("layer_norm", "rms_norm"):
        over = _argument(op, 1, "normalized_shape", shape)
        return [cut] if cut.dim < len(shape) - len(over) else None
    position, default = (2, 1) if name_of(op) == "normalize" else (1, None)
    dim = _dim(op, position, "dim", len(shape), default)
    kept = name_of(op) != "mean" or op.kwargs.get("keepdim") is True
    return [cut] if kept and dim is not None and dim != cut.dim else None


_HANDLERS: dict[str, Callable[[Follower, Op], Cuts]] = {
    **dict.fromkeys(("to", "float", "type_as"), _cast),
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten"), _reshape),
    **dict.fromkeys(("squeeze", "unsqueeze"), _reshape),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), _transpose),
    **dict.fromkeys(("split", "chunk"), _split),
    **dict.fromkeys(("expand", "repeat", "broadcast_to"), _expand),
    **dict.fromkeys(("cat", "stack"), _join),
    **dict.fromkeys(("view_as_complex", "view_as_real"), _complex),
    **dict.fromkeys(("layer_norm", "rms_norm", "normalize", "mean", "softmax"), _normalize),
    "permute": _permute,
    "unbind": _unbind,
    "__getitem__": _index,
    "repeat_interleave": _repeat_interleave,
}
