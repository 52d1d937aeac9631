"""The private torch APIs this project uses, in one place, for torch 2.11 to 2.13.

Place in the flow: below runtime, nn and engine. When torch moves, this is the file to mend.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed import _symmetric_memory
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
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        log.setLevel(before)


def multiply(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiplies all of them in place by a tensor of one element, which stays on the device.

    One call for all of them. `mul_` by such a tensor has a slow kernel on a GPU (2 GB took 5.8 ms,
    by a number 3.8 ms); this one is meant for it, but was not timed there yet.
    """
    torch._foreach_mul_(tensors, factor)


@contextmanager
def real_tensors() -> Iterator[None]:
    """Real tensors again inside `fake_mode`."""
    with unset_fake_temporarily():
        yield


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
    """Whether the code runs inside `torch.func` (vmap, grad, ...)."""
    return bool(torch._C._are_functorch_transforms_active())


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
