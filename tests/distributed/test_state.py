"""What a step leaves behind: buffers and attributes that a forward changes, weights without a
gradient. As plain torch leaves them, or refused.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import whale as wh
from tests.parity.layouts import Layout
from tests.ranks import run_ranks
from whale.ir.virtual_device import micro_batch_cuts

pytestmark = pytest.mark.usefixtures("untried")

ROWS, STEPS, WIDTH = 7, 4, 6
OPTIMIZER = partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.1)


class Block(nn.Module):
    """A Linear whose forward leaves something behind, by `how`."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("flag", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("wave", torch.ones(2, dtype=torch.complex128))
        self.register_buffer("hidden", torch.zeros(WIDTH), persistent=False)
        self.calls = 0
        self.last: Tensor = torch.zeros(1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.fc(x)
        mean = out.detach().mean(0)
        match self.how:
            case "counter":
                self.count += 1
                self.wave *= 1j
                self.flag[0] = True
                out = out / self.count.clone()
            case "assigned":
                self.count = self.count + 1
                self.calls += 1
                out = out / self.calls
            case "scratch":
                self.last = out.detach()
                self.hidden = mean
            case "average":
                self.mean.mul_(0.9).add_(mean, alpha=0.1)
                out = out - self.mean.clone()
            case "average by data":
                self.mean.data = 0.9 * self.mean + 0.1 * mean
            case "rows":
                self.count += len(x)
            case "hidden":
                self.hidden = 0.9 * self.hidden + 0.1 * mean
                out = out - self.hidden
            case "number":
                self.calls = 0.9 * self.calls + float(mean.sum())
                out = out - self.calls
        return out


class Net(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.block = Block(how)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.block(torch.tanh(self.first(x)))))


class Twice(nn.Module):
    """One block under two names, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.block = Block("counter")
        self.again = self.block
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.again(torch.tanh(self.block(self.first(x)))))


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.block = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.block(self.first(x))))


class Choosy(nn.Module):
    """Experts of which some never get a row, a branch of some steps only, and a loose Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.frozen(self.first(x))
        # Column 0 says which expert: 2 in the first rows only, 3 in no row at all.
        choice = x[:, 0].round().long().clamp(0, 2)
        out = torch.zeros_like(hidden)
        for index, expert in enumerate(self.experts):
            rows = (choice == index).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(hidden[rows]))
        if bool((x[:, 1] > 50).any()):
            out = out + self.sometimes(hidden)
        return self.last(torch.tanh(out))


class Branches(nn.Module):
    """A trace can see it all: a loose Linear, and one whose output nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.loose = nn.Linear(WIDTH, WIDTH)
        self.unread = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        self.unread(hidden)
        return self.last(self.frozen(hidden))


class Routed(nn.Module):
    """Experts that live on several ranks, and a layer that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.block = wh.nn.MoE(WIDTH, 8, 5, top_k=1, balance="bias", balance_rate=0.05)
        self.idle = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(torch.tanh(self.first(x))))


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{how: partial(Net, how) for how in ("counter", "assigned", "scratch")},
    "twice": Twice,
    "spectral": Spectral,
    "choosy": Choosy,
    "branches": Branches,
    "routed": Routed,
}
KEPT = tuple(MODELS)
REFUSED = ("average", "average by data", "rows", "hidden", "number")


def nothing(model: nn.Module, paths: Any) -> nn.Module:
    return model


def halves(model: nn.Module, paths: Any) -> nn.Module:
    """Two stages, the second from `last` on."""
    rest = "|".join(name for name, _ in model.named_children() if name not in ("last", "again"))
    return wh.annotate(model, {rest: wh.stage(), "last": wh.stage()})


def split_first(model: nn.Module, paths: Any) -> nn.Module:
    rest = {name for name, _ in model.named_children()} - {"first", "last"}
    entries = {"first|last": wh.split()}
    return wh.annotate(model, {**entries, "...": wh.replicate()} if rest else entries)


def split_block(model: nn.Module, paths: Any) -> nn.Module:
    return wh.annotate(model, {"block": wh.split(), "...": wh.replicate()})


LAYOUTS = {
    "data": Layout("data", 3, nothing, {"pipeline.num_micro_batch": 2}, speeds=(3.0, 2.0, 1.0)),
    # With 7 rows in 3 micro-batches, some replica has none now and then.
    "thin": Layout("thin", 3, nothing, {"pipeline.num_micro_batch": 4}, speeds=(3.0, 1.0, 1.0)),
    "split": Layout("split", 2, split_first),
    "experts": Layout("experts", 2, split_block, {"pipeline.num_micro_batch": 2}),
    "stages": Layout("stages", 2, halves, {"pipeline.num_micro_batch": 3}),
    "zero-bubble": Layout(
        "zero-bubble",
        2,
        halves,
        {"pipeline.num_micro_batch": 3, "pipeline.schedule": "zero-bubble"},
    ),
    "nested": Layout("nested", 4, halves, {"pipeline.num_micro_batch": 3}),
}
UNTRACED = ("choosy",)
"""Their forwards branch on values, so they have no stages and no splits."""


