"""What ranks share out (`zero.level`) beside plain torch: a step whole, and checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import whale as wh
from tests.ranks import RankFailure, run_ranks

pytestmark = pytest.mark.usefixtures("untried")

WIDTH = 6
LEVELS = ("v0", "v1", "v2")
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)


class Block(nn.Module):
    """A residual block that may run its inside again in the backward, in either way."""

    def __init__(self, again: bool | None, frozen: bool = False) -> None:
        super().__init__()
        self.up, self.norm, self.down = (
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.LayerNorm(2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
        )
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.again = again
        self.up.requires_grad_(not frozen)

    def inside(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.norm(self.up(x))))

    def forward(self, x: Tensor) -> Tensor:
        if self.again is None:
            return x + self.scale * self.inside(x)
        return x + self.scale * checkpoint(self.inside, x, use_reentrant=self.again)


class Net(nn.Module):
    """Blocks of every kind, a weight that code between them reads, and an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList([Block(None), Block(False), Block(True), Block(None, True)])
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for block in self.blocks:
            h = block(h) * self.gain
        return checkpoint(self.head, h, use_reentrant=False)


LAYOUTS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "data": lambda: {"": wh.replicate()},
    "stages": lambda: {"stem|blocks.[01]": wh.stage(), "blocks.[23]|head|unused": wh.stage()},
}


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(7, 5, generator=generator), torch.randn(7, 4, generator=generator)


def model() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def plain(max_norm: float | None, num_micro_batch: int) -> list[Any]:
    """Losses, gradients of the last step, and the state after it."""
    net, losses = model(), []
    optimizer = ADAMW(net.parameters())
    for index in range(3):
        x, y = data(index)
        optimizer.zero_grad()
        loss = F.mse_loss(net(x), y)
        loss.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(net.parameters(), max_norm)
        optimizer.step()
        losses.append(loss.item())
    gradients = {n: p.grad for n, p in net.named_parameters()}
    return [losses, gradients, net.state_dict()]


def config(level: str, layout: str, max_norm: float | None) -> dict[str, Any]:
    found = {"zero.level": level, "optimizer.max_grad_norm": max_norm, "timeout_seconds": 20}
    return found | {"pipeline.num_micro_batch": 2 if layout == "stages" else 1}


def made(level: str, layout: str, max_norm: float | None = None, **more: Any) -> Any:
    net = wh.annotate(model(), LAYOUTS[layout]())
    settings = config(level, layout, max_norm) | more
    return wh.parallelize(net, optimizer=ADAMW, loss=F.mse_loss, batch=data(0), config=settings)


def train(level: str, layout: str, max_norm: float | None) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    wh.init()
    step = made(level, layout, max_norm)
    losses = []
    for index in range(3):
        losses.append(float(step(data(index))["loss"]))
        step.evaluate(data(9))
    want_losses, want_gradients, want_state = plain(max_norm, step.plan.num_micro_batch)
    found = {
        "loss": max(abs(a - b) for a, b in zip(losses, want_losses, strict=True)),
        "gradient": _worst(step.gradients(), want_gradients),
        "state": _worst(step.state_dict(), want_state),
        "levels": {home.name: home.zero for home in step.plan.homes},
        "elements": sum(p.numel() for p in step._lowered.store.kept.values()),
    }
    step.close(forget=True)
    return found


def _worst(found: Mapping[str, Tensor], want: Mapping[str, Any]) -> float:
    assert found.keys() <= want.keys()
    pairs = ((v, want[k]) for k, v in found.items())
    return max(float((a - (0.0 if b is None else b)).abs().max()) for a, b in pairs)


@pytest.mark.covering(2)
@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("level", LEVELS)
def test_equal_to_plain_torch(level: str, layout: str, max_norm: float | None) -> None:
    found = run_ranks(4, train, level, layout, max_norm)
    for rank in found:
        assert max(rank["loss"], rank["gradient"], rank["state"]) < 1e-12, rank
    highest = LEVELS.index(level) + 1
    levels = found[0]["levels"]
    assert levels["blocks.0.up.weight"] == highest
    # What no Layer alone reads stays; what does not train has no gradient or state to share out.
    assert levels["gain"] == min(highest, 2 if layout == "data" else 1)
    assert levels["blocks.3.up.weight"] == (3 if level == "v2" else 0)
    assert levels["unused.weight"] >= 1
    if layout == "data" and level == "v2":
        total = sum(p.numel() for p in Net().parameters())
        assert sum(rank["elements"] for rank in found) == total


