"""The one registry of presets: a model with its batch, loss, optimizer and annotations, by name.

Place in the flow: before it. Every command that takes MODEL looks here. A preset's model is a plain
module; how a preset wants it parallel is said here, from outside, as a user would.

Global batches are conventions: the Whale paper names none for its models. BERT has the 256 rows of
128 tokens of its own paper's first phase, T5 half of the 128 rows of 512 tokens of its own; 512
rows of 50 tokens for GNMT and 1024 images for ResNet are common for 8 to 32 devices. M6 has 8
samples for each of the GPUs that its papers name (`m6-tiny` of 4 devices, `m6-small` of 8).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from whale.annotations import annotate, replicate, split
from whale.errors import ConfigError
from whale.models import bert, encoder_decoder, gnmt, gpt, resnet, seq2seq_lstm, t5
from whale.models.example_batches import (
    IGNORED,
    images,
    masked_tokens,
    next_tokens,
    translations,
)
from whale.models.m6.annotate import expert_parallel
from whale.models.m6.config import M6Config
from whale.models.m6.config import presets as m6_configs
from whale.models.m6.model import M6
from whale.models.m6.objectives import example_batch as m6_batch
from whale.optim import Adafactor


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A model and what it is trained with.

    Attributes:
        name: what commands call it.
        about: one line for `--help`.
        build: makes the plain module; call it under `torch.device("meta")` for shapes alone.
        batch: (rows, sequence length) to an example of a global batch, the same every time; None
            takes the preset's own length. Under `torch.device("meta")` it costs nothing.
        loss: of (output, target), a mean over the labels that count; None: the model returns it.
        rows: default global batch.
        seq: default sequence length, of the text alone where there are pictures too; None for
            images.
        precision: a name that `whale plan --precision` takes.
        optimizer: a name that `optimizer_factory` knows.
        annotate: tags the model in place; None: the planner decides.
        num_micro_batch: micro-batches of a step.
        small: the preset of the same kind, with the same module paths, that stands in where this
            one is too large to be run, under this one's annotations.
    """

    name: str
    about: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, int | None], Any]
    loss: Callable[[Any, Any], Any] | None
    rows: int
    seq: int | None
    precision: str = "fp32"
    optimizer: str = "adamw"
    annotate: Callable[[nn.Module], nn.Module] | None = None
    num_micro_batch: int = 1
    small: str | None = None


def preset(name: str) -> Preset:
    """The preset of this name."""
    if name not in PRESETS:
        raise ConfigError(f"unknown preset {name!r}", hint=near(name, PRESETS))
    return PRESETS[name]


def listing() -> str:
    """The presets with what they are, as a table for `--help`."""
    width = max(map(len, PRESETS))
    return "presets:\n" + "\n".join(f"  {p.name:{width}}  {p.about}" for p in PRESETS.values())


