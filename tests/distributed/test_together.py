"""Ranks that do not do the same: other calls, other batches, other weights, other branches.

Each is refused in words, on every rank, before the timeout.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import whale as wh
from tests.ranks import run_ranks
from whale.errors import RankError, WhaleError

SGD = partial(torch.optim.SGD, lr=0.1)
LONG = 1000.0
"""Seconds that nobody waits for: a test ends long before."""


def rank() -> int:
    return int(os.environ["RANK"])


def batch_of(seed: int, rows: int = 4, length: int = 3) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, length, 5, generator=g), torch.randn(rows, length, 2, generator=g)


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.BatchNorm1d(3), nn.Linear(4, 2))


def data() -> nn.Module:
    return wh.replicate()(plain())


def staged() -> nn.Module:
    return wh.annotate(plain(), {"0|1": wh.stage(), "2|3": wh.stage()})


def build(model: nn.Module, **config: Any) -> Any:
    wh.init(wh.Config(timeout_seconds=LONG))
    return wh.parallelize(
        model,
        optimizer=SGD,
        batch=batch_of(0),
        loss=F.mse_loss,
        config={"timeout_seconds": LONG, "check_parts": False, **config},
    )


# ---- calls ---------------------------------------------------------------------------------------


def _save(step: Any) -> None:
    if rank() == 0:
        step.save(tempfile.mkdtemp() + "/c")
    step(batch_of(1))


def _state(step: Any) -> None:
    if rank() == 1:
        step.state_dict()
    step(batch_of(1))


def _evaluate(step: Any) -> None:
    if rank() == 0:
        step.evaluate(batch_of(2))
    for seed in range(3):
        step(batch_of(seed))


def _end(step: Any) -> None:
    if rank() == 0:
        step.gradients()
    step.close()


def _slow(step: Any) -> None:
    """No fault: a rank that only takes its time is not to blame."""
    time.sleep(3.0 * rank())
    step.report()
    step.state_dict()


CALLS: list[tuple[Callable[[Any], None], str]] = [
    (_save, "rank 0 saves, rank 1 steps"),
    (_state, "rank 0 steps, rank 1 calls state_dict()"),
    (_evaluate, "rank 0 evaluates, rank 1 steps"),
    (_end, "rank 1 has ended"),
]


LAYOUTS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "stages": (staged, {}),
    "data": (data, {}),
    # A forward begins to gather what the next Layer needs.
    "gathered": (data, {"zero.level": "v2"}),
}


def _call(number: int, layout: str) -> str:
    made, config = LAYOUTS[layout]
    step = build(made(), **config)
    for _ in range(5):
        step(batch_of(0))
    try:
        CALLS[number][0](step)
    except RankError as error:
        return str(error)
    return "ended"


@pytest.mark.every(3)
@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("number", range(len(CALLS)), ids=lambda n: CALLS[n][0].__name__)
def test_calls_of_one_rank_are_named(number: int, layout: str) -> None:
    found = run_ranks(2, _call, number, layout, timeout=20.0)
    said = CALLS[number][1]
    # The one whose program is over has nothing to say.
    assert all(said in text for text in found[: 1 if "ended" in said else 2]), found


def _calm() -> None:
    step = build(data())
    step(batch_of(0))
    _slow(step)
    # The same error on all ranks, caught, does not end the job.
    for _ in range(2):
        with pytest.raises(WhaleError):
            step.load("/nowhere/at/all")
        step(batch_of(1))
    step.close()


# ---- batches -------------------------------------------------------------------------------------


def _refused(step: Any, batch: Any) -> str:
    try:
        step(batch)
    except WhaleError as error:
        return str(error)
    return "accepted"


def _own_batches(kind: str) -> str:
    step = build(data(), guard=0)
    step(batch_of(0))
    own = {
        "content": lambda: batch_of(10 + rank()),
        "rows": lambda: batch_of(1, rows=4 + rank()),
        "length": lambda: (batch_of(1)[0].repeat(1, 1 + rank(), 1), batch_of(1)[1]),
        "dtype": lambda: (
            batch_of(1)[0].to([torch.float32, torch.float64][rank()]),
            batch_of(1)[1],
        ),
        "shape later": lambda: None,
    }
    if kind == "shape later":
        # Long after the first steps, when values are compared no more.
        for _ in range(9):
            step(batch_of(0))
        return _refused(step, batch_of(0, rows=4 if rank() else 3))
    if kind == "autocast":
        with torch.autocast("cpu", torch.bfloat16, enabled=rank() == 1):
            return _refused(step, batch_of(1))
    return _refused(step, own[kind]())


def _own_samples() -> str:
    step = build(data())
    torch.manual_seed(rank())
    order = torch.randperm(8).tolist()
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*batch_of(0, rows=8)), batch_size=4, sampler=order
    )
    return "".join(_refused(step, batch) for batch in wh.shard(loader))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("content", "ranks [1] have other values than rank 0"),
        ("rows", "rank 0: 4, rank 1: 5"),
        ("dtype", "float64[rows, 3, 5]"),
        ("shape later", "another kind than its last"),
        ("autocast", "rank 0: None, rank 1: bfloat16"),
    ],
)
def test_batches_of_one_rank_are_refused(kind: str, said: str) -> None:
    for text in run_ranks(2, _own_batches, kind, timeout=40.0):
        assert said in text, text
        assert "global batch" in text


def _odd_batches() -> None:
    _calm()
    assert "other values" in _own_samples()
    step = build(data(), guard=0)
    x, y = batch_of(0)
    good = step((x, y))["loss"].item()
    assert good > 0
    with pytest.raises(WhaleError, match="an array of shape"):
        step((x, numpy.zeros(4), y))
    with pytest.raises(WhaleError, match="a list of as many entries"):
        step((x, ["a", "b", "c", "d"], y))
    with pytest.raises(WhaleError, match="no rows"):
        step((x[:0], y[:0]))
    with pytest.raises(WhaleError, match="in the first batch its dim 0 was the rows"):
        step((x, y[:3]))
    for batch in wh.shard([(x, y)]):
        with pytest.raises(WhaleError, match="cannot be unpacked") as error:
            _, _ = batch
        assert "step(batch)" in str(error.value)
        step(batch)
    for wrapped in (nn.parallel.DistributedDataParallel(plain()), nn.DataParallel(plain())):
        with pytest.raises(WhaleError, match="averaged twice"):
            wh.parallelize(wrapped, optimizer=SGD, batch=(x, y), loss=F.mse_loss)


class Shifted(nn.Module):
    """A position vector of the batch, whose length may be the number of rows by chance."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(5, 4).double()

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        return self.a(x) * places[None, :, None]


