"""Program: the glue between Layers as operations that can be cut into stages.

Place in the flow: made by `engine.trace`, cut by `engine.lower.stages`. It is a few plain classes
rather than an `fx.Graph` because glue passes arbitrary Python objects (configs, caches, slices)
between Layers, which fx cannot print as code, and because shape constants that grow with the batch
become `Rows` expressions here.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from whale.engine.trace.modes import PLAIN, Mode
from whale.errors import CaptureError


@dataclass(frozen=True, slots=True)
class Ref:
    """A value of the program by number."""

    index: int


@dataclass(frozen=True, slots=True)
class State:
    """A parameter or buffer by name, read from this rank's copy of the model."""

    name: str


class Constant:
    """A tensor from outside of the model that glue reads, such as the class weights of a loss."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._moved: tuple[torch.device, int, torch.Tensor] | None = None

    def on(self, device: torch.device) -> torch.Tensor:
        """As it is now, on that device."""
        if self.tensor.device == device:
            return self.tensor
        version = self.tensor._version
        if self._moved is None or self._moved[:2] != (device, version):
            self._moved = device, version, self.tensor.to(device)
        return self._moved[2]

    def __repr__(self) -> str:
        """The same for the same values: a trace is compared with a later one by it."""
        data = self.tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest = hashlib.sha256(data.numpy().tobytes()).hexdigest()[:12]
        return f"a constant of {self.tensor.dtype} {tuple(self.tensor.shape)} ({digest})"


@dataclass(frozen=True, slots=True)
class Rows:
    """An integer that grows with the rows of the batch: `slope * rows + offset`."""

    slope: int
    offset: int


@dataclass(frozen=True, slots=True)
class RowRange:
    """A `range` with a bound that grows with the rows of the batch."""

    start: int | Rows
    stop: int | Rows
    step: int | Rows

    def at(self, rows: int) -> range:
        """It for that many rows."""
        start, stop, step = (
            n.slope * rows + n.offset if isinstance(n, Rows) else n
            for n in (self.start, self.stop, self.step)
        )
        return range(start, stop, step)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueSpec:
    """Shape and dtype of a value; `shape[batch_dim]` is `rows * factor` (batch_dim None.

    No batch in it).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    batch_dim: int | None
    factor: int
    grad: bool

    def at(self, rows: int) -> tuple[int, ...]:
        """The shape for that many rows."""
        if self.batch_dim is None:
            return self.shape
        shape = list(self.shape)
        shape[self.batch_dim] = rows * self.factor
        return tuple(shape)


@dataclass(slots=True, kw_only=True)
class Op:
    """One step: a Layer by path (`layer`) or a function, its arguments, and the values it makes."""

    layer: str | None
    target: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[int, ...]
    where: str
    pure: bool = False
    state: tuple[str, ...] = ()
    mode: Mode = PLAIN
    """What `torch.no_grad` and `torch.autocast` it ran in."""
    random: tuple[str, int] | None = None
    """The name of what it draws: the module whose forward it is in, and the number there."""
    drawn: dict[str, int] = field(default_factory=dict)
    """Of a Layer: how many draws each module had made before."""
    region: Any = None
    """The checkpoint it is inside of: see `engine.trace.regions`."""
    _inputs: tuple[int, ...] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def inputs(self) -> tuple[int, ...]:
        """The values it reads; arguments never change."""
        if self._inputs is None:
            found: list[int] = []
            visit((self.args, self.kwargs), lambda leaf: found.append(leaf.index), Ref)
            self._inputs = tuple(dict.fromkeys(found))
        return self._inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A torch function that read a value and made no tensor: its size, a hook on it."""

    value: int
    name: str
    where: str

    @property
    def hangs(self) -> bool:
        """Whether it leaves something on the value that acts later."""
        return self.name in HANGING


KEPT = "kept"
"""The name of what code of a Layer does that leaves a value where other code may find it."""
HANGING = frozenset({"register_hook", "retain_grad", "register_post_accumulate_grad_hook", KEPT})


@dataclass(slots=True, kw_only=True)
class Program:
    """Operations in execution order. Values 0..num_inputs-1 are the tensors of the batch."""

    num_inputs: int
    ops: list[Op]
    specs: list[ValueSpec] = field(default_factory=list)
    result: Any = None
    asked: list[Asked] = field(default_factory=list)
    written: frozenset[int] = frozenset()
    """Values that were written to in place after they were made, directly or through a view."""
    loss_from: int = 0
    """The first operation of the code that is watched for means: all, if the model makes its loss.
    """

    def digest(self) -> str:
        """The same on all ranks that traced the same operations in the same order."""
        told: list[Any] = []
        for op in self.ops:
            name = getattr(op.target, "__name__", "")
            constants: list[Any] = []
            visit((op.args, op.kwargs), constants.append, _COMPARED)
            told.append((op.layer, name, constants, op.outputs))
        return hashlib.sha256(repr(told).encode()).hexdigest()

    def origins(self) -> dict[int, str]:
        """Where in the user's code each value is made."""
        return {value: op.where for op in self.ops for value in op.outputs}


