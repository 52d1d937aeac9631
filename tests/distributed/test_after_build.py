"""What no build saw, under plans that share out, move, recompute or update early.

Weights are there for their Layer alone, a Layer runs twice, an update comes inside the backward,
the optimizer has a part of the model. Code that a flag, a counter or a script leads to later must
give what plain torch gives, or be refused; never another number, never a raw error.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import whale as wh
from tests.ranks import run_ranks

WIDTH = 6
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)

SHARED = {"zero.level": "v2"}
MOVED = {"offload.level": "weights"}
ALL_MOVED = {"offload.level": "v0"}
AGAIN = {"gradient_checkpoint.type": "collection"}
PRODUCTS = {**AGAIN, "gradient_checkpoint.keep": "products"}
EARLY = {"optimizer.num_apply_group": 3, "optimizer.apply_in_backward": True}


class Net(nn.Module):
    """Three Layers; `late` is set by the script before its third step."""

    def __init__(self, middle: Callable[[], nn.Module] = lambda: nn.Linear(WIDTH, WIDTH)) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(5, WIDTH), middle(), nn.Linear(WIDTH, 4)
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.late = False

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


class MoreLayers(Net):
    """A Layer that runs later."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.middle(torch.tanh(self.first(x))))
        return self.last(h + torch.tanh(self.extra(h)) if self.late else h)


class EvaluatesMore(Net):
    """A Layer that runs in evaluation alone."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.middle(torch.tanh(self.first(x))))
        return self.last(h if self.training else h + self.extra(h))


class ReadsInEvaluation(Net):
    """A weight that is read outside of its Layer, in evaluation alone."""

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        return h if self.training else h * self.middle.weight.norm()


class ReadsLater(Net):
    """The same in training, later, and where no gradient shows it."""

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        return h * self.middle.weight.detach().abs().mean() if self.late else h


class Parts(nn.Module):
    """A Layer of two, one of which others call too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.on = False

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(F.relu(self.inner(x)))


class CallsAPart(Net):
    """A part of a Layer, outside of it, later."""

    def __init__(self) -> None:
        super().__init__(Parts)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = self.middle(h) + (self.middle.inner(h) if self.late else 0.0)
        return self.last(torch.tanh(h))


class LooksOnly(Net):
    """Shapes and dtypes may be asked for at any time."""

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x).to(self.middle.weight.dtype)
        return h / self.middle.weight.shape[0] * self.middle.weight.numel() ** 0.5


class Called(Net):
    """A Layer with other weights than its own."""

    def forward(self, x: Tensor) -> Tensor:
        own = {name: p * 1.5 for name, p in self.middle.named_parameters()}
        h = torch.func.functional_call(self.middle, own, (torch.tanh(self.first(x)),))
        return self.last(torch.tanh(h))


class Observer(nn.Module):
    """Moves a buffer, once the script says so."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("size", torch.ones(()))
        self.on = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        if self.on and self.training:
            self.size.mul_(0.9).add_(0.1 * h.detach().abs().mean())
        return h / self.size


class Counter(Observer):
    """A number instead."""

    def forward(self, x: Tensor) -> Tensor:
        if self.on:
            self.calls = getattr(self, "calls", 0) + 1
        return self.inner(x) * (1.0 + 0.1 * getattr(self, "calls", 0))


SCALE = [1.0]


class Scaled(nn.Module):
    """Reads a flag that is up for its call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * SCALE[0]


class Flagged(Net):
    def __init__(self) -> None:
        super().__init__(Scaled)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        SCALE[0] = 2.0 if self.late else 1.0
        h = self.middle(h)
        SCALE[0] = 1.0
        return self.last(torch.tanh(h))


class UsesData(Net):
    """A weight's numbers, beside autograd and nearer to the input than its Layer."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + (torch.tanh(x) @ self.middle.weight.data[:5, :5]))


class UsesACopy(Net):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.tanh(x) @ self.middle.weight.detach().clone()[:5, :5])


class Hooked(nn.Module):
    """A hook in the backward reads a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda grad: grad * self.inner.weight.detach().square().mean())
        return self.inner(x)


class Jvp(Net):
    """A derivative forward through a Layer."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        _, slope = torch.func.jvp(self.middle, (h,), (torch.ones_like(h),))
        return self.last(h + slope)


class Slopes(nn.Module):
    """torch.func inside of a Layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.grad(lambda h: torch.tanh(self.inner(h)).square().sum())(x)


