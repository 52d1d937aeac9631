"""A decoder-only Transformer language model: learned positions, pre-norm blocks, tied head.

Place in the flow: a user's model. Nothing here knows of parallelism.

Shapes: B batch, T tokens, D model dim, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from whale.models.layers import MLP, Attention, init_normal


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


class Block(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.dim)
        self.attention = Attention(
            config.dim,
            config.num_heads,
            num_kv_heads=config.num_kv_heads,
            dropout=config.dropout,
            is_causal=True,
        )
        self.dropout1 = nn.Dropout(config.dropout)
        self.norm2 = nn.LayerNorm(config.dim)
        self.mlp = MLP(config.dim, config.mlp_dim)
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
        self.apply(init_normal)
        if config.tie_embeddings:
            self.lm_head.weight = self.token_embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps tokens [B, T] to logits [B, T, V]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x_btd = self.dropout(self.token_embedding(tokens) + self.position_embedding(positions))
        for block in self.blocks:
            x_btd = block(x_btd)
        return self.lm_head(self.norm(x_btd))


presets: dict[str, GPTConfig] = {
    "gpt-tiny": GPTConfig(vocab_size=256, max_seq_len=128, dim=128, num_layers=4, num_heads=4),
    "gpt-small": GPTConfig(
        vocab_size=50257, max_seq_len=1024, dim=768, num_layers=12, num_heads=12, dropout=0.1
    ),
}
