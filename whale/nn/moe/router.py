"""Routers: which experts a token goes to, by what weight, and which tokens find no room.

Place in the flow: first half of `layer.MoE`. Pure functions of the logits and of what `Meeting`
says about the other replicas' tokens: selection, capacity and losses are those of the whole global
micro-batch, so that the layout changes nothing.

Shapes: T tokens here, k choices per token, E experts, R replicas.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

ROUTERS = ("top-k", "prototype", "expert-choice")


class Meeting(Protocol):
    """What the replicas of a micro-batch tell each other."""

    index: int
    """This replica's place in the order of rows."""

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """[R, ...]: every replica's `local`, of equal shapes, without a gradient."""
        ...

    def rows(self, local: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """All replicas' rows of something without a gradient, `sizes` of them each."""
        ...

    def sum(self, local: torch.Tensor) -> torch.Tensor:
        """The SUM over replicas, through which gradients go to all of them."""
        ...


class Alone:
    """One device sees the whole micro-batch."""

    index = 0

    def gather(self, local: torch.Tensor) -> torch.Tensor:
        """It has one replica."""
        return local.unsqueeze(0)

    def rows(self, local: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """They are all here."""
        return local

    def sum(self, local: torch.Tensor) -> torch.Tensor:
        """Nothing to add."""
        return local


class Routed(NamedTuple):
    """Where the tokens of this replica go.

    Attributes:
        ids: [T, k] int64 experts, -1 where a choice found no room (or, with expert choice, was not
            made).
        gates: [T, k] weights, with gradients.
        wanted: [R, k, E] int64, choices before any was dropped, by replica, or [R, 1, E].
        kept: [R, E] int64, choices that found room.
        num_tokens: [] int64, tokens of all replicas.
        num_slots: routed slots here, or a few more, where that is known without looking.
    """

    ids: torch.Tensor
    gates: torch.Tensor
    wanted: torch.Tensor
    kept: torch.Tensor
    num_tokens: torch.Tensor
    num_slots: int | None = None


def choose(
    scores: torch.Tensor, bias: torch.Tensor | None, top_k: int, *, prototypes: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, gates) [T, k] of the highest scores; `bias` [E] weighs in the selection alone.

    With `prototypes` the experts are k groups, each with scores of its own and one winner.
    """
    by_group = scores.unflatten(1, (top_k, -1)) if prototypes else scores.unsqueeze(1)
    wanted = by_group.detach()
    if bias is not None:
        wanted = wanted + bias.to(wanted.dtype).view(1, by_group.shape[1], -1)
    if prototypes:
        best = wanted.argmax(-1, keepdim=True)
        gates = by_group.gather(-1, best).squeeze(-1)
        first = torch.arange(top_k, device=scores.device) * by_group.shape[-1]
        return best.squeeze(-1) + first, gates
    best = wanted.squeeze(1).topk(top_k, dim=-1).indices
    gates = scores.gather(-1, best)
    if top_k > 1:
        gates = gates / gates.sum(-1, keepdim=True)
    return best, gates


def probabilities(logits: torch.Tensor, top_k: int, *, prototypes: bool) -> torch.Tensor:
    """[T, E] softmax over the experts, or over those of each prototype."""
    if not prototypes:
        return logits.softmax(-1)
    return logits.unflatten(1, (top_k, -1)).softmax(-1).flatten(1)


def capacity_of(num_tokens: int, factor: float, num_experts: int) -> int:
    """Rows an expert has room for: `factor` times its even part of the tokens."""
    return max(1, math.ceil(factor * num_tokens / num_experts))


def with_room(
    ids: torch.Tensor,
    gates: torch.Tensor,
    num_experts: int,
    factor: float | None,
    meeting: Meeting,
    valid: torch.Tensor | None = None,
) -> Routed:
    """The choices `ids`, less those that find no room and those of tokens that are not `valid`.

    First choices of all tokens go before second ones, and within a choice tokens go in the order of
    the global micro-batch. Without `factor` everyone finds room.
    """
    num_tokens, k = ids.shape
    # The queue of each expert: all first choices in order, then all second ones; then those who
    # are in none.
    keys = ids + torch.arange(k, device=ids.device) * num_experts
    if valid is not None:
        ids = torch.where(valid.unsqueeze(1), ids, -1)
        keys = torch.where(valid.unsqueeze(1), keys, k * num_experts)
    keys = keys.t().reshape(-1)
    local = count(keys, k * num_experts + 1)[:-1]
    wanted = meeting.gather(local.view(k, num_experts))
    total = wanted[:, 0].sum()  # each token has one choice of the first kind
    if factor is None:
        return Routed(ids, gates, wanted, wanted.sum(1), total)
    room = torch.ceil(total.double() * (factor * k / num_experts)).long().clamp(min=1)
    by_choice = wanted.sum(0)
    earlier = by_choice.cumsum(0) - by_choice
    before = earlier + wanted.cumsum(0) - wanted  # [R, k, E]: in the queue ahead of a replica's
    kept = (room - before).clamp(min=0).minimum(wanted)
    ahead = F.pad(before[meeting.index].reshape(-1), (0, 1)).index_select(0, keys)
    fits = (_places(keys, k * num_experts + 1) + ahead < room).view(k, num_tokens).t()
    return Routed(torch.where(fits, ids, -1), gates, wanted, kept.sum(1), total)


def count(values: torch.Tensor, size: int) -> torch.Tensor:
    """How often each of 0 .. size - 1 is among `values`; unlike `bincount`, on meta too."""
    return values.new_zeros(size).scatter_add_(0, values, torch.ones_like(values))


def _places(keys: torch.Tensor, size: int) -> torch.Tensor:
    """How many of the same key, which are below `size`, come before."""
    order = torch.sort(keys, stable=True).indices
    ordered = keys.index_select(0, order)
    firsts = torch.searchsorted(
        ordered, torch.arange(size, device=keys.device, dtype=ordered.dtype)
    )
    ranks = torch.arange(len(keys), device=keys.device) - firsts.index_select(0, ordered)
    return torch.empty_like(keys).scatter_(0, order, ranks)


_GRID = {torch.float64: 2.0**36, torch.float32: 2.0**16}
"""Steps between 0 and 1 in which experts tell probabilities apart."""


def chosen_by_experts(
    scores: torch.Tensor, factor: float, meeting: Meeting, valid: torch.Tensor | None = None
) -> Routed:
    """Expert choice: every expert takes its best tokens of the global micro-batch.

    `ids` are [T, E], and a token may have none, or several. It looks at all tokens that are
    `valid`, also later ones: for encoders.
    """
    num_tokens, num_experts = scores.shape
    wanted = scores.detach()
    grid = _GRID.get(wanted.dtype)
    if grid is not None:
        # Tokens that are alike (the first of every sentence) tie, and the first of them is taken;
        # the last bits, which differ with the number of rows in a product, must not part them.
        wanted = (wanted * grid).round() / grid
    if valid is not None:
        # Below every probability: behind all others in every expert's order.
        wanted = torch.where(valid.unsqueeze(1), wanted, -1.0)
    here = scores.new_tensor([num_tokens], dtype=torch.long)
    # A shape that depends on the others' rows cannot be known without them; alone it can.
    sizes = [num_tokens] if isinstance(meeting, Alone) else meeting.gather(here).view(-1).tolist()
    everyone = meeting.rows(wanted, sizes)
    room = min(len(everyone), capacity_of(len(everyone), factor, num_experts))
    best = torch.sort(everyone, dim=0, descending=True, stable=True).indices[:room]
    taken = torch.zeros_like(everyone, dtype=torch.bool)
    if valid is None:
        taken.scatter_(0, best, True)
    else:
        # Padding takes no room: an expert's room is that of the valid tokens.
        total = (everyone[:, 0] >= 0).sum()
        own = torch.ceil(total.double() * factor / num_experts).clamp(min=1)
        places = torch.arange(room, device=scores.device).unsqueeze(1)
        taken.scatter_(0, best, (places < own).expand(best.shape))
        taken &= everyone >= 0
    first = sum(sizes[: meeting.index])
    mine = taken.narrow(0, first, num_tokens)
    experts = torch.arange(num_experts, device=scores.device)
    by_replica = torch.stack([part.sum(0) for part in taken.split(sizes)])
    return Routed(
        ids=torch.where(mine, experts, -1),
        gates=scores,
        wanted=by_replica.unsqueeze(1),
        kept=by_replica,
        num_tokens=(everyone[:, 0] >= 0).sum(),
        num_slots=room * num_experts if len(sizes) == 1 else None,
    )
