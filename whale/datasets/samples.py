"""The two kinds of samples: a Picture with what is said of it, and a Document of running text.

Place in the flow: what every loader of `whale.datasets` gives and the streams carry, so a model
trained on the shipped data takes a user's own folder without a change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
Language = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = ("en", "zh")

T_co = TypeVar("T_co", covariant=True)


class Source(Protocol[T_co]):
    """Samples by number: all a stream needs. A list is one; so is every set of samples here."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> T_co: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """An image and the texts that belong to it."""

    key: str
    """The sample's name, unique in its source: `1F436/noto`, or the file of a user's picture."""
    image: Pixels
    """[height, width, 3], red, green and blue from 0 to 255."""
    captions: Mapping[str, str]
    """By language: `{"en": "dog face", "zh": "狗脸"}`; a folder may have other languages."""
    tags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Words about the picture, by language; may be empty."""
    question: str | None = None
    """Something asked about the picture, with its `answer`."""
    answer: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A text, or one piece of a longer one."""

    key: str
    """Unique in its source; a piece ends with `#` and its number."""
    text: str
    language: str
    """`en`, `zh`, or what the user named; `und` where nobody said."""
    title: str = ""
    author: str = ""
