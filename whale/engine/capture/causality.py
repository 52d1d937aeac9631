"""Causality: a warning where experts choose among all tokens in a model that must not look ahead.

Place in the flow: around the runs of `engine.capture`. Expert choice picks the best tokens of the
whole micro-batch, so whether a token is taken depends on later ones. In a decoder that is a leak:
the loss looks good in training, and generation cannot have it.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from whale.nn.moe.layer import MoE

_TRIANGLES = frozenset("tril triu tril_ triu_ tril_indices triu_indices".split())
_ATTENTION = "scaled_dot_product_attention"
_LARGEST = 4096
"""Side of the largest buffer that is looked at."""


class CausalWatch(TorchFunctionMode):
    """Sees causal attention while a model runs; warns at the end if it has expert choice."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.choosing = [
            path
            for path, module in model.named_modules()
            if isinstance(module, MoE) and module.router_kind == "expert-choice"
        ]
        self.seen = ""
        if self.choosing:
            self.seen = _said(model)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.choosing and not self.seen:
            name = getattr(func, "__name__", "")
            causal = kwargs.get("is_causal") or (
                name == _ATTENTION and len(args) > 5 and args[5] is True
            )
            if name in _TRIANGLES or causal:
                self.seen = f"{name}, is_causal=True" if causal else f"a mask made by {name}"
        return func(*args, **kwargs)

    def warn(self) -> None:
        """Once, if there is something to say."""
        if self.choosing and self.seen:
            warnings.warn(
                f'{self.choosing[0]} is wh.nn.MoE(router="expert-choice") in a model with causal '
                f"attention ({self.seen}): experts choose among all tokens, so a token's output "
                "depends on later ones, which the loss then sees; use top-k or prototype in "
                "decoders",
                stacklevel=3,
            )


def _said(model: nn.Module) -> str:
    """What modules and buffers say of causality."""
    for path, module in model.named_modules():
        if getattr(module, "is_causal", None) is True:
            return f"{path}.is_causal"
    for name, buffer in model.named_buffers():
        if _is_triangle(buffer):
            return f"the buffer {name}"
    return ""


def _is_triangle(mask: Tensor) -> bool:
    if mask.is_meta or mask.dim() < 2 or mask.shape[-1] != mask.shape[-2]:
        return False
    if not 1 < mask.shape[-1] <= _LARGEST:
        return False
    square = mask.reshape(-1, *mask.shape[-2:])[0]
    if square.is_floating_point() and bool((square < 0).any()):
        square = square == 0
    lower = square.bool()
    return bool(torch.equal(lower, torch.ones_like(lower).tril())) or bool(
        torch.equal(lower, torch.ones_like(lower).triu(1))
    )
