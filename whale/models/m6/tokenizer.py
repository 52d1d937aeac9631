"""Text to token ids and back: words, characters of any language, bytes for what it does not know.

Place in the flow: built once from the training text, saved with the model as JSON, used to make
batches and to read what the model writes.

The ids, in order: special tokens, 256 bytes, characters (most frequent first), words (the same),
unused ones, image codes. The size is fixed by the model, not by the text, so that a preset is one
model whatever it is trained on. Words have the room that characters leave: a name of three tokens
is learned far sooner than one of twenty. They are those of Latin letters, each also with the space
before it; in a script without spaces every character is a token.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whale.errors import WhaleError

SPECIAL = (
    "<pad>",
    "<bos>",
    "<eos>",
    "<mask>",
    "<sep>",
    "<en>",
    "<zh>",
    "<caption>",
    "<ask>",
    "<draw>",
    "<text>",
    "<fill>",
)
"""Padding, begin and end of a target, a masked span, a separator; languages; tasks."""

PAD = SPECIAL.index("<pad>")
NUM_BYTES = 256

FORMAT = 2

_WORD = re.compile("( ?)([A-Za-z\u00c0-\u024f]{2,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """A character vocabulary in which nothing is lost.

    Attributes:
        characters: those with an id of their own, in the order of their ids.
        words: the same; a space may be the first character of one.
        vocab_size: ids in all.
        num_codes: image codes, the last ids.
    """

    characters: str
    words: tuple[str, ...] = ()
    vocab_size: int
    num_codes: int
    _ids: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        first = len(SPECIAL) + NUM_BYTES
        room = self.vocab_size - first - self.num_codes
        pieces = self._pieces()
        if len(pieces) > room:
            raise WhaleError(
                f"{len(pieces)} characters and words in a vocabulary of {self.vocab_size}, of "
                f"which {first} are special tokens and bytes and {self.num_codes} image codes",
                hint=f"at most {room} of them: raise vocab_size or lower num_codes",
            )
        ids = {piece: first + i for i, piece in enumerate(pieces)}
        if len(ids) != len(pieces):
            twice = next(piece for piece, n in Counter(pieces).items() if n > 1)
            raise WhaleError(
                f"{twice!r} is in the vocabulary twice",
                hint="each character and each word has one id; was the file edited?",
            )
        object.__setattr__(self, "_ids", ids)

    @classmethod
    def build(cls, *sources: Iterable[str], vocab_size: int, num_codes: int) -> Tokenizer:
        """The most frequent characters that fit, then the most frequent words; ties by text.

        Every source of texts counts alike, however much of it there is: a few names would be lost
        beside a book.
        """
        characters: list[Counter[str]] = []
        words: list[Counter[str]] = []
        for texts in sources:
            characters.append(Counter())
            words.append(Counter())
            for text in texts:
                characters[-1].update(text)
                words[-1].update(found[0] for found in _WORD.finditer(text))
        room = max(0, vocab_size - len(SPECIAL) - NUM_BYTES - num_codes)
        known = _most_frequent(characters, room)
        return cls(
            characters="".join(known),
            words=tuple(_most_frequent(words, room - len(known))),
            vocab_size=vocab_size,
            num_codes=num_codes,
        )

    def _pieces(self) -> list[str]:
        return [*self.characters, *self.words]

    # ---- special tokens ----

    @property
    def pad(self) -> int:
        """Fills a row up."""
        return PAD

    @property
    def bos(self) -> int:
        """Begins a target."""
        return 1

    @property
    def eos(self) -> int:
        """Ends a target."""
        return 2

    @property
    def mask(self) -> int:
        """Stands for a span that was taken out."""
        return 3

    def special(self, name: str) -> int:
        """The id of a special token, for example `<zh>`."""
        if name not in SPECIAL:
            raise WhaleError(
                f"unknown special token {name!r}", hint=f"allowed: {', '.join(SPECIAL)}"
            )
        return SPECIAL.index(name)

    def prompt(self, task: str, lang: str | None = None) -> list[int]:
        """What a source begins with: its task and, where it matters, the language."""
        names = [f"<{task}>"] if lang is None else [f"<{task}>", f"<{lang}>"]
        return [self.special(name) for name in names]

    # ---- text ----

    def encode(self, text: str) -> list[int]:
        """The ids of its words, of its characters, or of their UTF-8 bytes: the first it knows."""
        ids: list[int] = []
        at = 0
        for found in _WORD.finditer(text):
            for start, word in ((found.start(), found[0]), (found.start(2), found[2])):
                if word in self._ids:
                    ids += self._spelled(text[at:start])
                    ids.append(self._ids[word])
                    at = found.end()
                    break
        return ids + self._spelled(text[at:])

    def _spelled(self, text: str) -> list[int]:
        ids: list[int] = []
        for character in text:
            known = self._ids.get(character)
            if known is not None:
                ids.append(known)
            else:
                # A lone surrogate is no text, but it is in some files.
                encoded = character.encode("utf-8", "surrogatepass")
                ids.extend(len(SPECIAL) + byte for byte in encoded)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; special tokens and image codes are left out, broken bytes become U+FFFD.

        The bytes of a lone surrogate come back as that surrogate.
        """
        parts: list[str] = []
        pending = bytearray()
        first = len(SPECIAL) + NUM_BYTES
        pieces = self._pieces()
        for i in ids:
            if len(SPECIAL) <= i < first:
                pending.append(i - len(SPECIAL))
                continue
            parts.append(_text(pending))
            if first <= i < first + len(pieces):
                parts.append(pieces[i - first])
        parts.append(_text(pending))
        return "".join(parts)

    # ---- image codes ----

    @property
    def first_code(self) -> int:
        """The id of image code 0."""
        return self.vocab_size - self.num_codes

    def encode_codes(self, codes: Iterable[int]) -> list[int]:
        """The ids of image codes."""
        ids = [self.first_code + int(code) for code in codes]
        if any(not self.first_code <= i < self.vocab_size for i in ids):
            raise WhaleError(
                f"an image code outside 0 to {self.num_codes - 1}",
                hint="the codebook and the tokenizer must be of the same model",
            )
        return ids

    def decode_codes(self, ids: Iterable[int]) -> list[int]:
        """The image codes among ids; the rest is left out."""
        return [i - self.first_code for i in ids if self.first_code <= i < self.vocab_size]

    def is_written(self) -> list[bool]:
        """By id, whether it may stand in a text: bytes, characters, words, and the end."""
        last = len(SPECIAL) + NUM_BYTES + len(self.characters) + len(self.words)
        return [i == self.eos or len(SPECIAL) <= i < last for i in range(self.vocab_size)]

    # ---- files ----

    def save(self, path: str | Path) -> None:
        """Writes it as JSON."""
        values = {
            "format": FORMAT,
            "special": SPECIAL,
            "vocab_size": self.vocab_size,
            "num_codes": self.num_codes,
            "characters": self.characters,
            "words": self.words,
        }
        text = json.dumps(values, ensure_ascii=True, indent=1)
        Path(path).write_text(text + "\n", encoding="ascii")

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Reads what `save` wrote."""
        values: dict[str, Any] = json.loads(Path(path).read_text(encoding="ascii"))
        special: Sequence[str] = values.get("special", ())
        if values.get("format") != FORMAT or tuple(special) != SPECIAL:
            raise WhaleError(
                f"{path} is a tokenizer of format {values.get('format')!r} with {len(special)} "
                f"special tokens; this version reads format {FORMAT} with {len(SPECIAL)}",
                hint="use the version of Whale that the model was trained with",
            )
        return cls(
            characters=values["characters"],
            words=tuple(values["words"]),
            vocab_size=values["vocab_size"],
            num_codes=values["num_codes"],
        )


def _most_frequent(sources: Sequence[Counter[str]], room: int) -> list[str]:
    shares: dict[str, float] = {}
    for counts in sources:
        total = counts.total()
        for piece, count in counts.items():
            shares[piece] = shares.get(piece, 0.0) + count / total
    return sorted(shares, key=lambda piece: (-shares[piece], piece))[:room]


def _text(pending: bytearray) -> str:
    """What collected bytes say; empties them."""
    data = bytes(pending)
    pending.clear()
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return data.decode("utf-8", "replace")
