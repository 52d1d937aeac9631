"""Updates in groups, after the backward and inside it: the same weights, or refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import whale as wh
from tests.distributed.test_zero import ADAMW, _worst, made, plain
from tests.distributed.test_zero import data as batch
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("untried")


def grouped(
    level: str, layout: str, num_groups: int, early: bool, max_norm: float | None
) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    wh.init()
    more = {
        "optimizer.num_apply_group": num_groups,
        "optimizer.apply_in_backward": early,
        "communication.bucket_bytes": 1000,
    }
    step = made(level, layout, max_norm, **more)
    updates: list[str] = []
    run = step._store.updater._run

    def noted(group: int, *args: Any) -> None:
        inside = torch._C._current_graph_task_id() != -1
        updates.append(f"{group}{'b' if inside else ''}")
        run(group, *args)

    step._store.updater._run = noted
    losses = [float(step(batch(index))["loss"]) for index in range(3)]
    want, _, state = plain(max_norm, 1)
    found = {
        "loss": max(abs(a - b) for a, b in zip(losses, want, strict=True)),
        "state": _worst(step.state_dict(), state),
        "updates": updates,
        "left": sum(p.grad is not None for p in step._lowered.store.kept.values()),
        "groups": {h.apply_group for h in step.plan.homes},
    }
    if early:
        with pytest.raises(wh.WhaleError, match="let go as soon as they are used"):
            step.gradients()
    step.close(forget=True)
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("num_groups", [1, 3])
@pytest.mark.parametrize("layout", ["one", "data", "stages"])
@pytest.mark.parametrize("level", ["", "v1", "v2"])
def test_equal_to_one_update(level: str, layout: str, num_groups: int, early: bool) -> None:
    ranks = {"one": 1, "data": 3, "stages": 4}[layout]
    name = "data" if layout == "one" else layout
    for found in run_ranks(ranks, grouped, level, name, num_groups, early, None):
        assert max(found["loss"], found["state"]) < 1e-12, found
        assert found["groups"] == set(range(num_groups))
        seen = [text.rstrip("b") for text in found["updates"]]
        assert len(seen) == 3 * len(set(seen))
        assert early or not any(text.endswith("b") for text in found["updates"])


def inside(zero: str) -> tuple[list[str], list[int]]:
    """Which groups are updated while the backward runs, and the gradients that there are then."""
    torch.set_num_threads(1)
    wh.init()
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(5, 5), nn.Tanh())]
    net = nn.Sequential(*layers, nn.Linear(5, 4))
    step = wh.parallelize(
        wh.annotate(net, {"": wh.replicate()}),
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
        loss=nn.functional.mse_loss,
        batch=batch(0),
        config={
            "optimizer.num_apply_group": 7,
            "optimizer.apply_in_backward": True,
            "communication.bucket_bytes": 1,
            "zero.level": zero,
        },
    )
    store, order, held = step._store, [], []
    run = store.updater._run

    def noted(group: int, *args: Any) -> None:
        order.append(f"{group}{'b' if torch._C._current_graph_task_id() != -1 else ''}")
        held.append(sum(p.grad is not None for p in store.params.values()))
        run(group, *args)

    store.updater._run = noted
    step(batch(0))
    step.close(forget=True)
    return order, held


@pytest.mark.parametrize("zero", ["", "v1"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_groups_follow_the_backward_and_their_gradients_are_let_go(ranks: int, zero: str) -> None:
    for order, held in run_ranks(ranks, inside, zero):
        assert order == [f"{group}b" for group in range(7)], order
        # Of 14 gradients never more than those of a group and of what is on its way.
        assert max(held) <= 4, held


@pytest.mark.parametrize("level", ["", "v2"])
def test_clipping_is_by_the_norm_of_all_groups(level: str) -> None:
    for found in run_ranks(3, grouped, level, "data", 3, False, 0.1):
        assert max(found["loss"], found["state"]) < 1e-12, found


class Straight(nn.Module):
    """Layers for any number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.side = nn.Linear(5, 6), nn.Linear(6, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.stem(x)
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        return self.head(h + self.side(h))  # type: ignore[no-any-return]


def some_rows(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Batches that leave ranks without rows, or with few."""
    g = torch.Generator().manual_seed(index)
    rows = (7, 1, 6, 2, 7)[index]
    return torch.randn(rows, 5, generator=g), torch.randn(rows, 4, generator=g)


APART = {
    "data": ({"": wh.replicate()}, {}),
    "stages": (
        {"stem|blocks.[01]": wh.stage(), "blocks.[23]|side|head": wh.stage()},
        {"pipeline.num_micro_batch": 2},
    ),
    "zero-bubble": (
        {"stem|blocks.[01]": wh.stage(), "blocks.[23]|side|head": wh.stage()},
        {"pipeline.num_micro_batch": 2, "pipeline.schedule": "zero-bubble"},
    ),
}


def apart(level: str, layout: str, tier: str) -> float:
    """Ranks of which some have all gradients of a group in the backward, and others do not."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    wh.init()
    torch.manual_seed(0)
    net = Straight()
    pattern, more = APART[layout]
    truth = copy.deepcopy(net)
    step = wh.parallelize(
        wh.annotate(net, pattern),
        optimizer=ADAMW,
        loss=nn.functional.mse_loss,
        batch=some_rows(0),
        config={
            "zero.level": level,
            "offload.level": tier,
            "optimizer.num_apply_group": 4,
            "optimizer.apply_in_backward": True,
            "communication.bucket_bytes": 200,
            "timeout_seconds": 40,
            **more,
        },
    )
    optimizer, far = ADAMW(truth.parameters()), 0.0
    for index in range(5):
        x, y = some_rows(index)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(truth(x), y)
        loss.backward()
        optimizer.step()
        far = max(far, abs(float(step((x, y))["loss"]) - loss.item()))
    found = max(far, _worst(step.state_dict(), truth.state_dict()))
    step.close(forget=True)
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("tier", ["", "state", "weights", "update"])
@pytest.mark.parametrize("layout", APART)
@pytest.mark.parametrize("level", ["", "v0", "v1", "v2"])
def test_ranks_need_not_know_when_others_update(level: str, layout: str, tier: str) -> None:
    ranks = 3 if layout == "data" else 4
    assert max(run_ranks(ranks, apart, level, layout, tier)) < 1e-12


def brought(num_micro_batch: int) -> list[float]:
    """What comes from the host and goes back in a step, over the bytes of what is kept there."""
    torch.set_num_threads(1)
    wh.init()
    step = wh.parallelize(
        Straight(),
        optimizer=ADAMW,
        loss=nn.functional.mse_loss,
        batch=batch(0),
        config={
            "offload.level": "weights",
            "optimizer.apply_in_backward": True,
            "optimizer.num_apply_group": 4,
            "pipeline.num_micro_batch": num_micro_batch,
            "check_parts": False,  # looks at rows of some steps again
        },
    )
    store = step._store
    nbytes = sum(store.kept[name].nbytes for name in store.streamed)
    for index in range(3):
        step(batch(index))
    before = store.moved_bytes()
    step(batch(3))
    found = [(b - a) / nbytes for a, b in zip(before, store.moved_bytes(), strict=True)]
    step.close(forget=True)
    return found


@pytest.mark.parametrize("num_micro_batch", [1, 3])
def test_streamed_weights_come_once_for_each_pass(num_micro_batch: int) -> None:
    ((came, went),) = run_ranks(1, brought, num_micro_batch)
    assert came <= 2.0 * num_micro_batch + 1e-9, came
    assert went == 1.0


def given(what: str) -> str:
    """A plan that updates inside the backward, under settings that it cannot keep."""
    torch.set_num_threads(1)
    wh.init()
    net = wh.annotate(nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 4)), {"": wh.replicate()})
    plain_loss = nn.functional.mse_loss
    settings: dict[str, Any] = {"optimizer.apply_in_backward": True}
    plan = wh.plan(net, cluster="1x1xCPU", batch=batch(0), loss=plain_loss, config=settings)
    if what == "clipping":
        settings["optimizer.max_grad_norm"] = 1.0
    if what == "scale":
        precision = plan.to_dict()["precision"] | {
            "autocast": "float16",
            "loss_scale": 1024.0,
            "dynamic": True,
        }
        plan = type(plan).from_dict(plan.to_dict() | {"precision": precision})
    try:
        wh.parallelize(
            net, optimizer=ADAMW, loss=plain_loss, batch=batch(0), config=settings, plan=plan
        )
    except wh.WhaleError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "words"), [("clipping", "max_grad_norm"), ("scale", "any gradient overflowed")]
)
def test_a_given_plan_is_held_to_the_same(what: str, words: str) -> None:
    (text,) = run_ranks(1, given, what)
    assert words in text and "hint:" in text, text


