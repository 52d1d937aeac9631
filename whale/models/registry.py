"""The one registry of presets: a model with its batch, loss, optimizer and annotations, by name.

Place in the flow: before it. Every command that takes MODEL looks here. A preset's model is a plain
module; how a preset wants it parallel is said here, from outside, as a user would.

Global batches are conventions: the Whale paper names none for its models. BERT has the 256 rows of
128 tokens of its own paper's first phase, T5 half of the 128 rows of 512 tokens of its own; 512
rows of 50 tokens for GNMT and 1024 images for ResNet are common for 8 to 32 devices.
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

IGNORED = -100
"""The label of a position that is not learned from: what `F.cross_entropy` leaves out."""

MASK_TOKEN = 103
"""[MASK] of BERT's published vocabulary."""

MASKED_SHARE = 0.15

Batch = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A model and what it is trained with.

    Attributes:
        name: what commands call it.
        about: one line for `--help`.
        build: makes the plain module; call it under `torch.device("meta")` for shapes alone.
        batch: (rows, sequence length) to an example of a global batch, the same every time; None
            takes the preset's own length. Under `torch.device("meta")` it costs nothing.
        loss: of (output, target), a mean over the labels that count.
        rows: default global batch.
        seq: default sequence length; None for images.
        precision: fp32, tf32 or bf16.
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
    "adafactor": partial(torch.optim.Adafactor, lr=1e-2),
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


# ---- batches -------------------------------------------------------------------------------------
# Torch's own generator rather than one that is passed: only so they work on the meta device.


def _checked(seq: int | None, default: int, longest: int | None) -> int:
    """The sequence length, which the model must have positions for."""
    seq = default if seq is None else seq
    if seq < 1 or (longest is not None and seq > longest):
        allowed = "1 or more" if longest is None else f"1 to {longest}, the model's positions"
        raise ConfigError(
            f"sequence length {seq}; allowed: {allowed}", hint=f"{default} is the preset's own"
        )
    return seq


def _next_token_batch(
    rows: int, seq: int | None, *, vocab_size: int, default: int, longest: int
) -> Batch:
    """(tokens, the tokens after them)."""
    seq = _checked(seq, default, longest)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        text = torch.randint(0, vocab_size, (rows, seq + 1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def _masked_batch(
    rows: int, seq: int | None, *, vocab_size: int, default: int, longest: int
) -> Batch:
    """(tokens, token types, labels): about 15 % of the tokens masked, at least one in each row."""
    seq = _checked(seq, default, longest)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        text = torch.randint(0, vocab_size, (rows, seq))
        masked = torch.rand(rows, seq) < MASKED_SHARE
    masked[:, 0] = True
    types = (torch.arange(seq) >= seq // 2).long().expand(rows, seq).contiguous()
    return text.masked_fill(masked, MASK_TOKEN), types, text.masked_fill(~masked, IGNORED)


def _translation_batch(
    rows: int,
    seq: int | None,
    *,
    vocab_size: int,
    default: int,
    longest: int | None = None,
    packed: bool = False,
) -> Batch:
    """(source, target, the target's next tokens); unless packed, targets are of half to all `seq`.

    Rows then have different numbers of labels that count.
    """
    seq = _checked(seq, default, longest)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        src = torch.randint(0, vocab_size, (rows, seq))
        tgt = torch.randint(0, vocab_size, (rows, seq + 1))
        lengths = torch.randint((seq + 1) // 2, seq + 1, (rows, 1))
    labels = tgt[:, 1:].contiguous()
    if not packed:
        labels = labels.masked_fill(torch.arange(seq) >= lengths, IGNORED)
    return src, tgt[:, :-1].contiguous(), labels


def _image_batch(rows: int, seq: int | None, *, size: int, num_classes: int) -> Batch:
    """(images, classes)."""
    del seq  # an image has none
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        images = torch.randn(rows, 3, size, size)
        return images, torch.randint(0, num_classes, (rows,))


# ---- families ------------------------------------------------------------------------------------


def _gpt(name: str, config: gpt.GPTConfig, about: str, rows: int, seq: int, **more: Any) -> Preset:
    batch = partial(
        _next_token_batch,
        vocab_size=config.vocab_size,
        default=seq,
        longest=config.max_seq_len,
    )
    build = partial(gpt.GPT, config)
    return Preset(
        name=name,
        about=about,
        build=build,
        batch=batch,
        loss=token_loss,
        rows=rows,
        seq=seq,
        **more,
    )


def _bert(name: str, about: str, rows: int, seq: int, **more: Any) -> Preset:
    config = bert.presets[name]
    batch = partial(
        _masked_batch, vocab_size=config.vocab_size, default=seq, longest=config.max_seq_len
    )
    build = partial(bert.BERT, config)
    return Preset(
        name=name,
        about=about,
        build=build,
        batch=batch,
        loss=token_loss,
        rows=rows,
        seq=seq,
        **more,
    )


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
        _translation_batch, vocab_size=vocab_size, default=seq, longest=longest, packed=packed
    )
    return Preset(
        name=name,
        about=about,
        build=build,
        batch=batch,
        loss=token_loss,
        rows=rows,
        seq=seq,
        **more,
    )


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
        batch=partial(_image_batch, size=224, num_classes=num_classes),
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
            batch=partial(_image_batch, size=16, num_classes=10),
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
    )
}
