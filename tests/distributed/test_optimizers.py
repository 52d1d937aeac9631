"""Optimizers as users write them, and what scripts do to them and to models between steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import whale as wh
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("untried")

WIDTH = 6
STEPS = 3
Factory = Callable[[Any], torch.optim.Optimizer]


def model() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4))
    for parameter in made.parameters():
        parameter.decays = parameter.dim() > 1  # type: ignore[attr-defined]
    return made.double()


def factories(made: nn.Module) -> dict[str, Factory]:
    """Each tells parameters apart by something else."""
    known = {id(p): i for i, p in enumerate(made.parameters())}

    def groups(rate: Callable[[Any], float], kind: Any = torch.optim.SGD) -> Factory:
        return lambda named: kind([{"params": [p], "lr": rate(p)} for _, p in named])

    return {
        "mark": groups(lambda p: 0.1 if p.decays else 0.01),
        "value": groups(lambda p: 0.01 * float(p.detach().norm())),
        "size": groups(lambda p: 1.0 / p.numel()),
        "size, with state": groups(lambda p: 1.0 / p.numel(), torch.optim.Adagrad),
        "id": groups(lambda p: 0.01 * known.get(id(p), 50)),
        "the model's": lambda named: torch.optim.Adam(made.parameters(), lr=0.1),
        "fused": lambda named: torch.optim.AdamW(named, lr=0.1, fused=True),
    }


LAYOUTS = {
    "replicas": {"": wh.replicate()},
    "split": {"": wh.split()},
    "stages": {"0|1": wh.stage(), "2|3": wh.stage()},
}


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(5, WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randn(5, 4, generator=generator, dtype=torch.float64)


def build(made: nn.Module, layout: str, factory: Factory, loss: Any = F.mse_loss) -> Any:
    return wh.parallelize(
        wh.annotate(made, LAYOUTS[layout]),
        optimizer=factory,
        batch=batch(0),
        loss=loss,
        config={"timeout_seconds": 20, "pipeline.num_micro_batch": 1 + (layout == "stages")},
    )


def trained(layout: str) -> dict[str, float]:
    wh.init()
    far = {}
    for name in factories(model()):
        plain, made = model(), model()
        optimizer = factories(plain)[name](list(plain.named_parameters()))
        step = build(made, layout, factories(made)[name])
        for seed in range(STEPS):
            x, y = batch(seed)
            optimizer.zero_grad()
            F.mse_loss(plain(x), y).backward()
            optimizer.step()
            step((x, y))
        state = step.state_dict()
        far[name] = max(float((state[n] - v).abs().max()) for n, v in plain.state_dict().items())
        step.close()
    return far


@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_are_those_of_one_device(layout: str) -> None:
    for far in run_ranks(2, trained, layout):
        for name, error in far.items():
            assert error < 1e-12, (name, error)


class Clipped(torch.optim.SGD):
    """Clips where gradients are large."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 40.0)
        return super().step(closure)


def patched(named: Any) -> torch.optim.Optimizer:
    made = torch.optim.SGD(named, lr=0.1)
    update = made.step

    def step(closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for g in made.param_groups for p in g["params"]], 0.1)
        return update(closure)

    made.step = step  # type: ignore[method-assign]
    return made


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1)


def refusals() -> dict[str, str]:
    """What each of these is told; those with `late` act between steps."""
    wh.init()
    said = {}

    def note(name: str, act: Callable[[], Any]) -> None:
        try:
            act()
            said[name] = "nothing"
        except wh.WhaleError as error:
            said[name] = str(error)

    note("clips when large", lambda: build(model(), "stages", lambda n: Clipped(n, lr=0.1)))
    note("step exchanged", lambda: build(model(), "split", patched))
    made = model()
    step = build(made, "stages", sgd)
    step(batch(0))
    step.optimizer.add_param_group({"params": [("more", nn.Parameter(torch.zeros(2)))]})
    note("late group", lambda: step(batch(1)))
    step.close(forget=True)
    step = build(made, "split", sgd)
    step(batch(0))
    step.optimizer.register_step_pre_hook(lambda *_: None)
    note("late hook", lambda: step(batch(1)))
    step.close(forget=True)
    for name, change in CHANGES.items():
        made = model()
        made[0].register_buffer("scale", torch.ones(()))  # type: ignore[operator, index]
        step = build(made, "replicas", sgd)
        step(batch(0))
        change(made[0])  # type: ignore[index]
        note(name, lambda step=step: step(batch(1)))  # type: ignore[misc]
        step.close(forget=True)
    return said


CHANGES: dict[str, Callable[[Any], Any]] = {
    "buffer": lambda module: module.register_buffer("scale", torch.zeros(())),
    "new buffer": lambda module: module.register_buffer("other", torch.zeros(())),
    "no bias": lambda module: module.register_parameter("bias", None),
    "converted": lambda module: module.to(torch.float32),
}


def test_what_sees_a_part_of_the_parameters_is_refused() -> None:
    words = {
        "clips when large": "more than its own gradient",
        "step exchanged": "not known to update every element",
        "late group": "not called with",
        "late hook": "hook around its step",
        **dict.fromkeys(("buffer", "new buffer", "no bias"), "other parameters or buffers"),
        "converted": "",
    }
    for said in run_ranks(2, refusals):
        for name, word in words.items():
            assert word in said[name] and "hint:" in said[name], (name, said[name])


class Writes(nn.Linear):
    """Scales its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(0.9))


def written() -> tuple[float, str]:
    """Fresh batches, which a stage writes to; then one of them again."""
    wh.init()

    def made() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(Writes(WIDTH, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4)).double()

    plain = made()
    optimizer = sgd(plain.parameters())
    step = build(made(), "stages", sgd)
    for seed in range(STEPS):
        x, y = batch(seed)
        optimizer.zero_grad()
        F.mse_loss(plain(x), y).backward()
        optimizer.step()
        again = batch(seed)
        step(again)
    state = step.state_dict()
    far = max(float((state[n] - v).abs().max()) for n, v in plain.state_dict().items())
    with pytest.raises(wh.WhaleError) as said:
        step(again)
    return far, str(said.value)


def test_a_batch_that_a_stage_wrote_to_does_not_come_again() -> None:
    for far, said in run_ranks(2, written):
        assert far < 1e-12
        assert "writes to its batch in place" in said and "hint:" in said
