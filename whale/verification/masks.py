"""Masks: plain torch with the random numbers that Whale draws, handed to it.

Place in the flow: under the one-device run of `wh.verify`, for models that draw. Whale keys its
masks by sample, so that they do not depend on the layout; torch's own generator cannot give them.
Only *which* elements stay is asked of Whale, by dropping a tensor of ones; what is done with the
mask is torch's documented arithmetic, written here once more. The masks themselves are looked at:
how many stay, and whether they change with row and step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from whale.engine.capture import capture
from whale.engine.random import install_randomness
from whale.nn.attention import MultiheadForward
from whale.nn.dropout import KeyedDropout
from whale.nn.forwards import replace_forward
from whale.nn.randomness import CallNames
from whale.runtime import batch as batches
from whale.runtime.context import StepContext

_FEW = 64
"""Masks of fewer elements may be alike by chance."""


_ARGUMENTS = (
    "query", "key", "value", "key_padding_mask", "need_weights", "attn_mask",
    "average_attn_weights", "is_causal",
)  # fmt: skip


class Draws:
    """A plain model's random numbers: those of Whale, by sample."""

    def __init__(
        self, model: nn.Module, batch: Any, loss: batches.Loss | None, seed: int, watch: Watch
    ) -> None:
        self.context = StepContext(seed=seed)
        self._names = CallNames(self.context)
        captured = capture(model, batch, loss)
        keyed = install_randomness(model, captured, self.context, self._names, {}, whole=True)
        self._modes = [] if keyed is None else [keyed, _Handed(watch)]
        for module in model.modules():
            forward = module.__dict__.get("forward")
            if isinstance(forward, KeyedDropout):
                replace_forward(module, _Dropout(module, forward, watch))
            elif isinstance(forward, MultiheadForward):
                del module.__dict__["forward"]
                replace_forward(module, _Multihead(module, forward, watch))
        self.watch = watch

    @contextmanager
    def at(self, step: int, micro_batch: int, low: int, high: int) -> Iterator[None]:
        """Inside, rows [low, high) of the global batch of a step are computed."""
        context = self.context
        context.step, context.micro_batch = step, micro_batch
        context.first_row, context.rows, context.micro_rows = low, high - low, high - low
        # Calls are numbered within a forward, and this is one of its own.
        context.layer_entry += 1
        self._names._position = (-1, -1, -1, -1)
        self.watch.begin(step, micro_batch)
        with ExitStack() as stack:
            for mode in self._modes:
                stack.enter_context(mode)
            yield


class Watch:
    """Looks at the masks: a mask that is always the same is no dropout."""

    def __init__(self) -> None:
        self.complaints: list[str] = []
        self._position = (0, 0)
        self._number = 0
        self._before: dict[tuple[int, int], tuple[int, Tensor]] = {}

    def begin(self, step: int, micro_batch: int) -> None:
        """The masks of another forward follow."""
        self._position, self._number = (step, micro_batch), 0

    def see(self, kept: Tensor, p: float) -> None:
        """A mask that was handed over."""
        number, self._number = self._number, self._number + 1
        if kept.numel() < _FEW or not 0.1 <= p <= 0.9:
            return
        size = kept.numel()
        share = float(kept.double().mean())
        # Six deviations: one in a billion, were they independent.
        if abs(share - (1 - p)) > 6 * math.sqrt(p * (1 - p) / size) + 1 / size:
            self.complaints.append(f"a mask keeps {share:.3f} of {size} elements at p = {p}")
        step, micro_batch = self._position
        rows = kept.flatten(1) if kept.dim() > 1 else kept.unsqueeze(1)
        if len(rows) > 1 and rows.shape[1] >= _FEW and bool((rows == rows[:1]).all()):
            self.complaints.append("a mask is the same for all samples")
        before = self._before.get((micro_batch, number))
        if before is not None and before[0] != step and torch.equal(before[1], kept):
            self.complaints.append("a mask is the same in two steps")
        self._before[micro_batch, number] = (step, kept)


def _dropped(x: Tensor, kept: Tensor, p: float) -> Tensor:
    """Dropout as torch defines it: what stays is divided by the chance to stay."""
    return x * 0 if p == 1.0 else torch.where(kept, x / (1.0 - p), torch.zeros_like(x))


class _Dropout:
    """The forward of an nn.Dropout."""

    def __init__(self, module: nn.Module, keyed: KeyedDropout, watch: Watch) -> None:
        self.module, self.keyed, self.watch = module, keyed, watch

    def __call__(self, x: Tensor) -> Tensor:
        p = float(self.module.p)  # type: ignore[arg-type]
        if not self.module.training or p == 0.0:
            return x
        kept = self.keyed(torch.ones_like(x)) != 0
        self.watch.see(kept, p)
        return _dropped(x, kept, p)


class _Handed(TorchFunctionMode):
    """Around Whale's own mode, which is asked for the masks of functional dropout."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return self._dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        # Asked in any case: calls are numbered, also those that drop nothing.
        kept = F.dropout(torch.ones_like(input), p, training) != 0
        if not training or p == 0.0:
            return input
        self.watch.see(kept, p)
        out = _dropped(input, kept, p)
        return input.copy_(out) if inplace else out

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if dropout_p == 0.0:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if enable_gqa:
            repeat = query.shape[-3] // key.shape[-3]
            key, value = (t.repeat_interleave(repeat, -3) for t in (key, value))
        # Even probabilities times the unit matrix are the mask itself.
        size = key.shape[-2]
        unit = torch.eye(size, dtype=query.dtype).expand(*query.shape[:-2], size, size)
        even = torch.zeros_like(query), torch.zeros_like(key)
        kept = F.scaled_dot_product_attention(*even, unit, dropout_p=dropout_p) != 0
        self.watch.see(kept, dropout_p)
        bias = torch.zeros(query.shape[-2], size, dtype=query.dtype)
        if is_causal:
            bias = bias.masked_fill(torch.ones_like(bias).triu(1).bool(), -torch.inf)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            bias = bias + torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(
                ~attn_mask, -torch.inf
            )
        elif attn_mask is not None:
            bias = bias + attn_mask
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        weights = torch.softmax(query @ key.mT * factor + bias, -1)
        return _dropped(weights, kept, dropout_p) @ value


class _Multihead:
    """The forward of an nn.MultiheadAttention: torch's own code, its dropout handed to it."""

    def __init__(
        self, module: nn.MultiheadAttention | nn.Module, forward: MultiheadForward, watch: Watch
    ) -> None:
        self.module, self.keyed, self.watch = module, forward, watch

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self.module
        if not module.training or not module.dropout:
            return type(module).forward(module, *args, **kwargs)
        given = dict(zip(_ARGUMENTS, args, strict=False)) | kwargs
        wanted = given.get("need_weights", True)
        # With weights wanted torch's code calls `dropout` by name; without, it calls a kernel.
        given["need_weights"] = True
        plain = F.dropout

        def handed(x: Tensor, p: float = 0.5, *_: Any, **__: Any) -> Tensor:
            shape = (-1, module.num_heads, *x.shape[1:]) if x.dim() == 3 else x.shape
            kept = self.keyed.drop(torch.ones_like(x).view(shape), p).view(x.shape) != 0
            self.watch.see(kept, p)
            return _dropped(x, kept, p)

        F.dropout = handed  # type: ignore[assignment]
        try:
            out, weights = type(module).forward(module, **given)
        finally:
            F.dropout = plain
        return out, weights if wanted else None
