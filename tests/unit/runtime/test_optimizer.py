"""Optimizers of ranks that hold a part of the model: the groups of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from whale.errors import WhaleError
from whale.runtime.optimizer import check_apart, check_no_hooks, make_optimizer

MODEL = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias=False))
ALL = list(MODEL.named_parameters())


def by_dim(named: Any) -> torch.optim.Optimizer:
    kinds: list[list[Any]] = [[], []]
    for name, p in named:
        kinds[p.dim() > 1].append((name, p))
    return torch.optim.AdamW([{"params": k, "weight_decay": 0.1 * i} for i, k in enumerate(kinds)])


def without_empty(named: Any) -> torch.optim.Optimizer:
    """A group less where there is nothing for it."""
    named = list(named)
    groups = [[p for n, p in named if n.endswith(end)] for end in ("bias", "weight")]
    return torch.optim.SGD([{"params": g, "lr": 0.1 + i} for i, g in enumerate(groups) if g])


def plain(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in params if p.dim() > 1], lr=0.1)


def fused(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(named, fused=True)


def adagrad(named: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(named)


FACTORIES = (by_dim, without_empty, plain, fused, adagrad)


@pytest.mark.parametrize("factory", FACTORIES)
@pytest.mark.parametrize("held", [(0,), (1, 2, 3), (4,), (), (0, 1, 2, 3, 4)])
def test_groups_are_those_of_one_device(
    factory: Callable[[Any], torch.optim.Optimizer], held: tuple[int, ...]
) -> None:
    mine = [ALL[i] for i in held]
    whole = make_optimizer(factory, ALL, ALL)
    made = make_optimizer(factory, mine, ALL)
    assert len(made.param_groups) == len(whole.param_groups)
    own = {id(p) for _, p in mine}
    for group, wanted in zip(made.param_groups, whole.param_groups, strict=True):
        assert group["params"] == [p for p in wanted["params"] if id(p) in own]
        assert group.get("param_names") == (
            [n for n in wanted["param_names"] if n in dict(mine)]
            if "param_names" in wanted
            else None
        )
        assert group["lr"] == wanted["lr"]
    assert all(id(p) in own for p in made.state)
    for _, p in mine:
        p.grad = torch.ones_like(p)
    made.step()
    for _, p in mine:
        p.grad = None


def test_hooks_around_a_step_are_refused() -> None:
    made = make_optimizer(by_dim, ALL, ALL)
    check_no_hooks(made)
    made.register_step_pre_hook(lambda optimizer, args, kwargs: None)
    with pytest.raises(WhaleError, match="hook around its step"):
        check_no_hooks(made)


def test_a_factory_that_fails_says_why() -> None:
    def broken(named: Any) -> torch.optim.Optimizer:
        raise KeyError("nothing here")

    with pytest.raises(WhaleError, match="nothing here.*and on plain parameters"):
        make_optimizer(broken, ALL[:1], ALL)
    with pytest.raises(WhaleError, match="was not called with"):
        make_optimizer(lambda named: torch.optim.SGD(MODEL.parameters(), lr=1), ALL[:1], ALL)


class Clipped(torch.optim.SGD):
    """Clips by the norm of all gradients it sees."""

    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 0.1)
        return super().step(closure)


class Trusted(torch.optim.Optimizer):
    """A rate by the norm of each tensor, and noise; tensors keep to themselves."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad * (p.norm() / p.grad.norm()), alpha=-group["lr"])


class Adapting(Trusted):
    """A rate by what all parameters did in the last step."""

    moved = 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        for p in params:
            p.add_(p.grad, alpha=-0.1 / (1.0 + self.moved))
        self.moved = float(sum(p.grad.abs().sum() for p in params))


def patched(named: Any) -> torch.optim.Optimizer:
    made = torch.optim.SGD(named, lr=0.1)
    step = made.step

    def clipped(closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_([p for g in made.param_groups for p in g["params"]], 0.1)
        return step(closure)

    made.step = clipped  # type: ignore[method-assign]
    return made


class Breaks(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("on a GPU only")


STAGES = (frozenset(n for n, _ in ALL[:2]), frozenset(n for n, _ in ALL[2:]))


@pytest.mark.parametrize("factory", [Clipped, Adapting, patched])
def test_an_update_by_the_parameters_of_other_stages_is_refused(factory: Any) -> None:
    with pytest.raises(WhaleError, match="more than its own gradient"):
        check_apart(factory, make_optimizer(factory, ALL, ALL), ALL, STAGES)
    check_apart(factory, make_optimizer(factory, ALL, ALL), ALL, (STAGES[0] | STAGES[1],))


@pytest.mark.parametrize("factory", [Trusted, *FACTORIES])
def test_an_update_of_each_tensor_by_itself_is_not(factory: Any) -> None:
    before = [p.detach().clone() for _, p in ALL]
    check_apart(factory, make_optimizer(factory, ALL, ALL), ALL, STAGES)
    assert all(torch.equal(a, p) for a, (_, p) in zip(before, ALL, strict=True))


def test_an_optimizer_that_cannot_be_tried_is_told(caplog: pytest.LogCaptureFixture) -> None:
    check_apart(Breaks, make_optimizer(Breaks, ALL, ALL), ALL, STAGES)
    assert "could not be tried" in caplog.text
