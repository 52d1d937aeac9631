"""Sharers: which ranks hold the very same bits of which parameter or buffer.

Place in the flow: read off the plan when a Step is built, for `runtime.guard`. Ranks whose
gradients are summed together update alike to the last bit. Members of one replica that each compute
a copy do not: on a GPU two sums of the same numbers may differ in the last digit. Those are
compared by value, by `engine.watch.drift`.
"""

from __future__ import annotations

from torch import nn

from whale.engine.lower.lowered import stage_of_module
from whale.ir.homes import sum_groups, syncs
from whale.ir.plan import Plan
from whale.ir.sharding import Piece
from whale.runtime.guard import Held


def held_tensors(plan: Plan, model: nn.Module, apart: frozenset[str]) -> list[Held]:
    """All parameters and buffers; those of `apart` are each replica's own on purpose."""
    return [*_parameters(plan), *_buffers(plan, model, apart)]


def _parameters(plan: Plan) -> list[Held]:
    found = []
    for home in plan.homes:
        together = [sync.ranks for _, _, groups in syncs(plan, home) for sync in groups]
        alike: dict[tuple[Piece, tuple[bool, ...]], list[int]] = {}
        for rank in range(plan.num_ranks):
            piece = plan.piece(home, rank)
            if piece is not None:
                key = (piece, tuple(rank in ranks for ranks in together))
                alike.setdefault(key, []).append(rank)
        sharers = tuple(tuple(ranks) for ranks in alike.values())
        found.append(Held(name=home.name, kind="parameter", sharers=sharers))
    return found


def _buffers(plan: Plan, model: nn.Module, apart: frozenset[str]) -> list[Held]:
    """A stage's buffers are kept by the ranks of that stage, and whole."""
    found = []
    for name, _ in model.named_buffers():
        path = name.rpartition(".")[0]
        if path in apart:
            continue
        device = plan.stages[stage_of_module(plan, path)].virtual_device
        columns = sum_groups([replica.ranks for replica in device.replicas])
        sharers = tuple(column.ranks for column in columns)
        found.append(Held(name=name, kind="buffer", sharers=sharers))
    return found
