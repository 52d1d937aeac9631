"""WorkCounter: what every Layer computes, moves and keeps, counted while the model runs on fakes.

Place in the flow: around both runs of `engine.capture`; its counts become `ir.model_graph.Work` and
the byte fields of a Layer, which the cost model prices. What runs between Layers (glue, the loss)
is counted to the Layer before it, which is also the one whose stage runs it.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from whale.engine.trace.examples import TensorShape
from whale.engine.trace.program import tensors_in
from whale.engine.trace.tracer import user_line
from whale.errors import CaptureError
from whale.ir.model_graph import DROPOUT_BYTES, Linear, Work
from whale.runtime.compat import PRODUCTS, in_transform, operation_flops

# cuDNN keeps 4 gates, the cell and its tanh beside the output; the CPU kernel used on fakes does
# not say so. Checked against measured peaks: benchmarks/results/heterogeneous-gpu.md.
_RNN_KEPT = 6
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


@dataclass(slots=True)
class Counts:
    """One Layer in one run."""

    calls: dict[str, int] = field(default_factory=dict)
    flops: dict[str, float] = field(default_factory=dict)
    moved: dict[str, float] = field(default_factory=dict)
    kept: float = 0.0
    """Bytes the backward needs."""
    entered: float = 0.0
    """Bytes of the Layer's inputs that none before it was given."""
    products: float = 0.0
    """Bytes that its products make."""
    largest: float = 0.0
    """Bytes that the largest single operation makes."""
    read: float = 0.0
    """Bytes of the Layer's inputs."""
    made: float = 0.0
    """Bytes of its outputs."""
    glue: dict[str, list[float]] = field(default_factory=dict)
    """What runs after it, until the next Layer: calls, FLOPs and bytes by kind."""

    def add(self, kind: str, calls: int, flops: float, moved: float) -> None:
        """Some operations of one kind."""
        self.calls[kind] = self.calls.get(kind, 0) + calls
        self.flops[kind] = self.flops.get(kind, 0.0) + flops
        self.moved[kind] = self.moved.get(kind, 0.0) + moved


class WorkCounter(TorchDispatchMode):
    """Counts under it, Layer by Layer."""

    def __init__(self, state: list[torch.Tensor]) -> None:
        super().__init__()
        self.layers: dict[str, Counts] = {}
        self._at: str | None = None
        """The Layer that runs or ran last; the root's path is empty."""
        self._inside = 0
        self._early = Counts()
        # Weights, buffers and the batch are in memory anyway: keeping them for backward is free.
        self._seen = {_storage(t) for t in state}
        self._given = set(self._seen)
        """What lies there, and what Layers were given so far."""
        self._alive: list[torch.Tensor] = []
        self._hooks: Any = None
        self._off = 0

    def __enter__(self) -> WorkCounter:
        self._hooks = saved_tensors_hooks(self._keep, lambda tensor: tensor)
        self._hooks.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._hooks.__exit__(*exc)
        first = next(iter(self.layers.values()), None)
        if first is not None:
            _join(first, self._early)

    def layer(self, path: str, inputs: Any, call: Callable[[], Any]) -> Any:
        """Runs a Layer; what follows until the next one is counted to it too."""
        self._at = path
        if not self._off and not in_transform():  # what is mapped over lies nowhere
            self._enter(inputs)
        self._inside += 1
        try:
            out = call()
        finally:
            self._inside -= 1
        counts = self._counts()
        counts.read += _nbytes(inputs)
        counts.made += _nbytes(out)
        return out

    def _enter(self, inputs: Any) -> None:
        for tensor in tensors_in(inputs):
            where = _storage(tensor)
            if where not in self._given:
                self._given.add(where)
                self._alive.append(tensor)
                self._counts().entered += tensor.untyped_storage().nbytes()

    def paused(self, call: Callable[[], Any]) -> Any:
        """Runs something that is no part of the model's step."""
        self._off += 1
        try:
            return call()
        finally:
            self._off -= 1

    def instead(self, call: Callable[[], Any], other: Callable[[Exception], Any]) -> Any:
        """Runs `call` or, where it fails, `other`: what the first had counted is forgotten."""
        before = copy.deepcopy(self._counts())
        try:
            return call()
        except Exception as error:
            if self._at is not None:
                self.layers[self._at] = before
            return other(error)

    def lies_there(self, tensors: Iterable[torch.Tensor]) -> None:
        """These are in memory anyway."""
        for tensor in tensors:
            self._seen.add(_storage(tensor))
            self._given.add(_storage(tensor))
            self._alive.append(tensor)

    def dropout(self, x: torch.Tensor) -> None:
        """A dropout, whose module is replaced during capture."""
        self._counts().kept += x.numel()  # its mask, a byte each
        self._add("dropout", 1, 0.0, DROPOUT_BYTES * x.numel())

    def _add(self, kind: str, calls: int, flops: float, moved: float) -> None:
        counts = self._counts()
        if self._inside:
            counts.add(kind, calls, flops, moved)
            return
        found = counts.glue.setdefault(kind, [0.0, 0.0, 0.0])
        for i, value in enumerate((calls, flops, moved)):
            found[i] += value

    def _counts(self) -> Counts:
        if self._at is None:
            return self._early
        return self.layers.setdefault(self._at, Counts())

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        where = _storage(tensor)
        if where not in self._seen and not self._off:
            self._seen.add(where)
            self._alive.append(tensor)  # or another tensor could take its address
            self._counts().kept += tensor.untyped_storage().nbytes()
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in _COLLECTIVES:
            raise CaptureError(
                f"the model's code calls torch.distributed itself ({func.overloadpacket.__name__})",
                hint="Whale gives every rank its rows and adds up losses, gradients and statistics "
                "by itself: write the model and the loss for one device, over all rows of a batch",
                where=user_line(),
            )
        out = func(*args, **kwargs)
        if self._off or func.is_view or func.namespace == "prim":
            return out
        made = tensors_in(out)
        if not made:
            return out
        name = func.overloadpacket.__name__
        kind = PRODUCTS.get(name, "memory")
        read = tensors_in((args, kwargs))
        size = _nbytes(made)
        moved = size + _nbytes(read)
        counts = self._counts()
        self._add(kind, 1, operation_flops(func, args, kwargs, out), moved)
        counts.largest = max(counts.largest, size)
        if kind != "memory" and self._inside:
            counts.products += size
        if kind == "rnn":
            counts.kept += _RNN_KEPT * made[0].numel() * made[0].element_size()
        return out


