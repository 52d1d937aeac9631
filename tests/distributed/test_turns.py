"""Code that turns later in training, by a counter that nobody outside can see.

Every place a counter may sit in, every kind of code it may turn on: exact until then, and refused
in that very batch where the layout cannot run it; exact to the end where it can.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import whale as wh
from tests.distributed.beside import sgd
from tests.ranks import run_ranks

WIDTH, HIDDEN, HEADS = 8, 6, 4
CALLS = {"n": 0}


class Clock:
    """Counts calls, wherever it is told to."""

    def __init__(self) -> None:
        self.inside = {"times": [0]}


class Counter(nn.Module):
    """A part that counts; `PLACES` says where."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.n, self.row, self.named = 0, [0], {"n": 0, "last": None}
        self.thing, self.pair, self.log = SimpleNamespace(n=0), (0, "x"), []
        self.recent: deque[int] = deque(maxlen=3)
        self.deep = Clock()
        self.register_buffer("times", torch.zeros((), dtype=torch.long))

    def count(self, h: Tensor) -> int:
        return int(PLACES[self.place](self, h))


def _attribute(c: Counter, h: Tensor) -> int:
    c.n += 1
    return c.n


def _row(c: Counter, h: Tensor) -> int:
    c.row[0] += 1
    return c.row[0]


def _beside_a_tensor(c: Counter, h: Tensor) -> int:
    c.named["n"] = int(c.named["n"] or 0) + 1
    c.named["last"] = h.detach()  # type: ignore[assignment]
    return int(c.named["n"])


def _thing(c: Counter, h: Tensor) -> int:
    c.thing.n += 1
    return int(c.thing.n)


def _pair(c: Counter, h: Tensor) -> int:
    c.pair = (c.pair[0] + 1, "x")
    return c.pair[0]


def _log(c: Counter, h: Tensor) -> int:
    c.log.append(0.5)
    return len(c.log)


def _recent(c: Counter, h: Tensor) -> int:
    c.recent.append(c.recent[-1] + 1 if c.recent else 1)
    return c.recent[-1]


def _deep(c: Counter, h: Tensor) -> int:
    c.deep.inside["times"][0] += 1
    return c.deep.inside["times"][0]


def _buffer(c: Counter, h: Tensor) -> int:
    c.times += 1
    return int(c.times)


def _global(c: Counter, h: Tensor) -> int:
    CALLS["n"] += 1
    return CALLS["n"]


PLACES: dict[str, Callable[[Counter, Tensor], int]] = {
    "attribute": _attribute,
    "row": _row,
    "beside a tensor": _beside_a_tensor,
    "thing": _thing,
    "pair": _pair,
    "log": _log,
    "recent": _recent,
    "deep": _deep,
    "buffer": _buffer,
    "global": _global,
}


class Block(Counter):
    """A pair of Linears; `turn` is done to what is between them in some of its forwards."""

    def __init__(self, place: str, turn: str, when: Callable[[int], bool]) -> None:
        super().__init__(place)
        self.up, self.down, self.turn, self.when = (
            nn.Linear(WIDTH, HIDDEN),
            nn.Linear(HIDDEN, WIDTH),
            turn,
            when,
        )

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        if self.training and self.when(self.count(h)):
            h = TURNS[self.turn](self, h)
        return self.down(h)


class Heads(Counter):
    """Attention that reads its number of heads in some of its forwards."""

    def __init__(self, place: str, when: Callable[[int], bool]) -> None:
        super().__init__(place)
        self.num_heads, self.when = HEADS, when
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        parts = (m(x).unflatten(-1, (self.num_heads, -1)) for m in (self.q, self.k, self.v))
        q, k, v = (part.transpose(1, 2) for part in parts)
        y = self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        turned = self.training and self.when(self.count(x))
        return y * (self.num_heads if turned else 1.0)


TURNS: dict[str, Callable[[Block, Tensor], Tensor]] = {
    "columns": lambda block, h: h - h.mean(-1, keepdim=True),
    "width": lambda block, h: h / h.shape[-1] ** 0.5,
    "weight": lambda block, h: h * block.up.weight.mean(),
    "rows": lambda block, h: h - h.mean(0, keepdim=True),
    "harmless": lambda block, h: F.silu(h) * 2,
}


