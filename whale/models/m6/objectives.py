"""The objectives: what the model is to read and to write, one function each, and rows of a batch.

Place in the flow: text and pictures in, the arguments of `M6.forward` out. Every objective is a
source and a target in one vocabulary, so all of them are one cross-entropy:

    denoise     text with spans masked           -> the text
    proceed     the beginning of a text          -> the rest (language modelling)
    caption     picture                          -> its caption
    mend        picture, caption with spans masked -> the caption
    ask         picture, question                -> the answer
    draw        caption                          -> image codes
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from whale.errors import WhaleError
from whale.models.m6.config import M6Config
from whale.models.m6.model import IGNORED
from whale.models.m6.pictures import Pixels, check_picture, patch_vectors
from whale.models.m6.tokenizer import SPECIAL, Tokenizer

MASKED_SHARE = 0.3
MEAN_SPAN = 3.0
"""Of the characters, and of a Poisson law: the text infilling of BART and OFA."""

MOST_PER_TOKEN = 6
"""Characters of a token, on average, at most: how much of a text is looked at to fill a window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One row before it is padded.

    Attributes:
        source: token ids that all may look at.
        target: token ids to be written, the end included where there is one.
        image: the picture of the source.
    """

    source: Sequence[int]
    target: Sequence[int]
    image: Pixels | None = None


def known_language(lang: str) -> str | None:
    """The language, or None where the vocabulary has no token for it: the text alone must do."""
    return lang if f"<{lang}>" in SPECIAL else None


def denoise(
    tokenizer: Tokenizer, text: str, lang: str, *, limit: int, rng: np.random.Generator
) -> Example:
    """A window of text, written in full from one with masked spans."""
    prompt = tokenizer.prompt("fill", known_language(lang))
    # Masking never makes a text longer: source and target take half each.
    window, _ = _window(tokenizer, text, (limit - len(prompt) - 1) // 2, rng)
    masked = mask_spans(window, tokenizer.mask, rng)
    return Example(source=[*prompt, *masked], target=[*window, tokenizer.eos])


def proceed(
    tokenizer: Tokenizer, text: str, lang: str, *, limit: int, rng: np.random.Generator
) -> Example:
    """A window of text whose beginning, of any length from nothing to half, is given."""
    prompt = tokenizer.prompt("text", known_language(lang))
    window, is_end = _window(tokenizer, text, limit - len(prompt) - 1, rng)
    given = int(rng.integers(0, len(window) // 2 + 1))
    target = [*window[given:], tokenizer.eos] if is_end else window[given:]
    return Example(source=[*prompt, *window[:given]], target=target)


def caption(
    tokenizer: Tokenizer, image: Pixels | None, text: str, lang: str, *, limit: int
) -> Example:
    """What a picture shows; without one, the text alone (what search compares with)."""
    prompt = tokenizer.prompt("caption", known_language(lang))
    return Example(source=prompt, target=_ended(tokenizer, text, limit - len(prompt)), image=image)


def mend(
    tokenizer: Tokenizer,
    image: Pixels,
    text: str,
    lang: str,
    *,
    limit: int,
    rng: np.random.Generator,
) -> Example:
    """A picture and its caption with spans masked, to the caption."""
    prompt = tokenizer.prompt("caption", known_language(lang))
    ids = tokenizer.encode(text)[: (limit - len(prompt) - 1) // 2]
    masked = mask_spans(ids, tokenizer.mask, rng)
    return Example(source=[*prompt, *masked], target=[*ids, tokenizer.eos], image=image)


def ask(
    tokenizer: Tokenizer, image: Pixels | None, question: str, answer: str, *, limit: int
) -> Example:
    """A picture and a question about it, to the answer."""
    prompt = tokenizer.prompt("ask")
    target = _ended(tokenizer, answer, limit // 2)
    ids = tokenizer.encode(question)[: limit - len(target) - len(prompt)]
    return Example(source=[*prompt, *ids], target=target, image=image)


def draw(tokenizer: Tokenizer, text: str, codes: Sequence[int], *, limit: int) -> Example:
    """A caption, to the picture's codes; an empty one asks for any picture."""
    prompt = tokenizer.prompt("draw")
    target = tokenizer.encode_codes(codes)
    room = limit - len(target) - len(prompt)
    if room < 0:
        raise WhaleError(
            f"{len(target)} image codes do not fit into {limit} text positions",
            hint="raise max_text_len, or code_patch_size for fewer codes",
        )
    # Codes have no end: their number is that of the picture's patches.
    return Example(source=[*prompt, *tokenizer.encode(text)[:room]], target=target)


