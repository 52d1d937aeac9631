"""Objectives: what is read, what is written, how often, and the same every time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from whale.datasets.samples import Document, Picture
from whale.errors import ConfigError, WhaleError
from whale.models.m6.config import M6Config
from whale.models.m6.image_codes import ImageCodes
from whale.models.m6.mixture import DEFAULT_WEIGHTS, Objectives, generator
from whale.models.m6.model import IGNORED
from whale.models.m6.objectives import (
    Example,
    ask,
    caption,
    collate,
    denoise,
    draw,
    example_batch,
    mask_spans,
    mend,
    proceed,
)
from whale.models.m6.tokenizer import Tokenizer
from whale.models.m6.variation import LIVELY

Pictures = NDArray[np.uint8]
LONG = "the dog face and the cat face, a red apple and a blue ball " * 4


@dataclass(frozen=True)
class Shown:
    """A user's own kind of sample: any object with these names will do."""

    image: NDArray[np.uint8]
    captions: Mapping[str, str] = field(default_factory=lambda: {"en": "red apple", "zh": "红苹果"})
    tags: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    question: str | None = None
    answer: str | None = None


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_rows(config: M6Config, tokenizer: Tokenizer, pictures: Pictures) -> None:
    rows = [
        caption(tokenizer, pictures[0], "red", "en", limit=24),
        draw(tokenizer, "狗", [3, 1], limit=24),
    ]
    batch = collate(config, tokenizer, rows)
    assert {name: tuple(x.shape) for name, x in batch.items()} == {
        "tokens": (2, 24),
        "patches": (2, 4, 192),
        "num_source": (2,),
        "has_image": (2,),
        "labels": (2, 24),
    }
    r, e, d = tokenizer.encode("red")
    prompt = tokenizer.prompt("caption", "en")
    assert batch["tokens"][0, :7].tolist() == [*prompt, tokenizer.bos, r, e, d, tokenizer.pad]
    assert batch["labels"][0, :7].tolist() == [IGNORED] * 2 + [r, e, d, tokenizer.eos, IGNORED]
    codes = tokenizer.encode_codes([3, 1])
    assert batch["labels"][1, :5].tolist() == [IGNORED, IGNORED, *codes, IGNORED]
    assert batch["num_source"].tolist() == [4 + 2, 4 + 2]
    assert batch["has_image"].tolist() == [True, False]
    assert batch["patches"][0].abs().max() == 1 and not batch["patches"][1].any()


def test_refused_rows(config: M6Config, tokenizer: Tokenizer, pictures: Pictures) -> None:
    with pytest.raises(WhaleError, match="20 source and 5 target tokens in 24"):
        collate(config, tokenizer, [Example(source=[5] * 20, target=[6] * 5)])
    with pytest.raises(WhaleError, match="0 target tokens"):
        collate(config, tokenizer, [Example(source=[5], target=[])])
    with pytest.raises(WhaleError, match=r"shape \(8, 16, 3\)"):
        collate(config, tokenizer, [Example(source=[5], target=[6], image=pictures[0][:8])])
    with pytest.raises(WhaleError, match="64 image codes do not fit into 24"):
        draw(tokenizer, "dog", [0] * 64, limit=24)


def test_spans(tokenizer: Tokenizer) -> None:
    ids = list(range(20, 120))
    masked = mask_spans(ids, tokenizer.mask, rng())
    kept = [i for i in masked if i != tokenizer.mask]
    assert len(kept) == 70 and kept == sorted(kept)
    assert 5 <= masked.count(tokenizer.mask) <= 25
    assert all(a != b or a != tokenizer.mask for a, b in zip(masked, masked[1:], strict=False))
    assert mask_spans([], tokenizer.mask, rng()) == []


@pytest.mark.parametrize("text", ["", "狗", "dog face", LONG])
def test_every_objective_fits_whatever_the_text(
    config: M6Config, tokenizer: Tokenizer, pictures: Pictures, text: str
) -> None:
    for seed in range(20):
        rows = [
            denoise(tokenizer, text, "en", limit=24, rng=rng(seed)),
            proceed(tokenizer, text, "und", limit=24, rng=rng(seed)),
            caption(tokenizer, pictures[0], text, "zh", limit=24),
            mend(tokenizer, pictures[0], text, "zh", limit=24, rng=rng(seed)),
            ask(tokenizer, pictures[0], text, text, limit=24),
            draw(tokenizer, text, [1] * 16, limit=24),
        ]
        collate(config, tokenizer, rows)


