"""What modules count is read wherever it sits, lent to another copy, and taken back."""

from __future__ import annotations

import copy
from collections import deque
from types import SimpleNamespace

import torch
from torch import nn

from whale.engine.state import counters


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n, self.word, self.row, self.pair = 0, "a", [1, 2], (3, "x")
        self.recent, self.names = deque([1], maxlen=2), {"b"}
        self.mixed = {"n": 0, "tensor": torch.zeros(3), "deep": [SimpleNamespace(times=0)]}
        self.register_buffer("times", torch.zeros((), dtype=torch.long))
        self.register_buffer("many", torch.zeros(4))

    def move(self) -> None:
        self.n, self.word, self.pair = self.n + 1, self.word + "b", (4, "y")
        self.row.append(3)
        self.recent.append(9)
        self.names.add("c")
        self.mixed["n"] = 7
        self.mixed["deep"][0].times += 1  # type: ignore[index]
        self.times += 1
        self.many += 1


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), Part())


def test_what_moved_is_found_by_its_place() -> None:
    first = model()
    before = counters.read(first, ())
    first[1].move()  # type: ignore[operator]
    moved = counters.moved(before, counters.read(first, ()))
    names = {counters.name_of(place) for place in moved}
    assert names == {
        "1.n", "1.word", "1.pair", "1.row", "1.recent", "1.names", "1.mixed['n']",
        "1.mixed['deep'][0]['times']", "1.times",
    }  # fmt: skip
    assert not counters.moved(before, counters.read(first, ("1.times",), paths=["0"]))


def test_what_is_lent_is_there_inside_and_gone_afterwards() -> None:
    first = model()
    before, second = counters.read(first, ()), copy.deepcopy(first)
    first[1].move()  # type: ignore[operator]
    now = counters.read(first, ())
    moved = counters.moved(before, now)
    held = second[1].row
    with counters.lent(second, moved):
        assert counters.read(second, ()) == now
        assert second[1].row is held
        second[1].move()  # type: ignore[operator]
    assert counters.read(second, ()) == before
    assert float(second[1].many.sum()) == 4.0  # a buffer of many is nobody's counter
