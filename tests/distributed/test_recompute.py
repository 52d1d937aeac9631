"""Layers that run again in the backward (`gradient_checkpoint.*`): the same step, less kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import whale as wh
from tests.distributed.test_zero import _worst
from tests.ranks import RankFailure, run_ranks
from whale.engine.recorder import record_step
from whale.runtime.recomputed import RecomputedForward

pytestmark = pytest.mark.usefixtures("untried")

WIDTH = 8
ADAMW = partial(torch.optim.AdamW, lr=1e-2)


class Block(nn.Module):
    """Attention by hand and a wide pair, with dropout; may count its calls.

    What counts is looked at again in many steps, which takes long.
    """

    def __init__(self, *, counts: bool) -> None:
        super().__init__()
        self.counts = counts
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.count = 0

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        if self.counts:
            self.calls += 1
            self.count += 1
        q, k, v = (
            t.unflatten(-1, (2, WIDTH // 2)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.drop(self.out(mixed)) * scale
        return x + self.drop(self.down(F.gelu(self.up(x))))


class Tokens(nn.Module):
    """Batch norm over the tokens of all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(x.flatten(0, 1)).view(x.shape)


class Experts(nn.Module):
    """A mixture whose bias moves with what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = wh.nn.MoE(WIDTH, 12, num_experts=4, top_k=2, balance="bias")

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(x)


class Net(nn.Module):
    """A tied head, glue with a weight, and a block that is called twice."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, WIDTH)
        inner = {"norm": Tokens, "experts": Experts, "plain": nn.Identity}[kind]
        self.blocks = nn.ModuleList([Block(counts=kind == "plain" and not i) for i in range(3)])
        self.inner = nn.ModuleList([inner(), inner()])
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.emb(ids)
        h = self.inner[0](self.blocks[0](h, scale=self.gain))
        h = self.blocks[1](h, scale=self.gain * 2)
        h = self.inner[1](self.blocks[2](h, scale=self.gain))
        return self.head(h)


STAGES = {
    "emb|blocks.0|inner.0": wh.stage(),
    "blocks.[12]|inner.1|head": wh.stage(),
}
LAYOUTS: Mapping[str, tuple[int, Callable[[], dict[str, Any]], dict[str, Any]]] = {
    "one": (1, lambda: {"": wh.replicate()}, {}),
    "data": (2, lambda: {"": wh.replicate()}, {"pipeline.num_micro_batch": 2}),
    "split": (2, lambda: {"": wh.split()}, {"pipeline.num_micro_batch": 2}),
    "stages": (2, lambda: dict(STAGES), {"pipeline.num_micro_batch": 3}),
    "zero-bubble": (
        2,
        lambda: dict(STAGES),
        {"pipeline.num_micro_batch": 3, "pipeline.schedule": "zero-bubble"},
    ),
    "nested": (
        4,
        lambda: {pattern: (scope, wh.split(2)) for pattern, scope in STAGES.items()},
        {"pipeline.num_micro_batch": 2},
    ),
}


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 11, (7, 3), generator=generator)
    return ids, torch.randint(0, 11, (7, 3), generator=generator)


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def step_of(kind: str, layout: str, keep: str, **more: Any) -> Any:
    torch.manual_seed(0)
    _, entries, settings = LAYOUTS[layout]
    again = {"gradient_checkpoint.type": "collection", "gradient_checkpoint.keep": keep}
    config = {**settings, **(again if keep else {}), "timeout_seconds": 20, **more}
    net = wh.annotate(Net(kind), entries())
    return wh.parallelize(net, optimizer=ADAMW, loss=loss, batch=data(0), config=config)


