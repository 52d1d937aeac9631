"""What is new in a batch: traits of its tensors that no batch before it had."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from whale.engine.watch.novelty import Novelty

X = torch.tensor([[0.5, -0.5], [1.5, -1.5]])
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("first", "later"),
    [
        (X, torch.tensor([[0.5, NAN], [1.5, -1.5]])),
        (X, torch.tensor([[0.5, -0.5], [INF, -1.5]])),
        (X, X * 8),
        (X, torch.tensor([[0.0, 0.0], [1.5, -1.5]])),
        (X.abs() + 1, X),
        (torch.tensor([5, 6, 7]), torch.tensor([5, 7, 7])),
        (torch.tensor([5, 6, 7]), torch.tensor([5, 6, -100])),
        (torch.tensor([[5, 6], [7, 8]]), torch.tensor([[5, 0], [7, 8]])),
        (torch.tensor([5, 6]), torch.tensor([6, 6])),
        (torch.tensor(True), torch.tensor(False)),
        (torch.tensor([[True, False]] * 2), torch.tensor([[True, False], [False, False]])),
    ],
)
def test_a_first_time_is_new_once(first: Tensor, later: Tensor):
    novelty = Novelty((first, torch.zeros(2, dtype=torch.complex64), "word"))
    assert not novelty.is_new((first,), 9)
    assert novelty.is_new((later,), 9)
    assert not novelty.is_new((later,), 9)


def test_tensors_are_told_apart_by_name_and_nothing_is_read_of_what_has_no_values():
    novelty = Novelty({"a": X, "b": X * 4})
    assert not novelty.is_new({"a": X, "b": X * 4, "c": torch.zeros(2, device="meta")}, 9)
    assert not novelty.is_new({"a": X, "b": torch.zeros(0), "c": X.to_sparse()}, 9)
    assert novelty.is_new({"a": X * 4, "b": X}, 9)


def test_what_is_new_time_and_again_is_looked_at_ever_more_rarely():
    novelty = Novelty((X,))
    found = [novelty.is_new((X * 2.0**power,), 2) for power in range(2, 12)]
    assert found == [True, True, False, True, False, False, False, True, False, False]


def test_late_batches_are_looked_at_where_they_are_small(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("whale.engine.watch.novelty._EVERY", 1)
    monkeypatch.setattr("whale.engine.watch.novelty._MOST", 4)
    novelty = Novelty((X, torch.ones(5)))
    assert not novelty.is_new((X, torch.ones(5)), 9)
    assert not novelty.is_new((X, torch.full((5,), NAN)), 9)
    assert novelty.is_new((X * 4, torch.ones(5)), 9)
