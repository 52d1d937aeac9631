"""Views of nothing: the sizes that any other batch would give."""

from __future__ import annotations

import random

import pytest
import torch

from whale.runtime.empty_rows import EmptyRows, sizes_of_none


def test_sizes_are_those_of_one_row() -> None:
    rng = random.Random(1)
    for _ in range(300):
        inner = [rng.choice((1, 2, 3, 4, 6)) for _ in range(rng.randrange(1, 4))]
        at = rng.randrange(len(inner))
        factor = rng.choice([f for f in range(1, inner[at] + 1) if inner[at] % f == 0])
        wanted = [*inner[:at], -1, factor, *inner[at + 1 :]]
        found = sizes_of_none((0, *inner), (0, *wanted))
        one = torch.zeros(1, *inner).view(1, *wanted)
        assert found == (0, *one.shape[1:])


def test_what_nothing_says_is_left_to_torch() -> None:
    assert sizes_of_none((0, 4), (-1, 4)) is None  # torch knows
    assert sizes_of_none((0, 4), (0, 3, -1)) is None
    assert sizes_of_none((0, 4), (0, -1, 0)) is None
    with EmptyRows():
        x = torch.zeros(0, 3, 8)
        assert x.view(0, 3, -1, 4).shape == (0, 3, 2, 4)
        assert x.reshape((0, 3, -1, 4)).shape == torch.reshape(x, (0, 3, -1, 4)).shape
        assert x.view(*x.shape[:2], -1, 4).flatten(1).shape == (0, 24)
        assert torch.zeros(2, 6).view(2, -1, 3).shape == (2, 2, 3)
        with pytest.raises(RuntimeError, match="reshape"):
            x.view(0, 5, -1, 3)
