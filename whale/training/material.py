"""The material of a run: vocabulary, codebook, samples to learn from and samples held out.

Place in the flow: a Run in; what the loop trains on and what `evaluate` asks about out. Everything
follows from the Run alone, so every rank has the same stream and a resumed run goes on in it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, cast

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from whale.datasets.emoji import EmojiPictures, load_emoji
from whale.datasets.folder import FolderPictures, FolderTexts
from whale.datasets.questions import group_questions, tag_questions
from whale.datasets.samples import Document, Language, Picture, Source
from whale.datasets.split import Split
from whale.datasets.stream import MixedStream
from whale.datasets.texts import load_texts
from whale.errors import ConfigError
from whale.models.m6.config import M6Config
from whale.models.m6.image_codes import ImageCodes
from whale.models.m6.mixture import DEFAULT_WEIGHTS, Objectives
from whale.models.m6.objectives import Example, collate
from whale.models.m6.pictures import Pixels
from whale.models.m6.tokenizer import Tokenizer
from whale.models.m6.variation import VARIATIONS
from whale.training.run import Run, nearest

EMOJI_SIDE = 32
TEXT_SOURCES: dict[str, str] = {"zh": "poems", "en": "addresses"}
MAX_FITTED = 4000
"""Pictures of a folder that the codebook is fitted on."""

Sample = Picture | Document


class InLanguages:
    """Pictures with the captions and tags of some languages only."""

    def __init__(self, pictures: EmojiPictures, languages: Sequence[str]) -> None:
        self.pictures, self.languages = pictures, tuple(languages)

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> Picture:
        picture = self.pictures[index]
        return replace(
            picture,
            captions={lang: picture.captions[lang] for lang in self.languages},
            tags={lang: picture.tags[lang] for lang in self.languages},
        )


class Joined:
    """Several sources, one after another."""

    def __init__(self, sources: Sequence[Source[Picture]]) -> None:
        self._sources = sources
        self._starts = [0, *accumulate(len(source) for source in sources)]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Picture:
        at = bisect_right(self._starts, index) - 1
        return self._sources[at][index - self._starts[at]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """All samples of one split, by the kind of what they are good for."""

    pictures: dict[str, Source[Picture]]
    """By source: `pictures`, `folder`."""
    questions: dict[str, Source[Picture]]
    """About shipped pictures, by kind: `groups en`, `tags zh`."""
    texts: dict[str, Source[Document]]

    def sources(self) -> dict[str, Source[Sample]]:
        """By name, as weights name them."""
        asked = {"questions": Joined(list(self.questions.values()))} if self.questions else {}
        return cast("dict[str, Source[Sample]]", {**self.pictures, **asked, **self.texts})

    def written(self) -> list[Iterator[str]]:
        """Everything written in it, by source."""
        return [
            *(_written(pictures) for pictures in self.pictures.values()),
            *(_written(questions) for questions in self.questions.values()),
            *((texts[i].text for i in range(len(texts))) for texts in self.texts.values()),
        ]


def _written(pictures: Source[Picture]) -> Iterator[str]:
    for i in range(len(pictures)):
        picture = pictures[i]
        yield from picture.captions.values()
        yield from (tag for tags in picture.tags.values() for tag in tags)
        if picture.question is not None and picture.answer is not None:
            yield from (picture.question, picture.answer)


def spread(count: int, limit: int) -> list[int]:
    """At most `limit` of `count` numbers, evenly spread, always the same."""
    if count <= limit:
        return list(range(count))
    return [i * count // limit for i in range(limit)]


def read_split(run: Run, config: M6Config, split: Split) -> Samples:
    """The samples of a split, as the Run names them."""
    data = run.data
    pictures: dict[str, Source[Picture]] = {}
    questions: dict[str, Source[Picture]] = {}
    if data.styles:
        if config.image_size != EMOJI_SIDE:
            raise ConfigError(
                f"model.image_size {config.image_size}; the shipped pictures have {EMOJI_SIDE}",
                hint="leave image_size as it is, or data.styles = [] with a folder of your own",
            )
        chosen = emoji_of(data.styles, split)
        pictures["pictures"] = Joined([InLanguages(part, data.languages) for part in chosen])
        if data.questions:
            for lang in data.languages:
                for kind, ask in (("groups", group_questions), ("tags", tag_questions)):
                    asked = [ask(part, cast(Language, lang)) for part in chosen]
                    questions[f"{kind} {lang}"] = Joined(asked)
    if data.folder:
        pictures["folder"] = FolderPictures(data.folder, side=config.image_size, split=split)
    texts: dict[str, Source[Document]] = {
        TEXT_SOURCES[lang]: load_texts(cast(Language, lang), split) for lang in data.texts
    }
    if data.text_folder:
        texts["text_folder"] = FolderTexts(
            data.text_folder, language=data.text_language, split=split
        )
    return Samples(pictures=pictures, questions=questions, texts=texts)


def emoji_of(styles: Sequence[str], split: Split) -> list[EmojiPictures]:
    """The shipped pictures of each style."""
    emoji = load_emoji()
    return [emoji.select(style=style, split=split) for style in styles]


def build_tokenizer(config: M6Config, train: Samples) -> Tokenizer:
    """The vocabulary of all that is learned from."""
    return Tokenizer.build(
        *train.written(), vocab_size=config.vocab_size, num_codes=config.num_codes
    )


def build_codes(run: Run, config: M6Config, train: Samples) -> ImageCodes | None:
    """The codebook of the pictures learned from; None where nothing is drawn."""
    weights = {**DEFAULT_WEIGHTS, **run.objectives}
    if not weights["draw"] or not config.num_codes or not train.pictures:
        return None
    images: list[Pixels] = [
        source[i].image
        for source in train.pictures.values()
        for i in spread(len(source), MAX_FITTED)
    ]
    return ImageCodes.fit(
        np.stack(images),
        num_codes=config.num_codes,
        patch_size=config.code_patch_size,
        seed=run.seed,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """What a run learns from."""

    config: M6Config
    tokenizer: Tokenizer
    codes: ImageCodes | None
    train: Samples
    held_out: Samples
    stream: MixedStream[Sample]
    objectives: Objectives

    def batches(self, run: Run, done: int, stop: int) -> DataLoader[Any]:
        """The global batches of the steps from `done` to `stop`, each row by its place."""
        rows = run.batch_rows
        return DataLoader(
            _Examples(self),
            batch_size=rows,
            sampler=_Places(done * rows, stop * rows),
            collate_fn=partial(collate_rows, self.config, self.tokenizer),
            num_workers=run.data.num_workers,
            prefetch_factor=4 if run.data.num_workers else None,
        )

    def state(self, run: Run, done: int) -> dict[str, Any]:
        """Where the stream is after so many steps; plain JSON."""
        return {**self.stream.state(), "position": done * run.batch_rows}


def make_material(
    run: Run, config: M6Config, tokenizer: Tokenizer, codes: ImageCodes | None
) -> Material:
    """The same on every rank."""
    train, held_out = (read_split(run, config, split) for split in ("train", "held_out"))
    sources = train.sources()
    for name in run.data.weights:
        if name not in sources:
            raise ConfigError(f"data.weights for {name!r}", hint=nearest(name, sources))
    weights = {name: run.data.weights.get(name, 1.0) for name in sources}
    return Material(
        config=config,
        tokenizer=tokenizer,
        codes=codes,
        train=train,
        held_out=held_out,
        stream=MixedStream(
            {name: source for name, source in sources.items() if weights[name]},
            {name: weight for name, weight in weights.items() if weight},
            seed=run.seed,
        ),
        objectives=Objectives(
            config=config,
            tokenizer=tokenizer,
            codes=codes,
            weights={**DEFAULT_WEIGHTS, **run.objectives},
            variation=VARIATIONS[run.data.vary],
        ),
    )


def collate_rows(
    config: M6Config, tokenizer: Tokenizer, examples: Sequence[Example]
) -> dict[str, Tensor]:
    """Rows of one length, in whatever company they come."""
    return collate(config, tokenizer, examples)


class _Examples(Dataset[Example]):
    """The example at each place of the stream."""

    def __init__(self, material: Material) -> None:
        self.material = material

    def __getitem__(self, position: int) -> Example:
        drawn = self.material.stream.at(position)
        return self.material.objectives.example(drawn.sample, drawn.generator())


class _Places(Sampler[int]):
    """The places of a stretch of the stream, in order."""

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))

    def __len__(self) -> int:
        return self.stop - self.start