class After:
    """Later than some forward, for good or once."""

    def __init__(self, last: int, once: bool = False) -> None:
        self.last, self.once = last, once

    def __call__(self, times: int) -> bool:
        return times == self.last + 1 if self.once else times > self.last


SPLIT = {"": wh.split()}
MIX = {"1": wh.split(), "...": wh.replicate()}
REPLICAS = {"": wh.replicate()}
STAGES = {"0": wh.stage(), "1": wh.stage()}
LAYOUTS = {"split": SPLIT, "mix": MIX, "replicas": REPLICAS, "stages": STAGES}


def trained(inside: nn.Module, layout: str, batches: int, micro_batches: int = 1) -> Any:
    """(differences of the losses, the refusal or ""): how far it came beside a plain loop."""
    wh.init()
    torch.manual_seed(0)
    CALLS["n"] = 0
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), inside).double()
    plain = copy.deepcopy(model)
    drawn = torch.Generator().manual_seed(1)
    shape = (5, 3, WIDTH) if isinstance(inside, Heads) else (5, WIDTH)
    data = [
        (torch.randn(shape, generator=drawn).double(), torch.randn(shape, generator=drawn).double())
        for _ in range(batches)
    ]
    optimizer, wanted = sgd(plain.parameters()), []
    for x, y in data:
        optimizer.zero_grad()
        parts = zip(x.tensor_split(micro_batches), y.tensor_split(micro_batches), strict=True)
        losses = [F.mse_loss(plain(a), b) * len(a) / len(x) for a, b in parts]
        torch.stack(losses).sum().backward()
        optimizer.step()
        wanted.append(sum(loss.item() for loss in losses))
    CALLS["n"] = 0
    step = wh.parallelize(
        wh.annotate(model, LAYOUTS[layout]),
        optimizer=sgd,
        batch=data[0],
        loss=F.mse_loss,
        config={"timeout_seconds": 20, "pipeline.num_micro_batch": micro_batches},
    )
    far: list[float] = []
    try:
        for batch, want in zip(data, wanted, strict=True):
            far.append(abs(float(step(batch)["loss"]) - want))
    except wh.WhaleError as error:
        assert error.hint
        return far, str(error)
    state = step.state_dict()
    far += [float((state[k] - v).abs().max()) for k, v in plain.state_dict().items()]
    step.close(forget=True)
    return far, ""


def cases() -> Iterator[Any]:
    """Each place and each turn, in a layout that cannot run it; and turns that do no harm."""
    kinds = ("columns", "width", "weight", "columns")
    for number, place in enumerate(PLACES):
        turn, last = kinds[number % 4], (9, 13, 20)[number % 3]
        layout = ("split", "mix")[number % 2]
        slow = pytest.mark.full if number % 7 else ()
        yield pytest.param(place, turn, last, layout, 1, True, marks=slow, id=f"{place}-{turn}")
    yield pytest.param("row", "heads", 12, "split", 1, True, id="heads")
    yield pytest.param("row", "rows", 9, "replicas", 1, True, id="rows-replicas")
    yield pytest.param("deep", "rows", 19, "stages", 2, True, id="rows-stages")
    yield pytest.param("deep", "harmless", 19, "stages", 2, False, id="harmless-in-turn")
    yield pytest.param("row", "harmless", 9, "split", 1, False, id="harmless-split")
    yield pytest.param("thing", "harmless", 9, "stages", 1, False, id="harmless-stages")


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("place", "turn", "last", "layout", "micro_batches", "refused"), [*cases()]
)
def test_code_that_a_counter_turns_on(
    place: str, turn: str, last: int, layout: str, micro_batches: int, refused: bool
) -> None:
    """Exact before, and refused by the batch that turns where it would be wrong."""
    once = After(last, once=place in ("thing", "log"))
    inside = Heads(place, once) if turn == "heads" else Block(place, turn, once)
    batches = last // micro_batches + 3
    far, said = run_ranks(2, trained, inside, layout, batches, micro_batches)[0]
    assert max(far) < 1e-12, (far, said)
    if refused and not (place == "buffer" and not said):  # what reads a buffer may stay whole
        turns = last // micro_batches  # a look runs a few forwards, and may see it that much early
        assert turns - 3 <= len(far) <= turns, (len(far), said)
        assert "batch" in said
    else:
        assert not said