def is_tree(value: Any) -> bool:
    """Whether `value` is a container that arguments are looked for in."""
    return isinstance(value, (tuple, list, dict, slice)) or hasattr(value, "to_tuple")


def tree_map(value: Any, fn: Callable[[Any], Any]) -> Any:
    """Rebuilds nested tuples, lists, dicts and slices with `fn` on the leaves."""
    if isinstance(value, tuple | list):
        return _sequence(value, [tree_map(v, fn) for v in value])
    if isinstance(value, slice):
        return slice(tree_map(value.start, fn), tree_map(value.stop, fn), tree_map(value.step, fn))
    if isinstance(value, dict):
        return _mapping(value, {k: tree_map(v, fn) for k, v in value.items()})
    return fn(value)


class Size(tuple[Any, ...]):
    """A torch.Size in a program, where it may hold more than integers."""

    __slots__ = ()


def _sequence(like: Any, items: list[Any]) -> Any:
    """`items` in a container of the same type: the user's code may look at it."""
    if isinstance(like, torch.Size | Size):
        whole = all(type(item) is int for item in items)
        return torch.Size(items) if whole else Size(items)
    if hasattr(like, "_fields"):
        return type(like)(*items)
    if type(like) in (list, tuple):
        return type(like)(items)
    try:
        return type(like)(items)
    except Exception:  # noqa: BLE001 - a class with a constructor of its own
        return list(items) if isinstance(like, list) else tuple(items)


def _mapping(like: dict[Any, Any], items: dict[Any, Any]) -> Any:
    """The same for dicts."""
    if type(like) is dict:
        return items
    if hasattr(like, "to_tuple"):  # outputs of transformers, which take no other update
        return type(like)(**items)
    found = copy.copy(like)
    for key, value in items.items():
        found[key] = value
    return found


