"""The sizes of the M6 family: what a model is made of, and the presets by name.

Place in the flow: read by every other file of the family; saved beside a trained model as JSON.

The ladder `m6-base` to `m6-10t` has the layer shapes of M6-T and M6-10T, whose experts alone are
1.34B, 10.7B, 103.1B, 1.003T and 10.05T parameters. All of it is top-1; k top-1 prototyping is
`replace(config, router="prototype", top_k=k)`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from whale.errors import ConfigError

ROUTERS = ("top-k", "prototype")
"""Expert choice is not among them: an expert that picks its tokens looks at later ones."""

BALANCES = ("bias", "loss", "none")

STEMS = ("patch", "conv")

CHANNELS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class M6Config:
    """The size of an `M6`.

    Attributes:
        vocab_size: tokens of all kinds: special ones, bytes, characters, image codes.
        num_codes: image codes, the last ids of the vocabulary.
        max_text_len: text positions of a sequence, source and target together.
        dim: width of the residual stream.
        num_layers: Transformer blocks.
        num_heads: attention heads.
        ffn_dim: hidden width of a dense feed-forward layer.
        expert_dim: hidden width of one expert; None: `ffn_dim`.
        num_experts: experts of a layer that has them; 0: every layer is dense.
        moe_every: the last of each so many layers has experts; 1: all have.
        top_k: experts per token; with the router `prototype`, the number of prototypes.
        router: how tokens find experts: `top-k` or `prototype` (k times top-1).
        balance: what keeps experts equally busy: `bias`, `loss` or `none`.
        balance_rate: step of that bias; a short run needs a larger one.
        capacity_factor: room of an expert over an equal share; None: no token is dropped.
        z_loss: weight of the router's z-loss.
        image_size: pixels of a picture's side.
        patch_size: pixels of an input patch's side.
        stem: what makes vectors of patches: `patch`, a small network on each alone; `conv`,
            convolutions over the picture, which need fewer pictures to learn to see.
        code_patch_size: pixels of the side of the patch that one image code stands for.
        dropout: of embeddings and of what blocks add; attention weights are not dropped, which
            keeps the fused kernels.
        tie_embeddings: the head is the token embedding.
        share_layers: all layers use one layer's parameters (the first stage of pseudo-to-real).
    """

    vocab_size: int
    num_codes: int
    max_text_len: int
    dim: int
    num_layers: int
    num_heads: int
    ffn_dim: int
    expert_dim: int | None = None
    num_experts: int = 0
    moe_every: int = 1
    top_k: int = 1
    router: str = "top-k"
    balance: str = "bias"
    balance_rate: float = 1e-3
    capacity_factor: float | None = None
    z_loss: float = 0.0
    image_size: int = 32
    patch_size: int = 8
    stem: str = "patch"
    code_patch_size: int = 4
    dropout: float = 0.0
    tie_embeddings: bool = True
    share_layers: bool = False

    def __post_init__(self) -> None:
        _multiple("dim", self.dim, "num_heads", self.num_heads)
        _multiple("image_size", self.image_size, "patch_size", self.patch_size)
        _multiple("image_size", self.image_size, "code_patch_size", self.code_patch_size)
        _one_of("router", self.router, ROUTERS)
        _one_of("balance", self.balance, BALANCES)
        _one_of("stem", self.stem, STEMS)
        if self.stem == "conv" and (self.patch_size < 2 or self.patch_size & (self.patch_size - 1)):
            raise ConfigError(
                f'patch_size {self.patch_size} with stem "conv"',
                hint="a power of two: every convolution but the first of two halves the picture",
            )
        if not 0 <= self.num_codes < self.vocab_size:
            raise ConfigError(
                f"num_codes {self.num_codes} in a vocabulary of {self.vocab_size}",
                hint="image codes are the last ids of the vocabulary: leave room for the text",
            )
        if self.num_experts and not 1 <= self.top_k <= self.num_experts:
            raise ConfigError(
                f"top_k {self.top_k} of {self.num_experts} experts",
                hint=f"allowed: 1 to {self.num_experts}",
            )
        if self.num_experts and self.router == "prototype":
            _multiple("num_experts", self.num_experts, "top_k", self.top_k)
        if self.num_experts and not 1 <= self.moe_every <= self.num_layers:
            raise ConfigError(
                f"moe_every {self.moe_every} with {self.num_layers} layers: none would have "
                "experts",
                hint=f"allowed: 1 to {self.num_layers}; num_experts=0 for a dense model",
            )
        if self.share_layers and self.num_experts and self.num_layers % self.moe_every:
            _multiple("num_layers", self.num_layers, "moe_every", self.moe_every)

    @property
    def num_patches(self) -> int:
        """Image positions of a sequence."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def patch_dim(self) -> int:
        """Numbers of one patch."""
        return CHANNELS * self.patch_size**2

    @property
    def codes_per_image(self) -> int:
        """Image codes that draw one picture."""
        return (self.image_size // self.code_patch_size) ** 2

    @property
    def seq_len(self) -> int:
        """Positions of a whole sequence: patches, then text."""
        return self.num_patches + self.max_text_len

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The layers that have experts."""
        return tuple(i for i in range(self.num_layers) if self.has_experts(i))

    @property
    def num_expert_params(self) -> int:
        """Parameters of all experts, as if no layer were shared; routers are not counted."""
        hidden = self.expert_dim or self.ffn_dim
        return len(self.moe_layers) * self.num_experts * 2 * self.dim * hidden

    @property
    def experts_have_loss(self) -> bool:
        """Whether experts add a loss of their own, for balance or for small logits."""
        return self.num_experts > 0 and (self.balance == "loss" or self.z_loss > 0)

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's feed-forward part is a mixture of experts."""
        return self.num_experts > 0 and layer % self.moe_every == self.moe_every - 1

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> M6Config:
        """From what `to_dict` gave; an unknown key is an error."""
        known = [field.name for field in fields(cls)]
        for key in values:
            if key not in known:
                close = difflib.get_close_matches(key, known, n=1)
                raise ConfigError(
                    f"unknown key {key!r} of an M6 config",
                    hint=f"did you mean {close[0]!r}?" if close else f"allowed: {', '.join(known)}",
                )
        return cls(**values)


def _multiple(name: str, value: int, of: str, unit: int) -> None:
    if unit < 1 or value < 1 or value % unit:
        raise ConfigError(
            f"{name} {value} is not a multiple of {of} {unit}",
            hint=f"allowed: {unit}, {2 * unit}, {3 * unit} ..." if unit > 0 else f"{of} is 1 up",
        )


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} {value!r}", hint=f"allowed: {', '.join(allowed)}")


