"""The private torch APIs this project uses, in one place, for torch 2.11 to 2.13.

Place in the flow: below runtime, nn and engine. When torch moves, this is the file to mend.
"""

from __future__ import annotations

import functools
import gc
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import MethodType
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.distributed import _symmetric_memory
from torch.distributions import Distribution
from torch.overrides import _get_current_function_mode_stack, resolve_name
from torch.utils import checkpoint as torch_checkpoint
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import flop_registry


@contextmanager
def fake_mode() -> Iterator[None]:
    """Tensors with shapes and no memory.

    Torch logs a traceback for every operation that fails on them; whoever asked for fakes handles
    the error.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), _idle_conversions():
            yield
    finally:
        log.setLevel(before)


def is_fake(value: Any) -> bool:
    """Whether it is a tensor with a shape and no values."""
    return isinstance(value, FakeTensor)


@contextmanager
def nested_tensors_made_by(stand_in: Callable[..., Any]) -> Iterator[None]:
    """Inside, what packs the valid tokens of an nn.TransformerEncoder is `stand_in`."""
    made = torch._nested_tensor_from_mask
    torch._nested_tensor_from_mask = stand_in
    try:
        yield
    finally:
        torch._nested_tensor_from_mask = made


def about_fakes(error: BaseException) -> bool:
    """Whether an error says that a fake tensor was met where values are needed."""
    return type(error).__module__.startswith("torch._subclasses")


_CACHES: weakref.WeakSet[Any] = weakref.WeakSet()
"""Every functools.lru_cache that was found so far: `gc.freeze` hides what was there before it."""


def drop_cached_fakes() -> None:
    """After a trace: what keeps results (functools.lru_cache) must not keep its tensors."""
    kind = functools._lru_cache_wrapper
    _CACHES.update([found for found in gc.get_objects() if type(found) is kind])
    for cache in _CACHES:
        if cache.cache_info().currsize and _refers_to_fake(cache, 5):
            cache.cache_clear()


def _refers_to_fake(value: Any, depth: int) -> bool:
    if isinstance(value, FakeTensor):
        return True
    return depth > 0 and any(
        _refers_to_fake(item, depth - 1)
        for item in gc.get_referents(value)
        if isinstance(item, FakeTensor | tuple | list | dict)
        or type(item).__name__ == "_lru_list_elem"
    )


@contextmanager
def _idle_conversions() -> Iterator[None]:
    """Inside, `module.to(...)` of what the module is already does nothing.

    Routers of transformers convert themselves in every forward; of a fake, torch swaps the tensors
    even where nothing changes, and fails.
    """
    convert = nn.Module.to

    def to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
        tensors = [*self.parameters(), *self.buffers()]
        same = all(
            (device is None or t.device == device)
            and (dtype is None or t.dtype == dtype or not t.is_floating_point())
            for t in tensors
        )
        return self if same and layout is None else convert(self, *args, **kwargs)

    nn.Module.to = to  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.to = convert  # type: ignore[method-assign]


def multiply(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiplies all of them in place by a tensor of one element, which stays on the device.

    One call for all of them. `mul_` by such a tensor has a slow kernel on a GPU (2 GB took 5.8 ms,
    by a number 3.8 ms); this one is meant for it, but was not timed there yet.
    """
    torch._foreach_mul_(tensors, factor)


