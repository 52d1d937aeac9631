"""Functional dropout, keyed: `F.dropout` and attention dropout called in the user's own code.

Place in the flow: a mode around a stage's forward in training, there only when capture saw such
calls. A call is named by its Layer and its number in that Layer, so the mask does not depend on the
layout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from whale.nn.attention import attend
from whale.nn.dropout import drop, key_of
from whale.runtime.context import StepContext

BatchDims = dict[tuple[str, int], int | None]


class CallNames:
    """Which Layer is running, and how many random calls it has made in this micro-batch.

    With `by_entry` the count begins again whenever a Layer begins, be it in another stage.
    """

    def __init__(self, context: StepContext, *, by_entry: bool = False) -> None:
        self.context, self.by_entry = context, by_entry
        self.layer = ""
        self.heads: tuple[int, int, int] | None = None
        """(first, own, all) units of the attention now running, when it is split."""
        self.drops_heads = False
        """Whether functional dropout in it sees some heads, in dim 1 of four."""
        self._position = (-1, -1, -1, -1)
        self._calls: dict[str, int] = {}

    def _begin(self) -> None:
        """Forgets the calls of another micro-batch."""
        context = self.context
        entry = context.layer_entry if self.by_entry else 0
        position = (context.step, context.stage, context.micro_batch, entry)
        if position != self._position:
            self._position, self._calls = position, {}

    def next(self) -> tuple[str, int]:
        """The name of the call being made now."""
        self._begin()
        number = self._calls.get(self.layer, 0)
        self._calls[self.layer] = number + 1
        return self.layer, number

    def at(self, number: int) -> None:
        """The next random call is number `number` of the glue."""
        self._begin()
        self._calls[""] = number

    def watch(self, path: str, layer: nn.Module, per_call: int) -> None:
        """Follows a Layer in and out; it makes `per_call` random calls each time."""

        def enter(*_: Any) -> None:
            self._begin()
            self.layer = path
            # A Layer called again, maybe in a later stage, goes on where its first call stopped.
            self._calls[path] = self.context.layer_call * per_call

        def leave(*_: Any) -> None:
            self.layer = ""

        layer.register_forward_pre_hook(enter)
        layer.register_forward_hook(leave, always_call=True)


def _head_span(local: int, units: tuple[int, int, int]) -> tuple[int, int, int]:
    first, own, every = units
    per_unit = local // own if own else 1
    return 1, first * per_unit, every * per_unit


class KeyedRandom(TorchFunctionMode):
    """Replaces dropout functions by keyed ones."""

    def __init__(self, names: CallNames, dims: BatchDims) -> None:
        super().__init__()
        self.names, self.dims = names, dims

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
        self, input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        name = self.names.next()
        if not training or p == 0.0:
            return input
        by_heads = self.names.drops_heads and input.dim() == 4
        return self.drop(input, p, name, self.names.heads if by_heads else None)

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if dropout_p == 0.0:
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask,
                is_causal=is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        name = self.names.next()
        return attend(
            query,
            key,
            value,
            mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            drop=lambda x, p: self.drop(x, p, name, self.names.heads),
        )

    def drop(
        self,
        x: torch.Tensor,
        p: float,
        name: tuple[str, int],
        heads: tuple[int, int, int] | None = None,
    ) -> torch.Tensor:
        """`x` with the keyed mask of the call `name`.

        `heads` is (first, own, all) where dim 1 is a part.
        """
        context = self.names.context
        layer, number = name
        dim = self.dims.get(name, 0)
        key = key_of(context.seed, context.step, f"{layer}()", number)
        sharded = _head_span(x.shape[1], heads) if heads is not None else None
        return drop(x, p, key, context, dim, sharded)
