"""Numbers outside of modules: counters of the user's code, and what a script changes in objects."""

from __future__ import annotations

import itertools
import types
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import whale as wh
from tests.covering import part
from tests.distributed.beside import beside
from tests.ranks import run_ranks

WIDTH = 6
TICKS = 0
MEANS: deque[Tensor] = deque(maxlen=2)
FLAGS: dict[str, Any] = {"ticks": 0, "mode": "plain"}


class Settings:
    """Of a file: a script turns them."""

    ticks = 0
    centred = False
    gain = 1.0


@dataclass
class Warmth:
    now: float = 1.0
    past: list[float] = field(default_factory=lambda: [1.0])


class Clock:
    __slots__ = ("time",)

    def __init__(self) -> None:
        self.time = 0

    def tick(self) -> int:
        self.time += 1
        return self.time


def ticker() -> Callable[[], int]:
    count = 0

    def tick() -> int:
        nonlocal count
        count += 1
        return count

    return tick


def in_class(block: Block) -> float:
    Settings.ticks += 1
    return Settings.ticks


def in_file(block: Block) -> float:
    global TICKS
    TICKS += 1
    return TICKS


def in_default(block: Block, ticks: deque[int] = deque([0])) -> float:  # noqa: B006
    ticks.append(ticks.pop() + 1)
    return ticks[0]


def in_function(block: Block) -> float:
    in_function.ticks += 1  # type: ignore[attr-defined]
    return in_function.ticks  # type: ignore[attr-defined, no-any-return]


def in_closure(block: Block) -> float:
    return block.tick()


def in_object(block: Block) -> float:
    return block.clock.tick()


def in_array(block: Block) -> float:
    block.times[1] += 1
    return float(block.times[1])


def in_iterator(block: Block) -> float:
    return next(block.numbers)


def by_rows(block: Block, x: Tensor) -> Tensor:
    """A mean of the rows that were seen, which the next forward adds."""
    before = MEANS[-1]
    MEANS.append(0.9 * before + 0.1 * x.detach().mean(0))
    return before


def logged(block: Block, x: Tensor) -> Tensor:
    """One that nobody reads."""
    MEANS.append(x.detach().mean(0))
    return torch.zeros(WIDTH)


def still(block: Block) -> float:
    return 0.0


def gain(block: Block) -> float:
    known = block.known
    return known["warmth"].now * known["sizes"][-1] * block.names.w + len(block.chosen) + known["n"]


def spread(block: Block) -> float:
    return float(block.times.sum()) * block.factor.item()


class Block(nn.Module):
    def __init__(self, number: Callable[[Block], float]) -> None:
        super().__init__()
        self.up, self.down, self.number = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH), number
        self.tick, self.clock, self.times = ticker(), Clock(), np.zeros(3)
        self.numbers, self.factor = itertools.count(1), torch.ones(())
        self.known = {"warmth": Warmth(), "sizes": [1, 2], "n": 1}
        self.names, self.chosen = types.SimpleNamespace(w=1.0), {1}

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.up(x))
        if FLAGS["mode"] == "soft":
            h = torch.softmax(h, -1)
        out = self.down(h) * (1 + 0.1 * self.number(self)) * Settings.gain
        return out - out.mean(0) if Settings.centred else out


class Net(nn.Module):
    def __init__(self, number: Callable[[Block], float] = still) -> None:
        super().__init__()
        self.block = Block(number)
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x))


class Counting(nn.Module):
    """A loss that counts in an attribute and in a buffer."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.log = 0, []
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        return F.mse_loss(out, target) * (self.calls + self.seen)


class Centring(nn.Module):
    """A loss that follows its targets, in a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.centre = torch.zeros(WIDTH)

    def forward(self, out: Tensor, target: Tensor) -> Tensor:
        value = F.mse_loss(out, target - self.centre)
        self.centre = 0.9 * self.centre + 0.1 * target.mean(0)
        return value


class Adding(nn.Module):
    """Two blocks of which one or both add what is kept outside."""

    def __init__(self, add: Callable[[Any, Tensor], Tensor], *, both: bool) -> None:
        super().__init__()
        self.block, self.head = Adder(add), Adder(add) if both else nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x))


class Adder(nn.Module):
    def __init__(self, add: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.line, self.add = nn.Linear(WIDTH, WIDTH), add

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x) + (self.add(self, x) if self.training else 0.0)


