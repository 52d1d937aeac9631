"""Code of a split that runs only in evaluation, at other sizes, or later: exact, or refused.

What a trace of the first batch does not show: branches on the gradient mode, on the number of rows
or of tokens, weights read by hand, choices of experts that are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale as wh
from tests.distributed.beside import beside
from tests.ranks import run_ranks

DIM, HIDDEN = 6, 10


class Pair(nn.Module):
    """Two Linears with something between them, that depends on `when`."""

    def __init__(self, when: Callable[[Tensor], bool], how: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, HIDDEN), nn.Linear(HIDDEN, DIM)
        self.when, self.how = when, how

    def forward(self, h: Tensor) -> Tensor:
        if not self.when(h):
            return self.down(torch.tanh(self.up(h)))
        if self.how == "mix":
            return self.down(self.up(h).softmax(-1))
        if self.how == "by hand":
            return torch.tanh(h @ self.up.weight.t()) @ self.down.weight.t()
        weights = dict(self.named_parameters())
        return self.down(torch.tanh(self.up(h))) * weights["up.weight"].norm()


class Model(nn.Module):
    def __init__(self, when: Callable[[Tensor], bool], how: str) -> None:
        super().__init__()
        self.first, self.pair, self.last = nn.Linear(DIM, DIM), Pair(when, how), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(h + self.pair(h))


def batch(rows: int = 6, length: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(rows, length, DIM, generator=generator).double() for _ in "xy")
    return x, y


class Calls:
    """True from the third call in training on."""

    def __init__(self) -> None:
        self.n = 0

    def __call__(self, h: Tensor) -> bool:
        self.n += torch.is_grad_enabled()
        return self.n > 3


WHEN: dict[str, tuple[Callable[[], Callable[[Tensor], bool]], dict[str, Any]]] = {
    "no gradients": (lambda: lambda h: not torch.is_grad_enabled(), {}),
    "rows": (lambda: lambda h: len(h) > 7, {"rows": 9}),
    "length": (lambda: lambda h: h.shape[1] > 4, {"length": 5}),
    "calls": (Calls, {}),
}


def judged(ranks: int) -> dict[tuple[str, str], str | float]:
    wh.init()
    found: dict[tuple[str, str], str | float] = {}
    for when, (make, sizes) in WHEN.items():
        for how in ("mix", "by hand", "named"):
            torch.manual_seed(0)
            found[when, how] = beside(
                Model(make(), how).double(),
                [batch(seed=i) for i in range(4)],
                {"": wh.split()},
                evaluated=[batch(seed=9, **sizes), batch(seed=8)],
            )
    return found


def test_code_that_did_not_run_at_first_is_exact_or_refused() -> None:
    for found in run_ranks(2, judged, 2, timeout=100):
        for case, far in found.items():
            assert isinstance(far, str) or far < 1e-9, (case, far)


# ---- experts -------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Stacked experts by their signature, with `odd` done to choices."""

    def __init__(self, odd: str) -> None:
        super().__init__()
        self.num_experts, self.odd = 4, odd
        self.up = nn.Parameter(torch.randn(4, DIM, HIDDEN) * 0.4)
        self.down = nn.Parameter(torch.randn(4, HIDDEN, DIM) * 0.4)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            chosen = top_k_index == expert
            if self.odd == "small weights":
                chosen = chosen & (top_k_weights > 1e-6)
            token, slot = torch.where(chosen)
            if self.odd == "capacity":
                token, slot = token[:5], slot[:5]
            made = torch.relu(hidden_states[token] @ self.up[expert]) @ self.down[expert]
            weights = top_k_weights[token, slot, None]
            if self.odd == "squared":
                weights = weights * weights
            if self.odd == "a number" and float(hidden_states.detach().abs().max()) > 1e6:
                made = made.clamp(-1, 1)
            out.index_add_(0, token, made * weights)
        return out * 0.9 if self.odd == "many" and len(hidden_states) > 20 else out


class Routed(nn.Module):
    def __init__(self, odd: str) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(DIM, 4), Experts(odd)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, ids = self.router(flat).softmax(-1).topk(2)
        return x + self.experts(flat, ids, weights).view_as(x)


def routed(odd: str, layout: str) -> str | float:
    wh.init()
    torch.manual_seed(1)
    scopes = {"split": (wh.split(),), "across": (wh.replicate(), wh.split())}[layout]
    annotations: dict[str, Any] = {"0|2": wh.replicate(), "1": scopes[-1]}
    if layout == "split":
        annotations = {"": wh.split()}
    model = nn.Sequential(nn.Linear(DIM, DIM), Routed(odd), nn.Linear(DIM, DIM)).double()
    return beside(model, [batch(rows=8, seed=i) for i in range(3)], annotations)


@pytest.mark.every(3)
@pytest.mark.parametrize("layout", ["split", "across"])
@pytest.mark.parametrize("odd", ["", "small weights", "capacity", "squared", "a number", "many"])
def test_experts_take_each_choice_by_itself_or_are_refused(odd: str, layout: str) -> None:
    found: Sequence[str | float] = run_ranks(2, routed, odd, layout)
    for far in found:
        assert isinstance(far, str) or far < 1e-9, far
        assert odd or not isinstance(far, str), far


# ---- gradients inside a forward ------------------------------------------------------------------


class Inner(nn.Module):
    """Scales by the gradient of its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        with torch.enable_grad():
            (grad,) = torch.autograd.grad(y.square().sum(), self.linear.weight, retain_graph=True)
        return self.out(y) * (1 + grad.detach().norm().tanh() * 0)


def differentiated(schedule: str) -> str | float:
    wh.init()
    torch.manual_seed(0)
    model = nn.Sequential(Inner(), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)).double()
    return beside(
        model,
        [batch(seed=i) for i in range(2)],
        {"0": wh.stage(), "1|2": wh.stage()},
        config={"pipeline.num_micro_batch": 2, "pipeline.schedule": schedule},
    )


def test_weight_gradients_are_not_put_off_where_a_forward_asks_for_some() -> None:
    for far in run_ranks(2, differentiated, "zero-bubble"):
        assert isinstance(far, float) and far < 1e-9, far
