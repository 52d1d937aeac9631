"""COCO captions: the annotation files people publish captions in, read as they are.

Place in the flow: `captions_val2014.json` and its folder of pictures in, Pictures to train on and
captions to score against out. `caption_metrics` has the figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from whale.datasets.annotation_file import list_in, number_in, read_json, text_in
from whale.datasets.picture_file import read_picture
from whale.datasets.samples import Picture
from whale.errors import WhaleError


@dataclass(frozen=True, slots=True, kw_only=True)
class CocoCaptions:
    """What an annotation file says."""

    path: Path
    files: Mapping[int, str]
    """The picture's file name, by image."""
    captions: Mapping[int, tuple[str, ...]]
    """All captions, by image, in the file's order; what `bleu` and `cider_d` call `given`."""


class CocoPictures:
    """One sample for each caption, with its picture; a source of Pictures."""

    def __init__(
        self, captions: CocoCaptions, folder: str | Path, *, side: int = 32, language: str = "en"
    ) -> None:
        """Names the folder of the pictures; they are read one by one when asked for.

        Args:
            captions: What `read_coco` gave.
            folder: Where the pictures are.
            side: Of the model's pictures, in pixels.
            language: Of the captions.
        """
        self._captions, self._folder = captions, Path(folder)
        self._side, self._language = side, language
        self._pairs = [
            (image, number)
            for image, texts in captions.captions.items()
            for number in range(len(texts))
        ]

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> Picture:
        image, number = self._pairs[index]
        path = self._folder / self._captions.files[image]
        return Picture(
            key=f"{image}/{number}",
            image=read_picture(path, self._side, where=f"{self._captions.path}, image {image}"),
            captions={self._language: self._captions.captions[image][number]},
        )


def read_coco(path: str | Path) -> CocoCaptions:
    """Reads `captions_*.json`: its images and their captions."""
    path = Path(path)
    content = read_json(path, dict)
    files = {}
    for i, image in enumerate(list_in(content, "images", path)):
        where = f"{path}, images[{i}]"
        files[number_in(image, "id", where)] = text_in(image, "file_name", where)
    captions: dict[int, list[str]] = {}
    for i, annotation in enumerate(list_in(content, "annotations", path)):
        where = f"{path}, annotations[{i}]"
        number = number_in(annotation, "image_id", where)
        if number not in files:
            raise WhaleError(
                f"image {number} is not among the {len(files)} images of the file",
                where=where,
                hint="take the file as it was published, images and annotations together",
            )
        captions.setdefault(number, []).append(text_in(annotation, "caption", where).strip())
    return CocoCaptions(
        path=path, files=files, captions={image: tuple(c) for image, c in captions.items()}
    )


def read_coco_results(path: str | Path) -> dict[int, str]:
    """Reads captions a model made, `[{"image_id": 1, "caption": "..."}]`, by image."""
    path = Path(path)
    made: dict[int, str] = {}
    for i, result in enumerate(read_json(path, list)):
        where = f"{path}, [{i}]"
        image = number_in(result, "image_id", where)
        if image in made:
            raise WhaleError(
                f"image {image} has a second caption; a model makes one for each image",
                where=where,
                hint="keep the best one",
            )
        made[image] = text_in(result, "caption", where)
    return made