def _nbytes(value: Any) -> float:
    return float(sum(t.numel() * t.element_size() for t in tensors_in(value)))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _join(into: Counts, other: Counts) -> None:
    for kind, numbers in other.glue.items():
        found = into.glue.setdefault(kind, [0.0, 0.0, 0.0])
        for i, value in enumerate(numbers):
            found[i] += value
    into.kept += other.kept
    into.largest = max(into.largest, other.largest)


def line_through(a: float, b: float, rows: tuple[int, int]) -> Linear:
    """The quantity that is `a` and `b` at two numbers of rows; nowhere below zero.

    What goes in steps (rooms of experts) or grows faster than rows has no such line. It is taken
    for one through zero then, or for a constant.
    """
    slope = (b - a) / (rows[1] - rows[0])
    fixed = a - slope * rows[0]
    if slope < 0:
        return Linear(fixed=max(a, b), per_row=0.0)
    if fixed < -1e-6 * max(a, b):
        return Linear(fixed=0.0, per_row=max(a / rows[0], b / rows[1]))
    return Linear(fixed=fixed, per_row=slope)


def costs(first: Counts, second: Counts, rows: tuple[int, int]) -> dict[str, Any]:
    """The cost fields of a Layer from its counts at two numbers of rows."""

    def line(a: float, b: float) -> Linear:
        return line_through(a, b, rows)

    nothing = [0.0, 0.0, 0.0]
    totals = [
        sum(counts.flops.values()) + sum(numbers[1] for numbers in counts.glue.values())
        for counts in (first, second)
    ]
    flops = line(*totals)
    return {
        "flops": flops.fixed,
        "flops_per_row": flops.per_row,
        "work": tuple(
            Work(
                kind=kind,
                calls=calls,
                flops=line(first.flops[kind], second.flops.get(kind, 0.0)),
                moved=line(first.moved[kind], second.moved.get(kind, 0.0)),
            )
            for kind, calls in sorted(first.calls.items())
        ),
        "glue": tuple(
            Work(
                kind=kind,
                calls=int(calls),
                flops=line(flops, second.glue.get(kind, nothing)[1]),
                moved=line(moved, second.glue.get(kind, nothing)[2]),
            )
            for kind, (calls, flops, moved) in sorted(first.glue.items())
        ),
        "kept": line(first.kept, second.kept),
        "entered": line(first.entered, second.entered),
        "products": line(first.products, second.products),
        "read": line(first.read, second.read),
        "made": line(first.made, second.made),
        "largest": line(first.largest, second.largest),
    }


def signature(module: torch.nn.Module, costs: dict[str, Any], shapes: list[TensorShape]) -> str:
    """Equal for Layers that take the same time on the same device."""
    parts = [
        type(module).__qualname__,
        [[list(p.shape), str(p.dtype)] for p in module.parameters()],
        [[list(s.shape), s.batch_dim, str(s.dtype)] for s in shapes],
        [[w.kind, w.calls, w.flops.per_row, w.moved.per_row] for w in costs["work"]],
    ]
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]
    return f"{type(module).__qualname__}-{digest}"