def mask_spans(ids: Sequence[int], mask: int, rng: np.random.Generator) -> list[int]:
    """Spans of Poisson length, `MASKED_SHARE` of the ids, each replaced by one mask."""
    budget = round(MASKED_SHARE * len(ids))
    hidden = np.zeros(len(ids), dtype=bool)
    while budget > 0:
        length = int(np.clip(rng.poisson(MEAN_SPAN), 1, budget))
        begin = int(rng.integers(0, len(ids) - length + 1))
        budget -= int((~hidden[begin : begin + length]).sum())
        hidden[begin : begin + length] = True
    kept: list[int] = []
    for i, token in enumerate(ids):
        if not hidden[i]:
            kept.append(token)
        elif i == 0 or not hidden[i - 1]:
            kept.append(mask)
    return kept


def _window(
    tokenizer: Tokenizer, text: str, length: int, rng: np.random.Generator
) -> tuple[list[int], bool]:
    """A part of a text that fits, from anywhere in it, and whether the text ends there."""
    begin = int(rng.integers(0, max(1, len(text) - length + 1)))
    end = begin + MOST_PER_TOKEN * length
    ids = tokenizer.encode(text[begin:end])
    return ids[:length], end >= len(text) and len(ids) <= length


def _ended(tokenizer: Tokenizer, text: str, room: int) -> list[int]:
    return [*tokenizer.encode(text)[: room - 1], tokenizer.eos]


# ---- rows of a batch -----------------------------------------------------------------------------


def collate(
    config: M6Config, tokenizer: Tokenizer, examples: Sequence[Example], length: int | None = None
) -> dict[str, Tensor]:
    """The arguments of `M6.forward`, by name, padded to `length` (default: the longest allowed).

    A row is its source, the beginning mark and the target but for its last token; the label of each
    position from the mark on is the token after it.
    """
    rows, size = len(examples), config.max_text_len if length is None else length
    tokens = np.full((rows, size), tokenizer.pad, dtype=np.int64)
    labels = np.full((rows, size), IGNORED, dtype=np.int64)
    patches = np.zeros((rows, config.num_patches, config.patch_dim), dtype=np.float32)
    num_source = np.empty(rows, dtype=np.int64)
    for row, example in enumerate(examples):
        begin, end = len(example.source), len(example.source) + len(example.target)
        if not example.target or end > size:
            raise WhaleError(
                f"an example of {begin} source and {len(example.target)} target tokens in "
                f"{size} text positions",
                hint="a target has at least one token, and both together must fit",
            )
        tokens[row, :end] = [*example.source, tokenizer.bos, *example.target[:-1]]
        labels[row, begin:end] = example.target
        num_source[row] = config.num_patches + begin
        if example.image is not None:
            check_picture(example.image, config.image_size)
            patches[row] = patch_vectors(example.image, config.patch_size)
    arrays: Mapping[str, np.ndarray] = {
        "tokens": tokens,
        "patches": patches,
        "num_source": num_source,
        "has_image": np.array([example.image is not None for example in examples]),
        "labels": labels,
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def example_batch(config: M6Config, rows: int, length: int | None = None) -> dict[str, Tensor]:
    """A batch of random numbers, the same every time: to plan and to time with.

    Under `torch.device("meta")` it costs nothing. Every row but each fourth has a picture; targets
    are of half to all the text.
    """
    size = config.max_text_len if length is None else length
    if not 2 <= size <= config.max_text_len:
        raise WhaleError(
            f"{size} text positions; allowed: 2 to {config.max_text_len}, the model's own",
            hint=f"{config.max_text_len} is the preset's own",
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        text = torch.randint(0, config.vocab_size, (rows, size + 1))
        patches = torch.rand(rows, config.num_patches, config.patch_dim) * 2 - 1
        source = torch.randint(1, size // 2 + 1, (rows,))
    positions = torch.arange(size)
    return {
        "tokens": text[:, :-1].contiguous(),
        "patches": patches,
        "num_source": config.num_patches + source,
        "has_image": torch.arange(rows) % 4 != 3,
        "labels": text[:, 1:].masked_fill(positions < source[:, None], IGNORED),
    }
