"""GNMT (Wu et al., 2016) in the form of NVIDIA's public v2: LSTM layers with attention in between.

Place in the flow: a user's model. Each layer is its own `nn.LSTM`, so stages can be cut between
layers; the attention's context skips over stages to each decoder layer after the first. Decoder
layers start from zero states and see the source through attention only: what passes between layers
then has the batch in dim 0, where the states of `nn.LSTM` have it in dim 1.

Shapes: B batch, S source tokens, T target tokens, D model dim, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

FIRST_RESIDUAL = 2
"""The third layer of a stack is the first that is added to its input."""

INIT_RANGE = 0.1
"""Weights are drawn evenly from minus to plus this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GNMTConfig:
    """The size of a `GNMT`: one vocabulary, whose embedding source and target share."""

    vocab_size: int
    dim: int
    num_encoder_layers: int
    num_decoder_layers: int
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.num_encoder_layers < 2:
            raise ValueError(
                f"num_encoder_layers is {self.num_encoder_layers}; allowed: 2 or more, the second "
                "joins the two directions of the first"
            )


class RecurrentLayer(nn.Module):
    """An LSTM behind dropout, which may read a context beside its input and be added to it."""

    def __init__(
        self, config: GNMTConfig, in_dim: int, *, bidirectional: bool = False, residual: bool
    ) -> None:
        super().__init__()
        self.residual = residual
        self.dropout = nn.Dropout(config.dropout)
        self.lstm = nn.LSTM(in_dim, config.dim, batch_first=True, bidirectional=bidirectional)

    def forward(self, x_btd: Tensor, context_btd: Tensor | None = None) -> Tensor:
        """Returns the states of the layer, from zero states on."""
        read = x_btd if context_btd is None else torch.cat((x_btd, context_btd), dim=-1)
        y_btd, _ = self.lstm(self.dropout(read))
        return x_btd + y_btd if self.residual else y_btd


class NormalisedAttention(nn.Module):
    """Bahdanau's attention: a score is the product of a direction with tanh(query + key + bias).

    The direction's length is a parameter of its own, as in weight normalisation.
    """

    def __init__(self, config: GNMTConfig) -> None:
        super().__init__()
        self.q_proj = nn.Linear(config.dim, config.dim, bias=False)
        self.k_proj = nn.Linear(config.dim, config.dim, bias=False)
        self.direction = nn.Parameter(torch.empty(config.dim))
        self.length = nn.Parameter(torch.empty(1))
        self.bias = nn.Parameter(torch.empty(config.dim))

    def forward(self, x_btd: Tensor, memory_bsd: Tensor) -> Tensor:
        """The mean of the memory for every target position, weighed by its scores."""
        q_bt1d = self.q_proj(x_btd).unsqueeze(2)
        k_b1sd = self.k_proj(memory_bsd).unsqueeze(1)
        direction = self.direction / self.direction.norm() * self.length
        scores_bts = torch.tanh(q_bt1d + k_b1sd + self.bias) @ direction
        return torch.softmax(scores_bts, dim=-1) @ memory_bsd


class GNMT(nn.Module):
    """Source and target tokens in, next-target-token logits out.

    Rows are taken as long as the batch: what is padding counts as tokens, labels aside.
    """

    def __init__(self, config: GNMTConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.dim
        self.embedding = nn.Embedding(config.vocab_size, dim)
        # Both directions of the first layer, side by side, are what the second reads.
        widths = [dim, 2 * dim] + [dim] * (config.num_encoder_layers - 2)
        self.encoder = nn.ModuleList(
            RecurrentLayer(
                config, width, bidirectional=index == 0, residual=index >= FIRST_RESIDUAL
            )
            for index, width in enumerate(widths)
        )
        self.decoder = nn.ModuleList(
            RecurrentLayer(config, dim if index == 0 else 2 * dim, residual=index >= FIRST_RESIDUAL)
            for index in range(config.num_decoder_layers)
        )
        self.attention = NormalisedAttention(config)
        self.lm_head = nn.Linear(dim, config.vocab_size)
        self.apply(self._init_weights)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        """Maps source [B, S] and target [B, T] tokens to logits [B, T, V]."""
        memory_bsd = self.embedding(src)
        for layer in self.encoder:
            memory_bsd = layer(memory_bsd)
        first, *later = self.decoder
        x_btd = first(self.embedding(tgt))
        context_btd = self.attention(x_btd, memory_bsd)
        for layer in later:
            x_btd = layer(x_btd, context_btd)
        return self.lm_head(x_btd)

    def _init_weights(self, module: nn.Module) -> None:
        """Even weights, zero biases, of one module alone.

        A method, so that Whale draws a model on the meta device the same way.
        """
        if isinstance(module, nn.Linear | nn.Embedding | nn.LSTM | NormalisedAttention):
            for name, parameter in module.named_parameters(recurse=False):
                if "bias" in name:
                    nn.init.zeros_(parameter)
                else:
                    nn.init.uniform_(parameter, -INIT_RANGE, INIT_RANGE)
        if isinstance(module, NormalisedAttention):
            nn.init.constant_(module.length, self.config.dim**-0.5)


presets: dict[str, GNMTConfig] = {
    "gnmt-tiny": GNMTConfig(vocab_size=256, dim=32, num_encoder_layers=4, num_decoder_layers=4),
    # 32,000 word pieces, as the paper of GNMT has; MLPerf's shared vocabulary has 36,548.
    "gnmt": GNMTConfig(
        vocab_size=32000, dim=1024, num_encoder_layers=4, num_decoder_layers=4, dropout=0.2
    ),
}