def near(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: the nearest one that is known, or all of them."""
    names = list(known)
    found = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {found[0]!r}?" if found else f"there are: {', '.join(names)}"


# ---- optimizers ----------------------------------------------------------------------------------

_OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-4, weight_decay=0.01),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adafactor": partial(Adafactor, lr=1e-2),
}


def optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
    """What `parallelize` takes as `optimizer`; other settings go in by keyword, `lr=` say."""
    if name not in _OPTIMIZERS:
        raise ConfigError(f"unknown optimizer {name!r}", hint=near(name, _OPTIMIZERS))
    return _OPTIMIZERS[name]


# ---- losses --------------------------------------------------------------------------------------


def token_loss(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    """Cross entropy of [B, T, V] logits over the labels [B, T] that are not `IGNORED`."""
    return F.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction=reduction
    )


# ---- families ------------------------------------------------------------------------------------


def _tokens(name: str, about: str, rows: int, seq: int, **more: Any) -> Preset:
    """A model of token logits."""
    return Preset(name=name, about=about, loss=token_loss, rows=rows, seq=seq, **more)


def _gpt(name: str, config: gpt.GPTConfig, about: str, rows: int, seq: int, **more: Any) -> Preset:
    longest = config.max_seq_len
    batch = partial(next_tokens, vocab_size=config.vocab_size, default=seq, longest=longest)
    return _tokens(name, about, rows, seq, build=partial(gpt.GPT, config), batch=batch, **more)


def _bert(name: str, about: str, rows: int, seq: int, **more: Any) -> Preset:
    config = bert.presets[name]
    longest = config.max_seq_len
    batch = partial(masked_tokens, vocab_size=config.vocab_size, default=seq, longest=longest)
    return _tokens(name, about, rows, seq, build=partial(bert.BERT, config), batch=batch, **more)


def _seq2seq(
    name: str,
    build: Callable[[], nn.Module],
    vocab_size: int,
    about: str,
    rows: int,
    seq: int,
    *,
    longest: int | None = None,
    packed: bool = False,
    **more: Any,
) -> Preset:
    batch = partial(
        translations, vocab_size=vocab_size, default=seq, longest=longest, packed=packed
    )
    return _tokens(name, about, rows, seq, build=build, batch=batch, **more)


def _t5(name: str, about: str, rows: int, seq: int, **more: Any) -> Preset:
    config = t5.presets[name]
    build = partial(t5.T5, config)
    return _seq2seq(name, build, config.vocab_size, about, rows, seq, packed=True, **more)


def _gnmt(name: str, about: str, rows: int, seq: int, **more: Any) -> Preset:
    config = gnmt.presets[name]
    build = partial(gnmt.GNMT, config)
    return _seq2seq(name, build, config.vocab_size, about, rows, seq, **more)


def _encdec(name: str, about: str, rows: int, seq: int, **more: Any) -> Preset:
    config = encoder_decoder.presets[name]
    build = partial(encoder_decoder.EncoderDecoder, config)
    longest = config.max_seq_len
    return _seq2seq(name, build, config.vocab_size, about, rows, seq, longest=longest, **more)


def _lstm(name: str, about: str, rows: int, seq: int) -> Preset:
    config = seq2seq_lstm.presets[name]
    build = partial(seq2seq_lstm.Seq2SeqLSTM, config)
    return _seq2seq(name, build, config.vocab_size, about, rows, seq)


def _resnet(name: str, about: str, num_classes: int, **more: Any) -> Preset:
    return Preset(
        name=name,
        about=about,
        build=partial(resnet.resnet50, num_classes),
        batch=partial(images, size=224, num_classes=num_classes),
        loss=F.cross_entropy,
        rows=1024,
        seq=None,
        optimizer="sgd",
        small="resnet-tiny",
        **more,
    )


def _split_head(model: nn.Module) -> nn.Module:
    """The paper's large classification: a data parallel trunk, its classes over the same devices.

    The trunk is named part by part: `""` would also enclose `fc`, whose split would be nested in
    the copies instead of going across them.
    """
    trunk = "conv1|bn1|relu|pool|blocks.*|average|flatten"
    return annotate(model, {trunk: replicate(), "fc": split()})


def _spread_experts(model: nn.Module) -> nn.Module:
    assert isinstance(model, M6)
    return expert_parallel(model)


def _m6(name: str, config: M6Config, about: str, num_gpus: int, **more: Any) -> Preset:
    """Of 8 samples per GPU, as published; the model returns its loss, that of its experts in it."""
    return Preset(
        name=name,
        about=about,
        build=partial(M6, config),
        batch=partial(m6_batch, config),
        loss=None,
        rows=8 * num_gpus,
        seq=config.max_text_len,
        annotate=_spread_experts,
        **more,
    )


def _m6_ladder(name: str, size: str, num_gpus: int, **more: Any) -> Preset:
    config = m6_configs[name]
    num_layers = len(config.moe_layers)
    about = f"M6 with {num_layers} x {config.num_experts:,} experts, {size} parameters"
    return _m6(name, config, about, num_gpus, small="m6-nano", **more)


_M6_NANO = replace(
    m6_configs["m6-tiny"],
    vocab_size=320,
    num_codes=16,
    max_text_len=10,
    dim=16,
    ffn_dim=24,
    capacity_factor=1.25,
    image_size=8,
    patch_size=4,
    code_patch_size=4,
)
"""Narrow, with both kinds of feed-forward layer, and with tokens that find no room."""

_NANO = replace(gpt.presets["gpt-tiny"], vocab_size=61, max_seq_len=8, dim=16)
"""Four narrow blocks, to be compared in float64 in a moment."""

PRESETS: Mapping[str, Preset] = {
    made.name: made
    for made in (
        _gpt("gpt-nano", _NANO, "GPT to verify with, 14 thousand parameters", 8, 8),
        _gpt(
            "gpt-tiny",
            gpt.presets["gpt-tiny"],
            "GPT for tests, 0.8 million parameters",
            8,
            64,
            small="gpt-nano",
        ),
        _gpt(
            "gpt-small",
            gpt.presets["gpt-small"],
            "GPT-2 small, 124 million parameters",
            512,
            1024,
            small="gpt-nano",
        ),
        _bert("bert-tiny", "BERT for tests, 0.1 million parameters", 8, 16),
        _bert("bert-base", "BERT-Base, 110 million parameters", 256, 128, small="bert-tiny"),
        _bert("bert-large", "BERT-Large, 335 million parameters", 256, 128, small="bert-tiny"),
        _t5("t5-tiny", "T5 for tests, 0.1 million parameters", 8, 12),
        _t5("t5-small", "T5-Small, 61 million parameters", 64, 512, small="t5-tiny"),
        _t5("t5-large", "T5-Large, 738 million parameters", 64, 512, small="t5-tiny"),
        _gnmt("gnmt-tiny", "GNMT for tests, 0.1 million parameters", 8, 10),
        _gnmt("gnmt", "GNMT v2, 160 million parameters", 512, 50, small="gnmt-tiny"),
        _lstm("lstm-tiny", "LSTM encoder-decoder for tests", 8, 12),
        _encdec("encdec-tiny", "Transformer encoder-decoder for tests", 8, 16),
        _encdec(
            "encdec-base", "Transformer base, 61 million parameters", 512, 50, small="encdec-tiny"
        ),
        Preset(
            name="resnet-tiny",
            about="residual network for tests",
            build=resnet.resnet_tiny,
            batch=partial(images, size=16, num_classes=10),
            loss=F.cross_entropy,
            rows=8,
            seq=None,
            optimizer="sgd",
        ),
        _resnet("resnet-50", "ResNet-50, 26 million parameters", 1000),
        _resnet(
            "resnet-50-100k",
            "ResNet-50 with 100,000 classes, its head split",
            100_000,
            annotate=_split_head,
        ),
        _resnet(
            "resnet-50-1m",
            "ResNet-50 with 1,000,000 classes, its head split",
            1_000_000,
            annotate=_split_head,
        ),
        _m6("m6-nano", _M6_NANO, "M6 to verify with, 25 thousand parameters", 1),
        _m6_ladder("m6-tiny", "1.3 million", 4),
        _m6_ladder("m6-small", "156 million", 8),
        _m6_ladder("m6-base", "1.4 billion", 8),
        _m6_ladder("m6-10b", "10.8 billion", 16),
        _m6_ladder(
            "m6-100b", "103 billion", 128, optimizer="adafactor", precision="bf16-stochastic"
        ),
        _m6_ladder("m6-1t", "1 trillion", 480, optimizer="adafactor", precision="fp16"),
        _m6_ladder("m6-10t", "10 trillion", 512, optimizer="adafactor", precision="fp16"),
    )
}
