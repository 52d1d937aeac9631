"""The private torch APIs this project uses, in one place, for torch 2.11 to 2.13.

Place in the flow: below runtime, nn and engine. When torch moves, this is the file to mend.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils.flop_counter import FlopCounterMode


def fake_mode() -> FakeTensorMode:
    """Tensors with shapes and no memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def real_tensors() -> Iterator[None]:
    """Real tensors again inside `fake_mode`."""
    with unset_fake_temporarily():
        yield


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """Two matrix products per head; torch counts none for its CPU flash kernel."""
    batch, heads, rows, width = query[-4], query[-3], query[-2], query[-1]
    columns = key[-2]
    return 2 * batch * heads * rows * columns * (width + value[-1])


def flop_counter() -> FlopCounterMode:
    """Counts FLOPs of everything run under it, fake or real."""
    extra: dict[Any, Any] = {}
    cpu_flash = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
    if cpu_flash is not None:
        extra[cpu_flash] = _attention_flops
    return FlopCounterMode(display=False, custom_mapping=extra)
