"""Stacked experts of other libraries, of which a member holds some: Mixtral, Qwen-MoE and kin.

Place in the flow: installed by the rule `stacked experts` (`engine.split.stacked_experts` finds the
modules). Such a module has no router: it is called with `(hidden_states [T, d], top_k_index [T, k],
top_k_weights [T, k])` and gives the weighted sum of each token's experts. An index that is no
expert's (-1, or the number of experts) is no choice. Every choice finds room, so members need
nothing of each other but how many rows go where.

| the group | what happens |
|---|---|
| members of one replica: all see the same rows | each runs its experts; outputs are summed |
| several replicas: each has rows of its own | counts gathered, all-to-all there, all-to-all back |

Weights of the choices stay at home: an expert's output travels back bare and is weighted there, so
that their gradient is there too. Plain gated experts run in `experts.moe_ffn`; any others in the
forward of the module itself, on rows of one choice each.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whale.errors import WhaleError
from whale.nn.column_shard import plain
from whale.nn.inside import Count, Inside
from whale.nn.moe import permute
from whale.nn.moe.exchange import Exchange
from whale.nn.moe.experts import moe_ffn
from whale.nn.shard import Shard
from whale.runtime import collectives

_ACTIVATIONS = {
    "SiLU": "silu", "SiLUActivation": "silu", "GELU": "gelu", "GELUActivation": "gelu",
    "ReLU": "relu",
}  # fmt: skip


def matrices(module: nn.Module, width: int | None = None) -> tuple[Tensor, Tensor] | None:
    """(w_in [E, d, f or 2 f], w_out [E, f, d]): views of its first and last stacked parameters.

    None where they do not fit. Stacks may be stored transposed, or with experts and their rows in
    one dim. Experts of one matrix in and one out fit both ways: then `width`, that of the tokens,
    tells.
    """
    stacks = [p for p in module.parameters() if p.dim() == 3]
    if not stacks:
        count = int(module.num_experts)  # type: ignore[arg-type]
        flat = [p for p in module.parameters() if p.dim() == 2 and p.shape[0] > count]
        stacks = [p.view(count, -1, p.shape[1]) for p in flat]  # type: ignore[misc]
    if len(stacks) not in (2, 3):
        return None
    first, last = stacks[0], stacks[-1]
    stored = [(first, last), (first.transpose(1, 2), last.transpose(1, 2))]
    if not getattr(module, "is_transposed", False):
        stored.reverse()
    # Three: gate, up and down apart, of which transformers stores the last as it is.
    stored.append((first.transpose(1, 2), last))
    found = [
        (w_in, w_out)
        for w_in, w_out in stored
        if w_in.shape[1] == w_out.shape[2] and w_in.shape[2] in (w_out.shape[1], 2 * w_out.shape[1])
    ]
    told = [pair for pair in found if pair[0].shape[1] == width]
    return next(iter(told or found), None)


def plain_activation(module: nn.Module) -> str | None:
    """The activation of experts that compute `(act(x @ left) * (x @ right)) @ w_out`, no more.

    None: they do something else, or it cannot be told.
    """
    told = (getattr(module, name, None) for name in ("has_gate", "is_concatenated"))
    more = (getattr(module, name, None) for name in ("has_bias", "has_post_expert_norm"))
    gate = getattr(getattr(type(module), "_apply_gate", None), "__name__", "")
    act = getattr(module, "act_fn", None)
    theirs = type(module).forward.__module__.startswith("transformers.")
    if not theirs or not all(told) or any(more) or gate != "_default_apply_gate":
        return None
    if type(act) is nn.GELU and act.approximate != "none":
        return None
    return _ACTIVATIONS.get(type(act).__name__)


class StackedForward:
    """The forward of stacked experts of which this member holds [shard.low, shard.high).

    Args:
        module: With its own experts' weights.
        shard: The group, and which experts are whose.
    """

    def __init__(self, module: nn.Module, shard: Shard, *, by_columns: bool = False) -> None:
        self.module, self.shard, self.by_columns = module, shard, by_columns
        self.exchange = Exchange(shard)
        self.activation = plain_activation(module)
        self.own = module.forward
        counts = [Count(module, "num_experts", shard.num_units, "num_experts")]
        self.inside = Inside("", [] if by_columns else counts)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The replaced forward."""
        collectives.refuse_transforms()
        tokens, gates = plain(hidden_states), plain(top_k_weights)
        if top_k_index.shape != gates.shape or tokens.numel() // tokens.shape[-1] != len(gates):
            raise WhaleError(
                f"{type(self.module).__name__} is split by expert and was called with tokens "
                f"{tuple(tokens.shape)}, choices {tuple(top_k_index.shape)} and weights "
                f"{tuple(gates.shape)}",
                hint="choices and weights must be [tokens, experts per token]; or leave the "
                "experts out of the split",
            )
        compute = self._inside if self.shard.rows is None else self._across
        if self.by_columns:
            compute = self._columns
        made = compute(tokens.reshape(-1, tokens.shape[-1]), top_k_index, gates)
        return made.view(tokens.shape)

    def _columns(self, tokens: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        """All members work on every row, each with its hidden columns of every expert."""
        shard = self.shard
        gates, tokens = shard.enter(gates), shard.enter(tokens)
        return shard.leave(self._ffn(tokens, shard.gather_rows(ids), gates))

    def _inside(self, tokens: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        """All members see the same rows."""
        shard = self.shard
        own = (ids >= shard.low) & (ids < shard.high)
        ids = torch.where(own, ids - shard.low, -1)
        gates, tokens = shard.enter(gates), shard.enter(tokens)
        if self.activation is not None:
            return shard.leave(self._ffn(tokens, ids, gates))
        (order, _, offsets), inverse = permute.route(ids, shard.num_units)
        rows = permute.gather_rows(tokens, order, ids.shape[1], inverse)
        routed = int(offsets[-1])
        here = ids.reshape(-1).index_select(0, order[:routed])
        made = F.pad(self._experts(rows[:routed], here), (0, 0, 0, len(rows) - routed))
        return shard.leave(permute.combine(made, order, gates, inverse))

    def _across(self, tokens: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        """Every member has rows of its own."""
        shard = self.shard
        size = len(shard.cuts) - 1
        known = (ids >= 0) & (ids < shard.cuts[-1])
        (order, counts, _), inverse = permute.route(torch.where(known, ids, -1), shard.cuts[-1])
        # [members, experts]: what each has for each expert. The sizes of an all-to-all are the
        # host's, so this is where it waits for the device.
        all_counts = collectives.gather(counts[None].long(), 0, [1] * size, shard.group).cpu()
        firsts = [0, *itertools.accumulate(self.exchange.sizes())]

        def compute(chunk: int, arrived: Tensor, offsets: Tensor) -> Tensor:
            counts = torch.diff(offsets, prepend=offsets.new_zeros(1)).long()
            here = firsts[chunk] + torch.arange(len(counts), device=counts.device)
            return self._experts(arrived, here.repeat_interleave(counts))

        rows = permute.gather_rows(tokens, order, ids.shape[1], inverse)
        routed = int(all_counts[shard.index].sum())
        returned = self.exchange.there_and_back(rows[:routed], all_counts, compute)
        # Choices of no expert come last, and nothing comes back for them.
        padded = F.pad(returned, (0, 0, 0, len(rows) - routed))
        return permute.combine(padded, order, gates, inverse)

    def _experts(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Each row through its one expert, of those that are here."""
        if not len(rows):
            # Nobody's gradient may be missing: others wait for it.
            return rows + sum(p.reshape(-1)[:0].sum() for p in self.module.parameters())
        ones = rows.new_ones(len(rows), 1)
        if self.activation is not None:
            return self._ffn(rows, ids.unsqueeze(1), ones)
        with self.inside:
            made: Tensor = self.own(rows, ids.unsqueeze(1), ones)
        return made.reshape(rows.shape)

    def _ffn(self, tokens: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
        assert self.activation is not None
        with self.inside:
            found = matrices(self.module)
        assert found is not None
        w_in, w_out = found
        return moe_ffn(tokens, ids, gates, w_in, w_out, activation=self.activation, gated=True)
