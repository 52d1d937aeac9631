"""An LSTM encoder-decoder with dot attention; `gnmt` is the published model of its kind.

Place in the flow: a user's model. Each layer is its own `nn.LSTM`, so stages can be cut between
layers. Decoder layers start from zero states and see the source through attention only: what passes
between layers then has the batch in dim 0, where the states of `nn.LSTM` have it in dim 1.

Shapes: B batch, S source tokens, T target tokens, D model dim, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Seq2SeqLSTMConfig:
    """The size of a `Seq2SeqLSTM`. `src_vocab_size` defaults to `vocab_size`, the target's."""

    vocab_size: int
    dim: int
    num_encoder_layers: int
    num_decoder_layers: int
    src_vocab_size: int | None = None
    dropout: float = 0.0


class DotAttention(nn.Module):
    """Luong's dot attention: a weighted sum of the memory, mixed with the query."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.out_proj = nn.Linear(2 * dim, dim)

    def forward(self, x_btd: Tensor, memory_bsd: Tensor) -> Tensor:
        """Attends from every target position to every source position."""
        weights_bts = torch.softmax(x_btd @ memory_bsd.transpose(1, 2), dim=-1)
        context_btd = weights_bts @ memory_bsd
        return torch.tanh(self.out_proj(torch.cat((context_btd, x_btd), dim=-1)))


class Seq2SeqLSTM(nn.Module):
    """Source and target tokens in, next-target-token logits out."""

    def __init__(self, config: Seq2SeqLSTMConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.dim
        self.src_embedding = nn.Embedding(config.src_vocab_size or config.vocab_size, dim)
        self.tgt_embedding = nn.Embedding(config.vocab_size, dim)
        self.encoder = nn.ModuleList(
            nn.LSTM(dim, dim, batch_first=True) for _ in range(config.num_encoder_layers)
        )
        self.decoder = nn.ModuleList(
            nn.LSTM(dim, dim, batch_first=True) for _ in range(config.num_decoder_layers)
        )
        self.dropout = nn.Dropout(config.dropout)
        self.attention = DotAttention(dim)
        self.lm_head = nn.Linear(dim, config.vocab_size)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        """Maps source [B, S] and target [B, T] tokens to logits [B, T, V]."""
        memory_bsd = self.src_embedding(src)
        for layer in self.encoder:
            memory_bsd, _ = layer(self.dropout(memory_bsd))
        x_btd = self.tgt_embedding(tgt)
        for layer in self.decoder:
            x_btd, _ = layer(self.dropout(x_btd))
        return self.lm_head(self.attention(x_btd, memory_bsd))


presets: dict[str, Seq2SeqLSTMConfig] = {
    "lstm-tiny": Seq2SeqLSTMConfig(
        vocab_size=256, dim=64, num_encoder_layers=2, num_decoder_layers=2
    ),
}
