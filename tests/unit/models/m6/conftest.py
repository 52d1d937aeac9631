"""Small models, words and pictures for the tests of the M6 family."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from whale.models.m6 import layers
from whale.models.m6.config import M6Config
from whale.models.m6.tokenizer import Tokenizer

TEXTS = ["a red apple, a blue ball", "the dog face and the cat face", "红苹果和蓝球", "狗脸 猫脸"]


class StandInExperts(nn.Module):
    """Top-1 experts by a loop: the parameters of the real layer, its maths in a few lines."""

    def __init__(self, dim: int, hidden: int, num_experts: int, **settings: Any) -> None:
        super().__init__()
        self.settings = settings
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.w_in = nn.Parameter(torch.empty(num_experts, dim, hidden))
        self.w_out = nn.Parameter(torch.empty(num_experts, hidden, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.w_in, std=self.w_in.shape[1] ** -0.5)
        nn.init.normal_(self.w_out, std=self.w_out.shape[1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(-1)
        best, chosen = gates.max(-1)
        y = torch.zeros_like(x)
        for expert, (w_in, w_out) in enumerate(zip(self.w_in, self.w_out, strict=True)):
            out = nn.functional.gelu(x @ w_in) @ w_out
            y = y + out * (best * (chosen == expert))[..., None]
        return y


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts that need nothing of `whale.nn`."""

    def make(config: M6Config) -> nn.Module:
        hidden = config.expert_dim or config.ffn_dim
        return StandInExperts(config.dim, hidden, config.num_experts)

    monkeypatch.setattr(layers, "make_experts", make)


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