def build(name: str) -> nn.Module:
    torch.manual_seed(5)
    made = MODELS[name]() if name in MODELS else Net(name)
    return made.double()


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(100 + step)
    x, y = torch.randn(ROWS, WIDTH).double(), torch.randn(ROWS, 1).double()
    x[:, 0] = torch.tensor([2.0, 2.0, 0.0, 1.0, 1.0, 0.0, 1.0]) if step != 1 else 0.0
    x[:, 1] = 99.0 if step == 2 else 0.0
    return x, y


def reference(name: str, micro: int) -> tuple[list[float], dict[str, Tensor]]:
    model = build(name)
    optimizer = OPTIMIZER(model.parameters())
    points = micro_batch_cuts(ROWS, micro)
    losses = []
    for step in range(STEPS):
        x, y = batch_of(step)
        optimizer.zero_grad()
        total = 0.0
        for low, high in zip(points, points[1:], strict=False):
            loss = F.mse_loss(model(x[low:high]), y[low:high], reduction="sum") / ROWS
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    return losses, model.state_dict()


def train(layout_name: str, names: list[str]) -> dict[str, Any]:
    """What each model came to, or why it was refused."""
    wh.init()
    layout = LAYOUTS[layout_name]
    found: dict[str, Any] = {}
    for name in names:
        model = build(name)
        before, example = copy.deepcopy(model), batch_of(0)
        random = torch.get_rng_state()
        layout.annotate(model, None)
        try:
            step = wh.parallelize(
                model,
                optimizer=OPTIMIZER,
                batch=example,
                loss=F.mse_loss,
                config={**layout.config, "check_parts": False},
                cluster=layout.cluster(),
            )
            assert same(before, model), f"{name}: parallelize changed the user's model"
            assert torch.equal(random, torch.get_rng_state()), f"{name}: parallelize drew numbers"
            losses = [float(step(batch_of(k))["loss"]) for k in range(STEPS)]
            found[name] = (losses, step.state_dict(), step.gradients())
            step.close()
            assert same(before, model), f"{name}: a step changed the user's model"
        except wh.WhaleError as error:
            found[name] = str(error)
    return found


def same(a: nn.Module, b: nn.Module) -> bool:
    tensors = zip((*a.parameters(), *a.buffers()), (*b.parameters(), *b.buffers()), strict=True)
    numbers = zip(a.modules(), b.modules(), strict=True)
    return all(torch.equal(x, y) for x, y in tensors) and all(
        getattr(x, key, None) == getattr(y, key, None)
        for x, y in numbers
        for key in ("calls", "training")
    )


@pytest.mark.every(3)
@pytest.mark.parametrize("layout_name", LAYOUTS)
def test_state_is_what_one_device_leaves(layout_name: str) -> None:
    layout = LAYOUTS[layout_name]
    traced = layout.annotate in (halves, split_first)
    every = ("routed",) if layout_name == "experts" else KEPT
    names = [n for n in every if not (traced and n in UNTRACED)]
    if layout.annotate is halves:
        names.remove("twice")
    micro = layout.config.get("pipeline.num_micro_batch", 1)
    for rank, results in enumerate(run_ranks(layout.num_ranks, train, layout_name, names)):
        for name, result in results.items():
            assert not isinstance(result, str), (name, result)
            losses, state = reference(name, micro)
            assert result[0] == pytest.approx(losses, rel=1e-9), (name, rank)
            assert list(result[1]) == list(state), (name, rank)
            for key, tensor in state.items():
                torch.testing.assert_close(
                    result[1][key], tensor, rtol=1e-9, atol=1e-11, msg=f"{name} {key} {rank}"
                )
            if name in ("choosy", "branches"):
                loose = "unused.weight" if name == "choosy" else "loose.weight"
                assert not result[2][loose].any(), "gradients() has zeros where there are none"


def test_state_by_rows_is_refused_on_several_replicas() -> None:
    for results in run_ranks(3, train, "data", list(REFUSED)):
        for name, result in results.items():
            assert isinstance(result, str), name
            assert "block." in result and "hint:" in result, (name, result)


def test_state_by_rows_is_exact_on_one_replica() -> None:
    names = [n for n in REFUSED if n != "number"]
    for results in run_ranks(2, train, "stages", names):
        for name, result in results.items():
            assert not isinstance(result, str), (name, result)
            losses, state = reference(name, 3)
            assert result[0] == pytest.approx(losses, rel=1e-9), name
            for key, tensor in state.items():
                torch.testing.assert_close(result[1][key], tensor, rtol=1e-9, atol=1e-11)


