"""Batched experts of which a member holds some: rows are sorted by expert, as many for each.

Place in the flow: installed by the rule `batched experts` (`engine.split.batched_experts` finds the
modules). Every member has all rows; it runs those of its experts, and outputs are gathered. Llama 4
is written so.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from whale.nn.column_shard import plain
from whale.nn.inside import Count, Inside
from whale.nn.shard import Shard


class BatchedForward:
    """The forward of batched experts of which this member holds [shard.low, shard.high)."""

    def __init__(self, module: nn.Module, shard: Shard) -> None:
        self.own, self.shard = module.forward, shard
        self.inside = Inside("", [Count(module, "num_experts", shard.num_units, "num_experts")])

    def __call__(self, rows: Tensor) -> Tensor:
        """The replaced forward."""
        shard, rows = self.shard, plain(rows)
        with torch._C.DisableTorchFunction():
            each = rows.shape[0] // shard.cuts[-1]
            own = shard.enter(rows).narrow(0, shard.low * each, shard.num_units * each)
        with self.inside:
            made: Tensor = self.own(own)
        with torch._C.DisableTorchFunction():
            return shard.join(made, 0, made.shape[0] // shard.num_units * shard.cuts[-1])
