"""How good a model is on data it has not seen, beside what is trivial.

Place in the flow: rank 0, off the training path, with the plain model on one device. Every figure
comes with what it has to beat: a unigram model of the same characters, the most frequent answer,
chance, the nearest picture by pixels.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from whale.datasets.answers import exact_match, majority
from whale.datasets.emoji import load_emoji
from whale.datasets.nearest import nearest
from whale.datasets.retrieval import recalls, same_label
from whale.datasets.samples import Picture
from whale.models.m6 import generate
from whale.models.m6.image_codes import ImageCodes
from whale.models.m6.model import M6
from whale.models.m6.objectives import Example, known_language
from whale.models.m6.objectives import caption as captioned
from whale.models.m6.pictures import Pixels
from whale.models.m6.score import log_likelihood, score
from whale.models.m6.tokenizer import Tokenizer
from whale.training.material import Material, Samples, spread
from whale.training.run import STYLES, Run

MAX_COUNTED = 4000
"""Samples of a source that the unigram model counts."""

END = ""
"""The end of a caption, counted as a character."""


class Unigram:
    """Characters drawn by how often training has them; one more stands for all it never saw."""

    def __init__(self, texts: Iterable[Sequence[str]]) -> None:
        self.counts = Counter(character for text in texts for character in text)
        self.total = self.counts.total() + len(self.counts) + 1

    def nats(self, characters: Sequence[str]) -> float:
        """The cost of a text."""
        return sum(math.log(self.total / (self.counts[c] + 1)) for c in characters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Nats per character, of a model and of the unigram model of the same kind of text."""

    num_characters: int
    model: float
    unigram: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """An evaluation. Shares are of 1; what is not asked is None or empty."""

    loss: Loss
    losses: dict[str, Loss] = field(default_factory=dict)
    """By kind of text: `captions en`, `poems`."""
    caption_match: dict[str, float] = field(default_factory=dict)
    """By language: captions of held-out pictures that are exactly right."""
    questions: dict[str, tuple[float, float]] = field(default_factory=dict)
    """By kind: the share answered exactly, and what always giving the most frequent answer of
    training scores."""
    recall: dict[str, dict[int, float]] = field(default_factory=dict)
    """`text for a picture` and `picture for a text`, at 1 and 5."""
    num_ranked: int = 0
    other_style_match: float | None = None
    """Pictures of the other style, named exactly: all but flags, held-out emoji included."""
    other_style_nearest: float | None = None
    """The same by the nearest picture of the learned style, pixel by pixel, held-out ones
    included."""
    drawn_match: float | None = None
    """Names drawn whose nearest five real pictures have one of that name."""

    def lines(self) -> list[str]:
        """For a reader."""
        gap = self.loss.model - self.loss.unigram
        lines = [
            f"loss {self.loss.model:.3f} nats per character, unigram {self.loss.unigram:.3f} "
            f"({gap:+.3f}; {self.loss.num_characters:,} characters)"
        ]
        kinds = [f"{name} {x.model:.2f} / {x.unigram:.2f}" for name, x in self.losses.items()]
        lines.append(f"  model / unigram: {', '.join(kinds)}")
        if self.caption_match:
            texts = [f"{lang} {share:.1%}" for lang, share in self.caption_match.items()]
            lines.append(f"captions exactly right: {', '.join(texts)}")
        if self.questions:
            texts = [f"{kind} {x:.1%} / {least:.1%}" for kind, (x, least) in self.questions.items()]
            lines.append("questions answered / always the most frequent answer:")
            lines.append(f"  {', '.join(texts)}")
        for name, by_k in self.recall.items():
            texts = [
                f"@{k} {share:.1%} (chance {min(1.0, k / self.num_ranked):.1%})"
                for k, share in by_k.items()
            ]
            lines.append(f"the right {name} of {self.num_ranked}: {', '.join(texts)}")
        if self.other_style_match is not None and self.other_style_nearest is not None:
            lines.append(
                f"named in the other style: {self.other_style_match:.1%}, "
                f"nearest by pixels {self.other_style_nearest:.1%}"
            )
        if self.drawn_match is not None:
            lines.append(f"drawings nearest to their name (of 5): {self.drawn_match:.1%}")
        return lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawings:
    """Pictures drawn for names that were learned.

    Attributes:
        names: what was asked for.
        drawn: uint8 [count, height, width, 3].
        real: the pictures of those names.
        right: whether one of the name is among the five real pictures nearest to the drawn one.
    """

    names: list[str]
    drawn: Pixels
    real: Pixels
    right: list[bool]

    def sheet(self, columns: int = 20) -> Pixels:
        """Some of them as one picture: a row drawn, the real ones below it."""
        height, width = self.drawn.shape[1:3]
        chosen = spread(len(self.names), 4 * columns)
        count = -(-len(chosen) // columns)
        sheet = np.full((2 * count * height, columns * width, 3), 255, dtype=np.uint8)
        for i, number in enumerate(chosen):
            row, column = divmod(i, columns)
            for line, pictures in enumerate((self.drawn, self.real)):
                top = (2 * row + line) * height
                left = column * width
                sheet[top : top + height, left : left + width] = pictures[number]
        return sheet


class Evaluator:
    """Asks a model about the held-out part of a run's data."""

    def __init__(self, run: Run, material: Material) -> None:
        self.run, self.material = run, material
        self.limit = run.watch.num_evaluated
        self.tokenizer = material.tokenizer
        # Counted once, when the first loss is asked for.
        self._unigram = lru_cache(maxsize=None)(self._count)

    def losses(self, model: M6) -> Scores:
        """The losses alone: cheap enough to be asked while it trains."""
        kinds = {
            kind: self._loss(model, kind, texts, examples)
            for kind, texts, examples in self._kinds(self.material.held_out)
            if examples
        }
        return Scores(loss=_together(list(kinds.values())), losses=kinds)

    def everything(self, model: M6) -> tuple[Scores, Drawings | None]:
        """All figures, and what was drawn for them."""
        found: dict[str, Any] = {}
        pictures = self.pictures()
        if pictures:
            found["caption_match"] = self._captions(model, pictures)
            found |= self._ranked(model, pictures)
            found["questions"] = self._asked(model)
            found |= self._other_style(model)
        drawings = None
        if self.run.watch.num_drawn and self.material.codes is not None and self.run.data.styles:
            drawings = self._drawn(model, self.material.codes)
            found["drawn_match"] = float(np.mean(drawings.right))
        losses = self.losses(model)
        return Scores(loss=losses.loss, losses=losses.losses, **found), drawings

    def pictures(self) -> list[Picture]:
        """Held-out pictures that have captions."""
        found = [
            source[i]
            for source in self.material.held_out.pictures.values()
            for i in spread(len(source), self.limit)
        ]
        return [picture for picture in found if picture.captions]

    def sample(self, model: M6, number: int) -> tuple[Picture, str, str, str]:
        """A held-out picture, a language, its caption in it, and what the model says."""
        pictures = self.pictures()
        picture = pictures[number % len(pictures)]
        languages = _languages(picture)
        lang = languages[number // len(pictures) % len(languages)] if languages else "en"
        (said,) = generate.caption(model, self.tokenizer, [picture.image], lang)
        return (
            picture,
            lang,
            picture.captions.get(lang, next(iter(picture.captions.values()))),
            said,
        )

    # ---- losses ----

    def _kinds(self, samples: Samples) -> Iterator[tuple[str, list[list[str]], list[Example]]]:
        """By kind of text: the characters of each, and what the model is to write."""
        config, tokenizer = self.material.config, self.tokenizer
        for lang in self.run.data.languages:
            texts, examples = [], []
            for source in samples.pictures.values():
                for i in spread(len(source), self.limit):
                    picture = source[i]
                    if lang in picture.captions:
                        text = _fitting(tokenizer, picture.captions[lang], config.max_text_len // 2)
                        texts.append([*text, END])
                        examples.append(
                            captioned(
                                tokenizer, picture.image, text, lang, limit=config.max_text_len
                            )
                        )
            yield f"captions {lang}", texts, examples
        for name, documents in samples.texts.items():
            texts, examples = [], []
            for i in spread(len(documents), self.limit):
                document = documents[i]
                prompt = tokenizer.prompt("text", known_language(document.language))
                text = _fitting(tokenizer, document.text, config.max_text_len - len(prompt) - 1)
                if text:
                    texts.append(list(text))
                    examples.append(Example(source=prompt, target=tokenizer.encode(text)))
            yield name, texts, examples

    def _loss(
        self, model: M6, kind: str, texts: Sequence[Sequence[str]], examples: Sequence[Example]
    ) -> Loss:
        sums, _ = log_likelihood(model, self.tokenizer, examples)
        count = sum(len(text) for text in texts)
        unigram: Unigram = self._unigram(kind)
        return Loss(
            num_characters=count,
            model=-float(sums.sum()) / count,
            unigram=sum(unigram.nats(text) for text in texts) / count,
        )

    def _count(self, kind: str) -> Unigram:
        """The unigram model of a kind of text, of the training split."""
        train = self.material.train
        if kind in train.texts:
            documents = train.texts[kind]
            return Unigram(documents[i].text for i in spread(len(documents), MAX_COUNTED))
        lang = kind.rpartition(" ")[2]
        return Unigram(
            [*picture.captions[lang], END]
            for source in train.pictures.values()
            for i in spread(len(source), MAX_COUNTED)
            if lang in (picture := source[i]).captions
        )

    # ---- pictures ----

    def _captions(self, model: M6, pictures: Sequence[Picture]) -> dict[str, float]:
        matches = {}
        for lang in self.run.data.languages:
            chosen = [p for p in pictures if lang in p.captions]
            if chosen:
                said = generate.caption(model, self.tokenizer, [p.image for p in chosen], lang)
                matches[lang] = exact_match(said, [p.captions[lang] for p in chosen])
        return matches

    def _ranked(self, model: M6, pictures: Sequence[Picture]) -> dict[str, Any]:
        """Every one of a few pictures against every one of their captions."""
        lang = next((x for x in self.run.data.languages if x in pictures[0].captions), None)
        chosen = [p for p in pictures if lang in p.captions]
        chosen = [chosen[i] for i in spread(len(chosen), self.run.watch.num_ranked)]
        if lang is None or len(chosen) < 2:
            return {}
        names = [p.captions[lang] for p in chosen]
        pairs = [(p.image, name) for p in chosen for name in names]
        found = score(
            model, self.tokenizer, [p for p, _ in pairs], [t for _, t in pairs], lang, relative=True
        )
        table = found.view(len(chosen), len(chosen)).numpy()
        both = recalls(table, same_label(names, names), (1, 5))
        return {
            "num_ranked": len(chosen),
            "recall": {
                "text for a picture": dict(both.forward),
                "picture for a text": dict(both.backward),
            },
        }

    def _asked(self, model: M6) -> dict[str, tuple[float, float]]:
        asked, known = _questions(self.material.held_out), _questions(self.material.train)
        found = {}
        for kind in asked:
            chosen = [asked[kind][i] for i in spread(len(asked[kind]), self.limit)]
            images, questions = [p.image for p in chosen], [p.question or "" for p in chosen]
            if not chosen or not known[kind]:
                continue
            replies = generate.answer(model, self.tokenizer, images, questions)
            answers = [p.answer or "" for p in chosen]
            least = majority([p.answer or "" for p in known[kind]], answers)
            found[kind] = exact_match(replies, answers), least.accuracy
        return found

    def _other_style(self, model: M6) -> dict[str, Any]:
        """Only where one shipped style was learned from and the other was not."""
        known = self.run.data.styles
        others = [style for style in STYLES if style not in known]
        if not known or not others:
            return {}
        lang = self.run.data.languages[0]
        emoji = load_emoji()
        asked = emoji.select(style=others[0], flags=False)
        gallery = emoji.select(style=known[0])
        numbers = spread(len(asked), 10 * self.limit)
        labels = [asked.emoji[i].labels[lang] for i in numbers]
        said = generate.caption(model, self.tokenizer, [asked.images[i] for i in numbers], lang)
        near = nearest(asked.images[numbers], gallery.images, 1)[:, 0]
        right = gallery.numbers[near] == asked.numbers[numbers]
        return {
            "other_style_match": exact_match(said, labels),
            "other_style_nearest": float(right.mean()),
        }

    def _drawn(self, model: M6, codes: ImageCodes) -> Drawings:
        """What is drawn for learned names, and whether it is near a real picture of that name."""
        lang = self.run.data.languages[0]
        gallery = load_emoji().select(style=self.run.data.styles[0])
        learned = load_emoji().select(style=self.run.data.styles[0], split="train")
        numbers = spread(len(learned), self.run.watch.num_drawn)
        names = [learned.emoji[i].labels[lang] for i in numbers]
        drawn = generate.draw(model, self.tokenizer, codes, names)
        near = gallery.numbers[nearest(drawn, gallery.images, 5)]
        right = (near == learned.numbers[numbers][:, None]).any(axis=1)
        return Drawings(
            names=names, drawn=drawn, real=learned.images[numbers], right=right.tolist()
        )


def _languages(picture: Picture) -> list[str]:
    return [lang for lang in sorted(picture.captions) if known_language(lang) is not None]


def _questions(samples: Samples) -> dict[str, list[Picture]]:
    """What is asked, by kind; a user's own questions are one."""
    sources = dict(samples.questions)
    if "folder" in samples.pictures:
        sources["folder"] = samples.pictures["folder"]
    return {
        kind: [
            p for i in spread(len(source), MAX_COUNTED) if (p := source[i]).question and p.answer
        ]
        for kind, source in sources.items()
    }


def _fitting(tokenizer: Tokenizer, text: str, room: int) -> str:
    """The beginning of a text that takes at most `room` tokens."""
    text = text[:room]
    while len(tokenizer.encode(text)) > room:
        text = text[:-1]
    return text


def _together(losses: Sequence[Loss]) -> Loss:
    count = sum(loss.num_characters for loss in losses)
    return Loss(
        num_characters=count,
        model=sum(x.model * x.num_characters for x in losses) / max(count, 1),
        unigram=sum(x.unigram * x.num_characters for x in losses) / max(count, 1),
    )