class Counting(torch.optim.SGD):
    """Its rate falls with each call, which it counts beside its parameters."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls = getattr(self, "calls", 0) + 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad, alpha=-0.1 / self.calls)


def refused(what: str) -> str:
    torch.set_num_threads(1)
    wh.init()
    more: dict[str, Any] = {
        "clipping": {"optimizer.apply_in_backward": True, "optimizer.max_grad_norm": 1.0},
        "scale": {
            "optimizer.apply_in_backward": True,
            "amp.level": "O1",
            "amp.dtype": "float16",
        },
        "counting": {"optimizer.num_apply_group": 2},
    }[what]
    net = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 4))
    try:
        wh.parallelize(
            wh.annotate(net, {"": wh.replicate()}),
            optimizer=lambda named: Counting([p for _, p in named], lr=0.1),
            loss=nn.functional.mse_loss,
            batch=batch(0),
            config=more,
        )
    except wh.WhaleError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("clipping", "max_grad_norm = 1.0: the norm of all gradients"),
        ("scale", "whether any gradient overflowed"),
        ("counting", "Counting updates .* otherwise when its step is called for 2 groups"),
    ],
)
def test_what_needs_all_gradients_at_once_is_refused(what: str, words: str) -> None:
    (text,) = run_ranks(1, refused, what)
    assert pytest.importorskip("re").search(words, text) and "hint:" in text, text