def _ladder(num_layers: int, num_experts: int, expert_dim: int = 4096) -> M6Config:
    """A model of the M6-T ladder: experts in every layer, 16 patches and up to 256 tokens.

    The vocabulary is that of Chinese BERT (21,128 entries) with the codes, rounded up to 22 x 1024.
    """
    return M6Config(
        vocab_size=22_528,
        num_codes=1024,
        max_text_len=256,
        dim=1024,
        num_layers=num_layers,
        num_heads=16,
        ffn_dim=expert_dim,
        num_experts=num_experts,
        capacity_factor=1.25,
    )


# `m6-tiny` is for a few hundred steps on a CPU, less than would overfit: it has no dropout.
presets: dict[str, M6Config] = {
    "m6-tiny": M6Config(
        vocab_size=6144,
        num_codes=256,
        max_text_len=64,
        dim=96,
        num_layers=4,
        num_heads=4,
        ffn_dim=256,
        num_experts=8,
        moe_every=2,
        code_patch_size=8,
    ),
    "m6-small": M6Config(
        vocab_size=8192,
        num_codes=1024,
        max_text_len=128,
        dim=512,
        num_layers=8,
        num_heads=8,
        ffn_dim=2048,
        num_experts=16,
        moe_every=2,
        stem="conv",
        dropout=0.1,
    ),
    "m6-base": _ladder(5, 32),
    "m6-10b": _ladder(10, 128),
    "m6-100b": _ladder(24, 512),
    "m6-1t": _ladder(24, 960, 21_248),
    "m6-10t": _ladder(48, 10_240, 9984),
}
