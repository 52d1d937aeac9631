"""A picture file becomes pixels of the model's size.

Place in the flow: under the readers of a user's own pictures (`folder`, `coco`, `vqa`). Pillow is
imported here alone and only when a file is read; the shipped pictures need numpy only.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from whale.datasets.samples import Pixels
from whale.errors import WhaleError


def read_picture(path: Path, side: int, *, where: str | None = None) -> Pixels:
    """The middle square of a picture, scaled to `side` x `side`, on white where transparent.

    Args:
        path: A file in any format Pillow knows.
        side: Of the square, in pixels.
        where: What names the file, `captions.jsonl:7`, to begin an error with.
    """
    pillow = _pillow()
    if not path.is_file():
        raise WhaleError(
            f"there is no picture {path}",
            where=where,
            hint="paths are relative to the folder of the file that names them",
        )
    try:
        with pillow.Image.open(path) as file:
            # Cameras store a turned picture and a note to turn it back.
            image = pillow.ImageOps.exif_transpose(file).convert("RGBA")
    except (OSError, ValueError, SyntaxError, pillow.Image.DecompressionBombError) as error:
        raise WhaleError(
            f"cannot read the picture {path}: {error}",
            where=where,
            hint="write it again as PNG or JPEG, or leave it out",
        ) from error
    width, height = image.size
    square = min(width, height)
    left, top = (width - square) // 2, (height - square) // 2
    # Cut before scaling: the filter would else bring in what is beside the square.
    middle = image.crop((left, top, left + square, top + square))
    white = pillow.Image.new("RGBA", middle.size, "white")
    white.alpha_composite(middle)
    # Pillow widens the filter with the reduction, so fine patterns become grey, not noise.
    scaled = white.convert("RGB").resize((side, side), pillow.Image.Resampling.BICUBIC)
    return np.array(scaled, dtype=np.uint8)


def _pillow() -> Any:
    try:
        pillow = import_module("PIL")
        for name in ("Image", "ImageOps"):
            import_module(f"PIL.{name}")
    except ImportError as error:
        raise WhaleError(
            "Pillow is not installed; pictures of your own are read with it",
            hint="pip install pillow",
        ) from error
    return pillow
