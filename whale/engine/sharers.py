"""Sharers: which ranks hold the same piece of which parameter or buffer.

Place in the flow: read off the plan when a Step is built, for `runtime.guard`.
"""

from __future__ import annotations

from torch import nn

from whale.engine.lower import stage_of_module
from whale.ir.plan import Plan
from whale.ir.sharding import Piece
from whale.runtime.guard import Held


def held_tensors(plan: Plan, model: nn.Module, apart: frozenset[str]) -> list[Held]:
    """All parameters and buffers; those of `apart` are each replica's own on purpose."""
    return [*_parameters(plan), *_buffers(plan, model, apart)]


def _parameters(plan: Plan) -> list[Held]:
    found = []
    for home in plan.homes:
        by_piece: dict[Piece, list[int]] = {}
        for rank in range(plan.num_ranks):
            piece = plan.piece(home, rank)
            if piece is not None:
                by_piece.setdefault(piece, []).append(rank)
        sharers = tuple(tuple(ranks) for ranks in by_piece.values())
        found.append(Held(name=home.name, kind="parameter", sharers=sharers))
    return found


def _buffers(plan: Plan, model: nn.Module, apart: frozenset[str]) -> list[Held]:
    """A stage's buffers are kept by the ranks of that stage, and whole."""
    found = []
    for name, _ in model.named_buffers():
        path = name.rpartition(".")[0]
        if path in apart:
            continue
        ranks = plan.stages[stage_of_module(plan, path)].virtual_device.ranks
        found.append(Held(name=name, kind="buffer", sharers=(tuple(ranks),)))
    return found