Change = Callable[[Any, int], Any]
COUNTERS = (
    in_class, in_file, in_default, in_function, in_closure, in_object, in_array, in_iterator,
)  # fmt: skip
CHANGES: dict[str, tuple[Callable[[Block], float], Change]] = {
    "attribute of an object": (gain, lambda m, i: setattr(m.block.known["warmth"], "now", i)),
    "last item": (gain, lambda m, i: m.block.known["sizes"].append(i)),
    "item": (gain, lambda m, i: m.block.known.update(n=i)),
    "namespace": (gain, lambda m, i: setattr(m.block.names, "w", 1.0 + i)),
    "set": (gain, lambda m, i: m.block.chosen.add(i)),
    "new object": (gain, lambda m, i: m.block.known.update(warmth=Warmth(now=2.0 * i))),
    "array": (spread, lambda m, i: m.block.times.fill(i)),
    "counted too": (in_object, lambda m, i: i == 2 and setattr(m.block.clock, "time", 9)),
}
REFUSED: dict[str, tuple[Callable[[Block], float], Change]] = {
    "tensor": (spread, lambda m, i: m.block.factor.fill_(i)),
    "module": (still, lambda m, i: i == 2 and m.head.__delitem__(1)),
}
FLIPS: dict[str, tuple[Change, frozenset[str]]] = {
    "gain": (lambda m, i: setattr(Settings, "gain", 1.0 + i), frozenset()),
    "centred": (lambda m, i: setattr(Settings, "centred", i == 2), frozenset({"data"})),
    "mode": (lambda m, i: FLAGS.update(mode="soft" if i == 2 else "plain"), frozenset({"split"})),
}
LAYOUTS: dict[str, Callable[[], dict[str, Any]]] = {
    "data": lambda: {"": wh.replicate()},
    "split": lambda: {"": wh.split()},
    "stages": lambda: {"block": wh.stage(), "head": wh.stage()},
}


def reset() -> None:
    global TICKS
    TICKS = 0
    Settings.ticks, Settings.centred, Settings.gain = 0, False, 1.0
    FLAGS.update(ticks=0, mode="plain")
    MEANS.append(torch.zeros(WIDTH))
    in_function.ticks = 0  # type: ignore[attr-defined]
    in_default.__defaults__ = (deque([0]),)
    torch.manual_seed(0)


def data(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(8, WIDTH, generator=generator) for _ in range(2))
    return x, y


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.01, momentum=0.9)


def nothing(model: Any, index: int) -> None:
    pass


def trained(
    number: Callable[[Block], float],
    layout: str | None,
    change: Change = nothing,
    make_loss: Callable[[], Any] = lambda: F.mse_loss,
) -> list[float]:
    """The losses of four steps; without a layout, by a plain loop."""
    reset()
    model, loss = Net(number), make_loss()
    if layout is None:
        optimizer, found = sgd(model.parameters()), []
        for i in range(4):
            change(model, i)
            optimizer.zero_grad()
            value = loss(model(data(i)[0]), data(i)[1])
            value.backward()
            optimizer.step()
            found.append(value.item())
        return found
    step = wh.parallelize(
        wh.annotate(model, LAYOUTS[layout]()),
        optimizer=sgd,
        batch=data(0),
        loss=loss,
        config={"timeout_seconds": 20},
    )
    try:
        found = []
        for i in range(4):
            change(model, i)
            found.append(float(step(data(i))["loss"]))
        return found
    finally:
        step.close(forget=True)


def far(*args: Any, layout: str) -> str | float:
    want = trained(args[0], None, *args[1:])
    try:
        got = trained(args[0], layout, *args[1:])
    except wh.WhaleError as error:
        return str(error)
    return max(abs(a - b) for a, b in zip(got, want, strict=True))


def count() -> dict[tuple[str, str], str | float]:
    wh.init()
    torch.set_default_dtype(torch.float64)
    names = {number.__name__: number for number in COUNTERS}
    found = {
        (name, layout): far(names[name], layout=layout)
        for name, layout in part(itertools.product(names, LAYOUTS))
    }
    for loss in (Counting, Centring):
        found[loss.__name__, "split"] = far(still, nothing, loss, layout="split")
    found["Counting", "data"] = far(still, nothing, Counting, layout="data")
    return found


def test_counters_are_those_of_the_steps_alone() -> None:
    for found in run_ranks(2, count, timeout=110.0):
        for case, result in found.items():
            assert isinstance(result, float) and result < 1e-9, (case, result)


def follow() -> dict[tuple[str, str], str | float]:
    wh.init()
    torch.set_default_dtype(torch.float64)
    every = {**CHANGES, **REFUSED}
    return {
        (name, layout): far(*every[name], layout=layout)
        for name, layout in part(itertools.product(every, ("data", "split", "stages")))
    }


