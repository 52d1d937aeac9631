"""The shipped pictures: 1,906 emoji in two styles, each with labels and tags in two languages.

Place in the flow: reads what `scripts/build_m6_data.py` wrote and gives Pictures, which streams mix
and a multi-modal model learns to name. A tenth of the emoji is held out, whole families at a time
(a woman, a man and a person running), so a held-out picture was never seen in any style or variant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from whale.datasets.samples import LANGUAGES, Picture, Pixels
from whale.datasets.shipped import EMOJI_PICTURES, EMOJI_RECORDS, shipped_file, unpack_records
from whale.datasets.split import Split, checked_split
from whale.errors import WhaleError

GROUP_NAMES = {
    "smileys-emotion": {"en": "smileys and emotion", "zh": "表情与情感"},
    "people-body": {"en": "people and body", "zh": "人物与身体"},
    "animals-nature": {"en": "animals and nature", "zh": "动物与自然"},
    "food-drink": {"en": "food and drink", "zh": "食物与饮料"},
    "travel-places": {"en": "travel and places", "zh": "旅行与地点"},
    "activities": {"en": "activities", "zh": "活动"},
    "objects": {"en": "objects", "zh": "物品"},
    "symbols": {"en": "symbols", "zh": "符号"},
    "flags": {"en": "flags", "zh": "旗帜"},
}
"""What a group is called when it is the answer to a question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Emoji:
    """One emoji, whatever its style."""

    code: str
    """Its code points, `1F468-200D-1F33E`, without the selector FE0F."""
    char: str
    labels: dict[str, str]
    """The one name in each language."""
    tags: dict[str, tuple[str, ...]]
    """Words about it in each language; a few have none."""
    group: str
    """One of the nine keys of `GROUP_NAMES`."""
    subgroup: str
    """Finer, `animal-mammal`: 98 of them."""
    is_flag: bool
    """The flag of a country or territory: nearly the same drawing in every style."""
    held_out: bool


class EmojiPictures:
    """A selection of pictures, as a source of samples and as arrays."""

    def __init__(
        self, emoji: Sequence[Emoji], styles: Sequence[str], images: Pixels, numbers: Sequence[int]
    ) -> None:
        self.emoji = tuple(emoji)
        """The emoji of each picture."""
        self.styles = tuple(styles)
        """The style of each picture."""
        self.images = images
        """[pictures, 32, 32, 3]."""
        self.numbers: npt.NDArray[np.int64] = np.asarray(numbers, dtype=np.int64)
        """The number of each picture's emoji in the EmojiSet: what two styles have in common."""

    def __len__(self) -> int:
        return len(self.emoji)

    def __getitem__(self, index: int) -> Picture:
        emoji, style = self.emoji[index], self.styles[index]
        return Picture(
            key=f"{emoji.code}/{style}",
            image=self.images[index],
            captions=emoji.labels,
            tags=emoji.tags,
        )


class EmojiSet:
    """All emoji and their pictures. See `load_emoji`."""

    def __init__(self, emoji: Sequence[Emoji], styles: Sequence[str], images: Pixels) -> None:
        assert images.shape[:2] == (len(emoji), len(styles))
        self.emoji = tuple(emoji)
        self.styles = tuple(styles)
        # One set serves the whole process: what is written to would be wrong for everyone else.
        images.flags.writeable = False
        self.images = images
        """[emoji, styles, 32, 32, 3], read-only."""

    def __len__(self) -> int:
        return len(self.emoji)

    def select(
        self, *, style: str | None = None, split: Split | None = None, flags: bool | None = None
    ) -> EmojiPictures:
        """The pictures of one style (default: of all), of one split, with or without flags.

        Args:
            style: One of `styles`.
            split: `train` or `held_out`; None for both.
            flags: True for flags of countries only, False for all but them.
        """
        checked_split(split)
        if style is not None and style not in self.styles:
            raise WhaleError(
                f"style {style!r}; there are {', '.join(map(repr, self.styles))}",
                hint="leave `style` out for the pictures of all styles",
            )
        chosen = [
            (number, s)
            for s, name in enumerate(self.styles)
            for number, emoji in enumerate(self.emoji)
            if style in (None, name)
            and (split is None or emoji.held_out == (split == "held_out"))
            and (flags is None or emoji.is_flag == flags)
        ]
        numbers = [number for number, _ in chosen]
        style_numbers = [s for _, s in chosen]
        return EmojiPictures(
            [self.emoji[number] for number in numbers],
            [self.styles[s] for s in style_numbers],
            self.images[numbers, style_numbers],
            numbers,
        )


@lru_cache(maxsize=1)
def load_emoji() -> EmojiSet:
    """The 1,906 emoji (no skin tones) in the styles `noto` and `twemoji`."""
    records = unpack_records(shipped_file(EMOJI_RECORDS).read_bytes())
    with np.load(shipped_file(EMOJI_PICTURES), allow_pickle=False) as arrays:
        images: Pixels = arrays["images"]
        styles = [str(style) for style in arrays["styles"]]
    emoji = [
        Emoji(
            code=record["code"],
            char=record["emoji"],
            labels={language: record[language] for language in LANGUAGES},
            tags={language: tuple(record[f"tags_{language}"]) for language in LANGUAGES},
            group=record["group"],
            subgroup=record["subgroup"],
            is_flag=record["flag"],
            held_out=record["held_out"],
        )
        for record in records
    ]
    return EmojiSet(emoji, styles, images)
