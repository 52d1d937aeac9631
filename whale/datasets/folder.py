"""A user's own folder: pictures with captions or questions, and text files.

Place in the flow: beside the shipped `emoji` and `texts`, with the same samples. Opening a folder
goes through its lines once and keeps where each begins; a line, picture or text is read when the
stream asks for it. So a folder may be larger than memory.

    pictures/
      captions.jsonl      one JSON object a line
      dog.jpg ...
    texts/
      a.txt  more/b.txt   UTF-8
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from whale.datasets.picture_file import read_picture
from whale.datasets.samples import LANGUAGES, Document, Picture
from whale.datasets.split import Split, checked_split, held_out
from whale.errors import WhaleError

CAPTIONS = "captions.jsonl"
_TEXT_KEYS = ("text", *LANGUAGES)
_MAX_LISTED = 10
"""Problems `check` names before it only counts."""


class FolderPictures:
    """The pictures that `captions.jsonl` of a folder lists; a source of Pictures.

    A line has `image` (a file, relative to the folder), and `en`, `zh`, or `text` with the caption,
    or `question` with `answer`, or both. Other keys are left alone.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        side: int = 32,
        language: str = "en",
        split: Split | None = None,
        held_out_share: float = 0.1,
    ) -> None:
        """Goes through the lines of `captions.jsonl`; a bad one is an error that names it.

        Args:
            folder: Where `captions.jsonl` is.
            side: Of the model's pictures, in pixels.
            language: Of captions called `text`.
            split: `train` or `held_out`, by a hash of the picture's file name; None for all.
            held_out_share: Of the pictures.
        """
        checked_split(split)
        self._folder, self._side, self._language = Path(folder), side, language
        self._path = self._folder / CAPTIONS
        if not self._path.is_file():
            raise WhaleError(
                f"{self._folder} has no {CAPTIONS}",
                hint='one line a picture: {"image": "dog.jpg", "en": "a dog"}',
            )
        self._starts, self._lines = array("q"), array("q")
        with self._path.open("rb") as file:
            start = 0
            for number, line in enumerate(file, 1):
                if line.strip():
                    entry = _parsed(line, f"{self._path}:{number}")
                    mark = held_out(entry["image"], held_out_share)
                    if split is None or mark == (split == "held_out"):
                        self._starts.append(start)
                        self._lines.append(number)
                start += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Picture:
        where = self._where(index)
        entry = self._entry(index)
        captions: dict[str, str] = {lang: entry[lang] for lang in LANGUAGES if lang in entry}
        if "text" in entry:
            captions.setdefault(self._language, entry["text"])
        return Picture(
            key=f"{entry['image']}#{self._lines[index]}",
            image=read_picture(self._folder / entry["image"], self._side, where=where),
            captions=captions,
            question=entry.get("question"),
            answer=entry.get("answer"),
        )

    def check(self) -> None:
        """Reads every picture once and names those that fail, before a long run meets them."""
        problems = []
        for index in range(len(self)):
            try:
                self[index]
            except WhaleError as error:
                problems.append(f"{error.where}: {error.message}" if error.where else str(error))
        if problems:
            listed = problems[:_MAX_LISTED]
            if len(problems) > len(listed):
                listed.append(f"... and {len(problems) - len(listed)} more")
            raise WhaleError(
                f"{len(problems)} of {len(self)} samples of {self._folder} cannot be read:\n  "
                + "\n  ".join(listed),
                hint="repair the pictures or delete their lines",
            )

    def _where(self, index: int) -> str:
        return f"{self._path}:{self._lines[index]}"

    def _entry(self, index: int) -> dict[str, Any]:
        # Opened each time: a handle kept open would be shared, with its position, after a fork.
        with self._path.open("rb") as file:
            file.seek(self._starts[index])
            return _parsed(file.readline(), self._where(index))


