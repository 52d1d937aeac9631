"""A Transformer encoder-decoder. Every decoder layer reads the encoder's output.

Place in the flow: a user's model. Cut into stages, the encoder's memory is a tensor that skips over
stages: it is made once and used by each decoder layer after it.

Shapes: B batch, S source tokens, T target tokens, D model dim, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from whale.models.layers import MLP, Attention, init_normal


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderDecoderConfig:
    """The size of an `EncoderDecoder`.

    `share_embeddings` uses one table for source and target tokens, which then have one vocabulary;
    `tie_embeddings` uses the target table as the head's weight.
    """

    vocab_size: int
    max_seq_len: int
    dim: int
    num_encoder_layers: int
    num_decoder_layers: int
    num_heads: int
    src_vocab_size: int | None = None
    mlp_dim: int | None = None
    dropout: float = 0.0
    share_embeddings: bool = False
    tie_embeddings: bool = True

    def __post_init__(self) -> None:
        if self.dim % self.num_heads:
            raise ValueError(f"dim {self.dim} is not a multiple of num_heads {self.num_heads}")
        if self.share_embeddings and self.src_vocab_size not in (None, self.vocab_size):
            raise ValueError(
                f"share_embeddings needs one vocabulary: src_vocab_size is {self.src_vocab_size}, "
                f"vocab_size is {self.vocab_size}"
            )


class EncoderLayer(nn.Module):
    """Self-attention over the whole source, then an MLP."""

    def __init__(self, config: EncoderDecoderConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.dim)
        self.attention = Attention(config.dim, config.num_heads, dropout=config.dropout)
        self.norm2 = nn.LayerNorm(config.dim)
        self.mlp = MLP(config.dim, config.mlp_dim)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_bsd: Tensor) -> Tensor:
        """Returns the residual stream after both parts."""
        x_bsd = x_bsd + self.dropout(self.attention(self.norm1(x_bsd)))
        return x_bsd + self.dropout(self.mlp(self.norm2(x_bsd)))


class DecoderLayer(nn.Module):
    """Causal self-attention, attention to the encoder's memory, then an MLP."""

    def __init__(self, config: EncoderDecoderConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.dim)
        self.self_attention = Attention(
            config.dim, config.num_heads, dropout=config.dropout, is_causal=True
        )
        self.norm2 = nn.LayerNorm(config.dim)
        self.cross_attention = Attention(config.dim, config.num_heads, dropout=config.dropout)
        self.norm3 = nn.LayerNorm(config.dim)
        self.mlp = MLP(config.dim, config.mlp_dim)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_btd: Tensor, memory_bsd: Tensor) -> Tensor:
        """Returns the residual stream after the three parts."""
        x_btd = x_btd + self.dropout(self.self_attention(self.norm1(x_btd)))
        x_btd = x_btd + self.dropout(self.cross_attention(self.norm2(x_btd), memory_bsd))
        return x_btd + self.dropout(self.mlp(self.norm3(x_btd)))


class EncoderDecoder(nn.Module):
    """Source and target tokens in, next-target-token logits out."""

    def __init__(self, config: EncoderDecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.tgt_embedding = nn.Embedding(config.vocab_size, config.dim)
        self.src_embedding = (
            self.tgt_embedding
            if config.share_embeddings
            else nn.Embedding(config.src_vocab_size or config.vocab_size, config.dim)
        )
        self.src_position = nn.Embedding(config.max_seq_len, config.dim)
        self.tgt_position = nn.Embedding(config.max_seq_len, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_encoder_layers))
        self.encoder_norm = nn.LayerNorm(config.dim)
        self.decoder = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_decoder_layers))
        self.decoder_norm = nn.LayerNorm(config.dim)
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.apply(init_normal)
        if config.tie_embeddings:
            self.lm_head.weight = self.tgt_embedding.weight

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        """Maps source [B, S] and target [B, T] tokens to logits [B, T, V]."""
        src_positions = torch.arange(src.shape[1], device=src.device)
        x_bsd = self.dropout(self.src_embedding(src) + self.src_position(src_positions))
        for layer in self.encoder:
            x_bsd = layer(x_bsd)
        memory_bsd = self.encoder_norm(x_bsd)
        tgt_positions = torch.arange(tgt.shape[1], device=tgt.device)
        x_btd = self.dropout(self.tgt_embedding(tgt) + self.tgt_position(tgt_positions))
        for layer in self.decoder:
            x_btd = layer(x_btd, memory_bsd)
        return self.lm_head(self.decoder_norm(x_btd))


presets: dict[str, EncoderDecoderConfig] = {
    "encdec-tiny": EncoderDecoderConfig(
        vocab_size=256,
        max_seq_len=64,
        dim=64,
        num_encoder_layers=2,
        num_decoder_layers=2,
        num_heads=4,
    ),
    "encdec-base": EncoderDecoderConfig(
        vocab_size=32000,
        max_seq_len=512,
        dim=512,
        num_encoder_layers=6,
        num_decoder_layers=6,
        num_heads=8,
        dropout=0.1,
        share_embeddings=True,
    ),
}