def _by_chance() -> float:
    """4 rows and 3 places in the first batch, 3 rows and 3 places later."""
    wh.init()
    model = Shifted()
    target = torch.zeros(4, 3, 4).double()
    places = torch.arange(1.0, 4.0).double()
    first = (batch_of(0)[0].double(), places, target)
    later = (batch_of(1, rows=3)[0].double(), places, target[:3])
    want = float(F.mse_loss(model(later[0], places), later[2]).detach())
    step = wh.parallelize(
        wh.replicate()(model), optimizer=SGD, batch=first, loss=F.mse_loss, config={"guard": 1}
    )
    return abs(float(step.evaluate(later)["loss"]) - want)


def test_odd_batches() -> None:
    run_ranks(2, _odd_batches, timeout=60.0)
    assert max(run_ranks(2, _by_chance, timeout=40.0)) < 1e-12


# ---- the guard -----------------------------------------------------------------------------------


def _flipped(kind: str) -> str:
    # Rank 3 of a pipeline of two replicated stages: rank 1 holds the same.
    step = build(staged() if kind == "staged" else data(), guard=2)
    local = step._lowered.model
    step(batch_of(0))
    step(batch_of(0))
    step(batch_of(0))
    if rank() == step.plan.num_ranks - 1:
        with torch.no_grad():
            tensor = local[2].running_var if kind == "buffer" else local[3].weight
            # Not the last one, which the rounding of the next update may put back.
            tensor.view(torch.int32).view(-1)[1] ^= 1 << 4
    return _refused(step, batch_of(0))


@pytest.mark.parametrize(
    ("kind", "ranks", "said"),
    [
        ("weight", 2, "parameter 3.weight"),
        ("buffer", 2, "buffer 2.running_var"),
        ("staged", 4, "parameter 3.weight"),
    ],
)
def test_one_flipped_bit_is_found(kind: str, ranks: int, said: str) -> None:
    for text in run_ranks(ranks, _flipped, kind, timeout=40.0):
        assert "after step 4 the ranks differ in " + said in text, text


# ---- branches ------------------------------------------------------------------------------------


class Branching(nn.Module):
    """Reads the values of its rows in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(5, 4), nn.Linear(4, 2)
        self.way, self.seen = way, 0.0

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.way == "bool" and x[:, 0, 0].max() > 2:
            h = h * 2
        if self.way == "item" and x.sum().item() > 0:
            h = torch.tanh(h)
        if self.way == "gradient" and bool((x[:, 0, 0] > 2).any()):
            h = h.detach()
        if self.way == "log":
            self.seen = h.mean().item()
        if self.way == "rows":
            h = torch.stack([row * 2 if row.sum() > 0 else row for row in h])
        return self.b(h)


def _branch(way: str) -> str:
    wh.init()
    g = torch.Generator().manual_seed(3)
    x = torch.randn(5, 3, 5, generator=g)
    x[0, 0, 0], x[1:, 0, 0] = 5.0, -1.0
    x[:3] += 1.0
    x[3:] -= 1.0
    x[0, 0, 0] = 5.0
    step = wh.parallelize(
        wh.replicate()(Branching(way)),
        optimizer=SGD,
        batch=(torch.zeros(5, 3, 5), torch.zeros(5, 3, 2)),
        loss=F.mse_loss,
    )
    return _refused(step, (x, torch.zeros(5, 3, 2)))


def _branches() -> dict[str, str]:
    return {way: _branch(way) for way in ("bool", "item", "gradient", "log", "rows", "none")}


def test_branches_on_values() -> None:
    for found in run_ranks(2, _branches, timeout=60.0):
        for way in ("bool", "item", "gradient"):
            # Either where a number is read, or by a trial of rows that are new in something.
            read = "differs between replicas" in found[way] and "test_together.py:" in found[way]
            assert read or "in two parts" in found[way], found
        for way in ("log", "rows", "none"):
            assert found[way] == "accepted", found
