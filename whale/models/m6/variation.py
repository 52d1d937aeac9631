"""Variation: a picture moved, bent, recoloured, partly hidden.

Place in the flow: on pictures that a model in training looks at. What stays the same under it is
what lets a model that saw one drawing style recognise another: not the exact colours, not shading,
not where each line is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from whale.models.m6.config import CHANNELS
from whale.models.m6.pictures import Pixels

WHITE = 255.0
BEND_POINTS = 4
"""Points along a side that bending moves; between them it is smooth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """How much a picture may be varied; zeros leave it as it is.

    Attributes:
        shift: pixels, either way.
        zoom: share by which it may grow or shrink, each axis by its own draw.
        turn: degrees, either way.
        shear: share of the height by which the top may lean, either way.
        bend: pixels by which parts may move against each other.
        colour: share by which each channel's contrast and brightness may change.
        mix: share by which a channel may take from the others.
        grey: how often colours are lost, wholly or in part.
        flat: how often shades become a few flat ones.
        blur: how often it is out of focus.
        noise: deviation of noise added to each pixel, of 255.
        background: how often white gives way to another colour.
        hide: how often a rectangle of up to half the side is covered.
    """

    shift: float = 0.0
    zoom: float = 0.0
    turn: float = 0.0
    shear: float = 0.0
    bend: float = 0.0
    colour: float = 0.0
    mix: float = 0.0
    grey: float = 0.0
    flat: float = 0.0
    blur: float = 0.0
    noise: float = 0.0
    background: float = 0.0
    hide: float = 0.0


PLAIN = Variation()
LIVELY = Variation(
    shift=2.0, zoom=0.15, turn=10.0, shear=0.1, colour=0.12, noise=0.02, background=0.1
)
STRONG = Variation(
    shift=2.0, zoom=0.15, turn=10.0, shear=0.1, bend=1.0, colour=0.12, mix=0.1, grey=0.1,
    flat=0.3, blur=0.3, noise=0.02, background=0.1, hide=0.3,
)  # fmt: skip

VARIATIONS: Mapping[str, Variation] = {"none": PLAIN, "lively": LIVELY, "strong": STRONG}


def vary(picture: Pixels, variation: Variation, rng: np.random.Generator) -> Pixels:
    """A picture like this one, by draws from `rng`."""
    if variation == PLAIN:
        return picture
    ink = _recoloured(WHITE - _moved(picture.astype(np.float32), variation, rng), variation, rng)
    pixels = WHITE - np.clip(ink, 0, WHITE)
    if rng.random() < variation.blur:
        pixels = _blurred(pixels, rng.uniform(0, 1))
    if rng.random() < variation.background:
        colour = rng.uniform(0, WHITE, CHANNELS)
        blank = np.clip(pixels.min(axis=-1, keepdims=True) - 247, 0, 8) / 8
        pixels = pixels * (1 - blank) + colour * blank
    if rng.random() < variation.hide:
        sides = rng.integers(1, len(pixels) // 2 + 1, 2)
        top, left = rng.integers(0, len(pixels) - sides + 1)
        pixels[top : top + sides[0], left : left + sides[1]] = rng.uniform(0, WHITE, CHANNELS)
    if variation.noise:
        pixels = pixels + rng.normal(0, variation.noise * 255, pixels.shape)
    return np.clip(np.rint(pixels), 0, 255).astype(np.uint8)


def _recoloured(ink: NDArray, variation: Variation, rng: np.random.Generator) -> NDArray:
    """Ink, the distance from white, in other colours: where there is none, none comes."""
    if rng.random() < variation.flat:
        steps = rng.uniform(24, 80)
        ink = np.rint(ink / steps) * steps
    if variation.mix:
        mixed = np.eye(CHANNELS) + rng.uniform(-variation.mix, variation.mix, (CHANNELS, CHANNELS))
        # Each row sums to one, so that greys stay grey.
        ink = ink @ (mixed / mixed.sum(1, keepdims=True)).T
    if rng.random() < variation.grey:
        kept = rng.uniform(0, 1)
        ink = kept * ink + (1 - kept) * ink.mean(axis=-1, keepdims=True)
    if variation.colour:
        contrast = 1 + rng.uniform(-variation.colour, variation.colour, CHANNELS)
        bright = 127.5 * rng.uniform(-variation.colour, variation.colour, CHANNELS)
        ink = ink * contrast + bright * (ink > 8)
    return ink


def _blurred(pixels: NDArray, share: float) -> NDArray:
    """Each pixel in part the mean of its neighbourhood."""
    padded = np.pad(pixels, ((1, 1), (1, 1), (0, 0)), mode="edge")
    rows = padded[:-2] + padded[1:-1] + padded[2:]
    mean = (rows[:, :-2] + rows[:, 1:-1] + rows[:, 2:]) / 9
    return (1 - share) * pixels + share * mean


@lru_cache(maxsize=8)
def _between(size: int) -> NDArray[np.float64]:
    """[size, points]: each pixel's weights of the points on its two sides."""
    at = np.linspace(0, BEND_POINTS - 1, size)
    return np.maximum(0, 1 - np.abs(at[:, None] - np.arange(BEND_POINTS)))


def _moved(
    pixels: NDArray[np.float32], variation: Variation, rng: np.random.Generator
) -> NDArray[np.float32]:
    """Moved, resized, turned, leaning and bent, by bilinear lookup; white comes in at the sides."""
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
    if variation.bend:
        points = rng.normal(0, variation.bend, (2, BEND_POINTS, BEND_POINTS))
        bent = _between(size) @ points @ _between(size).T
        from_y, from_x = from_y + bent[0], from_x + bent[1]
    padded = np.pad(pixels, ((1, 1), (1, 1), (0, 0)), constant_values=WHITE)
    from_y = np.clip(from_y + 1, 0, size + 0.999)
    from_x = np.clip(from_x + 1, 0, size + 0.999)
    low_y, low_x = from_y.astype(np.int64), from_x.astype(np.int64)
    part_y, part_x = (from_y - low_y)[..., None], (from_x - low_x)[..., None]
    high_y, high_x = np.minimum(low_y + 1, size + 1), np.minimum(low_x + 1, size + 1)
    top = padded[low_y, low_x] * (1 - part_x) + padded[low_y, high_x] * part_x
    bottom = padded[high_y, low_x] * (1 - part_x) + padded[high_y, high_x] * part_x
    return (top * (1 - part_y) + bottom * part_y).astype(np.float32)