def _parsed(line: bytes, where: str) -> dict[str, Any]:
    """A line of `captions.jsonl`, whose values are known to be texts."""
    try:
        entry = json.loads(line.decode("utf-8-sig"))
    except ValueError as error:
        raise WhaleError(
            f"this line is not JSON in UTF-8: {error}",
            where=where,
            hint='one object a line: {"image": "dog.jpg", "en": "a dog"}',
        ) from error
    if not isinstance(entry, dict) or not isinstance(entry.get("image"), str):
        found = sorted(entry) if isinstance(entry, dict) else type(entry).__name__
        raise WhaleError(
            f'this line has {found}; it needs an object with "image", the name of a file',
            where=where,
            hint='{"image": "dog.jpg", "en": "a dog"}',
        )
    for key in (*_TEXT_KEYS, "question", "answer"):
        if key in entry and not (isinstance(entry[key], str) and entry[key].strip()):
            raise WhaleError(
                f'"{key}" is {entry[key]!r}; it must be a text that is not empty',
                where=where,
                hint=f'leave "{key}" out where there is none',
            )
    if ("question" in entry) != ("answer" in entry):
        raise WhaleError(
            f"this line has {sorted(entry)}; a question needs an answer and an answer a question",
            where=where,
            hint='give both: {"image": "dog.jpg", "question": "What is it?", "answer": "a dog"}',
        )
    if not any(key in entry for key in (*_TEXT_KEYS, "question")):
        raise WhaleError(
            f"this line has {sorted(entry)}; it needs a caption ({', '.join(_TEXT_KEYS)}) or a "
            "question with its answer",
            where=where,
            hint='{"image": "dog.jpg", "en": "a dog"}',
        )
    return entry


class FolderTexts:
    """All `.txt` files below a folder, in UTF-8; a source of Documents.

    A file larger than `max_bytes` comes in pieces, cut at the end of a line or word where it can
    be. Put together in order they are the file again.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        language: str = "und",
        max_bytes: int = 65536,
        split: Split | None = None,
        held_out_share: float = 0.1,
    ) -> None:
        """Goes through the files once; one that is not UTF-8 is an error that names the line.

        Args:
            folder: Where the files are, at any depth.
            language: What the documents say they are in.
            max_bytes: Of a piece.
            split: `train` or `held_out`, by a hash of the file's name and the piece's number;
                None for all.
            held_out_share: Of the pieces.
        """
        checked_split(split)
        if max_bytes < 8:
            raise WhaleError(
                f"pieces of at most {max_bytes} bytes; at least 8 are needed",
                hint="some thousand bytes make a useful piece",
            )
        self._folder, self._language = Path(folder), language
        self._names = sorted(
            path.relative_to(self._folder).as_posix() for path in self._folder.rglob("*.txt")
        )
        if not self._names:
            raise WhaleError(
                f"{self._folder} has no .txt files, at any depth",
                hint="give the folder they are in",
            )
        # Of each piece: its file, its number in the file, its first byte and its bytes.
        self._pieces = array("q")
        for file, name in enumerate(self._names):
            for number, (start, size) in enumerate(_spans(self._folder / name, max_bytes)):
                mark = held_out(f"{name}#{number}", held_out_share)
                if split is None or mark == (split == "held_out"):
                    self._pieces.extend((file, number, start, size))

    def __len__(self) -> int:
        return len(self._pieces) // 4

    def __getitem__(self, index: int) -> Document:
        if not 0 <= index < len(self):
            raise IndexError(index)
        file, number, start, size = self._pieces[4 * index : 4 * index + 4]
        name = self._names[file]
        with (self._folder / name).open("rb") as opened:
            opened.seek(start)
            content = opened.read(size)
        return Document(
            key=f"{name}#{number}",
            text=content.decode("utf-8").replace("\r\n", "\n"),
            language=self._language,
            title=Path(name).stem,
        )


def _spans(path: Path, max_bytes: int) -> Iterator[tuple[int, int]]:
    """The pieces of a file, as (first byte, bytes)."""
    with path.open("rb") as file:
        start = 3 if file.read(3) == b"\xef\xbb\xbf" else 0
        line = 1
        while True:
            file.seek(start)
            content = file.read(max_bytes + 1)
            if not content:
                return
            content = content[: _cut(content, max_bytes)]
            try:
                content.decode("utf-8")
            except UnicodeDecodeError as error:
                bad = line + content.count(b"\n", 0, error.start)
                raise WhaleError(
                    f"this line is not UTF-8: {error.reason}",
                    where=f"{path}:{bad}",
                    hint="convert the file, for example with `iconv -t UTF-8`",
                ) from error
            yield start, len(content)
            line += content.count(b"\n")
            start += len(content)


def _cut(content: bytes, max_bytes: int) -> int:
    """How many of the bytes make a piece."""
    if len(content) <= max_bytes:
        return len(content)
    for end in (b"\n", b" "):
        after = content.rfind(end, max_bytes // 2, max_bytes) + 1
        if after:
            return after
    # Bytes 10xxxxxx are inside a character; one has at most three of them.
    after = max_bytes
    while after > max_bytes - 3 and content[after] & 0xC0 == 0x80:
        after -= 1
    return after