def visit(value: Any, fn: Callable[[Any], Any], kind: type | tuple[type, ...]) -> None:
    """Calls `fn` on every leaf of `kind`, in order."""

    def look(leaf: Any) -> Any:
        if isinstance(leaf, kind):
            fn(leaf)
        return leaf

    tree_map(value, look)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a nested value, in order."""
    found: list[torch.Tensor] = []
    visit(value, found.append, torch.Tensor)
    return found


def run_ops(
    ops: Sequence[Op],
    values: dict[int, torch.Tensor],
    rows: int,
    layers: Mapping[str, Callable[..., Any]],
    state: Callable[[str], torch.Tensor],
    device: torch.device,
    before: Callable[[Op], None],
) -> dict[int, torch.Tensor]:
    """Runs `ops` on `values` (changed in place).

    The user's Layers and the recorded glue between them.
    """

    def bind(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            return values[leaf.index]
        if isinstance(leaf, Rows):
            return leaf.slope * rows + leaf.offset
        if isinstance(leaf, RowRange):
            return leaf.at(rows)
        if isinstance(leaf, State):
            return state(leaf.name)
        if isinstance(leaf, Constant):
            return leaf.on(device)
        if isinstance(leaf, torch.device):
            # The trace ran on fake CPU tensors: a device in glue (`device=x.device`) is this rank's
            # own.
            return device
        return leaf

    for op in ops:
        fn = layers[op.layer] if op.layer is not None else op.target
        assert fn is not None
        before(op)
        with op.mode.entered(device) if op.mode is not PLAIN else nullcontext():
            out = fn(*tree_map(op.args, bind), **tree_map(op.kwargs, bind))
        made = tensors_in(out)
        if len(made) != len(op.outputs):
            raise CaptureError(
                f"{op.where}: {op.layer or op.target} gave {len(made)} tensors, {len(op.outputs)} "
                "when traced",
                hint="what a Layer returns must not depend on the values of the batch",
            )
        values.update(zip(op.outputs, made, strict=True))
    return values


def merge(first: Program, second: Program, rows: tuple[int, int]) -> Program:
    """One program for every number of rows, out of traces at two.

    Constants that differ become `Rows`.
    """
    if len(first.ops) != len(second.ops):
        raise CaptureError(
            f"the glue runs {len(first.ops)} operations for {rows[0]} rows and {len(second.ops)} "
            f"for {rows[1]}",
            hint="put code that branches or loops on the batch size inside one annotated module",
        )
    ops = []
    for a, b in zip(first.ops, second.ops, strict=True):
        if (a.layer, getattr(a.target, "__name__", None)) != (
            b.layer,
            getattr(b.target, "__name__", None),
        ):
            raise CaptureError(
                f"{a.where}: glue differs with the batch size ({a.layer or a.target} against "
                f"{b.layer or b.target})",
                hint="put code that branches on the batch size inside one annotated module",
            )
        args, kwargs = _merge_tree((a.args, a.kwargs), (b.args, b.kwargs), rows, a.where)
        ops.append(
            Op(
                layer=a.layer,
                target=a.target,
                args=args,
                kwargs=kwargs,
                outputs=a.outputs,
                where=a.where,
                pure=a.pure,
                state=a.state,
                random=a.random,
                mode=a.mode,
                drawn=a.drawn,
                region=a.region,
            )
        )
    specs = [
        _merge_spec(x, y, rows, index)
        for index, (x, y) in enumerate(zip(first.specs, second.specs, strict=True))
    ]
    return Program(
        num_inputs=first.num_inputs,
        ops=ops,
        specs=specs,
        result=first.result,
        asked=first.asked,
        written=first.written | second.written,
        loss_from=first.loss_from,
    )


def check_rows(program: Program, traced: Program, rows: int) -> None:
    """Raises if the glue for `rows` rows, traced by itself, is not what `program` makes of it.

    Code such as `rows // 2` or `if rows > 4` looks constant in traces at two numbers of rows.
    """
    hint = "put code that computes with or branches on the batch size inside one annotated module"
    if len(program.ops) != len(traced.ops):
        raise CaptureError(
            f"the glue runs {len(traced.ops)} operations for {rows} rows and {len(program.ops)} "
            "for a few",
            hint=hint,
        )

    def constants(op: Op) -> list[str]:
        found: list[str] = []

        def add(leaf: Any) -> None:
            if isinstance(leaf, Rows):
                leaf = leaf.slope * rows + leaf.offset
            elif isinstance(leaf, RowRange):
                leaf = leaf.at(rows)
            found.append(repr(leaf))

        visit((op.args, op.kwargs), add, _COMPARED)
        return found

    for known, found in zip(program.ops, traced.ops, strict=True):
        same = (known.layer, known.outputs) == (found.layer, found.outputs)
        same = same and getattr(known.target, "__name__", 0) == getattr(found.target, "__name__", 0)
        if not same or constants(known) != constants(found):
            pairs = zip(constants(known), constants(found), strict=False)
            what = next((f"{b} instead of {a}" for a, b in pairs if a != b), "another operation")
            raise CaptureError(
                f"{found.where}: the glue for {rows} rows differs from that for a few ({what})",
                hint=hint,
            )


_PLAIN = (Ref, State, bool, int, float, str, type(None), torch.dtype)
_COMPARED = (Ref, State, Constant, Rows, RowRange, range, bool, int, float, str, torch.dtype)


def _merge_tree(a: Any, b: Any, rows: tuple[int, int], where: str) -> Any:
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)) and len(a) == len(b):
        return _sequence(a, [_merge_tree(x, y, rows, where) for x, y in zip(a, b, strict=True)])
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return _mapping(a, {k: _merge_tree(a[k], b[k], rows, where) for k in a})
    if isinstance(a, slice) and isinstance(b, slice):
        return slice(
            _merge_tree(a.start, b.start, rows, where),
            _merge_tree(a.stop, b.stop, rows, where),
            _merge_tree(a.step, b.step, rows, where),
        )
    if isinstance(a, range) and isinstance(b, range) and a != b:
        bounds = ((a.start, b.start), (a.stop, b.stop), (a.step, b.step))
        return RowRange(*(_merge_tree(x, y, rows, where) for x, y in bounds))
    hint = "put arithmetic on the batch size inside one annotated module"
    if isinstance(a, tuple | list | dict) and isinstance(b, tuple | list | dict):
        raise CaptureError(
            f"{where}: a list, tuple or dict in the glue has {len(a)} items for {rows[0]} rows and "
            f"{len(b)} for {rows[1]}",
            hint=hint + "; or make a tensor of the batch's size with torch.full or torch.arange",
        )
    if type(a) is int and type(b) is int and a != b:
        slope, rest = divmod(b - a, rows[1] - rows[0])
        if rest == 0:
            return Rows(slope, a - slope * rows[0])
    elif isinstance(a, _PLAIN) and isinstance(b, _PLAIN) and repr(a) != repr(b):
        pass
    elif isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and not _same_arrays(a, b):
        raise CaptureError(
            f"{where}: an array of numpy in the glue is of shape {a.shape} for {rows[0]} rows and "
            f"{b.shape} for {rows[1]}, or has other values",
            hint="make it a tensor, by torch's functions (torch.arange instead of numpy.arange)",
        )
    else:
        return a
    raise CaptureError(
        f"{where}: a constant of the glue is {a!r} for {rows[0]} rows and {b!r} for {rows[1]}",
        hint=hint,
    )


def _same_arrays(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def _merge_spec(a: ValueSpec, b: ValueSpec, rows: tuple[int, int], index: int) -> ValueSpec:
    changed = [d for d, (x, y) in enumerate(zip(a.shape, b.shape, strict=False)) if x != y]
    if not changed and len(a.shape) == len(b.shape):
        return a
    if len(changed) == 1 and a.shape[changed[0]] % rows[0] == 0:
        dim = changed[0]
        factor = a.shape[dim] // rows[0]
        if b.shape[dim] == factor * rows[1]:
            return ValueSpec(
                shape=a.shape, dtype=a.dtype, batch_dim=dim, factor=factor, grad=a.grad
            )
    # Not a value that can cross stages; refused only if it has to (engine.lower.stages).
    return ValueSpec(shape=a.shape, dtype=a.dtype, batch_dim=-1, factor=0, grad=a.grad)
