"""Sharded forwards: what a Linear, embedding or convolution does with only its part of the weight.

Place in the flow: installed by `engine.rules` on this rank's copy of a module. The module keeps its class and
its parameter names; only `forward` is replaced, so state dicts and breakpoints stay the user's own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from whale.nn.column_shard import ColumnShard, plain
from whale.nn.shard import Shard


def is_conv1d(module: nn.Module) -> bool:
    """transformers' Conv1D: a Linear whose weight is stored [in, out]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_linear(module: nn.Module) -> bool:
    """A plain Linear or a Conv1D (subclasses may compute anything)."""
    return type(module) is nn.Linear or is_conv1d(module)


def linear_dims(module: nn.Module) -> tuple[int, int]:
    """(out dim, in dim) of the weight."""
    return (1, 0) if is_conv1d(module) else (0, 1)


def features(module: nn.Module) -> tuple[int, int]:
    """(out, in) features."""
    out_dim, in_dim = linear_dims(module)
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight.shape[out_dim], weight.shape[in_dim]


def product(module: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`x` times the module's weight, which may be a shard."""
    if is_conv1d(module):
        out = x.reshape(-1, x.shape[-1]).mm(module.weight)
        if bias is not None:
            out = out + bias
        return out.view(*x.shape[:-1], out.shape[-1])
    return F.linear(x, module.weight, bias)


class SharedInput:
    """One `enter` for all columns that read the same tensor (query, key and value): one sum in backward."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.source: torch.Tensor | None = None
        self.entered: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.source is not x or self.entered is None:
            self.source, self.entered = x, self.shard.enter(plain(x))
        return self.entered

    def clear(self) -> None:
        """Forgets the tensor, so that it can be freed."""
        self.source = self.entered = None


class Column:
    """Output columns of a Linear; the result stays sharded for the row split that follows."""

    def __init__(self, module: Any, shared: SharedInput) -> None:
        self.module, self.shared = module, shared

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return product(self.module, self.shared(x), self.module.bias)


class Row:
    """Input rows of a Linear: partial products, summed, then the bias once."""

    def __init__(self, module: Any, shard: Shard, shared: SharedInput) -> None:
        self.module, self.shard, self.shared = module, shard, shared

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.shared.clear()
        out = self.shard.leave(product(self.module, x, None))
        return out if self.module.bias is None else out + self.module.bias


class LoneColumn:
    """A Linear split by columns with nothing to pair it with: the output is a ColumnShard."""

    def __init__(self, module: Any, shard: Shard, columns: int) -> None:
        self.module, self.shard, self.columns = module, shard, columns

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        entered = self.shard.enter(plain(x))
        return ColumnShard(
            product(self.module, entered, self.module.bias), self.shard, self.columns
        )


class VocabEmbedding:
    """Rows of an embedding table: each member looks up its own ids, the sum has them all."""

    def __init__(self, module: nn.Embedding, shard: Shard) -> None:
        self.module, self.shard = module, shard

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        ids = self.shard.gather_rows(ids)
        own = (ids >= self.shard.low) & (ids < self.shard.high)
        weight = self.module.weight
        if weight.shape[0] == 0:
            found = weight.new_zeros((*ids.shape, weight.shape[1])) + weight.sum()
        else:
            local = torch.where(own, ids - self.shard.low, torch.zeros_like(ids))
            padding = self.module.padding_idx
            if padding is not None:
                inside = self.shard.low <= padding < self.shard.high
                padding = padding - self.shard.low if inside else None
            found = F.embedding(local, weight, padding) * own.unsqueeze(-1)
        return self.shard.leave(found)


class ColumnConv:
    """Output channels of a convolution, gathered along the channel dim."""

    def __init__(self, module: Any, shard: Shard, channels: int) -> None:
        self.module, self.shard, self.channels = module, shard, channels

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        entered = self.shard.enter(plain(x))
        module = self.module
        if module.weight.shape[0] == 0:
            out = _no_channels(module, entered)
        else:
            out = module._conv_forward(entered, module.weight, module.bias)
        return self.shard.join(out, out.dim() - module.weight.dim() + 1, self.channels)


def _no_channels(module: Any, x: torch.Tensor) -> torch.Tensor:
    """The output of a convolution that holds no channel here: right shape, still on the graph."""
    with torch.no_grad():
        probe = module.weight.new_zeros((1, *module.weight.shape[1:]))
        shape = module._conv_forward(x, probe, None).shape
    dim = x.dim() - module.weight.dim() + 1
    empty = x.new_empty((*shape[:dim], 0, *shape[dim + 1 :]))
    return empty + (x.sum() + module.weight.sum()) * 0