def test_what_a_script_changes_in_objects_is_followed_or_refused() -> None:
    for found in run_ranks(2, follow, timeout=110.0):
        for (name, layout), result in found.items():
            assert isinstance(result, str) == (name in REFUSED), (name, layout, result)
            assert isinstance(result, str) or result < 1e-9, (name, layout, result)
            assert isinstance(result, float) or "hint: " in result, (name, layout, result)


def keep() -> dict[tuple[str, bool, str], str | float]:
    wh.init()
    torch.set_default_dtype(torch.float64)
    found: dict[tuple[str, bool, str], str | float] = {}
    for add in (by_rows, logged):
        for both, layout in ((False, "data"), (True, "split"), (False, "stages"), (True, "stages")):

            def before(model: Any, index: int) -> None:
                if index == 0:
                    MEANS.append(torch.zeros(WIDTH))

            reset()
            model, batches = Adding(add, both=both), [data(i) for i in range(4)]
            found[add.__name__, both, layout] = beside(
                model, batches, LAYOUTS[layout](), before=before
            )
    return found


def test_what_rows_leave_outside_is_exact_or_refused() -> None:
    for found in run_ranks(2, keep, timeout=110.0):
        for (add, both, layout), result in found.items():
            shared = both and layout == "stages"
            refused = shared or (add == "by_rows" and layout == "data")
            assert isinstance(result, str) == refused, (add, both, layout, result)
            assert isinstance(result, str) or result < 1e-9, (add, both, layout, result)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(WIDTH, momentum=0.3), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x))


class Late(Normed):
    """Rows interact in the third step: a buffer counts them."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        out = super().forward(x)
        return out - out.mean(0) if self.seen == 3 else out


def untracked(model: Normed, index: int) -> None:
    model.norm.track_running_stats = index != 1


def glue_flag() -> str | float:
    """In a pipeline, code between Layers reads a flag: it is refused before the step runs."""
    reset()
    model = wh.annotate(Scaled(), LAYOUTS["stages"]())
    step = wh.parallelize(model, optimizer=sgd, batch=data(0), loss=F.mse_loss)
    try:
        for i in range(4):
            Settings.gain = 2.0 if i == 2 else 1.0
            step(data(i))
    except wh.WhaleError as error:
        return f"{i} {error}"
    finally:
        step.close(forget=True)
    return 0.0


class Scaled(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * Settings.gain


def flip() -> dict[tuple[str, str], str | float]:
    wh.init()
    torch.set_default_dtype(torch.float64)
    return {
        (name, layout): far(still, change, layout=layout)
        for name, (change, _) in FLIPS.items()
        for layout in ("data", "split")
    } | {
        ("norm", "data"): beside(
            Normed(), [data(i) for i in range(4)], LAYOUTS["data"](), before=untracked
        ),
        ("late", "data"): beside(Late(), [data(i) for i in range(4)], LAYOUTS["data"]()),
        ("glue", "stages"): glue_flag(),
    }


def test_a_flag_that_leads_to_other_code_is_looked_at() -> None:
    for found in run_ranks(2, flip, timeout=110.0):
        said = found.pop(("glue", "stages"))
        assert isinstance(said, str) and said.startswith("2 ") and "another now" in said, said
        for (name, layout), result in found.items():
            refused = name == "late" or (name in FLIPS and layout in FLIPS[name][1])
            assert isinstance(result, str) == refused, (name, layout, result)
            assert isinstance(result, str) or result < 1e-9, (name, layout, result)


@pytest.mark.filterwarnings("ignore:Net is compiled")
def test_a_forward_compiled_in_place_runs_eagerly() -> None:
    def model(*, compiled: bool) -> Net:
        reset()
        made = Net()
        if compiled:
            made.block.forward = torch.compile(  # type: ignore[method-assign]
                made.block.forward, backend="eager"
            )
        return made

    found = []
    for compiled in (False, True):
        made = model(compiled=compiled)
        own = made.block.__dict__.get("forward")
        step = wh.parallelize(made, optimizer=sgd, batch=data(0), loss=F.mse_loss)
        found.append([float(step(data(i))["loss"]) for i in range(3)])
        step.close(forget=True)
        assert made.block.__dict__.get("forward") is own
    assert found[0] == found[1]


def test_a_loss_is_as_before_on_one_rank() -> None:
    loss, centring = Counting(), Centring()
    for each in (loss, centring):
        reset()
        step = wh.parallelize(Net(in_class), optimizer=sgd, batch=data(0), loss=each)
        assert Settings.ticks == 0
        step(data(0))
        assert Settings.ticks == 1
        step.close(forget=True)
    assert loss.calls == 1 and float(loss.seen) == 1
    torch.testing.assert_close(centring.centre, 0.1 * data(0)[1].mean(0))