def switch(net: Any, index: int) -> None:
    net.late = net.middle.on = index >= 2


MODELS: dict[str, Callable[[], Net]] = {
    "a Layer later": MoreLayers,
    "a Layer in evaluation": EvaluatesMore,
    "a read in evaluation": ReadsInEvaluation,
    "a read later": ReadsLater,
    "a part": CallsAPart,
    "looks": LooksOnly,
    "other weights": Called,
    "an observer": partial(Net, Observer),
    "a counter": partial(Net, Counter),
    "a flag": Flagged,
    "data": UsesData,
    "a copy": UsesACopy,
    "a hook": partial(Net, Hooked),
    "jvp": Jvp,
    "slopes": partial(Net, Slopes),
}
EXACT = ""
CASES: dict[str, tuple[tuple[Mapping[str, Any], str], ...]] = {
    "a Layer later": ((SHARED, EXACT), (MOVED, EXACT), (ALL_MOVED, EXACT)),
    "a Layer in evaluation": ((SHARED, EXACT), (MOVED, EXACT)),
    "a read in evaluation": ((SHARED, "middle.weight is read"), (MOVED, "middle.weight is read")),
    "a read later": ((MOVED, "middle.weight is read"), (EARLY, EXACT)),
    "a part": ((SHARED, "there only while it runs"), (MOVED, "middle.inner.weight is read")),
    "looks": ((SHARED, EXACT), (MOVED, EXACT), (EARLY, EXACT)),
    "other weights": ((AGAIN, EXACT), (PRODUCTS, EXACT)),
    "an observer": ((AGAIN, "changes middle.size"), (EARLY, EXACT)),
    "a counter": ((AGAIN, "changes middle.calls"),),
    "a flag": ((AGAIN, "gives something else"), (PRODUCTS, "gives something else")),
    "data": ((EARLY, r"reads middle.weight.data"), ({}, EXACT)),
    "a copy": ((EARLY, EXACT),),
    "a hook": ((EARLY, "a hook reads middle.inner.weight"), ({}, EXACT)),
    "jvp": ((MOVED, "forward-mode"), ({}, EXACT)),
    "slopes": (({"offload.activations": True}, "uses torch.func"), ({}, EXACT)),
}


def data(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 5, generator=generator), torch.randn(8, 4, generator=generator)


Script = Callable[[Any, torch.optim.Optimizer, int], None]