def resume(folder: str) -> list[float]:
    """Saved at one level, loaded at each other, and in plain torch: the next losses."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    wh.init()
    far = []
    for saved in ("", *LEVELS):
        path = str(Path(folder) / f"level{saved}")
        step = made(saved, "data")
        step(data(0))
        step.save(path)
        want = [float(step(data(i))["loss"]) for i in (1, 2)]
        step.close(forget=True)
        for loaded in ("", *LEVELS):
            step = made(loaded, "data" if loaded != "v1" else "stages")
            step.load(path)
            far += [
                abs(float(step(data(i))["loss"]) - w) for i, w in zip((1, 2), want, strict=True)
            ]
            step.close(forget=True)
    return far


def test_a_checkpoint_of_any_level_goes_on_at_any_other(tmp_path: Path) -> None:
    for far in run_ranks(2, resume, str(tmp_path), timeout=120.0):
        assert max(far) < 1e-12, far


def given_weights() -> tuple[float, list[int]]:
    """Unequal shares, by a plan of one's own; what was loaded trains."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    wh.init()
    net = wh.annotate(model(), LAYOUTS["data"]())
    settings = config("v2", "data", None)
    plan = wh.plan(net, cluster="1x3xCPU", batch=data(0), loss=F.mse_loss, config=settings)
    text = plan.to_dict() | {"state_weights": [5, 0, 2]}
    plan = type(plan).from_dict(text)
    step = wh.parallelize(
        net, optimizer=ADAMW, loss=F.mse_loss, batch=data(0), config=settings, plan=plan
    )
    other = copy.deepcopy(model())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    step.load_state_dict(other.state_dict())
    optimizer = ADAMW(other.parameters())
    for index in range(2):
        x, y = data(index)
        optimizer.zero_grad()
        F.mse_loss(other(x), y).backward()
        optimizer.step()
        step((x, y))
    step.write_back()
    far = _worst(net.state_dict(), other.state_dict())
    kept = [p.numel() for p in step._lowered.store.kept.values()]
    step.close()
    return far, [sum(kept)]


def test_shares_may_be_unequal() -> None:
    found = run_ranks(3, given_weights)
    assert max(far for far, _ in found) < 1e-12
    sizes = [size for _, (size,) in found]
    assert sizes[1] == 0 and 2.0 < sizes[0] / sizes[2] < 3.0


def refused(what: str) -> str:
    torch.set_num_threads(1)
    wh.init()
    try:
        if what == "optimizer":
            net = wh.annotate(model(), LAYOUTS["data"]())
            wh.parallelize(
                net,
                optimizer=lambda named: torch.optim.Adafactor([p for _, p in named]),
                loss=F.mse_loss,
                batch=data(0),
                config=config("v0", "data", None),
            )
        step = made("v2", "data")
        if what == "plan":
            plan = step.plan.to_dict()
            homes = [h | ({"zero": 3} if h["name"] == "gain" else {}) for h in plan["homes"]]
            plan = type(step.plan).from_dict(plan | {"homes": homes})
            made_again = wh.annotate(model(), LAYOUTS["data"]())
            wh.parallelize(made_again, optimizer=ADAMW, loss=F.mse_loss, batch=data(0), plan=plan)
        if what == "call":
            step._model(data(0)[0])
    except wh.WhaleError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("optimizer", "Adafactor is not known to update every element by itself"),
        ("plan", r"shares out gain \(zero = 3\), allowed: \(0, 1, 2\)"),
        ("call", "is shared out over several ranks"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(what: str, words: str) -> None:
    for text in run_ranks(2, refused, what):
        assert pytest.importorskip("re").search(words, text) and "hint:" in text, text


def outside() -> None:
    torch.set_num_threads(1)
    wh.init()

    class Penalised(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0.01 * self.blocks[0].up.weight.norm()

    torch.manual_seed(0)
    net = wh.annotate(Penalised(), LAYOUTS["data"]())
    step = wh.parallelize(
        net, optimizer=ADAMW, loss=F.mse_loss, batch=data(0), config=config("v2", "data", None)
    )
    assert step.plan.home("blocks.0.up.weight").zero == 2
    assert step.plan.home("blocks.1.up.weight").zero == 3
    assert torch.isfinite(step(data(0))["loss"])
    step.close(forget=True)


def test_a_weight_that_other_code_reads_is_not_let_go() -> None:
    run_ranks(2, outside)


def lost(level: str) -> None:
    torch.set_num_threads(1)
    wh.init()
    step = made(level, "data")
    step(data(0))
    if torch.distributed.get_rank() == 1:
        raise SystemExit("gone")
    step(data(1))


def test_a_lost_rank_is_named() -> None:
    with pytest.raises(RankFailure, match="rank 1"):
        run_ranks(3, lost, "v2")
