"""The glue tracer: the user's own `forward` on fake tensors, written down between Layers.

Place in the flow: used by `engine.capture` when there is more than one stage. Layers are opaque.
Glue that reads the *value* of a tensor is evaluated when the value depends on constants alone, and
refused with the user's file and line when it depends on the batch: a trace would silently freeze
one outcome.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode, resolve_name

from whale.engine.trace.chance import Chances
from whale.engine.trace.closures import held_tensors
from whale.engine.trace.draw_recorder import DrawRecorder, is_random
from whale.engine.trace.modes import Modes
from whale.engine.trace.program import (
    Asked,
    Constant,
    Op,
    Program,
    Ref,
    State,
    ValueSpec,
    tensors_in,
    tree_map,
)
from whale.engine.trace.regions import Regions
from whale.errors import CaptureError
from whale.ir.model_graph import IN_PLACE
from whale.runtime.compat import is_fake, real_tensors, version, watch_functions

READS = {
    "__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__",
    "item", "tolist", "numpy", "is_nonzero", "equal", "__array__",
}  # fmt: skip
_EFFECTS = {"backward", "__set__"}
# A constant larger than this is not kept as a real tensor beside its fake one.
_CONSTANT_ELEMENTS = 1 << 26


_ENGINE = str(Path(__file__).resolve().parents[1])
_WHALE = os.path.dirname(_ENGINE)
_MACHINERY = (
    *(os.path.join(_WHALE, part, "") for part in ("engine", "runtime", "nn")),
    os.path.join(_WHALE, "parallel.py"),
)
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))


def user_line() -> str:
    """file:line of the innermost frame that is neither torch's nor this package's machinery."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = os.path.abspath(frame.f_code.co_filename)
        if not name.startswith((*_MACHINERY, _TORCH)):
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def called_by_machinery() -> bool:
    """Whether the torch function now seen by a mode was called by this package's machinery."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_name == "__torch_function__" or frame.f_code.co_filename.startswith(_TORCH)
    ):
        frame = frame.f_back
    return os.path.abspath(frame.f_code.co_filename).startswith(_MACHINERY)


def called_by_engine() -> bool:
    """Whether the torch function now seen by a mode was called by this package's own code."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        frame.f_code.co_filename == __file__ or frame.f_code.co_name == "__torch_function__"
    ):
        frame = frame.f_back
    return os.path.abspath(frame.f_code.co_filename).startswith(_ENGINE)


def _asks_gradient(func: Any, args: tuple[Any, ...]) -> bool:
    """`x.requires_grad = True` on data, for a checkpoint's sake: no weight's gradient needs it."""
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    return attribute == "requires_grad" and args[1] is True and not args[0].requires_grad


