"""A drawn picture becomes a PNG file, and an emoji a picture: what pictures on a command line are.

Place in the flow: under `whale generate` and `whale search`. Writing needs the standard library
only; reading a file needs Pillow, an emoji does not.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np

from whale.datasets.emoji import load_emoji
from whale.datasets.picture_file import read_picture
from whale.errors import WhaleError
from whale.models.m6.pictures import Pixels

SELECTOR = "\ufe0f"
SCALE = 8
"""Pixels of the file for a pixel of the model, which would be a stamp."""


def find_picture(text: str, side: int) -> Pixels:
    """The picture of a file, or of an emoji: `dog.png`, `🐶`, `🐶/twemoji`."""
    if Path(text).exists():
        return read_picture(Path(text), side)
    emoji = load_emoji()
    character, _, style = text.partition("/")
    wanted = character.replace(SELECTOR, "")
    for number, known in enumerate(emoji.emoji):
        if wanted in (known.char.replace(SELECTOR, ""), known.code):
            chosen = style or emoji.styles[0]
            if chosen not in emoji.styles:
                raise WhaleError(
                    f"--image {text!r}: style {chosen!r}", hint=f"of {', '.join(emoji.styles)}"
                )
            image: Pixels = emoji.images[number, emoji.styles.index(chosen)]
            if image.shape[0] != side:
                raise WhaleError(
                    f"--image {text!r}: emoji have {image.shape[0]} pixels, the model takes {side}",
                    hint="name a file",
                )
            return image
    raise WhaleError(
        f"--image {text!r} is neither a file nor an emoji of the project",
        hint=f"looked for the file in {Path.cwd()}",
    )


def write_png(path: str, picture: Pixels, scale: int = SCALE) -> None:
    """Writes [height, width, 3] as a PNG, every pixel a square of `scale`."""
    large = np.repeat(np.repeat(picture, scale, axis=0), scale, axis=1)
    height, width, _ = large.shape
    # Each row begins with the number of its filter; 0 is none.
    rows = b"".join(b"\0" + row.tobytes() for row in large)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b"")]
    data = b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in parts
    )
    Path(path).write_bytes(b"\x89PNG\r\n\x1a\n" + data)
