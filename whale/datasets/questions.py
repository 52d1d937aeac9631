"""Questions about the shipped pictures, made from their groups and tags, in two languages.

Place in the flow: pictures of `emoji` in, the same pictures with a question and its answer out: the
visual question answering that ships with the project. `answers` scores what a model replies; what
always giving the most frequent answer scores is the least a model must beat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from whale.datasets.emoji import GROUP_NAMES, EmojiPictures
from whale.datasets.samples import Language, Picture
from whale.datasets.split import fraction_of

_GROUP_QUESTION = {"en": "Which group does this picture belong to?", "zh": "这张图属于哪一类？"}
_TAG_QUESTION = {"en": 'Does the word "{}" fit this picture?', "zh": "“{}”这个词适合这张图吗？"}
_YES = {"en": "yes", "zh": "是"}
_NO = {"en": "no", "zh": "否"}


class Questions:
    """One question a sample; a source of Pictures with `question` and `answer` filled in."""

    def __init__(
        self,
        pictures: EmojiPictures,
        asked: Sequence[tuple[int, str, str]],
        choices: Sequence[str],
    ) -> None:
        self._pictures = pictures
        self._asked = tuple(asked)
        self.answers = tuple(answer for _, _, answer in asked)
        """The right answer of each question."""
        self.choices = tuple(choices)
        """Every answer that can be right."""

    def __len__(self) -> int:
        return len(self._asked)

    def __getitem__(self, index: int) -> Picture:
        picture, question, answer = self._asked[index]
        return replace(self._pictures[picture], question=question, answer=answer)


def group_questions(pictures: EmojiPictures, language: Language) -> Questions:
    """Which of the nine groups each picture belongs to."""
    asked = [
        (i, _GROUP_QUESTION[language], GROUP_NAMES[emoji.group][language])
        for i, emoji in enumerate(pictures.emoji)
    ]
    return Questions(pictures, asked, [names[language] for names in GROUP_NAMES.values()])


def tag_questions(pictures: EmojiPictures, language: Language) -> Questions:
    """Two questions a picture: whether one of its own tags fits, and one of another picture's.

    As many answers are yes as no, and words come as often with the one as with the other, so
    neither the most frequent answer nor the word alone is better than one half.
    """
    tagged = [i for i, emoji in enumerate(pictures.emoji) if emoji.tags[language]]
    asked = []
    for i in tagged:
        emoji = pictures.emoji[i]
        # All styles of an emoji are asked the same, or the pair would tell the answer.
        own = _choice(emoji.tags[language], f"{emoji.code}/{language}/yes")
        known = {*emoji.tags[language], emoji.labels[language]}
        other = _foreign_tag(pictures, tagged, known, f"{emoji.code}/{language}/no", language)
        question = _TAG_QUESTION[language]
        asked.append((i, question.format(own), _YES[language]))
        if other is not None:
            asked.append((i, question.format(other), _NO[language]))
    return Questions(pictures, asked, [_YES[language], _NO[language]])


def _foreign_tag(
    pictures: EmojiPictures, tagged: Sequence[int], known: set[str], key: str, language: Language
) -> str | None:
    """A tag of some other picture that this one has not; None where a few draws find none."""
    for attempt in range(20):
        other = pictures.emoji[tagged[int(fraction_of(f"{key}/{attempt}") * len(tagged))]]
        tag = _choice(other.tags[language], f"{key}/{attempt}/tag")
        if tag not in known:
            return tag
    return None


def _choice(words: Sequence[str], key: str) -> str:
    return words[int(fraction_of(key) * len(words))]
