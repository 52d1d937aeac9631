"""The shipped running text: poems of the Song dynasty, and State of the Union addresses.

Place in the flow: reads what `scripts/build_m6_data.py` wrote and gives Documents, whole or in
pieces of one size, which streams mix. A tenth of the documents is held out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from whale.datasets.samples import LANGUAGES, Document, Language
from whale.datasets.shipped import TEXTS, shipped_file, unpack_records
from whale.datasets.split import Split, checked_split
from whale.errors import WhaleError

_ENDS = "\n 。"
"""A piece may end after any of these."""


class Texts:
    """Documents in their order; a source of samples."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self.documents = tuple(documents)

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> Document:
        return self.documents[index]

    @property
    def num_characters(self) -> int:
        """Of all documents together, titles not counted."""
        return sum(len(document.text) for document in self.documents)

    def pieces(self, max_characters: int) -> Texts:
        """The same text in pieces that a model can take, cut between words or lines if it can be.

        Nothing is lost: the pieces of a document put together are its text again.
        """
        if max_characters < 1:
            raise WhaleError(
                f"pieces of at most {max_characters} characters; at least 1 is needed",
                hint="give the length of the model's input",
            )
        return Texts(
            [
                replace(document, key=f"{document.key}#{number}", text=piece)
                for document in self.documents
                for number, piece in enumerate(cut(document.text, max_characters))
            ]
        )


def cut(text: str, max_characters: int) -> Iterator[str]:
    """`text` in pieces of at most `max_characters`, that end after a space, line or sentence.

    Where there is none of them in the last half of a piece, it ends in the middle of a word.
    """
    start = 0
    while len(text) - start > max_characters:
        end = start + max_characters
        middle = start + max_characters // 2
        after = max(text.rfind(character, middle, end) for character in _ENDS) + 1
        yield text[start : (end := after or end)]
        start = end
    if start < len(text):
        yield text[start:]


def load_texts(language: Language, split: Split | None = None) -> Texts:
    """The running text of a language: `zh` is poems, `en` is addresses.

    Args:
        language: `zh` or `en`.
        split: `train` or `held_out`; None for both.
    """
    checked_split(split)
    if language not in LANGUAGES:
        raise WhaleError(
            f"there is no text in {language!r}, only in {', '.join(map(repr, LANGUAGES))}",
            hint="read files of your own with whale.datasets.folder.FolderTexts",
        )
    return Texts(
        [
            Document(
                key=record["key"],
                text=record["text"],
                language=language,
                title=record["title"],
                author=record["author"],
            )
            for record in _records(language)
            if split is None or record["held_out"] == (split == "held_out")
        ]
    )


@lru_cache(maxsize=len(LANGUAGES))
def _records(language: Language) -> list[dict[str, Any]]:
    return unpack_records(shipped_file(TEXTS[language]).read_bytes())
