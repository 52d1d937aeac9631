"""Pictures as arrays: cut into patches, put together again, varied.

Place in the flow: between a picture file (uint8 [height, width, 3]) and the model's patches or the
codebook's. Varying a picture (moved, resized, turned, recoloured, its background changed) is what
lets a model that saw one drawing style recognise another.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from whale.errors import WhaleError
from whale.models.m6.config import CHANNELS

Pixels = NDArray[np.uint8]
"""[height, width, 3], 0 to 255."""

WHITE = 255.0


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """How much a picture may be varied; zeros leave it as it is.

    Attributes:
        shift: pixels, either way.
        zoom: share by which it may grow or shrink, each axis by its own draw.
        turn: degrees, either way.
        shear: share of the height by which the top may lean, either way.
        colour: share by which each channel's contrast and brightness may change.
        noise: deviation of noise added to each pixel, of 255.
        background: how often white gives way to another colour.
    """

    shift: float = 0.0
    zoom: float = 0.0
    turn: float = 0.0
    shear: float = 0.0
    colour: float = 0.0
    noise: float = 0.0
    background: float = 0.0


PLAIN = Variation()
LIVELY = Variation(
    shift=2.0, zoom=0.15, turn=10.0, shear=0.1, colour=0.12, noise=0.02, background=0.1
)


def vary(picture: Pixels, variation: Variation, rng: np.random.Generator) -> Pixels:
    """A picture like this one, by draws from `rng`."""
    if variation == PLAIN:
        return picture
    pixels: NDArray = _move(picture.astype(np.float32), variation, rng)
    if variation.colour:
        contrast = 1 + rng.uniform(-variation.colour, variation.colour, CHANNELS)
        bright = 127.5 * rng.uniform(-variation.colour, variation.colour, CHANNELS)
        # Distance from white is what changes, so that the background stays.
        ink = WHITE - pixels
        pixels = WHITE - np.clip(ink * contrast + bright * (ink > 8), 0, 255)
    if rng.random() < variation.background:
        colour = rng.uniform(0, WHITE, CHANNELS)
        blank = np.clip(pixels.min(axis=-1, keepdims=True) - 247, 0, 8) / 8
        pixels = pixels * (1 - blank) + colour * blank
    if variation.noise:
        pixels = pixels + rng.normal(0, variation.noise * 255, pixels.shape)
    return np.clip(np.rint(pixels), 0, 255).astype(np.uint8)


def _move(
    pixels: NDArray[np.float32], variation: Variation, rng: np.random.Generator
) -> NDArray[np.float32]:
    """Moved, resized, turned and leaning, by bilinear lookup; white comes in at the sides."""
    size = pixels.shape[0]
    turn = np.deg2rad(rng.uniform(-variation.turn, variation.turn))
    zoom_y, zoom_x = 1 / (1 + rng.uniform(-variation.zoom, variation.zoom, 2))
    lean = rng.uniform(-variation.shear, variation.shear)
    shift_y, shift_x = rng.uniform(-variation.shift, variation.shift, 2)
    centre = (size - 1) / 2
    y, x = np.meshgrid(np.arange(size) - centre, np.arange(size) - centre, indexing="ij")
    x = x + lean * y
    from_y = (np.cos(turn) * y - np.sin(turn) * x) * zoom_y + centre - shift_y
    from_x = (np.sin(turn) * y + np.cos(turn) * x) * zoom_x + centre - shift_x
    padded = np.pad(pixels, ((1, 1), (1, 1), (0, 0)), constant_values=WHITE)
    from_y = np.clip(from_y + 1, 0, size + 0.999)
    from_x = np.clip(from_x + 1, 0, size + 0.999)
    low_y, low_x = from_y.astype(np.int64), from_x.astype(np.int64)
    part_y, part_x = (from_y - low_y)[..., None], (from_x - low_x)[..., None]
    high_y, high_x = np.minimum(low_y + 1, size + 1), np.minimum(low_x + 1, size + 1)
    top = padded[low_y, low_x] * (1 - part_x) + padded[low_y, high_x] * part_x
    bottom = padded[high_y, low_x] * (1 - part_x) + padded[high_y, high_x] * part_x
    return (top * (1 - part_y) + bottom * part_y).astype(np.float32)
