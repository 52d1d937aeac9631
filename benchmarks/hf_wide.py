"""Wide: transformers computes norms, softmaxes and losses in float64 instead of float32.

Place in the flow: under `hf_models`. Its code casts to float32 there whatever the weights are in,
so that an error in the last bit of float64 becomes one in the last bit of float32. Cast to float64,
anything above 1e-9 is an error.
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Any

import torch


class _Wide(ModuleType):
    """`torch`, in which float32 is float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def widen() -> None:
    """Makes every cast to float32 in transformers' code one to float64, in this process."""
    wide = _Wide("torch")
    for name, module in list(sys.modules.items()):
        if name.startswith(("transformers.", "peft.")) and vars(module).get("torch") is torch:
            module.torch = wide  # type: ignore[attr-defined]
            for kind in (k for k in vars(module).values() if isinstance(k, type)):
                for function in (f for f in vars(kind).values() if inspect.isfunction(f)):
                    # Evaluated when the module was imported.
                    function.__defaults__ = function.__defaults__ and tuple(
                        torch.float64 if d is torch.float32 else d for d in function.__defaults__
                    )
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
