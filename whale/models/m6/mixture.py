"""The mixture: which objective a sample is used for, and batches of them.

Place in the flow: between samples (pictures with captions, documents), which a stream mixes, and
`M6.forward`. Everything drawn for an example comes from a generator of its own, which depends on
the sample's place in the run alone: every rank and every restart makes the same batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from whale.errors import ConfigError, WhaleError
from whale.models.m6 import objectives
from whale.models.m6.config import M6Config
from whale.models.m6.image_codes import ImageCodes
from whale.models.m6.objectives import Example
from whale.models.m6.pictures import Pixels
from whale.models.m6.tokenizer import Tokenizer
from whale.models.m6.variation import PLAIN, Variation, vary


@runtime_checkable
class PictureSample(Protocol):
    """A picture with what is said of it."""

    @property
    def image(self) -> Pixels:
        """[height, width, 3], uint8."""

    @property
    def captions(self) -> Mapping[str, str]:
        """By language."""

    @property
    def tags(self) -> Mapping[str, tuple[str, ...]]:
        """Words about it, by language; may be empty."""

    @property
    def question(self) -> str | None:
        """Asked about it."""

    @property
    def answer(self) -> str | None:
        """To the question."""


class TextSample(Protocol):
    """Running text."""

    @property
    def text(self) -> str:
        """All of it."""

    @property
    def language(self) -> str:
        """A name such as `en`."""


Sample = PictureSample | TextSample

PICTURE_OBJECTIVES = ("caption", "mend", "ask", "draw", "denoise")
TEXT_OBJECTIVES = ("proceed", "denoise")

# A sample that comes with a question is mostly there to be asked about.
DEFAULT_WEIGHTS: Mapping[str, float] = {
    "caption": 4.0,
    "mend": 1.0,
    "ask": 8.0,
    "draw": 2.0,
    "denoise": 1.0,
    "proceed": 2.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Objectives:
    """Makes examples of samples.

    Attributes:
        config: of the model they are for.
        tokenizer: of the same model.
        codes: the codebook; None: nothing is drawn.
        weights: by objective, how often a sample that allows several is used for it.
        variation: of the pictures that are looked at; those to be drawn stay as they are.
        unseen: how often a caption is to be written, or a picture drawn, from nothing. It teaches
            what is likely anyway, which guidance and search compare with.
    """

    config: M6Config
    tokenizer: Tokenizer
    codes: ImageCodes | None = None
    weights: Mapping[str, float] = field(default_factory=lambda: dict(DEFAULT_WEIGHTS))
    variation: Variation = PLAIN
    unseen: float = 0.1

    def __post_init__(self) -> None:
        for name, weight in self.weights.items():
            if name not in DEFAULT_WEIGHTS or weight < 0:
                raise ConfigError(
                    f"the weight {weight} of the objective {name!r}",
                    hint=f"zero or more, of: {', '.join(DEFAULT_WEIGHTS)}",
                )
        check_belong(self.config, self.tokenizer, self.codes)

    def example(self, sample: Sample, rng: np.random.Generator) -> Example:
        """What a sample is used for, by draws from `rng`."""
        if isinstance(sample, PictureSample):
            return self._picture(sample, rng)
        limit, lang = self.config.max_text_len, sample.language
        if self._choose(TEXT_OBJECTIVES, rng) == "proceed":
            return objectives.proceed(self.tokenizer, sample.text, lang, limit=limit, rng=rng)
        return objectives.denoise(self.tokenizer, sample.text, lang, limit=limit, rng=rng)

    def batch(
        self, samples: Sequence[Sample], generators: Sequence[np.random.Generator]
    ) -> dict[str, Tensor]:
        """The arguments of `M6.forward`: a row for each sample, by draws from the rng beside it."""
        pairs = zip(samples, generators, strict=True)
        examples = [self.example(sample, rng) for sample, rng in pairs]
        return objectives.collate(self.config, self.tokenizer, examples)

    def _picture(self, sample: PictureSample, rng: np.random.Generator) -> Example:
        possible = [
            name
            for name in PICTURE_OBJECTIVES
            if (name != "draw" or self.codes is not None)
            and (sample.captions if name != "ask" else sample.question and sample.answer)
        ]
        chosen = self._choose(possible, rng)
        tokenizer, limit = self.tokenizer, self.config.max_text_len
        if chosen == "ask":
            assert sample.question is not None and sample.answer is not None
            image = vary(sample.image, self.variation, rng)
            return objectives.ask(tokenizer, image, sample.question, sample.answer, limit=limit)
        languages = sorted(sample.captions)
        lang = languages[int(rng.integers(len(languages)))]
        text = sample.captions[lang]
        from_nothing = rng.random() < self.unseen
        if chosen == "draw":
            assert self.codes is not None
            codes = self.codes.encode(sample.image[None])[0].tolist()
            return objectives.draw(tokenizer, "" if from_nothing else text, codes, limit=limit)
        if chosen == "denoise":
            words = ", ".join([text, *sample.tags.get(lang, ())])
            return objectives.denoise(tokenizer, words, lang, limit=limit, rng=rng)
        image = vary(sample.image, self.variation, rng)
        if chosen == "mend":
            return objectives.mend(tokenizer, image, text, lang, limit=limit, rng=rng)
        seen = None if from_nothing else image
        return objectives.caption(tokenizer, seen, text, lang, limit=limit)

    def _choose(self, names: Sequence[str], rng: np.random.Generator) -> str:
        weights = np.array([self.weights.get(name, 0.0) for name in names])
        if not weights.sum():
            raise ConfigError(
                f"a sample allows {', '.join(names)}, all of which have weight 0",
                hint="give one of them a weight, or leave such samples out",
            )
        return names[int(rng.choice(len(names), p=weights / weights.sum()))]


def generator(seed: int, index: int) -> np.random.Generator:
    """The draws of sample number `index` of a run."""
    return np.random.default_rng([seed, index])


def check_belong(config: M6Config, tokenizer: Tokenizer, codes: ImageCodes | None) -> None:
    """Refuses a tokenizer or a codebook of another model."""
    if (tokenizer.vocab_size, tokenizer.num_codes) != (config.vocab_size, config.num_codes):
        raise WhaleError(
            f"a tokenizer of {tokenizer.vocab_size} ids, {tokenizer.num_codes} of them image "
            f"codes, for a model of {config.vocab_size} and {config.num_codes}",
            hint="build it with the model's vocab_size and num_codes",
        )
    if codes is None:
        return
    has = (codes.num_codes, codes.patch_size, codes.image_size)
    wants = (config.num_codes, config.code_patch_size, config.image_size)
    if has[0] > wants[0] or has[1:] != wants[1:]:
        raise WhaleError(
            f"a codebook of (codes, patch size, image size) {has} for a model of {wants}",
            hint="fit it with the model's num_codes and code_patch_size, on pictures of its size",
        )