def _storage(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()


def _in_place(function: Any) -> bool:
    name = getattr(function, "__name__", "")
    if name in IN_PLACE:
        return True
    return name.endswith("_") and not name.endswith("__")


def set_item(tensor: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    """`tensor[index] = value` as an operation that gives the changed tensor."""
    tensor[index] = value
    return tensor


# What may be asked of a tensor that is the same for any part of it.
HARMLESS = frozenset(
    "dtype device requires_grad ndim dim ndimension is_floating_point is_complex is_cuda layout "
    "is_leaf grad_fn is_sparse is_quantized is_meta is_mkldnn is_nested is_inference "
    "element_size get_device is_signed is_mps is_xpu is_cpu is_conj is_neg is_sparse_csr "
    "result_type is_tensor".split()
)


class GlueTracer(TorchFunctionMode):
    """Records torch functions called in glue; `layer_call` records Layers."""

    def __init__(
        self,
        inputs: list[torch.Tensor],
        state: Mapping[int, str],
        model: torch.nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.state = state
        # The user's own: what trains is a copy, so they are no constants.
        held = (*model.parameters(), *model.buffers()) if model is not None else ()
        self.stale = {storage for tensor in held if (storage := _storage(tensor))}
        self.program = Program(num_inputs=len(inputs), ops=[])
        self.keep: list[torch.Tensor] = []
        self.made: list[tuple[torch.Tensor, int]] = []
        self.refs: dict[int, int] = {}
        self.pure: list[bool] = []
        self.from_layers: set[int] = set()
        self.from_functions: set[int] = set()
        self.constants: dict[int, torch.Tensor] = {}
        self.outside: dict[int, torch.Tensor] = {}
        self.uses_outside = False
        self.paused = 0
        self.modes = Modes()
        self.recorder = DrawRecorder()
        self.chances = Chances(self.constants)
        self.regions = Regions()
        for tensor in inputs:
            self._value(tensor, pure=True)

    def _value(self, tensor: torch.Tensor, *, pure: bool) -> int:
        index = len(self.program.specs)
        self.refs[id(tensor)] = index
        self.keep.append(tensor)
        self.made.append((tensor, version(tensor)))
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

    def written(self) -> frozenset[int]:
        """The values that were written to since they were made."""
        pairs = enumerate(self.made)
        return frozenset(index for index, (tensor, old) in pairs if version(tensor) != old)

    def reference(self, value: Any, where: str) -> tuple[Any, bool, tuple[str, ...]]:
        """`value` with tensors replaced by references; whether it is pure; the state it reads."""
        pure = True
        names: list[str] = []

        def leaf(item: Any) -> Any:
            nonlocal pure
            if isinstance(item, np.generic):
                return item.item()  # numpy's numbers, of a shape, say, are followed as Python's
            if not isinstance(item, torch.Tensor):
                # A key-value cache has no use in training, and one kept from the trace would be
                # stale.
                return None if is_cache(item) else item
            if id(item) in self.refs:
                index = self.refs[id(item)]
                known = index in self.from_layers or index in self.from_functions
                if isinstance(item.grad_fn, BackwardCFunction) and not known:
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
            if self.from_outside(item):
                self.uses_outside = True
                return Constant(item)
            raise CaptureError(
                f"{where}: glue uses a tensor of shape {tuple(item.shape)} that is neither in the "
                "batch, "
                "nor a parameter or buffer, nor made by glue",
                hint="register it as a buffer (register_buffer), or move this code into an "
                "annotated module",
            )

        return tree_map(value, leaf), pure, tuple(names)

    def from_outside(self, tensor: torch.Tensor) -> bool:
        """Whether it is a constant that the loss closes over, such as class weights."""
        if id(tensor) not in self.outside or tensor.is_meta or tensor.requires_grad:
            return False
        return _storage(tensor) not in self.stale

    def record(
        self,
        *,
        layer: str | None,
        target: Callable[..., Any] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        random: tuple[str, int] | None = None,
        drawn: dict[str, int] | None = None,
    ) -> None:
        """Appends an operation whose result was `out`."""
        where = user_line()
        (ref_args, ref_kwargs), pure, names = self.reference((args, kwargs), where)
        if ref_args and isinstance(ref_args[0], Constant) and _in_place(target):
            raise CaptureError(
                "the glue between stages changes a tensor from outside of the model in place "
                f"(`{getattr(target, '__name__', target)}`): other stages would not see it",
                hint="keep it in a buffer of an annotated module that changes it, or use one stage",
                where=where,
            )
        pure = pure and layer is None and random is None
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
                mode=self.modes.now(),
                random=random,
                drawn=drawn or {},
                region=self.regions.current,
            )
        )

    def region(
        self, function: Any, args: tuple[Any, ...], options: dict[str, Any]
    ) -> AbstractContextManager[None] | None:
        """A checkpoint in the glue: its inside is traced, and marked. In a Layer it is torch's."""
        if self.paused:
            return None
        return self.regions.enter(tensors_in(args), options, user_line())

    def layer_call(
        self, path: str, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs a Layer without looking inside and records the call."""
        if self.paused:
            return forward(*args, **kwargs)
        self.paused += 1
        drawn = dict(self.recorder.names.counts)
        try:
            out = forward(*args, **kwargs)
        finally:
            self.paused -= 1
        with torch._C.DisableTorchFunction():
            self.record(layer=path, target=None, args=args, kwargs=kwargs, out=out, drawn=drawn)
        return out

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in READS:
            return self._read(func, name, args, kwargs)
        if name == "__setitem__":
            func, name = set_item, "set_item"
        if name == "__set__" and not self.paused and _asks_gradient(func, args):
            return None
        drawn = None
        if is_random(func):
            out = self.recorder.__torch_function__(func, (), args, kwargs)
            drawn = self.recorder.last
            self._check_generator(kwargs)
        else:
            out = func(*args, **kwargs)
        self.chances.follow(func, name, args, kwargs, out, drawn)
        if self.paused:
            return None if func is set_item else out
        if name == "__get__":
            if not tensors_in(out):
                self._note_asked(func.__self__.__name__, args, kwargs)
                return out
            getter, attribute = func, func.__self__.__name__
            del getter
            self.record(layer=None, target=getattr, args=(args[0], attribute), kwargs={}, out=out)
            return out
        made = tensors_in(out)
        if not made and name in _EFFECTS:
            raise CaptureError(
                f"the glue between stages calls `{resolve_name(func) or name}`, which gives no "
                "tensor: a trace would lose what it does",
                hint="put this code inside one annotated module, where it runs as it stands",
                where=user_line(),
            )
        if not made:
            self._note_asked(name, args, kwargs)
        if made:
            self._keep_constant(func, args, kwargs, out, drawn is not None)
            self.record(layer=None, target=func, args=args, kwargs=kwargs, out=out, random=drawn)
        return None if func is set_item else out

    def _note_asked(self, name: str, args: tuple[Any, ...], kwargs: Any) -> None:
        if name in HARMLESS or called_by_engine():
            return
        where = user_line()
        for tensor in tensors_in((args, kwargs)):
            if id(tensor) in self.refs:
                value = self.refs[id(tensor)]
                self.program.asked.append(Asked(value=value, name=name, where=where))

    def noting(self, loss: Callable[[Any, Any], Any] | None) -> Callable[[Any, Any], Any] | None:
        """The same loss, which notes where its operations begin."""
        if loss is None:
            return None

        def noted(output: Any, target: Any) -> Any:
            self.program.loss_from = len(self.program.ops)
            before = list(held_tensors(loss))
            self.outside = {id(t): t for t in before if not is_fake(t)}
            value = loss(output, target)
            if self.uses_outside and [*map(id, held_tensors(loss))] != [*map(id, before)]:
                raise CaptureError(
                    "the loss keeps tensors of its own from one call to the next: in the stages of "
                    "a pipeline they would stay what they are now",
                    hint="keep them in buffers of an annotated module, or use one stage",
                )
            return value

        return noted

    @contextmanager
    def functions(self) -> Iterator[None]:
        """Inside, a user's autograd.Functions are seen: one operation each, whatever is in it."""
        with watch_functions(self._function):
            yield

    def _function(
        self, kind: type, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        # A recompute calls the model's own code inside, Layers and all.
        if self.paused or kind.__module__.startswith("torch.utils.checkpoint"):
            return run(*args, **kwargs)
        if any(callable(leaf) for leaf in args):
            raise CaptureError(
                f"the glue hands code of its own to an autograd.Function ({kind.__name__})",
                hint="call it inside an annotated module, where it runs as it stands",
                where=user_line(),
            )
        self.paused += 1
        try:
            out = run(*args, **kwargs)
        finally:
            self.paused -= 1
        if tensors_in(out):
            apply = kind.apply  # type: ignore[attr-defined]
            with torch._C.DisableTorchFunction():
                self.record(layer=None, target=apply, args=args, kwargs=kwargs, out=out)
            self.from_functions.update(self.refs[id(t)] for t in tensors_in(out))
        return out

    def _check_generator(self, kwargs: Any) -> None:
        if not self.paused and kwargs.get("generator") is not None:
            raise CaptureError(
                "the glue between stages draws from a torch.Generator of its own, which other "
                "stages do not share",
                hint="leave `generator` out: draws are keyed by seed, step and row then",
                where=user_line(),
            )

    def _constant_args(self, value: Any) -> Any | None:
        known = True

        def leaf(item: Any) -> Any:
            nonlocal known
            if isinstance(item, torch.Tensor):
                if id(item) not in self.constants:
                    if self.from_outside(item):
                        return item
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
        if known is None and self.paused:
            known = self.chances.typical_args((args, kwargs))
            if known is None:
                return func(*args, **kwargs)
        if known is not None:
            with real_tensors():
                return func(*known[0], **known[1])
        drawn = self.chances.typical_args((args, kwargs)) is not None
        raise CaptureError(
            "the glue between stages reads the value of a tensor that depends on "
            + ("a random draw" if drawn else "the batch")
            + f" (`{resolve_name(func) or name}`)",
            hint="put this code inside one annotated module, where it runs as it stands; or "
            + ("use one stage" if drawn else "pass the decision in as a Python value"),
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


def refuse_exchanged(
    path: str, before: Mapping[str, torch.Tensor], now: Mapping[str, torch.Tensor]
) -> None:
    """A Layer that glue calls with other tensors than its own: stages run it with its own."""
    for name in sorted({*before, *now}):
        if before.get(name) is not now.get(name):
            raise CaptureError(
                f"{path} is called with another {name} than its own (functional_call, or code that "
                "exchanges it around the call): stages and splits run it with its own",
                hint="make the change inside one annotated module around both, compute with "
                "torch.nn.functional on the tensor itself, or use data parallelism alone",
                where=user_line(),
            )
