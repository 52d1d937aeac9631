"""T5 (Raffel et al., 2020): an encoder-decoder with relative position biases and RMS norms.

Place in the flow: a user's model. The position bias of a stack is made once and read by each of its
blocks, as the encoder's memory is by each decoder block: cut into stages, both are tensors that
skip over stages, and the bias is one without a batch dim.

Shapes: B batch, S source tokens, T target tokens, D model dim, H heads, E head dim, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class T5Config:
    """The size of a `T5`. `head_dim` is free: heads together may be wider than `dim`.

    `num_buckets` and `max_distance` shape the position bias: distances share buckets that widen up
    to `max_distance`.
    """

    vocab_size: int
    dim: int
    mlp_dim: int
    num_encoder_layers: int
    num_decoder_layers: int
    num_heads: int
    head_dim: int
    num_buckets: int = 32
    max_distance: int = 128
    dropout: float = 0.0


class RelativeBias(nn.Module):
    """What is added to the attention scores of each head, by the distance of key from query."""

    def __init__(self, config: T5Config, *, is_causal: bool) -> None:
        super().__init__()
        self.num_buckets = config.num_buckets
        self.max_distance = config.max_distance
        self.is_causal = is_causal
        self.table = nn.Parameter(torch.empty(config.num_buckets, config.num_heads))

    def forward(self, num_tokens: int) -> Tensor:
        """The biases [1, H, T, T] of a sequence; minus infinity where a causal one looks ahead."""
        positions = torch.arange(num_tokens, device=self.table.device)
        distance_tt = positions[None, :] - positions[:, None]
        bias_tth = F.embedding(self._bucket(distance_tt), self.table)
        bias_1htt = bias_tth.permute(2, 0, 1).unsqueeze(0)
        if self.is_causal:
            # Attention takes a mask or `is_causal`, not both.
            bias_1htt = bias_1htt.masked_fill(distance_tt > 0, -torch.inf)
        # Fused attention on GPUs takes no other layout, and the plain one keeps all scores.
        return bias_1htt.contiguous()

    def _bucket(self, distance: Tensor) -> Tensor:
        """The number of the bucket: near distances have one each, far ones share, by logarithm."""
        num_buckets = self.num_buckets
        first = torch.zeros_like(distance)
        if self.is_causal:
            distance = (-distance).clamp(min=0)
        else:
            num_buckets //= 2
            first = (distance > 0).long() * num_buckets
            distance = distance.abs()
        exact = num_buckets // 2
        spread = math.log(self.max_distance / exact)
        # In float64 whatever the model's dtype: a bucket must not change with the precision.
        scaled = (distance.clamp(min=exact).double() / exact).log() / spread
        far = exact + (scaled * (num_buckets - exact)).long()
        return first + torch.where(distance < exact, distance, far.clamp(max=num_buckets - 1))


class Attention(nn.Module):
    """Attention from one sequence to another, or to itself; scores are not scaled."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        width = config.num_heads * config.head_dim
        self.head_dim = config.head_dim
        self.dropout = config.dropout
        self.q_proj = nn.Linear(config.dim, width, bias=False)
        self.k_proj = nn.Linear(config.dim, width, bias=False)
        self.v_proj = nn.Linear(config.dim, width, bias=False)
        self.out_proj = nn.Linear(width, config.dim, bias=False)
        # The scale that other models put on the scores is in these weights, from the start.
        self.q_proj.init_gain = config.head_dim**-0.5  # type: ignore[assignment]

    def forward(self, x_btd: Tensor, memory_bsd: Tensor, bias_1hts: Tensor | None = None) -> Tensor:
        """Attends from `x_btd` to `memory_bsd`; the same tensor twice is self-attention."""
        B, T, _ = x_btd.shape  # noqa: N806
        S = memory_bsd.shape[1]  # noqa: N806
        q_bhte = self.q_proj(x_btd).view(B, T, -1, self.head_dim).transpose(1, 2)
        k_bhse = self.k_proj(memory_bsd).view(B, S, -1, self.head_dim).transpose(1, 2)
        v_bhse = self.v_proj(memory_bsd).view(B, S, -1, self.head_dim).transpose(1, 2)
        dropout = self.dropout if self.training else 0.0
        y_bhte = F.scaled_dot_product_attention(
            q_bhte, k_bhse, v_bhse, attn_mask=bias_1hts, dropout_p=dropout, scale=1.0
        )
        return self.out_proj(y_bhte.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    """Two linear layers around a ReLU, with dropout between them."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.dim, config.mlp_dim, bias=False)
        self.act = nn.ReLU()
        self.dropout = nn.Dropout(config.dropout)
        self.fc2 = nn.Linear(config.mlp_dim, config.dim, bias=False)

    def forward(self, x_btd: Tensor) -> Tensor:
        """Applies the layers to every token alone."""
        return self.fc2(self.dropout(self.act(self.fc1(x_btd))))


class EncoderBlock(nn.Module):
    """Self-attention over the whole source, then an MLP, each behind a norm."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.dim, eps=NORM_EPS)
        self.attention = Attention(config)
        self.dropout1 = nn.Dropout(config.dropout)
        self.norm2 = nn.RMSNorm(config.dim, eps=NORM_EPS)
        self.mlp = MLP(config)
        self.dropout2 = nn.Dropout(config.dropout)

    def forward(self, x_bsd: Tensor, bias_1hss: Tensor) -> Tensor:
        """Returns the residual stream after both parts."""
        y_bsd = self.norm1(x_bsd)
        x_bsd = x_bsd + self.dropout1(self.attention(y_bsd, y_bsd, bias_1hss))
        return x_bsd + self.dropout2(self.mlp(self.norm2(x_bsd)))


class DecoderBlock(nn.Module):
    """Causal self-attention, attention to the encoder's memory, then an MLP."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.dim, eps=NORM_EPS)
        self.self_attention = Attention(config)
        self.dropout1 = nn.Dropout(config.dropout)
        self.norm2 = nn.RMSNorm(config.dim, eps=NORM_EPS)
        self.cross_attention = Attention(config)
        self.dropout2 = nn.Dropout(config.dropout)
        self.norm3 = nn.RMSNorm(config.dim, eps=NORM_EPS)
        self.mlp = MLP(config)
        self.dropout3 = nn.Dropout(config.dropout)

    def forward(self, x_btd: Tensor, memory_bsd: Tensor, bias_1htt: Tensor) -> Tensor:
        """Returns the residual stream after the three parts."""
        y_btd = self.norm1(x_btd)
        x_btd = x_btd + self.dropout1(self.self_attention(y_btd, y_btd, bias_1htt))
        x_btd = x_btd + self.dropout2(self.cross_attention(self.norm2(x_btd), memory_bsd))
        return x_btd + self.dropout3(self.mlp(self.norm3(x_btd)))


class T5(nn.Module):
    """Source and target tokens in, next-target-token logits out.

    Sequences are packed, as in pre-training: there is no padding mask.
    """

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.src_dropout = nn.Dropout(config.dropout)
        self.encoder_bias = RelativeBias(config, is_causal=False)
        self.encoder = nn.ModuleList(EncoderBlock(config) for _ in range(config.num_encoder_layers))
        self.encoder_norm = nn.RMSNorm(config.dim, eps=NORM_EPS)
        self.memory_dropout = nn.Dropout(config.dropout)
        self.tgt_dropout = nn.Dropout(config.dropout)
        self.decoder_bias = RelativeBias(config, is_causal=True)
        self.decoder = nn.ModuleList(DecoderBlock(config) for _ in range(config.num_decoder_layers))
        self.decoder_norm = nn.RMSNorm(config.dim, eps=NORM_EPS)
        self.head_dropout = nn.Dropout(config.dropout)
        self.lm_head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.apply(self._init_weights)
        self.lm_head.weight = self.embedding.weight

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        """Maps source [B, S] and target [B, T] tokens to logits [B, T, V]."""
        x_bsd = self.src_dropout(self.embedding(src))
        bias_1hss = self.encoder_bias(src.shape[1])
        for block in self.encoder:
            x_bsd = block(x_bsd, bias_1hss)
        memory_bsd = self.memory_dropout(self.encoder_norm(x_bsd))
        x_btd = self.tgt_dropout(self.embedding(tgt))
        bias_1htt = self.decoder_bias(tgt.shape[1])
        for block in self.decoder:
            x_btd = block(x_btd, memory_bsd, bias_1htt)
        x_btd = self.head_dropout(self.decoder_norm(x_btd))
        # The head's weight is the embedding, whose entries are of size one.
        return self.lm_head(x_btd * self.config.dim**-0.5)

    def _init_weights(self, module: nn.Module) -> None:
        """Normal weights by fan-in, as published, of one module alone.

        A method, so that Whale draws a model on the meta device the same way.
        """
        if isinstance(module, nn.Linear):
            gain = getattr(module, "init_gain", 1.0)
            nn.init.normal_(module.weight, std=gain * module.in_features**-0.5)
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight)
        if isinstance(module, RelativeBias):
            nn.init.normal_(module.table, std=self.config.dim**-0.5)
        if isinstance(module, nn.RMSNorm):
            module.reset_parameters()


presets: dict[str, T5Config] = {
    "t5-tiny": T5Config(
        vocab_size=256,
        dim=48,
        mlp_dim=96,
        num_encoder_layers=2,
        num_decoder_layers=2,
        num_heads=6,
        head_dim=8,
        num_buckets=8,
        max_distance=16,
    ),
    "t5-small": T5Config(
        vocab_size=32128,
        dim=512,
        mlp_dim=2048,
        num_encoder_layers=6,
        num_decoder_layers=6,
        num_heads=8,
        head_dim=64,
        dropout=0.1,
    ),
    "t5-large": T5Config(
        vocab_size=32128,
        dim=1024,
        mlp_dim=4096,
        num_encoder_layers=24,
        num_decoder_layers=24,
        num_heads=16,
        head_dim=64,
        dropout=0.1,
    ),
}
