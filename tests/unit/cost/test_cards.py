"""Lanes on one card: who is beside whom, and how fast one is while others rest."""

from __future__ import annotations

import pytest

from whale.cost.cards import neighbours, paces


def test_neighbours_count_by_their_ranks() -> None:
    # Rank 0 is one lane, ranks 1 to 3 of the same card are another, rank 4 has a card to itself.
    near = neighbours(["a", "a", "a", "a", ""], [(0,), (1, 2, 3), (4,)])
    assert near == [{1: 1.0}, {0: pytest.approx(1 / 3)}, {}]


def test_two_cards() -> None:
    near = neighbours(["a", "b", "a", "b"], [(0,), (1,), (2,), (3,)])
    assert near == [{2: 1.0}, {3: 1.0}, {0: 1.0}, {1: 1.0}]


def test_a_lane_of_several_cards_has_the_neighbours_of_each() -> None:
    near = neighbours(["a", "a", "b", "b"], [(0, 2), (1, 3)])
    assert near == [{1: 1.0}, {0: 1.0}]
    near = neighbours(["a", "a", "b", "b"], [(0, 2), (1,), (3,)])
    assert near == [{1: 0.5, 2: 0.5}, {0: 1.0}, {0: 1.0}]


def test_a_lane_gains_by_the_part_that_rests() -> None:
    near = [{1: 1.0}, {0: 1 / 3}, {}]
    assert paces([0.7, 0.7, 0.7], [0.5, 0.0, 0.9], near) == pytest.approx([1.0, 0.95, 1.0])
