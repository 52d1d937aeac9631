"""`whale search CKPT`: ranks pictures for a text, or texts for a picture, by a trained M6.

Place in the flow: after `whale train`; a front of `whale.models.m6.score`, on one device. The more
likely the model finds a text for a picture, less what it finds without any, the better they match.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from whale.datasets.emoji import load_emoji
from whale.datasets.folder import FolderPictures
from whale.errors import ConfigError
from whale.models.m6.pictures import Pixels
from whale.models.m6.score import score
from whale.models.m6.trained import Trained
from whale.training.folder import load_trained
from whale.training.png import find_picture

LANGUAGES = ("en", "zh")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Something that can be found."""

    name: str
    """How it is shown: an emoji with its code, or a file."""
    image: Pixels
    text: str | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("checkpoint", metavar="CKPT", help="the folder of a run")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--text", metavar="T", help="rank pictures for a text")
    what.add_argument(
        "--image",
        metavar="F",
        help="rank texts for a picture: a file, or an emoji such as 🐶/twemoji",
    )
    parser.add_argument(
        "--in",
        dest="folder",
        metavar="FOLDER",
        help="search the pictures or captions of a folder with captions.jsonl (default: the "
        "project's own emoji)",
    )
    parser.add_argument(
        "--style", default="noto", metavar="S", help="of the emoji: noto (default) or twemoji"
    )
    parser.add_argument("--lang", default="en", metavar="L", help="of texts: en (default) or zh")
    parser.add_argument("--top", type=int, default=5, metavar="K", help="how many (default 5)")


def run(args: argparse.Namespace) -> int:
    """Rank, and print the best: rank, score, what it is."""
    if args.top < 1:
        raise ConfigError(f"--top {args.top}", hint="allowed: 1 or more")
    if args.lang not in LANGUAGES:
        raise ConfigError(f"--lang {args.lang!r}", hint=f"allowed: {', '.join(LANGUAGES)}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trained = load_trained(args.checkpoint, device)
    side = trained.model.config.image_size
    found = candidates(args.folder, args.style, args.lang, side)
    if args.text is not None:
        scores = _scores(trained, [c.image for c in found], [args.text] * len(found), args.lang)
        names = [c.name if c.text is None else f"{c.name}  {c.text}" for c in found]
    else:
        image = find_picture(args.image, side)
        # Equal captions are one answer.
        texts = list(dict.fromkeys(c.text for c in found if c.text is not None))
        if not texts:
            raise ConfigError(
                f"nothing in {args.folder} has a caption in {args.lang!r}", hint="try --lang"
            )
        scores, names = _scores(trained, [image] * len(texts), texts, args.lang), texts
    best = scores.topk(min(args.top, len(names)))
    for place, (value, at) in enumerate(zip(*map(Tensor.tolist, best), strict=True), start=1):
        print(f"{place:2}  {value:8.3f}  {names[at]}")
    return 0


def candidates(folder: str | None, style: str, lang: str, side: int) -> list[Candidate]:
    """All that can be found: the emoji of a style, or the pictures of a folder."""
    if folder is None:
        emoji = load_emoji().select(style=style)
        return [
            Candidate(name=f"{e.char}  {e.code}", image=emoji.images[i], text=e.labels[lang])
            for i, e in enumerate(emoji.emoji)
        ]
    pictures = FolderPictures(folder, side=side)
    found = [pictures[i] for i in range(len(pictures))]
    return [
        Candidate(name=p.key.rpartition("#")[0], image=p.image, text=p.captions.get(lang))
        for p in found
    ]


def _scores(trained: Trained, images: Sequence[Pixels], texts: Sequence[str], lang: str) -> Tensor:
    return score(trained.model, trained.tokenizer, images, texts, lang, relative=True)
