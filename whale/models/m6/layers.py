"""The layers of an M6: patch stem, positions, prefix mask, block.

Place in the flow: used by `model`. Nothing here knows of parallelism.

Shapes: B batch, P patches, S text tokens, N = P + S positions, D model dim.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from whale.models.layers import MLP, Attention
from whale.models.m6.config import CHANNELS, M6Config
from whale.nn.moe.layer import MoE


def prefix_mask(num_source: Tensor, has_image: Tensor, num_patches: int, num_text: int) -> Tensor:
    """Who may look at whom, True for yes [B, 1, N, N] (query, then key).

    All look at the source, and at what is not after them; so the source is bidirectional and the
    target causal. Patches of a row without a picture are seen by none. Padding is at the end, where
    it is after everything that counts.

    Args:
        num_source: positions of each row's source, patches included whether there are any or not.
        has_image: whether a row has a picture.
        num_patches: P.
        num_text: S.
    """
    positions = torch.arange(num_patches + num_text, device=num_source.device)
    query, key = positions[:, None], positions[None, :]
    seen = (key < num_source[:, None, None]) | (key <= query)
    real = (key >= num_patches) | has_image[:, None, None]
    # A row of nothing but False has no softmax; whoever sees nothing else sees itself.
    return ((seen & real) | (key == query)).unsqueeze(1)


class PatchStem(nn.Module):
    """Patch vectors to the model's width: a small network on each patch, and where it was."""

    def __init__(self, config: M6Config) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.patch_dim, config.dim)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(config.dim, config.dim)
        self.position_embedding = nn.Embedding(config.num_patches, config.dim)

    def forward(self, patches: Tensor) -> Tensor:
        """Maps [B, P, patch_dim] to [B, P, D]."""
        positions = torch.arange(patches.shape[1], device=patches.device)
        x_bpd = self.fc2(self.act(self.fc1(patches.to(self.fc1.weight.dtype))))
        return x_bpd + self.position_embedding(positions)


class ConvStem(nn.Module):
    """Convolutions over the whole picture, down to one vector a patch, and where it was.

    M6 sees through a ResNet. Here two convolutions for each halving: small edges and colours are
    the same wherever they are, which a network on patches would have to learn for each place.
    Two more see all of the picture, and what they make of it is added to every patch: attention
    takes far longer than a convolution to learn to look at the whole.
    """

    def __init__(self, config: M6Config) -> None:
        super().__init__()
        self.grid = config.image_size // config.patch_size
        self.patch_size = config.patch_size
        halvings = config.patch_size.bit_length() - 1
        widths = [max(32, config.dim >> (halvings - i)) for i in range(halvings)]
        self.patches = nn.Sequential(
            *(
                layer
                for before, width in pairwise([CHANNELS, *widths])
                for layer in (*_convolved(before, width, 1), *_convolved(width, width, 2))
            )
        )
        self.whole = nn.Sequential(
            *_convolved(widths[-1], widths[-1], 1),
            *_convolved(widths[-1], widths[-1], 2),
            nn.Flatten(),
            nn.Linear(widths[-1] * (-(-self.grid // 2)) ** 2, config.dim),
        )
        self.fc = nn.Linear(widths[-1], config.dim)
        self.position_embedding = nn.Embedding(config.num_patches, config.dim)

    def forward(self, patches: Tensor) -> Tensor:
        """Maps [B, P, patch_dim] to [B, P, D]."""
        grid, side = self.grid, self.patch_size
        cut = patches.to(self.fc.weight.dtype).unflatten(1, (grid, grid))
        apart = cut.unflatten(3, (side, side, CHANNELS)).permute(0, 5, 1, 3, 2, 4)
        picture_bchw = apart.flatten(4, 5).flatten(2, 3)
        x_bchw = self.patches(picture_bchw)
        positions = torch.arange(patches.shape[1], device=patches.device)
        x_bpd = self.fc(x_bchw.flatten(2).transpose(1, 2)) + self.whole(x_bchw).unsqueeze(1)
        return x_bpd + self.position_embedding(positions)


def _convolved(before: int, width: int, stride: int) -> tuple[nn.Module, ...]:
    return (
        nn.Conv2d(before, width, 3, stride=stride, padding=1, bias=False),
        nn.GroupNorm(8, width),
        nn.GELU(),
    )


def make_stem(config: M6Config) -> nn.Module:
    """What makes vectors of patches."""
    return ConvStem(config) if config.stem == "conv" else PatchStem(config)


class TextStem(nn.Module):
    """Tokens to vectors. Positions of the target are counted from its own beginning.

    So an image code always has the position of its place in the picture, however long the text that
    asked for it.
    """

    def __init__(self, config: M6Config) -> None:
        super().__init__()
        self.max_text_len = config.max_text_len
        self.token_embedding = nn.Embedding(config.vocab_size, config.dim)
        self.position_embedding = nn.Embedding(2 * config.max_text_len, config.dim)

    def forward(self, tokens: Tensor, num_source_text: Tensor) -> Tensor:
        """Maps tokens [B, S], of which the first `num_source_text` [B] are source, to [B, S, D]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        begin = num_source_text[:, None]
        target = positions - begin + self.max_text_len
        return self.token_embedding(tokens) + self.position_embedding(
            torch.where(positions < begin, positions, target)
        )


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and added to the residual stream.

    `ffn` is an `MLP` or a mixture of experts.
    """

    def __init__(self, config: M6Config, layer: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.dim)
        self.attention = Attention(config.dim, config.num_heads)
        self.attention.out_proj.init_gain = _residual_gain(config)  # type: ignore[assignment]
        self.dropout1 = nn.Dropout(config.dropout)
        self.norm2 = nn.LayerNorm(config.dim)
        self.ffn = make_experts(config) if config.has_experts(layer) else _mlp(config)
        self.dropout2 = nn.Dropout(config.dropout)
        self.has_experts = config.has_experts(layer)
        self.has_loss = self.has_experts and config.experts_have_loss

    def forward(
        self, x_bnd: Tensor, mask_b1nn: Tensor, valid_bn: Tensor
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Returns the residual stream after both parts; with `has_loss`, also the experts' loss.

        Experts are for the positions that `valid_bn` marks: padding would only take their room.
        """
        x_bnd = x_bnd + self.dropout1(self.attention(self.norm1(x_bnd), mask=mask_b1nn))
        y_bnd = self.norm2(x_bnd)
        y_bnd = self.ffn(y_bnd, valid_bn) if self.has_experts else self.ffn(y_bnd)
        if not self.has_loss:
            return x_bnd + self.dropout2(y_bnd)
        y_bnd, loss = y_bnd
        return x_bnd + self.dropout2(y_bnd), loss


def make_experts(config: M6Config) -> nn.Module:
    """The mixture of experts of one layer."""
    return MoE(
        config.dim,
        config.expert_dim or config.ffn_dim,
        config.num_experts,
        top_k=config.top_k,
        router=config.router,
        balance=config.balance,
        balance_rate=config.balance_rate,
        capacity_factor=config.capacity_factor,
        z_loss=config.z_loss,
        activation="gelu",
    )


def _mlp(config: M6Config) -> MLP:
    made = MLP(config.dim, config.ffn_dim)
    made.fc2.init_gain = _residual_gain(config)  # type: ignore[assignment]
    return made


def _residual_gain(config: M6Config) -> float:
    """Keeps the size of the residual stream, to which every block adds twice."""
    return (2 * config.num_layers) ** -0.5
