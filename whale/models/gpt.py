"""A decoder-only Transformer language model: learned positions, pre-norm blocks, tied head.

Place in the flow: a user's model. Nothing here knows of parallelism; head counts are written as -1
in views, so that the same `forward` is right for the part of the heads that a rank holds.

Shapes: B batch, T tokens, D model dim, H query heads, K key/value heads, E head dim, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """The size of a `GPT`. `num_kv_heads` below `num_heads` makes grouped-query attention."""

    vocab_size: int
    max_seq_len: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None = None
    mlp_dim: int | None = None
    dropout: float = 0.0
    tie_embeddings: bool = True

    def __post_init__(self) -> None:
        if self.dim % self.num_heads:
            raise ValueError(f"dim {self.dim} is not a multiple of num_heads {self.num_heads}")
        if self.num_heads % (self.num_kv_heads or self.num_heads):
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )


class Attention(nn.Module):
    """Causal self-attention with separate projections for queries, keys and values."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads or config.num_heads
        self.head_dim = config.dim // config.num_heads
        self.dropout = config.dropout
        kv_dim = self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.dim, config.dim)
        self.k_proj = nn.Linear(config.dim, kv_dim)
        self.v_proj = nn.Linear(config.dim, kv_dim)
        self.out_proj = nn.Linear(config.dim, config.dim)

    def forward(self, x_btd: Tensor) -> Tensor:
        """Attends from every token to itself and those before it."""
        B, T, _ = x_btd.shape  # noqa: N806
        q_bhte = self.q_proj(x_btd).view(B, T, -1, self.head_dim).transpose(1, 2)
        k_bkte = self.k_proj(x_btd).view(B, T, -1, self.head_dim).transpose(1, 2)
        v_bkte = self.v_proj(x_btd).view(B, T, -1, self.head_dim).transpose(1, 2)
        y_bhte = F.scaled_dot_product_attention(
            q_bhte,
            k_bkte,
            v_bkte,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=True,
            enable_gqa=self.num_kv_heads != self.num_heads,
        )
        return self.out_proj(y_bhte.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    """Two linear layers around a GELU."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        hidden = config.mlp_dim or 4 * config.dim
        self.fc1 = nn.Linear(config.dim, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, config.dim)

    def forward(self, x_btd: Tensor) -> Tensor:
        """Applies the layers to every token alone."""
        return self.fc2(self.act(self.fc1(x_btd)))


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.dim)
        self.attention = Attention(config)
        self.dropout1 = nn.Dropout(config.dropout)
        self.norm2 = nn.LayerNorm(config.dim)
        self.mlp = MLP(config)
        self.dropout2 = nn.Dropout(config.dropout)

    def forward(self, x_btd: Tensor) -> Tensor:
        """Returns the residual stream after both parts."""
        x_btd = x_btd + self.dropout1(self.attention(self.norm1(x_btd)))
        return x_btd + self.dropout2(self.mlp(self.norm2(x_btd)))


class GPT(nn.Module):
    """Tokens in, next-token logits out.

    Example:
        >>> model = GPT(presets["gpt-tiny"])
        >>> model(torch.zeros(2, 5, dtype=torch.long)).shape
        torch.Size([2, 5, 256])
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.dim)
        self.position_embedding = nn.Embedding(config.max_seq_len, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.dim)
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.apply(_init_weights)
        if config.tie_embeddings:
            self.lm_head.weight = self.token_embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps tokens [B, T] to logits [B, T, V]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x_btd = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            x_btd = block(x_btd)
        return self.lm_head(self.norm(x_btd))


def _init_weights(module: nn.Module) -> None:
    """Normal weights of deviation 0.02 and zero biases, as GPT-2."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


presets: dict[str, GPTConfig] = {
    "gpt-tiny": GPTConfig(vocab_size=256, max_seq_len=128, dim=128, num_layers=4, num_heads=4),
    "gpt-small": GPTConfig(
        vocab_size=50257, max_seq_len=1024, dim=768, num_layers=12, num_heads=12, dropout=0.1
    ),
}
