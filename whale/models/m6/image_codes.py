"""Pictures as words: each small patch stands for the nearest of a few hundred learned ones.

Place in the flow: fitted once on the training pictures, saved with the model as safetensors. Its
codes are what the model writes when it draws; `decode` makes the picture.

The codebook is k-means on the pixels of patches, which is what minimises the squared error (the
PSNR) of a given number of codes. Most patches of a drawing are one plain colour, mostly white:
patches are counted once however often they occur, or most codes would be shades of nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from whale.errors import WhaleError
from whale.models.m6.config import CHANNELS
from whale.models.m6.pictures import Pixels, cut, join

MAX_PATCHES = 60_000
"""Patches that a codebook is fitted on; more take longer and change nothing that can be seen."""

NUM_ROUNDS = 20

CHUNK = 8192
"""Patches compared with all codes at once: bounds the memory of the distances."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageCodes:
    """A codebook: what each code looks like.

    Attributes:
        codebook: [codes, numbers of a patch], 0 to 1.
        patch_size: pixels of a patch's side.
        image_size: pixels of a picture's side.
    """

    codebook: Tensor
    patch_size: int
    image_size: int

    @property
    def num_codes(self) -> int:
        """Entries of the codebook."""
        return self.codebook.shape[0]

    @property
    def codes_per_image(self) -> int:
        """Codes of one picture."""
        return (self.image_size // self.patch_size) ** 2

    @classmethod
    def fit(
        cls,
        pictures: NDArray[np.uint8],
        *,
        num_codes: int,
        patch_size: int,
        seed: int = 0,
        max_patches: int = MAX_PATCHES,
        num_rounds: int = NUM_ROUNDS,
    ) -> ImageCodes:
        """Learns the codebook of pictures [count, height, width, 3]; the same for the same seed."""
        patches, counts = np.unique(_patches(pictures, patch_size), axis=0, return_counts=True)
        if len(patches) < num_codes:
            raise WhaleError(
                f"{num_codes} codes for {len(patches)} different patches",
                hint="more pictures, fewer codes, or larger patches",
            )
        rng = np.random.default_rng(seed)
        chosen = rng.permutation(len(patches))[:max_patches]
        vectors = torch.from_numpy(patches[np.sort(chosen)].astype(np.float32) / 255.0)
        codebook = _k_means(vectors, num_codes, num_rounds, rng)
        # A background that is nearly white looks dirty: the commonest patch is kept as it is.
        plain = torch.from_numpy(patches[counts.argmax()].astype(np.float32) / 255.0)
        codebook[(codebook - plain).square().sum(1).argmin()] = plain
        return cls(codebook=codebook, patch_size=patch_size, image_size=pictures.shape[1])

    def encode(self, pictures: NDArray[np.uint8]) -> NDArray[np.int64]:
        """The codes [count, codes per image] of pictures [count, height, width, 3]."""
        size = self.image_size
        if pictures.ndim != 4 or pictures.shape[1:] != (size, size, CHANNELS):
            raise WhaleError(
                f"pictures of shape {pictures.shape}; the codebook is for [count, {size}, {size}, "
                f"{CHANNELS}]",
                hint="resize them first; one picture is `picture[None]`",
            )
        vectors = torch.from_numpy(_patches(pictures, self.patch_size).astype(np.float32) / 255.0)
        nearest = torch.cat([near for near, _ in _nearest(vectors, self.codebook)])
        return nearest.view(len(pictures), -1).numpy()

    def decode(self, codes: NDArray[np.int64]) -> Pixels:
        """The pictures [count, height, width, 3] that codes [count, codes per image] stand for."""
        values = self.codebook.numpy()[np.asarray(codes)]
        return join(np.clip(np.rint(values * 255.0), 0, 255).astype(np.uint8), self.patch_size)

    def save(self, path: str | Path) -> None:
        """Writes it as safetensors."""
        facts = {"patch_size": str(self.patch_size), "image_size": str(self.image_size)}
        save_file({"codebook": self.codebook.contiguous()}, str(path), metadata=facts)

    @classmethod
    def load(cls, path: str | Path) -> ImageCodes:
        """Reads what `save` wrote."""
        with safe_open(str(path), framework="pt") as file:
            facts = file.metadata() or {}
            if "codebook" not in file.keys() or "patch_size" not in facts:  # noqa: SIM118
                raise WhaleError(
                    f"{path} holds {sorted(file.keys())}, not a codebook",
                    hint="a codebook is written by ImageCodes.save",
                )
            return cls(
                codebook=file.get_tensor("codebook"),
                patch_size=int(facts["patch_size"]),
                image_size=int(facts["image_size"]),
            )


def _patches(pictures: NDArray[np.uint8], patch_size: int) -> NDArray[np.uint8]:
    """All patches [count, numbers of a patch] of all pictures, in order."""
    return cut(pictures, patch_size).reshape(-1, CHANNELS * patch_size**2)


def _nearest(vectors: Tensor, codebook: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """For each chunk of vectors the nearest code, and the square of its distance."""
    sizes = codebook.square().sum(1)
    for chunk in vectors.split(CHUNK):
        # Without the vector's own square, which is the same for all codes.
        score, near = torch.addmm(sizes, chunk, codebook.t(), alpha=-2).min(1)
        yield near, score + chunk.square().sum(1)


def _k_means(vectors: Tensor, count: int, rounds: int, rng: np.random.Generator) -> Tensor:
    """Lloyd's rounds from a random start; a code that lost all its vectors gets the worst one."""
    start = np.sort(rng.choice(len(vectors), count, replace=False))
    codebook = vectors[torch.from_numpy(start)].clone()
    for _ in range(rounds):
        found = list(_nearest(vectors, codebook))
        near = torch.cat([part for part, _ in found])
        error = torch.cat([part for _, part in found])
        sums = torch.zeros_like(codebook).index_add_(0, near, vectors)
        members = torch.bincount(near, minlength=count)
        codebook = sums / members.clamp(min=1)[:, None]
        empty = (members == 0).nonzero().flatten()
        worst = error.topk(len(empty)).indices if len(empty) else empty
        codebook[empty] = vectors[worst]
    return codebook
