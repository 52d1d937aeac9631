"""BERT (Devlin et al., 2019): a post-norm Transformer encoder that fills in masked tokens.

Place in the flow: a user's model, and the one most of the paper's figures are about. Nothing here
knows of parallelism.

Shapes: B batch, T tokens, D model dim, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from whale.models.layers import MLP, Attention, init_normal

NORM_EPS = 1e-12
"""As published; torch's default of 1e-5 is another model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BERTConfig:
    """The size of a `BERT`. `pooler` adds the head for next-sentence prediction."""

    vocab_size: int
    max_seq_len: int
    dim: int
    num_layers: int
    num_heads: int
    mlp_dim: int | None = None
    num_token_types: int = 2
    dropout: float = 0.0
    pooler: bool = False

    def __post_init__(self) -> None:
        if self.dim % self.num_heads:
            raise ValueError(f"dim {self.dim} is not a multiple of num_heads {self.num_heads}")


class Block(nn.Module):
    """Attention and MLP, each added to its input and then normalised."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.attention = Attention(config.dim, config.num_heads, dropout=config.dropout)
        self.dropout1 = nn.Dropout(config.dropout)
        self.norm1 = nn.LayerNorm(config.dim, eps=NORM_EPS)
        self.mlp = MLP(config.dim, config.mlp_dim)
        self.dropout2 = nn.Dropout(config.dropout)
        self.norm2 = nn.LayerNorm(config.dim, eps=NORM_EPS)

    def forward(self, x_btd: Tensor, mask_b11t: Tensor | None = None) -> Tensor:
        """Returns the normalised sum after both parts."""
        x_btd = self.norm1(x_btd + self.dropout1(self.attention(x_btd, mask=mask_b11t)))
        return self.norm2(x_btd + self.dropout2(self.mlp(x_btd)))


class MaskedLMHead(nn.Module):
    """Hidden states to token logits; `decoder` shares its weight with the token embedding."""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.dim, config.dim)
        self.act = nn.GELU()
        self.norm = nn.LayerNorm(config.dim, eps=NORM_EPS)
        self.decoder = nn.Linear(config.dim, config.vocab_size)

    def forward(self, x_btd: Tensor) -> Tensor:
        """Maps [B, T, D] to [B, T, V]."""
        return self.decoder(self.norm(self.act(self.dense(x_btd))))


class NextSentenceHead(nn.Module):
    """The pooler and its classifier: does the second segment follow the first?"""

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.pooler = nn.Linear(config.dim, config.dim)
        self.classifier = nn.Linear(config.dim, 2)

    def forward(self, x_btd: Tensor) -> Tensor:
        """Maps the first token of [B, T, D] to [B, 2]."""
        return self.classifier(torch.tanh(self.pooler(x_btd[:, 0])))


class BERT(nn.Module):
    """Tokens in, logits of the tokens that were masked out.

    Example:
        >>> model = BERT(presets["bert-tiny"])
        >>> model(torch.zeros(2, 5, dtype=torch.long)).shape
        torch.Size([2, 5, 256])
    """

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.dim)
        self.position_embedding = nn.Embedding(config.max_seq_len, config.dim)
        self.token_type_embedding = nn.Embedding(config.num_token_types, config.dim)
        self.norm = nn.LayerNorm(config.dim, eps=NORM_EPS)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.lm_head = MaskedLMHead(config)
        self.next_sentence = NextSentenceHead(config) if config.pooler else None
        self.apply(self._init_weights)
        self.lm_head.decoder.weight = self.token_embedding.weight

    def forward(
        self, tokens: Tensor, token_types: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Maps tokens [B, T] to logits [B, T, V]; with a pooler, also to next-sentence [B, 2].

        Args:
            tokens: token ids.
            token_types: segment of each token [B, T]; None: all in the first.
            mask: True (or 1) where a token is one, False where it is padding [B, T]; None: no
                padding.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        types = torch.zeros_like(tokens) if token_types is None else token_types
        x_btd = (
            self.token_embedding(tokens)
            + self.position_embedding(positions)
            + self.token_type_embedding(types)
        )
        x_btd = self.dropout(self.norm(x_btd))
        mask_b11t = None if mask is None else mask.to(torch.bool)[:, None, None, :]
        for block in self.blocks:
            x_btd = block(x_btd, mask_b11t)
        logits_btv = self.lm_head(x_btd)
        if self.next_sentence is None:
            return logits_btv
        return logits_btv, self.next_sentence(x_btd)

    def _init_weights(self, module: nn.Module) -> None:
        """Normal weights of deviation 0.02, zero biases, norms of one: of one module alone.

        A method, so that Whale draws a model on the meta device the same way.
        """
        init_normal(module)
        if isinstance(module, nn.LayerNorm):
            module.reset_parameters()


presets: dict[str, BERTConfig] = {
    "bert-tiny": BERTConfig(vocab_size=256, max_seq_len=64, dim=48, num_layers=4, num_heads=6),
    "bert-base": BERTConfig(
        vocab_size=30522, max_seq_len=512, dim=768, num_layers=12, num_heads=12, dropout=0.1
    ),
    "bert-large": BERTConfig(
        vocab_size=30522, max_seq_len=512, dim=1024, num_layers=24, num_heads=16, dropout=0.1
    ),
}
