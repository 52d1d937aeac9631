"""Optimizers of ranks that hold a part of the model: the groups of one device."""

from __future__ import annotations

import copy
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


def by_value(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [p], "lr": float(p.detach().norm())} for _, p in named])


def by_id(named: Any) -> torch.optim.Optimizer:
    decayed = {id(p) for p in MODEL.parameters() if p.dim() > 1}
    kinds: list[list[Any]] = [[], []]
    for _, p in named:
        kinds[id(p) in decayed].append(p)
    return torch.optim.AdamW([{"params": k, "weight_decay": 0.1 * i} for i, k in enumerate(kinds)])


def by_mark(named: Any) -> torch.optim.Optimizer:
    kinds: list[list[Any]] = [[], []]
    for _, p in named:
        kinds[getattr(p, "large", False)].append(p)
    return torch.optim.SGD([{"params": k, "lr": 0.1 + i} for i, k in enumerate(kinds)])


def by_size(named: Any) -> torch.optim.Optimizer:
    """An optimizer that makes its state at once."""
    return torch.optim.Adagrad(
        [{"params": [p], "lr": 1.0 / p.numel()} for _, p in named], initial_accumulator_value=0.3
    )


def over_model(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(MODEL.parameters(), lr=0.2)


def pieces(held: tuple[int, ...]) -> list[tuple[str, nn.Parameter]]:
    """Copies of some of the model's parameters, cut to one row."""
    found = []
    for name, p in (ALL[i] for i in held):
        found.append((name, nn.Parameter(p.detach()[:1].clone())))
        found[-1][1].__dict__.update(p.__dict__)
    return found


@pytest.mark.parametrize("factory", [by_value, by_id, by_mark, by_size, over_model, *FACTORIES])
@pytest.mark.parametrize("held", [(0, 1), (2, 3, 4), (), (0, 1, 2, 3, 4)])
def test_pieces_are_told_apart_as_the_whole_is(
    factory: Callable[[Any], torch.optim.Optimizer], held: tuple[int, ...]
) -> None:
    ALL[0][1].large = True  # type: ignore[attr-defined]
    mine = pieces(held)
    try:
        whole: Any = factory(ALL)
    except (AttributeError, TypeError):
        whole = factory([p for _, p in ALL])
    made = make_optimizer(factory, mine, ALL)
    names = {**{id(p): n for n, p in ALL}, **{id(p): n for n, p in mine}}
    assert len(made.param_groups) == len(whole.param_groups)
    for group, wanted in zip(made.param_groups, whole.param_groups, strict=True):
        expected = [names[id(p)] for p in wanted["params"] if names[id(p)] in dict(mine)]
        assert [names[id(p)] for p in group["params"]] == expected
        for key in ("lr", "weight_decay"):
            assert group[key] == wanted[key]
    for p, state in made.state.items():
        assert id(p) in {id(q) for _, q in mine}
        assert state["sum"].shape == p.shape
        assert bool((state["sum"] == whole.param_groups[0]["initial_accumulator_value"]).all())


class OwnSGD(torch.optim.SGD):
    """A class of the user's, which may keep parameters anywhere."""


@pytest.mark.parametrize("kind", ["id", "value"])
def test_own_optimizers_that_tell_pieces_apart_otherwise_are_refused(kind: str) -> None:
    known = {id(p) for p in MODEL.parameters()}

    def factory(named: Any) -> torch.optim.Optimizer:
        rate = {"id": lambda p: 0.1 + (id(p) in known), "value": lambda p: float(p.norm())}[kind]
        return OwnSGD(
            [{"params": [p], "lr": rate(p.detach() if kind == "value" else p)} for _, p in named]
        )

    with pytest.raises(WhaleError, match="other groups"):
        make_optimizer(factory, pieces((0, 1)), ALL)


@pytest.mark.parametrize("kind", [torch.optim.SGD, OwnSGD])
@pytest.mark.parametrize("by", [lambda p: 0.1, lambda p: float(p.detach().norm())])
def test_the_last_that_was_made_is_the_one_that_trains(
    kind: Any, by: Callable[[Any], float]
) -> None:
    """A scheduler that the factory makes follows the optimizer that steps."""
    made: list[Any] = []

    def factory(named: Any) -> torch.optim.Optimizer:
        made.append(kind([{"params": [p], "lr": by(p)} for _, p in named]))
        torch.optim.lr_scheduler.ExponentialLR(made[-1], 0.3)
        return made[-1]

    if kind is OwnSGD and by(torch.full((1,), 3.0)) != 0.1:
        pytest.skip("refused")
    assert make_optimizer(factory, pieces((0, 1)), ALL) is made[-1]


def test_a_factory_that_writes_is_refused() -> None:
    def factory(named: Any) -> torch.optim.Optimizer:
        with torch.no_grad():
            for name, p in named:
                if name.endswith("bias"):
                    p.fill_(p.sum())
        return torch.optim.SGD(named)

    with pytest.raises(WhaleError, match="writes to 0.bias"):
        make_optimizer(factory, pieces((0, 1)), list(copy.deepcopy(MODEL).named_parameters()))


def test_numbers_made_of_no_values_are_refused() -> None:
    """A model without memory: nobody can know what the factory asks for."""
    empty = [(name, nn.Parameter(p.detach().to("meta"))) for name, p in ALL]
    with pytest.raises(WhaleError, match="lr = nan"):
        make_optimizer(by_value, pieces((0, 1)), empty)


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
        others = list(nn.Linear(2, 2).parameters())
        make_optimizer(lambda named: torch.optim.SGD(others, lr=1), ALL[:1], ALL)


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


class ClippedHigh(torch.optim.SGD):
    """Clips where gradients are large only."""

    def step(self, closure: Any = None) -> Any:
        torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 50.0)
        return super().step(closure)


class SkipsOverflow(torch.optim.SGD):
    """No update at all where one gradient is no number."""

    def step(self, closure: Any = None) -> Any:
        every = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        return super().step(closure) if all(g.isfinite().all() for g in every) else None


class ClippedLate(Clipped):
    """From its tenth step on."""

    def step(self, closure: Any = None) -> Any:
        self.times = getattr(self, "times", 0) + 1
        return super().step(closure) if self.times >= 10 else torch.optim.SGD.step(self, closure)


class Breaks(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("on a GPU only")


STAGES = (frozenset(n for n, _ in ALL[:2]), frozenset(n for n, _ in ALL[2:]))


@pytest.mark.parametrize(
    "factory", [Clipped, Adapting, patched, ClippedHigh, SkipsOverflow, ClippedLate]
)
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