class Glue(nn.Module):
    """Counts between its Layers, where nobody would count in a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.last(self.first(x) / self.count.clone())


MODELS["glue"] = Glue


def test_state_between_stages_is_refused() -> None:
    for results in run_ranks(2, train, "stages", ["glue"]):
        assert "count is changed by the forward, between Layers" in results["glue"]


class DeadEnd(nn.Module):
    """Sends the next stage a value that it reads without a gradient."""

    def __init__(self, detach: bool) -> None:
        super().__init__()
        self.first, self.aside = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last, self.detach = nn.Linear(WIDTH, 1), detach

    def forward(self, x: Tensor) -> Tensor:
        hidden, aside = self.first(x), self.aside(x)
        aside = aside.detach() if self.detach else aside
        return self.last(hidden) + (self.last(aside).detach() > 0)


MODELS["dead end"] = partial(DeadEnd, False)
MODELS["detached"] = partial(DeadEnd, True)


def test_a_value_without_a_gradient_is_refused_between_stages() -> None:
    for results in run_ranks(2, train, "stages", ["dead end", "detached"]):
        assert "have no gradient there" in results["dead end"]
        losses, state = reference("detached", 3)
        assert results["detached"][0] == pytest.approx(losses, rel=1e-9)
        for key, tensor in state.items():
            torch.testing.assert_close(results["detached"][1][key], tensor, rtol=1e-9, atol=1e-11)


# ---- the user's module while a step is open -----------------------------------------------------


class Faced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


MODELS["faced"] = Faced


def use_face(layout_name: str) -> dict[str, Any]:
    """Trains, loads, freezes a norm and reads, all through the user's module."""
    wh.init()
    layout = LAYOUTS[layout_name]
    model = build("faced")
    layout.annotate(model, None)
    step = wh.parallelize(
        model,
        optimizer=OPTIMIZER,
        batch=batch_of(0),
        loss=F.mse_loss,
        config={**layout.config, "check_parts": False},
        cluster=layout.cluster(),
    )
    step(batch_of(0))
    found: dict[str, Any] = {"trained": model.state_dict(), "part": model.first.state_dict()}
    model.load_state_dict({k: v / 2 for k, v in model.state_dict().items()})
    model.first[1].eval()
    step(batch_of(1))
    step.evaluate(batch_of(2))
    step(batch_of(2))
    found["loaded"] = model.state_dict()
    model.eval()
    try:
        found["output"] = model(batch_of(3)[0])
    except wh.WhaleError as error:
        found["output"] = str(error)
    model.train()
    model.first[1].eval()
    model.last.requires_grad_(False)
    try:
        step(batch_of(3))
    except wh.WhaleError as error:
        found["frozen"] = str(error)
    model.last.requires_grad_(True)
    step.write_back()
    step.close()
    found["after"] = model.state_dict()
    found["whole"] = model.eval()(batch_of(3)[0]).detach()
    return found


def face_reference(micro: int) -> dict[str, Any]:
    model = build("faced")
    optimizer = OPTIMIZER(model.parameters())
    points = micro_batch_cuts(ROWS, micro)

    def step(number: int) -> None:
        x, y = batch_of(number)
        optimizer.zero_grad()
        for low, high in zip(points, points[1:], strict=False):
            (F.mse_loss(model(x[low:high]), y[low:high], reduction="sum") / ROWS).backward()
        optimizer.step()

    step(0)
    found: dict[str, Any] = {"trained": copy.deepcopy(model.state_dict())}
    model.load_state_dict({k: v / 2 for k, v in model.state_dict().items()})
    model.first[1].eval()
    step(1)
    step(2)
    found["loaded"] = model.state_dict()
    found["output"] = model.eval()(batch_of(3)[0]).detach()
    return found


@pytest.mark.every(2)
@pytest.mark.parametrize("layout_name", ["data", "split", "stages", "nested"])
def test_the_users_module_is_the_face_of_the_trained_one(layout_name: str) -> None:
    layout = LAYOUTS[layout_name]
    truth = face_reference(layout.config.get("pipeline.num_micro_batch", 1))
    for result in run_ranks(layout.num_ranks, use_face, layout_name):
        close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-11, check_dtype=False)
        for key in ("trained", "loaded"):
            assert list(result[key]) == list(truth[key])
            close(dict(result[key]), dict(truth[key]))
        close(dict(result["after"]), dict(truth["loaded"]))
        close(dict(result["part"]), {k: result["trained"][f"first.{k}"] for k in result["part"]})
        close(result["whole"], truth["output"])
        assert "requires_grad=False now" in result["frozen"]
        if layout_name == "data":
            close(result["output"], truth["output"])
        else:
            assert "step.evaluate" in result["output"]