def far(name: str, config: Mapping[str, Any], script: Script, *, split: bool = False) -> float:
    """Of losses, evaluated ones and weights from those of plain torch."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    wh.init()
    torch.manual_seed(0)
    net = MODELS.get(name, Net)()
    plain = copy.deepcopy(net)
    optimizer, wanted = SGD(plain.parameters()), []
    for index in range(4):
        script(plain, optimizer, index)
        x, y = data(index)
        optimizer.zero_grad()
        value = F.mse_loss(plain(x), y)
        value.backward()
        optimizer.step()
        wanted.append(value.item())
        plain.eval()
        with torch.no_grad():
            wanted.append(F.mse_loss(plain(data(9)[0]), data(9)[1]).item())
        plain.train()
    step = wh.parallelize(
        wh.annotate(net, {"": (wh.replicate(4), wh.split(2)) if split else wh.replicate()}),
        optimizer=SGD,
        loss=F.mse_loss,
        batch=data(0),
        config={"timeout_seconds": 20, **config},
    )
    got = []
    for index in range(4):
        script(net, step.optimizer, index)
        got += [float(step(data(index))["loss"]), float(step.evaluate(data(9))["loss"])]
    state, due = step.state_dict(), plain.state_dict()
    apart = [abs(a - b) for a, b in zip(got, wanted, strict=True)]
    apart += [float((state[key] - due[key]).abs().max()) for key in due]
    step.close(forget=True)
    return max(apart) if all(x == x for x in apart) else float("inf")  # noqa: PLR0124


def later(net: Any, optimizer: torch.optim.Optimizer, index: int) -> None:
    switch(net, index)


def on_rank(
    name: str, config: Mapping[str, Any], script: str, *, split: bool = False
) -> float | str:
    try:
        return far(name, config, SCRIPTS[script], split=split)
    except wh.WhaleError as error:
        return str(error)


def check(ranks: int, name: str, config: Mapping[str, Any], said: str, script: str) -> None:
    results = run_ranks(ranks, on_rank, name, dict(config), script)
    if said == EXACT:
        assert all(isinstance(x, float) and x < 1e-9 for x in results), (name, config, results)
        return
    assert all(isinstance(found, str) for found in results), (name, config, results)
    # Where one rank refuses first, the others are told.
    assert any(said in found and "hint:" in found for found in results), (name, config, results)


def _cases() -> list[Any]:
    found = []
    for name, settings in CASES.items():
        for config, said in settings:
            ranks = 2 if config is SHARED else 1
            words = "-".join(map(str, config.values())) or "plain"
            found.append(pytest.param(ranks, name, config, said, id=f"{name}-{words}"))
    return found


def split_on_rank(name: str, config: Mapping[str, Any]) -> float | str:
    return on_rank(name, config, "later", split=True)


def test_a_part_of_a_split_is_read_where_it_is_away() -> None:
    """Four ranks: two copies of each shard; it is our module that reads the weight there."""
    results = run_ranks(4, split_on_rank, "a part", SHARED)
    assert all(isinstance(found, str) for found in results), results
    assert any("middle" in found and "hint:" in found for found in results), results


@pytest.mark.parametrize(("ranks", "name", "config", "said"), _cases())
def test_code_that_comes_later(ranks: int, name: str, config: Any, said: str) -> None:
    check(ranks, name, config, said, "later")


# ---- what a script does with the optimizer -------------------------------------------------------


@torch.no_grad()
def clamps(net: Any, optimizer: torch.optim.Optimizer, index: int) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.clamp_(-0.1, 0.1)


def wraps(net: Any, optimizer: torch.optim.Optimizer, index: int) -> None:
    if index != 1:
        return
    plainly = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        own = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(own, 0.01)
        return plainly(*args, **kwargs)

    optimizer.step = step  # type: ignore[method-assign]


def schedules(net: Any, optimizer: torch.optim.Optimizer, index: int) -> None:
    """torch's schedulers wrap `step` too, to count its calls."""
    if index == 1:
        torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def drops(net: Any, optimizer: torch.optim.Optimizer, index: int) -> None:
    if index == 1:
        group = optimizer.param_groups[0]
        group["params"] = group["params"][:2]


SCRIPTS: dict[str, Script] = {
    "later": later, "clamps": clamps, "wraps": wraps, "schedules": schedules, "drops": drops
}  # fmt: skip


@pytest.mark.parametrize(
    ("script", "config", "said"),
    [
        ("clamps", {}, EXACT),
        ("clamps", SHARED, "extra.weight was written to"),  # others are gathered for each use
        ("clamps", {"zero.level": "v0"}, "was written to between two steps"),
        ("clamps", {"offload.level": "update"}, "was written to between two steps"),
        ("wraps", {}, EXACT),
        ("wraps", {"zero.level": "v1"}, "the optimizer's step was exchanged"),
        ("wraps", {"optimizer.num_apply_group": 3}, "the optimizer's step was exchanged"),
        ("schedules", {"zero.level": "v1"}, EXACT),
        ("drops", {}, EXACT),
        ("drops", {"zero.level": "v1"}, "lost parameters"),
    ],
    ids=str,
)
def test_what_a_script_does_with_the_optimizer(
    script: str, config: Mapping[str, Any], said: str
) -> None:
    check(2, "plain", config, said, script)


def emptied(config: Mapping[str, Any]) -> dict[str, Tensor]:
    wh.init()
    torch.manual_seed(0)
    net = nn.Linear(5, 4)
    net.nothing = nn.Parameter(torch.zeros(0, 3))
    step = wh.parallelize(
        wh.annotate(net, {"": wh.replicate()}),
        optimizer=SGD,
        loss=F.mse_loss,
        batch=data(0),
        config=dict(config),
    )
    step(data(0))
    found = {**step.state_dict(), "gradient": step.gradients()["weight"]}
    step.close(forget=True)
    return found


@pytest.mark.parametrize("level", ["v0", "v2"])
def test_a_parameter_without_elements_is_kept_by_all(level: str) -> None:
    plain, shared = (run_ranks(2, emptied, config)[0] for config in ({}, {"zero.level": level}))
    assert shared["nothing"].shape == (0, 3)
    for key, value in plain.items():
        torch.testing.assert_close(shared[key], value)
