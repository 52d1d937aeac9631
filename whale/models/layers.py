"""What the plain Transformers have in common: attention by heads, and an MLP.

Place in the flow: used by `gpt`, `bert`, `encoder_decoder` and `m6`. Nothing here knows of
parallelism; head counts are written as -1 in views, so that the same `forward` is right for the
part of the heads that a rank holds. T5 has its own: no biases, scores that are not scaled.

Shapes: B batch, T tokens, S tokens looked at, D model dim, H query heads, K key/value heads,
E head dim.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Attention with separate projections for queries, keys and values.

    Args:
        dim: width of the residual stream.
        num_heads: query heads.
        num_kv_heads: fewer than `num_heads` makes grouped-query attention; None: as many.
        dropout: of the attention weights.
        is_causal: whether a token sees only itself and those before it.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        dropout: float = 0.0,
        is_causal: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads or num_heads
        self.head_dim = dim // num_heads
        self.dropout = dropout
        self.is_causal = is_causal
        kv_dim = self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(dim, dim)
        self.k_proj = nn.Linear(dim, kv_dim)
        self.v_proj = nn.Linear(dim, kv_dim)
        self.out_proj = nn.Linear(dim, dim)

    def forward(
        self, x_btd: Tensor, memory_bsd: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """Attends from `x_btd` to `memory_bsd` (None: to itself) where `mask` is True (None: all).

        The mask is anything that broadcasts to [B, H, T, S].
        """
        memory_bsd = x_btd if memory_bsd is None else memory_bsd
        B, T, _ = x_btd.shape  # noqa: N806
        S = memory_bsd.shape[1]  # noqa: N806
        q_bhte = self.q_proj(x_btd).view(B, T, -1, self.head_dim).transpose(1, 2)
        k_bkse = self.k_proj(memory_bsd).view(B, S, -1, self.head_dim).transpose(1, 2)
        v_bkse = self.v_proj(memory_bsd).view(B, S, -1, self.head_dim).transpose(1, 2)
        y_bhte = F.scaled_dot_product_attention(
            q_bhte,
            k_bkse,
            v_bkse,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.is_causal,
            enable_gqa=self.num_kv_heads != self.num_heads,
        )
        return self.out_proj(y_bhte.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    """Two linear layers around a GELU; `hidden` None is four times `dim`."""

    def __init__(self, dim: int, hidden: int | None = None) -> None:
        super().__init__()
        hidden = hidden or 4 * dim
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x_btd: Tensor) -> Tensor:
        """Applies the layers to every token alone."""
        return self.fc2(self.act(self.fc1(x_btd)))


def init_normal(module: nn.Module) -> None:
    """Normal weights of deviation 0.02 and zero biases, as GPT-2: of one module alone."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