def test_denoising_and_proceeding_give_the_text_back(tokenizer: Tokenizer) -> None:
    example = denoise(tokenizer, "dog face", "en", limit=24, rng=rng())
    assert tokenizer.decode(example.target) == "dog face"
    assert tokenizer.mask in example.source
    example = proceed(tokenizer, "dog face", "en", limit=24, rng=rng(3))
    both = [*example.source, *example.target]
    assert tokenizer.decode(both) == "dog face" and both[-1] == tokenizer.eos
    cut_off = proceed(tokenizer, 8 * LONG, "en", limit=24, rng=rng())
    assert tokenizer.eos not in cut_off.target
    assert len(cut_off.source) + len(cut_off.target) == 23


# ---- mixture ----


@pytest.fixture
def objectives(config: M6Config, tokenizer: Tokenizer, pictures: Pictures) -> Objectives:
    config = replace(config, code_patch_size=4)
    codes = ImageCodes.fit(pictures, num_codes=16, patch_size=4)
    return Objectives(config=config, tokenizer=tokenizer, codes=codes, variation=LIVELY)


def test_the_same_every_time(objectives: Objectives, pictures: Pictures) -> None:
    samples = [Shown(image=picture) for picture in pictures]
    first, again, other = (
        objectives.batch(samples, [generator(seed, i) for i in range(12)]) for seed in (0, 0, 1)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    # A row does not depend on those it is batched with.
    alone = objectives.batch(samples[5:6], [generator(0, 5)])
    assert all(torch.equal(alone[name][0], first[name][5]) for name in first)


def test_objectives_come_by_weight(objectives: Objectives, pictures: Pictures) -> None:
    sample = Shown(image=pictures[0], question="which?", answer="red")
    counts: Counter[str] = Counter()
    tasks = [objectives.tokenizer.special(f"<{t}>") for t in ("ask", "draw", "fill", "caption")]
    for i in range(1600):
        example = objectives.example(sample, generator(0, i))
        counts[tasks.index(example.source[0])] += 1
    # caption and mend have one task token.
    for task, weight in enumerate([8, 2, 1, 5]):
        assert counts[task] == pytest.approx(100 * weight, rel=0.25)


def test_datasets_of_the_package_and_what_they_allow(
    objectives: Objectives, pictures: Pictures
) -> None:
    shown = Picture(key="a", image=pictures[0], captions={"en": "red apple"})
    read = Document(key="b", text=LONG, language="en")
    words = {name: 0.0 for name in DEFAULT_WEIGHTS} | {"ask": 1.0, "proceed": 1.0}
    choosy = replace(objectives, weights=words)
    assert choosy.example(read, generator(0, 0)).source[0] == choosy.tokenizer.special("<text>")
    with pytest.raises(ConfigError, match="all of which have weight 0"):
        choosy.example(shown, generator(0, 0))
    asked = replace(shown, question="which?", answer="red")
    assert choosy.example(asked, generator(0, 0)).image is not None


def test_refused_mixtures(objectives: Objectives) -> None:
    with pytest.raises(ConfigError, match="the objective 'paint'"):
        replace(objectives, weights={"paint": 1.0})
    with pytest.raises(WhaleError, match="a tokenizer of 400 ids"):
        replace(objectives, config=replace(objectives.config, vocab_size=500))
    with pytest.raises(WhaleError, match="a codebook of"):
        replace(objectives, config=replace(objectives.config, code_patch_size=8))


def test_example_batch(config: M6Config) -> None:
    batch = example_batch(config, 5)
    assert all(torch.equal(x, example_batch(config, 5)[name]) for name, x in batch.items())
    assert ((batch["labels"] != IGNORED).sum(1) >= 12).all()
    with pytest.raises(WhaleError, match="25 text positions; allowed: 2 to 24"):
        example_batch(config, 5, 25)
