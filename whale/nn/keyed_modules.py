"""Dropout modules whose masks are keyed, without a mode around the forward.

Place in the flow: installed by `engine.lower.random` on the modules whose forward is torch's own.
The mode of `nn.randomness` would give the same masks under the same names; a model that draws
nowhere else is spared its cost for every function it calls.
"""

from __future__ import annotations

import torch
from torch import nn

from whale.nn.attention import MultiheadForward
from whale.nn.dropout import drop
from whale.nn.randomness import Draws
from whale.nn.shard import Shard


def is_dropout(module: nn.Module) -> bool:
    """Whether a module is torch's dropout, forward and all."""
    return isinstance(module, nn.Dropout) and type(module).forward is nn.Dropout.forward


class KeyedDropout:
    """The forward of an `nn.Dropout` on this rank's copy."""

    def __init__(self, module: nn.Module, path: str, draws: Draws) -> None:
        self.module, self.path, self.draws = module, path, draws
        self.shard: Shard | None = None
        """Of the split it is inside of: it sees a part of the columns, and maybe more rows."""
        self.dim = -1
        """The dim of which it sees a part: the columns', or that of attention's heads."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The replaced forward."""
        p = float(self.module.p)  # type: ignore[arg-type]
        name = self.draws.names.next(self.path)
        if not self.module.training or p == 0.0:
            return x
        out = self._drop(x, p, name) if x.dim() else self._drop(x.unsqueeze(0), p, name).squeeze(0)
        return x.copy_(out) if self.module.inplace else out

    def _drop(self, x: torch.Tensor, p: float, name: tuple[str, int]) -> torch.Tensor:
        context = self.draws.names.context
        if self.shard is None:
            key, dim = self.draws.where(name, x.shape)
            return drop(x, p, key, context, dim, None)
        sharded = (self.dim % x.dim(), *self.shard.span(x.shape[self.dim]))
        with self.shard.all_rows():
            key, dim = self.draws.where(name, x.shape)
            return drop(x, p, key, context, dim, sharded)


def key_multihead(forward: MultiheadForward, path: str, draws: Draws, shard: Shard | None) -> None:
    """Keys the dropout of an nn.MultiheadAttention whose forward is ours."""

    def keyed(x: torch.Tensor, p: float) -> torch.Tensor:
        sharded = (1, shard.low, shard.cuts[-1]) if shard is not None else None
        key, dim = draws.where(draws.names.next(path), x.shape)
        return drop(x, p, key, draws.names.context, dim, sharded)

    forward.drop = keyed
