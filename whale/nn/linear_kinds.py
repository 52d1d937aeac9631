"""Which classes are Linears: those that run torch's forward, and those that write the same out.

Place in the flow: asked by `nn.sharded.is_linear`. A subclass may compute anything, so one with a
forward of its own is run on a probe that has a weight and a bias and nothing else: it is a Linear
if it calls products and sums only, and they come out as torch's do. transformers' Falcon has one.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from whale.runtime.compat import real_tensors

_PRODUCTS = frozenset(
    "linear matmul __matmul__ mm addmm t transpose __get__ add __add__ __radd__".split()
)


class _Names(TorchFunctionMode):
    """The names of the functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.names.add(getattr(func, "__name__", ""))
        with torch._C.DisableTorchFunction():
            return func(*args, **(kwargs or {}))


def is_linear_kind(kind: type[nn.Module]) -> bool:
    """Whether calling an instance of this class is a product with its weight, plus its bias."""
    if not issubclass(kind, nn.Linear) or kind.__call__ is not nn.Module.__call__:
        return False
    own: Any = kind
    return kind.forward is nn.Linear.forward or bool(_writes_it_out(own))


@cache
def _writes_it_out(kind: Any) -> bool:
    # It may be asked in the middle of a capture, where tensors are fake.
    with real_tensors():
        return all(_is_linear_on(kind, b, t) for b in (True, False) for t in (True, False))


def _is_linear_on(kind: type[nn.Linear], with_bias: bool, training: bool) -> bool:
    probe = kind.__new__(kind)
    try:
        nn.Module.__init__(probe)
        weight = (torch.arange(15, dtype=torch.float64, device="cpu").view(3, 5) - 6.5) / 7
        bias = torch.tensor([0.3, -0.7, 1.9], dtype=torch.float64, device="cpu")
        probe.in_features, probe.out_features, probe.training = 5, 3, training
        probe.weight = nn.Parameter(weight)
        probe.register_parameter("bias", nn.Parameter(bias) if with_bias else None)
        x = (torch.arange(40, dtype=torch.float64, device="cpu").view(2, 4, 5) - 21.0) / 11
        names = _Names()
        with torch.no_grad(), names:
            made = probe.forward(x)
        want = x @ weight.t()
        want = want + bias if with_bias else want
        return names.names <= _PRODUCTS and torch.allclose(made, want, rtol=1e-12, atol=1e-12)
    except Exception:  # noqa: BLE001 - it reads something a Linear does not have
        return False
