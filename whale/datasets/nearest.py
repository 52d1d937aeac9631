"""The trivial baseline: name a picture by the nearest picture of another style, pixel by pixel.

    python -m whale.datasets.nearest

Place in the flow: beside `emoji`; what a model that names pictures of a style it was not trained on
has to beat. Flags of countries are reported apart, since both styles draw them nearly alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from whale.datasets.emoji import EmojiSet, load_emoji
from whale.datasets.samples import Pixels


@dataclass(frozen=True, slots=True, kw_only=True)
class NearestScore:
    """How often the right emoji is the nearest, or among the nearest five."""

    num_pictures: int
    top1: float
    top5: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelBaseline:
    """The scores of all pictures of one style against all of another."""

    everything: NearestScore
    flags: NearestScore
    others: NearestScore


def nearest(queries: Pixels, gallery: Pixels, count: int) -> npt.NDArray[np.int64]:
    """For each query the numbers of the `count` nearest pictures, by squared pixel distance."""
    # Of images of bytes the sums stay below 2**53, so float64 is exact and ties are real ties.
    a = queries.reshape(len(queries), -1).astype(np.float64)
    b = gallery.reshape(len(gallery), -1).astype(np.float64)
    # The query's own square is the same for all of a row and changes no order.
    distance = (b * b).sum(axis=1) - 2 * (a @ b.T)
    return np.argsort(distance, axis=1, kind="stable")[:, :count]


def pixel_baseline(
    emoji: EmojiSet, *, queries: str = "twemoji", gallery: str = "noto"
) -> PixelBaseline:
    """Every picture of style `queries` against all pictures of style `gallery`, no training."""
    asked, known = emoji.select(style=queries), emoji.select(style=gallery)
    found = known.numbers[nearest(asked.images, known.images, 5)] == asked.numbers[:, None]
    is_flag = np.array([e.is_flag for e in asked.emoji])

    def score(chosen: npt.NDArray[np.bool_]) -> NearestScore:
        hits = found[chosen]
        return NearestScore(
            num_pictures=len(hits),
            top1=float(hits[:, 0].mean()),
            top5=float(hits.any(axis=1).mean()),
        )

    return PixelBaseline(
        everything=score(np.ones_like(is_flag)), flags=score(is_flag), others=score(~is_flag)
    )


def main() -> None:
    """Prints the table."""
    baseline = pixel_baseline(load_emoji())
    print("nearest Noto picture of each Twemoji picture, by pixels")
    print(f"{'':12}{'pictures':>10}{'top 1':>10}{'top 5':>10}")
    for name in ("everything", "flags", "others"):
        score: NearestScore = getattr(baseline, name)
        print(f"{name:12}{score.num_pictures:>10}{score.top1:>10.1%}{score.top5:>10.1%}")


if __name__ == "__main__":
    main()