def _ctc_shapes(
    mode: Any, func: Any, log_probs: torch.Tensor, targets: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `F.ctc_loss` gives: a number for each sequence, and what its backward wants.

    torch says nothing of it for fakes; how long the longest target is, their values would tell.
    """
    with mode:
        rows = log_probs.shape[1:-1]
        states = 2 * targets.shape[-1] + 1
        return log_probs.new_empty(rows), log_probs.new_empty((*rows, len(log_probs), states))


for _op in (torch.ops.aten._ctc_loss.default, torch.ops.aten._ctc_loss.Tensor):
    if _op not in fake_impls.op_implementations_dict:
        fake_impls.register_op_impl(_op)(_ctc_shapes)


@contextmanager
def real_tensors() -> Iterator[None]:
    """Real tensors again inside `fake_mode`."""
    with unset_fake_temporarily():
        yield


FunctionCall = Callable[[type, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""(the user's Function, its `apply`, arguments) -> what it gives."""


@contextmanager
def watch_functions(around: FunctionCall) -> Iterator[None]:
    """Inside, `around` runs every `torch.autograd.Function.apply`, which no mode sees.

    Below `Function.apply` itself, so that one bound long ago (`swish = Swish.apply`) is seen too.
    """
    owner: Any = _SingleLevelFunction
    before = owner.__dict__.get("apply")
    run = owner.apply.__func__ if before is not None else None

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        def real(*args: Any, **kwargs: Any) -> Any:
            if run is not None:
                return run(cls, *args, **kwargs)
            return super(_SingleLevelFunction, cls).apply(*args, **kwargs)  # type: ignore[misc]

        return around(cls, real, args, kwargs)

    owner.apply = classmethod(apply)
    try:
        yield
    finally:
        if before is None:
            del owner.apply
        else:
            owner.apply = before


def is_torch_function(func: Any) -> bool:
    """Whether this is a function of torch itself, not one of the same name (a custom operator)."""
    if isinstance(func, OpOverload | OpOverloadPacket):
        return str(func).startswith("aten")
    try:
        return resolve_name(func) is not None
    except TypeError:
        return False


def assert_later(ok: torch.Tensor) -> None:
    """Fails on the device if `ok` is false, without waiting for it here."""
    torch._assert_async(ok)


PRODUCTS = {
    "mm": "matmul",
    "addmm": "matmul",
    "bmm": "matmul",
    "baddbmm": "matmul",
    "convolution": "conv",
    "_scaled_dot_product_flash_attention_for_cpu": "attention",
    "_scaled_dot_product_flash_attention": "attention",
    "_scaled_dot_product_efficient_attention": "attention",
    "_scaled_dot_product_attention_math": "attention",
    "mkldnn_rnn_layer": "rnn",
    "_cudnn_rnn": "rnn",
}
"""Dispatched operations that compute more than they move, and their kinds."""


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """Two matrix products per head; torch counts none for its CPU flash kernel."""
    batch, heads, rows, width = query.shape[-4:]
    return int(2 * batch * heads * rows * key.shape[-2] * (width + value.shape[-1]))


def _rnn_flops(x: Any, from_input: Any, from_state: Any, *args: Any, **kwargs: Any) -> int:
    """Every step multiplies the input and the state with the weights of all gates."""
    return int(2 * x.shape[0] * x.shape[1] * (from_input.numel() + from_state.numel()))


_MORE_FLOPS = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention_flops,
    "mkldnn_rnn_layer": _rnn_flops,
}


def operation_flops(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """FLOPs of one dispatched operation: those of matrix products and the like, else 0."""
    packet = func.overloadpacket
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=out))
    more = _MORE_FLOPS.get(packet.__name__)
    return float(more(*args, **kwargs)) if more is not None else 0.0


def in_transform() -> bool:
    """Whether the code runs inside `torch.func` (vmap, grad, ...) or in forward-mode autograd."""
    return bool(torch._C._are_functorch_transforms_active()) or forward_ad._current_level >= 0


def forward_mode() -> bool:
    """Whether the code runs in forward-mode autograd (`torch.func.jvp`)."""
    return bool(forward_ad._current_level >= 0)


class SymmetricBuffer(Protocol):
    """What a rendezvous gives: the same buffer on every member."""

    def get_buffer(
        self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0
    ) -> torch.Tensor:
        """A member's, as this rank sees it; the offset is in elements."""

    def barrier(self, channel: int = 0) -> None:
        """What the stream does next comes after what all members' streams did before."""