def trained(kind: str, layout: str, keep: str, more: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    wh.init()
    found: list[dict[str, Any]] = []
    for own in ("", keep):
        step = step_of(kind, layout, own, **more)
        losses = [float(step(data(index))["loss"]) for index in range(3)]
        found.append({"losses": losses, "state": step.state_dict(), "gradients": step.gradients()})
        wrapped = [
            path
            for path, module in step._lowered.model.named_modules()
            if isinstance(module.__dict__.get("forward"), RecomputedForward)
            or isinstance(
                getattr(module.__dict__.get("forward"), "forward", None), RecomputedForward
            )
        ]
        found[-1]["again"] = [x.path for s in step.plan.stages for x in s.layers if x.recompute]
        found[-1]["wrapped"] = wrapped
        step.close(forget=True)
    plain, again = found
    return {
        "loss": max(abs(a - b) for a, b in zip(plain["losses"], again["losses"], strict=True)),
        "state": _worst(again["state"], plain["state"]),
        "gradients": _worst(again["gradients"], plain["gradients"]),
        "again": again["again"],
        "wrapped": again["wrapped"],
        "before": plain["again"],
    }


@pytest.mark.covering(1)
@pytest.mark.parametrize("zero", ["", "v2"])
@pytest.mark.parametrize("activations", [False, True])
@pytest.mark.parametrize("keep", ["inputs", "products"])
@pytest.mark.parametrize("kind", ["plain", "norm", "experts"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_step(layout: str, kind: str, keep: str, activations: bool, zero: str) -> None:
    more = {"zero.level": zero, "offload.activations": activations}
    ranks = LAYOUTS[layout][0]
    found = run_ranks(ranks, trained, kind, layout, keep, more)
    for each in found:
        assert max(each["loss"], each["state"], each["gradients"]) < 1e-12, each
        assert not each["before"]
        assert {f"blocks.{i}" for i in range(3)} <= set(each["again"])
    assert any(each["wrapped"] for each in found)


def test_a_second_run_may_gather_what_the_first_had() -> None:
    """A checkpoint that keeps products follows what runs inside, and a gather is no part of it."""
    more = {"zero.level": "v2", "offload.activations": True}
    for found in run_ranks(2, trained, "norm", "data", "products", more):
        assert max(found["loss"], found["state"], found["gradients"]) < 1e-12, found


def recorded(kind: str, layout: str, keep: str) -> tuple[list[str], list[str]]:
    torch.set_num_threads(1)
    wh.init()
    step = step_of(kind, layout, keep)
    planned, seen = record_step(step, data(0))
    step.close(forget=True)
    return [str(item) for item in planned], [str(item) for item in seen]


@pytest.mark.covering(1)
@pytest.mark.parametrize("keep", ["inputs", "products"])
@pytest.mark.parametrize("kind", ["plain", "norm", "experts"])
@pytest.mark.parametrize("layout", ["data", "split", "stages"])
def test_what_runs_is_what_was_planned(layout: str, kind: str, keep: str) -> None:
    for planned, seen in run_ranks(LAYOUTS[layout][0], recorded, kind, layout, keep):
        assert planned == seen


# ---- what cannot run again -----------------------------------------------------------------------


HOLDER = {"scale": torch.ones(())}


class Shared(nn.Module):
    """Reads a number outside of modules, which the Layer after it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.lin(x)) * HOLDER["scale"]
        HOLDER["scale"] = 1.0 + x.detach().mean()
        return y


class Writes(nn.Module):
    """Writes to its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x.relu_()
        return self.lin(x)


class Logs(nn.Module):
    """Changes an object of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.log = Counter()

    def forward(self, x: Tensor) -> Tensor:
        self.log.seen += 1
        return self.lin(x) * self.log.seen


class Counter:
    def __init__(self) -> None:
        self.seen = 0


def refused(kind: str, pattern: str) -> str:
    torch.set_num_threads(1)
    wh.init()
    torch.manual_seed(0)
    middle = {
        "shared": lambda: nn.Sequential(Shared(), Shared()),
        "writes": Writes,
        "logs": Logs,
    }[kind]()
    net = nn.Sequential(
        nn.Linear(4, 4), *(middle if kind == "shared" else [middle]), nn.Linear(4, 2)
    )
    config = {"gradient_checkpoint.type": "collection", "gradient_checkpoint.layers": pattern}
    x, y = torch.randn(6, 4), torch.randn(6, 2)
    try:
        step = wh.parallelize(net, optimizer=ADAMW, loss=F.mse_loss, batch=(x, y), config=config)
    except wh.WhaleError as error:
        return str(error)
    paths = [x.path for s in step.plan.stages for x in s.layers if x.recompute]
    step.close(forget=True)
    return f"recomputes {paths}"


@pytest.mark.parametrize(
    ("kind", "pattern", "said"),
    [
        ("writes", "1", "cannot run again: it writes to a tensor that it is given"),
        ("logs", "1", "cannot run again: its forward changes 1.log, a Counter"),
        ("logs", "*", "recomputes ['0', '2']"),
        ("shared", "1", "run again in the backward, does not compute what it did"),
        ("writes", "9", "matches none of the model's 3 Layers"),
    ],
)
def test_what_cannot_run_again_is_refused(kind: str, pattern: str, said: str) -> None:
    (found,) = run_ranks(1, refused, kind, pattern)
    assert said in found


def test_a_wrong_layer_is_named() -> None:
    with pytest.raises((RankFailure, wh.ConfigError)):
        wh.Config.from_dict({"gradient_checkpoint.keep": "nothing"})
