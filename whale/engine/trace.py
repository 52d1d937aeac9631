"""The glue tracer: the user's own `forward` on fake tensors, written down between Layers.

Place in the flow: used by `engine.capture` when there is more than one stage. Layers are opaque.
Glue that reads the *value* of a tensor is evaluated when the value depends on constants alone, and
refused with the user's file and line when it depends on the batch: a trace would silently freeze
one outcome.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode, resolve_name

from whale.engine.program import Op, Program, Ref, State, ValueSpec, tensors_in, tree_map
from whale.errors import CaptureError
from whale.runtime.compat import real_tensors

READS = {
    "__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__",
    "item", "tolist", "numpy", "is_nonzero", "equal", "__array__",
}  # fmt: skip
_RANDOM = ("rand", "bernoulli", "normal", "dropout", "multinomial", "uniform", "exponential")
# A constant larger than this is not kept as a real tensor beside its fake one.
_CONSTANT_ELEMENTS = 1 << 26


def user_line() -> str:
    """file:line of the innermost frame that is neither torch's nor this package's engine."""
    engine = os.path.dirname(os.path.abspath(__file__))
    torch_root = os.path.dirname(os.path.abspath(torch.__file__))
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = os.path.abspath(frame.f_code.co_filename)
        if not name.startswith((engine, torch_root)):
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def set_item(tensor: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    """`tensor[index] = value` as an operation that gives the changed tensor."""
    tensor[index] = value
    return tensor


_ATTENTION = "scaled_dot_product_attention"


@dataclass(frozen=True, slots=True)
class RandomCall:
    """A random function seen in a Layer or in glue, and the shape it draws (None.

    Not one Whale keys).
    """

    layer: str
    name: str
    shape: tuple[int, ...] | None


class GlueTracer(TorchFunctionMode):
    """Records torch functions called in glue; `layer_call` records Layers."""

    def __init__(self, inputs: list[torch.Tensor], state: Mapping[int, str]) -> None:
        super().__init__()
        self.state = state
        self.program = Program(num_inputs=len(inputs), ops=[])
        self.keep: list[torch.Tensor] = []
        self.refs: dict[int, int] = {}
        self.pure: list[bool] = []
        self.from_layers: set[int] = set()
        self.constants: dict[int, torch.Tensor] = {}
        self.paused = 0
        self.layer = ""
        self.training = True
        self.calls: list[RandomCall] = []
        for tensor in inputs:
            self._value(tensor, pure=True)

    def _value(self, tensor: torch.Tensor, *, pure: bool) -> int:
        index = len(self.program.specs)
        self.refs[id(tensor)] = index
        self.keep.append(tensor)
        self.pure.append(pure)
        self.program.specs.append(
            ValueSpec(
                shape=tuple(tensor.shape),
                dtype=tensor.dtype,
                batch_dim=None,
                factor=1,
                grad=tensor.requires_grad,
            )
        )
        return index

    def reference(self, value: Any, where: str) -> tuple[Any, bool, tuple[str, ...]]:
        """`value` with tensors replaced by references; whether it is pure; the state it reads."""
        pure = True
        names: list[str] = []

        def leaf(item: Any) -> Any:
            nonlocal pure
            if not isinstance(item, torch.Tensor):
                # A key-value cache has no use in training, and one kept from the trace would be
                # stale.
                return None if is_cache(item) else item
            if id(item) in self.refs:
                index = self.refs[id(item)]
                if isinstance(item.grad_fn, BackwardCFunction) and index not in self.from_layers:
                    raise CaptureError(
                        f"{where}: the glue between stages calls an autograd.Function "
                        f"({type(item.grad_fn).__name__}), whose backward a trace would lose",
                        hint="call it inside an annotated module, where it runs as it stands",
                    )
                pure = pure and self.pure[index]
                return Ref(index)
            if id(item) in self.state:
                pure = False
                names.append(self.state[id(item)])
                return State(self.state[id(item)])
            raise CaptureError(
                f"{where}: glue uses a tensor of shape {tuple(item.shape)} that is neither in the "
                "batch, "
                "nor a parameter or buffer, nor made by glue",
                hint="register it as a buffer (register_buffer), or move this code into an "
                "annotated module",
            )

        return tree_map(value, leaf), pure, tuple(names)

    def record(
        self,
        *,
        layer: str | None,
        target: Callable[..., Any] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        random: bool = False,
    ) -> None:
        """Appends an operation whose result was `out`."""
        where = user_line()
        (ref_args, ref_kwargs), pure, names = self.reference((args, kwargs), where)
        pure = pure and layer is None and not random
        outputs = tuple(self._value(tensor, pure=pure) for tensor in tensors_in(out))
        if layer is not None:
            self.from_layers.update(outputs)
        self.program.ops.append(
            Op(
                layer=layer,
                target=target,
                args=ref_args,
                kwargs=ref_kwargs,
                outputs=outputs,
                where=where,
                pure=pure,
                state=names,
                random=self._glue_number() if random else None,
                call=sum(1 for op in self.program.ops if layer is not None and op.layer == layer),
            )
        )

    def _glue_number(self) -> int:
        return sum(1 for call in self.calls if call.layer == "") - 1

    def _note_random(self, func: Any, name: str, args: tuple[Any, ...], kwargs: Any) -> None:
        if func is F.dropout:
            drawn = tuple(args[0].shape if args else kwargs["input"].shape)
            self.calls.append(RandomCall(self.layer, name, drawn))
        elif name == _ATTENTION:
            p = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
            if p:
                q, k = (
                    args[i] if len(args) > i else kwargs[n] for i, n in ((0, "query"), (1, "key"))
                )
                drawn = (*q.shape[:-1], k.shape[-2])
                self.calls.append(RandomCall(self.layer, name, drawn))
        elif self.training and not name.endswith("_"):
            self.calls.append(RandomCall(self.layer, name, None))

    def layer_call(
        self, path: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs a Layer without looking inside and records the call."""
        if self.paused:
            return forward(*args, **kwargs)
        self.paused += 1
        self.layer = path
        try:
            out = forward(*args, **kwargs)
        finally:
            self.paused -= 1
            self.layer = ""
        self.record(layer=path, target=None, args=args, kwargs=kwargs, out=out)
        return out

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if any(word in name for word in _RANDOM) or name == _ATTENTION:
            self._note_random(func, name, args, kwargs)
        if self.paused:
            return func(*args, **kwargs)
        if name in READS:
            return self._read(func, name, args, kwargs)
        if name == "__setitem__":
            func, name = set_item, "set_item"
        out = func(*args, **kwargs)
        if name == "__get__":
            if not tensors_in(out):
                return out
            getter, attribute = func, func.__self__.__name__
            del getter
            self.record(layer=None, target=getattr, args=(args[0], attribute), kwargs={}, out=out)
            return out
        made = tensors_in(out)
        if made:
            random = any(word in name for word in _RANDOM)
            self._keep_constant(func, args, kwargs, out, random)
            self.record(layer=None, target=func, args=args, kwargs=kwargs, out=out, random=random)
        return None if func is set_item else out

    def _constant_args(self, value: Any) -> Any | None:
        known = True

        def leaf(item: Any) -> Any:
            nonlocal known
            if isinstance(item, torch.Tensor):
                if id(item) not in self.constants:
                    known = False
                    return item
                return self.constants[id(item)]
            return item

        mapped = tree_map(value, leaf)
        return mapped if known else None

    def _keep_constant(
        self, func: Any, args: tuple[Any, ...], kwargs: Any, out: Any, random: bool
    ) -> None:
        made = tensors_in(out)
        if random or sum(t.numel() for t in made) > _CONSTANT_ELEMENTS:
            return
        known = self._constant_args((args, kwargs))
        if known is None:
            return
        with real_tensors():
            real = tensors_in(func(*known[0], **known[1]))
        for fake, value in zip(made, real, strict=True):
            self.keep.append(fake)
            self.constants[id(fake)] = value

    def _read(self, func: Any, name: str, args: tuple[Any, ...], kwargs: Any) -> Any:
        known = self._constant_args((args, kwargs))
        if known is not None:
            with real_tensors():
                return func(*known[0], **known[1])
        raise CaptureError(
            f"the glue between stages reads the value of a tensor that depends on the batch "
            f"(`{resolve_name(func) or name}`)",
            hint="put this code inside one annotated module, where it runs as it stands; or pass "
            "the decision in as "
            "a Python value",
            where=user_line(),
        )


def is_cache(value: Any) -> bool:
    """Whether this is transformers' key-value cache, which training does not need."""
    return any(
        t.__name__ == "Cache" and t.__module__.startswith("transformers")
        for t in type(value).__mro__
    )


def add_constants(tracer: GlueTracer, tensors: Mapping[int, torch.Tensor]) -> None:
    """Makes buffers whose real values are known usable in branches."""
    tracer.constants.update(tensors)
