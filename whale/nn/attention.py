"""Attention whose dropout is keyed, and attention on a part of its heads.

The plain product for masked probabilities, and nn.MultiheadAttention.

Place in the flow: `attend` stands in for `scaled_dot_product_attention` when it has dropout (torch
draws that mask inside its kernel, by layout); `own_mask` is the mask of this rank's heads in a
module split by heads (`nn.own_heads`); `MultiheadForward` is nn.MultiheadAttention's forward in
torch operations, which also lets it be split by heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from whale.errors import WhaleError
from whale.nn.column_shard import plain
from whale.nn.forwards import runs
from whale.nn.shard import Shard

Drop = Callable[[torch.Tensor, float], torch.Tensor]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    drop: Drop,
) -> torch.Tensor:
    """softmax(q k / sqrt(d) + mask), dropped by `drop`, times v."""
    if enable_gqa and key.shape[-3] != query.shape[-3]:
        repeat = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(repeat, -3) for t in (key, value))
    factor = scale if scale is not None else 1.0 / math.sqrt(query.shape[-1])
    scores = query @ key.transpose(-2, -1) * factor
    if is_causal:
        rows, columns = scores.shape[-2:]
        allowed = torch.ones(rows, columns, dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, -torch.inf)
    if mask is not None:
        scores = (
            scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        )
    return drop(scores.softmax(-1), dropout_p) @ value


def own_mask(mask: torch.Tensor, shard: Shard, heads: int) -> torch.Tensor:
    """A mask of all `heads`, or of none in particular, for this rank's own.

    Its gradient is a sum over heads, so every member's part is summed.
    """
    entered = shard.enter(mask)
    if mask.dim() < 3 or mask.shape[-3] == 1:
        return entered
    if mask.shape[-3] != heads:
        raise WhaleError(
            f"attention is split by heads and got a mask for {mask.shape[-3]} heads, not for all "
            f"{heads}",
            hint="make the mask outside of the attention module, or without a head dim",
        )
    return entered.narrow(-3, shard.low * (heads // shard.cuts[-1]), shard.local(heads))


class MultiheadForward:
    """nn.MultiheadAttention on this rank's heads (all of them when `shard` is None)."""

    def __init__(self, module: nn.MultiheadAttention, shard: Shard | None, drop: Drop) -> None:
        self.module, self.shard, self.drop = module, shard, drop
        self.heads = module.num_heads if shard is None else shard.num_units

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The replaced forward."""
        module: Any = self.module
        # Columns of a split Linear before it: gathered once, for gradients flow through whole ones.
        whole = {id(t): plain(t) for t in (query, key, value)}
        query, key, value = (whole[id(t)] for t in (query, key, value))
        key_padding_mask, attn_mask = plain(key_padding_mask), plain(attn_mask)
        if query.dim() == 2:
            masks = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
            axis = 0 if module.batch_first else 1
            out, weights = self(
                query.unsqueeze(axis),
                key.unsqueeze(axis),
                value.unsqueeze(axis),
                key_padding_mask=masks,
                need_weights=need_weights,
                attn_mask=attn_mask,
                average_attn_weights=average_attn_weights,
            )
            return out.squeeze(axis), None if weights is None else weights.squeeze(0)
        if not module.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        q, k, v = (self._heads(t) for t in self._project(query, key, value))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        scores = self._masked(scores, attn_mask, key_padding_mask)
        probabilities = scores.softmax(-1)
        p = module.dropout if module.training else 0.0
        mixed = (self.drop(probabilities, p) if p else probabilities) @ v
        mixed = mixed.transpose(1, 2).flatten(2)
        weight, bias = module.out_proj.weight, module.out_proj.bias
        if self.shard is None:
            out = F.linear(mixed, weight, bias)
        else:
            out = self.shard.leave(F.linear(mixed, weight))
            out = out if bias is None else out + bias.to(out.dtype)
        if not module.batch_first:
            out = out.transpose(0, 1)
        if not need_weights:
            return out, None
        if self.shard is not None:
            probabilities = self.shard.join(probabilities, 1, self.shard.cuts[-1])
        return out, probabilities.mean(1) if average_attn_weights else probabilities

    def _project(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> list[torch.Tensor]:
        weights = self.module.in_proj_weight.chunk(3)
        bias = self.module.in_proj_bias
        biases = bias.chunk(3) if bias is not None else (None, None, None)
        entered: dict[int, torch.Tensor] = {}
        made = []
        for source, weight, b in zip((query, key, value), weights, biases, strict=True):
            if id(source) not in entered:
                entered[id(source)] = source if self.shard is None else self.shard.enter(source)
            made.append(F.linear(entered[id(source)], weight, b))
        return made

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.heads, self.module.head_dim)).transpose(1, 2)

    def _masked(
        self,
        scores: torch.Tensor,
        attn_mask: torch.Tensor | None,
        key_padding_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        if attn_mask is not None:
            if attn_mask.dim() == 3:
                attn_mask = attn_mask.view(scores.shape[0], -1, *attn_mask.shape[1:])
            if self.shard is not None:
                attn_mask = own_mask(attn_mask, self.shard, self.shard.cuts[-1])
            scores = (
                scores.masked_fill(attn_mask, -torch.inf)
                if attn_mask.dtype == torch.bool
                else scores + attn_mask
            )
        if key_padding_mask is not None:
            if self.shard is not None:
                key_padding_mask = self.shard.enter(key_padding_mask)
            padding = key_padding_mask[:, None, None, :]
            scores = (
                scores.masked_fill(padding, -torch.inf)
                if padding.dtype == torch.bool
                else scores + padding
            )
        return scores


def supported(module: nn.MultiheadAttention) -> bool:
    """Whether `MultiheadForward` covers this instance.

    Torch's own code, one embedding size, no extra key or value rows.
    """
    plain_form = module._qkv_same_embed_dim and module.bias_k is None and not module.add_zero_attn
    return bool(plain_form) and runs(module, nn.MultiheadAttention)
