"""Small models, words and pictures for the tests of the M6 family."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from whale.models.m6.config import M6Config
from whale.models.m6.tokenizer import Tokenizer

TEXTS = ["a red apple, a blue ball", "the dog face and the cat face", "红苹果和蓝球", "狗脸 猫脸"]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """One thread: the tests share the machine; and the same numbers every time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def config() -> M6Config:
    return M6Config(
        vocab_size=400,
        num_codes=16,
        max_text_len=24,
        dim=32,
        num_layers=4,
        num_heads=4,
        ffn_dim=48,
        image_size=16,
    )


@pytest.fixture
def tokenizer(config: M6Config) -> Tokenizer:
    return Tokenizer.build(TEXTS, vocab_size=config.vocab_size, num_codes=config.num_codes)


@pytest.fixture
def pictures() -> NDArray[np.uint8]:
    """Twelve pictures of 16 x 16: a coloured square each, on white."""
    rng = np.random.default_rng(0)
    made = np.full((12, 16, 16, 3), 255, dtype=np.uint8)
    for picture in made:
        y, x = rng.integers(0, 8, 2)
        picture[y : y + 8, x : x + 8] = rng.integers(0, 200, 3)
    return made