def symmetric_buffer(nbytes: int, group: dist.ProcessGroup) -> tuple[torch.Tensor, SymmetricBuffer]:
    """Bytes on this GPU that the group's other members can read; every member calls it alike."""
    device = torch.device("cuda", torch.cuda.current_device())
    # Allocated as floats: its kernels look at the storage, not at the dtype of a view.
    buffer = _symmetric_memory.empty(nbytes // 4, dtype=torch.float32, device=device)
    handle = _symmetric_memory.rendezvous(buffer, group)
    return buffer.view(torch.uint8), cast(SymmetricBuffer, handle)


def uncompiled(model: nn.Module) -> nn.Module:
    """The module that `torch.compile(model)` wrapped; any other as it is."""
    return cast(nn.Module, model._modules["_orig_mod"]) if _wraps(model) else model


def uncompiled_function(function: Any) -> Any:
    """What `torch.compile(function)` wrapped, a module's too; anything else as it is."""
    if isinstance(function, nn.Module):
        return uncompiled(function)
    return getattr(function, "_torchdynamo_orig_callable", function)


def _wraps(module: nn.Module) -> bool:
    # By name: importing dynamo takes seconds.
    return type(module).__name__ == "OptimizedModule"


def compiled_parts(model: nn.Module) -> list[str]:
    """Paths of the modules that torch.compile or Module.compile was called on."""
    return [
        path
        for path, module in model.named_modules()
        if _wraps(module) or module._compiled_call_impl is not None
    ]


def has_compiled_forward(module: nn.Module) -> bool:
    """Whether somebody wrote `module.forward = torch.compile(module.forward)`."""
    own = module.__dict__.get("forward")
    inside = getattr(own, "_torchdynamo_orig_callable", None)
    return (
        isinstance(inside, MethodType)
        and inside.__self__ is module
        and inside.__func__ is type(module).forward
    )


def run_eagerly(model: nn.Module) -> None:
    """Copies of compiled modules run what was compiled, not the compiled code."""
    for module in model.modules():
        if _wraps(module):
            module.__dict__["forward"] = module._modules["_orig_mod"]


@contextmanager
def without_functions() -> Iterator[None]:
    """Inside, neither function modes nor tensor subclasses see calls."""
    with torch._C.DisableTorchFunction():
        yield


@contextmanager
def outside_dispatch() -> Iterator[None]:
    """Inside, no dispatch mode sees what is computed: it is no part of what they follow."""
    with _disable_current_modes():
        yield


def function_modes() -> list[Any]:
    """The function modes now active, the outermost first."""
    return list(_get_current_function_mode_stack())


def wrap_checkpoint(
    reentrant: Callable[[Any], Any], frames: Callable[[Any], Callable[..., Iterator[None]]]
) -> None:
    """Puts wrappers around the two things `torch.utils.checkpoint.checkpoint` calls, once.

    `reentrant` gets the autograd.Function of the one kind, `frames` the generator around the
    forward of the other. Both are looked up when checkpoint runs, whoever imported it from where.
    """
    module: Any = torch_checkpoint
    if isinstance(module.CheckpointFunction, type):
        module.CheckpointFunction = reentrant(module.CheckpointFunction)
        module._checkpoint_without_reentrant_generator = frames(
            module._checkpoint_without_reentrant_generator
        )


standard_gamma: Callable[..., torch.Tensor] = torch._standard_gamma
sample_dirichlet: Callable[..., torch.Tensor] = torch._sample_dirichlet
gamma_grad: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch._standard_gamma_grad


@contextmanager
def unchecked_distributions() -> Iterator[None]:
    """torch.distributions ask for the values of their arguments, which fake tensors do not have."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def num_holders(tensor: torch.Tensor) -> int:
    """Tensors on a tensor's memory, itself among them: views, and what autograd keeps of them."""
    storage = tensor.untyped_storage()
    # The storage object just made is a holder too.
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def version(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place."""
    return tensor._version


def in_backward() -> bool:
    """Whether autograd is running the code that asks."""
    return torch._C._current_graph_task_id() != -1


def set_world_timeout(timeout: timedelta) -> None:
    """From now on, how long collectives and messages of the job's default group wait."""
    dist.distributed_c10d._set_pg_timeout(timeout)


def backward_under_modes(value: torch.Tensor, seed: torch.Tensor) -> None:
    """A backward whose code runs under the function modes that are on; its graph is kept.

    `torch.autograd.backward` is a torch function itself, which a mode is left for.
    """
    torch.autograd.Variable._execution_engine.run_backward(
        (value,), (seed,), True, False, (), allow_unreachable=True, accumulate_grad=True
    )


def enclosing_saved_hooks() -> tuple[Callable[[Any], Any], Callable[[Any], Any]] | None:
    """What packs and unpacks the tensors that autograd keeps, where anything does."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)
