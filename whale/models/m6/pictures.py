"""Pictures as arrays: cut into patches, put together again.

Place in the flow: between a picture file (uint8 [height, width, 3]) and the model's patches or the
codebook's.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from whale.errors import WhaleError
from whale.models.m6.config import CHANNELS

Pixels = NDArray[np.uint8]
"""[height, width, 3], 0 to 255."""


def check_picture(picture: Pixels, image_size: int) -> None:
    """Refuses what is no picture of the model's size."""
    expected = (image_size, image_size, CHANNELS)
    if picture.shape != expected or picture.dtype != np.uint8:
        raise WhaleError(
            f"a picture of shape {picture.shape}, {picture.dtype}; the model takes {expected}, "
            "uint8",
            hint="put it on a white background and resize it first",
        )


def cut(pictures: NDArray, patch_size: int) -> NDArray:
    """[..., height, width, 3] to [..., patches, numbers of a patch], row by row."""
    *front, height, width, channels = pictures.shape
    rows, columns = height // patch_size, width // patch_size
    grid = pictures.reshape(*front, rows, patch_size, columns, patch_size, channels)
    return np.swapaxes(grid, -4, -3).reshape(*front, rows * columns, patch_size**2 * channels)


def join(patches: NDArray, patch_size: int) -> NDArray:
    """What `cut` took apart, of a square picture."""
    *front, count, _ = patches.shape
    rows = round(count**0.5)
    grid = patches.reshape(*front, rows, rows, patch_size, patch_size, CHANNELS)
    size = rows * patch_size
    return np.swapaxes(grid, -4, -3).reshape(*front, size, size, CHANNELS)


def patch_vectors(picture: Pixels, patch_size: int) -> NDArray[np.float32]:
    """The model's input [P, patch_dim], from -1 to 1."""
    return cut(picture.astype(np.float32) / 127.5 - 1.0, patch_size)


def psnr(a: NDArray, b: NDArray) -> float:
    """Peak signal-to-noise ratio of two uint8 arrays, in dB; infinite where they are equal."""
    error = np.mean((a.astype(np.float64) - b.astype(np.float64)) ** 2)
    return float("inf") if error == 0 else float(10 * np.log10(255.0**2 / error))
