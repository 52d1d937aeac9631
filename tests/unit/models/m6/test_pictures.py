"""Pictures: patches and back, variation, codes and how well they draw."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from whale.datasets.emoji import load_emoji
from whale.errors import WhaleError
from whale.models.m6.image_codes import ImageCodes
from whale.models.m6.pictures import cut, join, patch_vectors, psnr
from whale.models.m6.variation import LIVELY, PLAIN, STRONG, Variation, vary

Pictures = NDArray[np.uint8]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_cut_and_join(pictures: Pictures) -> None:
    patches = cut(pictures, 8)
    assert patches.shape == (12, 4, 192)
    np.testing.assert_array_equal(patches[0, 1], pictures[0, :8, 8:].reshape(-1))
    np.testing.assert_array_equal(join(patches, 8), pictures)


def test_patch_vectors_are_from_minus_one_to_one() -> None:
    picture = np.zeros((16, 16, 3), dtype=np.uint8)
    picture[:8] = 255
    vectors = patch_vectors(picture, 8)
    assert vectors.dtype == np.float32
    assert (vectors[:2] == 1).all() and (vectors[2:] == -1).all()


@pytest.mark.parametrize("variation", [LIVELY, STRONG], ids=["lively", "strong"])
def test_variation(pictures: Pictures, variation: Variation) -> None:
    plain = pictures[0].copy()
    assert vary(plain, PLAIN, rng()) is plain
    once, again = (vary(plain, variation, rng(1)) for _ in range(2))
    np.testing.assert_array_equal(once, again)
    assert once.dtype == np.uint8 and once.shape == plain.shape
    assert (once != vary(plain, variation, rng(2))).any()
    np.testing.assert_array_equal(plain, pictures[0])
    # Moved by nothing, a picture is itself.
    still = vary(pictures[0], Variation(background=1e-9), rng())
    np.testing.assert_array_equal(still, pictures[0])


def test_colour_leaves_a_white_background_white(pictures: Pictures) -> None:
    blank = np.full_like(pictures[0], 255)
    recoloured = Variation(colour=0.3, turn=20, zoom=0.2, bend=2, mix=0.3, grey=1, flat=1, blur=1)
    assert (vary(blank, recoloured, rng()) == 255).all()


def test_greys_stay_grey_under_mixed_channels() -> None:
    grey = np.full((16, 16, 3), 96, dtype=np.uint8)
    mixed = vary(grey, Variation(mix=0.3), rng())
    np.testing.assert_array_equal(mixed[4:-4, 4:-4], grey[4:-4, 4:-4])


def test_hiding_covers_one_rectangle(pictures: Pictures) -> None:
    picture = pictures[0]
    changed = (vary(picture, Variation(hide=1.0), rng(3)) != picture).any(-1)
    rows, columns = np.flatnonzero(changed.any(1)), np.flatnonzero(changed.any(0))
    assert 0 < len(rows) <= len(picture) // 2 and 0 < len(columns) <= len(picture) // 2


# ---- codes ----


@pytest.fixture
def codes(pictures: Pictures) -> ImageCodes:
    return ImageCodes.fit(pictures, num_codes=16, patch_size=4)


def test_codes_round_trip(codes: ImageCodes, pictures: Pictures, tmp_path: Path) -> None:
    coded = codes.encode(pictures)
    assert coded.shape == (12, 16) and coded.max() < 16
    drawn = codes.decode(coded)
    assert drawn.shape == pictures.shape and drawn.dtype == np.uint8
    assert psnr(pictures, drawn) > 17
    # What was drawn with codes is drawn exactly by them.
    np.testing.assert_array_equal(codes.decode(codes.encode(drawn)), drawn)
    codes.save(tmp_path / "codes.safetensors")
    loaded = ImageCodes.load(tmp_path / "codes.safetensors")
    assert (loaded.patch_size, loaded.image_size, loaded.codes_per_image) == (4, 16, 16)
    assert torch.equal(loaded.codebook, codes.codebook)


def test_white_is_exact(codes: ImageCodes) -> None:
    white = np.full((1, 16, 16, 3), 255, dtype=np.uint8)
    np.testing.assert_array_equal(codes.decode(codes.encode(white)), white)


def test_fit_depends_on_the_seed_alone(codes: ImageCodes, pictures: Pictures) -> None:
    assert torch.equal(
        ImageCodes.fit(pictures, num_codes=16, patch_size=4).codebook, codes.codebook
    )
    other = ImageCodes.fit(pictures, num_codes=16, patch_size=4, seed=1)
    assert not torch.equal(other.codebook, codes.codebook)


def test_refused(codes: ImageCodes, pictures: Pictures) -> None:
    with pytest.raises(WhaleError, match="pictures of shape"):
        codes.encode(pictures[0])
    with pytest.raises(WhaleError, match="500 codes for"):
        ImageCodes.fit(pictures, num_codes=500, patch_size=8)


def test_real_pictures_keep_their_look() -> None:
    """On pictures that were not fitted; with all patches and 1024 codes it is 21.3 dB."""
    emoji = load_emoji()
    learned = emoji.select(split="train").images[::4]
    unseen = emoji.select(split="held_out").images[::4]
    codes = ImageCodes.fit(learned, num_codes=256, patch_size=4, max_patches=10_000, num_rounds=8)
    assert psnr(unseen, codes.decode(codes.encode(unseen))) > 18.5
