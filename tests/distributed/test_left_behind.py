"""What a forward leaves behind, and code that looks for it where the user's own model is.

Exact beside plain torch, or refused; never another number, never a raw error.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import whale as wh
from tests.ranks import run_ranks

SGD = partial(torch.optim.SGD, lr=0.1)
Loss = Callable[[Tensor, Tensor], Tensor]


class Meter:
    """An object with state and a method that reads it."""

    __slots__ = ("values",)

    def __init__(self) -> None:
        self.values: list[Any] = [0.0]

    def last(self) -> Any:
        return self.values[-1]


class Net(nn.Module):
    """Leaves something of its forward wherever `keep` puts it."""

    def __init__(self, keep: Callable[[Net, Tensor], None], held: Any = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(()))
        self.keep, self.held, self.calls, self.left = keep, held, 0, None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = torch.tanh(self.first(x))
        self.keep(self, h)
        return self.last(h)  # type: ignore[no-any-return]


def mse(out: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(out, target)


def set_left(net: Net, h: Tensor) -> None:
    net.left = h.pow(2).mean()


def set_rows(net: Net, h: Tensor) -> None:
    net.left = h.detach().abs().mean(-1)


def set_number(net: Net, h: Tensor) -> None:
    net.left = 0.1 * net.calls


def set_buffer(net: Net, h: Tensor) -> None:
    with torch.no_grad():
        net.mean.mul_(0.5).add_(h.detach().square().mean())


class Holder:
    """A loss that reaches the model through its attributes."""

    def __init__(self, net: Net) -> None:
        self.nets = {"student": [net]}

    def __call__(self, out: Tensor, target: Tensor) -> Tensor:
        return mse(out, target) * (1.0 + reader(self.nets["student"][0]))


def reader(net: Net) -> Any:
    return getattr(net, "le" + "ft") if not hasattr(net, "absent") else 0.0


def of_attribute(keep: Callable[[Net, Tensor], None], how: str) -> tuple[Net, Loss]:
    net = Net(keep)
    losses: Mapping[str, Loss] = {
        "closure": lambda out, y: mse(out, y) * (1.0 + net.left),
        "function": lambda out, y: mse(out, y) + 0.1 * reader(net),
        "rows": lambda out, y: ((out - y).square().mean(-1) * net.left).mean(),
        "holder": Holder(net),
        "partial": functools.partial(_with_net, net),
        "buffer": lambda out, y: mse(out, y) * (1.0 + net.mean),
        "method": lambda out, y: mse(out, y) * (1.0 + net.get_buffer("mean")),
    }
    return net, losses[how]


def _with_net(net: Net, out: Tensor, target: Tensor) -> Tensor:
    return mse(out, target) * (1.0 + net.left)


def of_object(held: Any, put: Callable[[Any, Tensor], None], get: Callable[[Any], Any]) -> Any:
    """Model and loss have one object, which is no module."""
    net = Net(lambda net, h: put(net.held, h), held)
    return net, lambda out, target: mse(out, target) * (1.0 + get(held))


def set_item(held: Any, h: Tensor) -> None:
    held["left"] = h.pow(2).mean()


def set_field(held: Any, h: Tensor) -> None:
    held.left = h.pow(2).mean()


def set_array(held: Any, h: Tensor) -> None:
    held[0] = float(h.detach().square().mean())


def set_tensor(held: Any, h: Tensor) -> None:
    with torch.no_grad():
        held.copy_(h.detach().square().mean())


STATE: dict[str, Any] = {"left": 0.0}


def of_global(named: bool) -> Any:
    """A global that a module holds too, or that nothing but code names."""
    STATE["left"] = 0.0

    def keep(net: Net, h: Tensor) -> None:
        STATE["left"] = h.pow(2).mean()

    net = Net(keep, STATE if named else None)
    return net, lambda out, target: mse(out, target) * (1.0 + STATE["left"])


def hooked() -> Any:
    """A hook that looks at the user's own module, past the one it is called with."""
    net = Net(set_left)
    net.last.register_forward_hook(lambda module, args, out: out * (1.0 + net.left))
    return net, mse


def bound() -> Any:
    """A loss that only names the model, and reads what never changes."""
    net = Net(lambda net, h: None)
    net.scale = 0.5
    return net, lambda out, target: mse(out, target) * net.scale


CASES: Mapping[str, tuple[Callable[[], Any], bool]] = {
    "closure": (partial(of_attribute, set_left, "closure"), False),
    "function": (partial(of_attribute, set_number, "function"), False),
    "rows": (partial(of_attribute, set_rows, "rows"), False),
    "holder": (partial(of_attribute, set_left, "holder"), False),
    "partial": (partial(of_attribute, set_number, "partial"), False),
    "buffer": (partial(of_attribute, set_buffer, "buffer"), False),
    "method": (partial(of_attribute, set_buffer, "method"), False),
    "list": (lambda: of_object([0.0], lambda o, h: o.append(h.mean()), lambda o: o[-1]), False),
    "deque": (
        lambda: of_object(deque([0.0], 2), lambda o, h: o.append(0.1), lambda o: o[-1]),
        False,
    ),
    "dict": (lambda: of_object({"left": 0.0}, set_item, lambda o: o["left"]), False),
    "namespace": (
        lambda: of_object(SimpleNamespace(left=0.0), set_field, lambda o: o.left),
        False,
    ),
    "nested": (
        lambda: of_object((Meter(),), lambda o, h: o[0].values.append(0.2), lambda o: o[0].last()),
        False,
    ),
    "array": (lambda: of_object(np.zeros(1), set_array, lambda o: float(o[0])), False),
    "tensor": (lambda: of_object(torch.zeros(()), set_tensor, lambda o: o), False),
    "only read": (lambda: of_object([0.5], lambda o, h: None, lambda o: o[0]), True),
    "a global and an attribute": (lambda: of_global(True), False),
    "a global": (lambda: of_global(False), True),
    "hook": (hooked, False),
    "nothing that changes": (bound, True),
}


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 3, generator=generator)


def built(name: str, before: bool) -> Any:
    torch.manual_seed(0)
    net, loss = CASES[name][0]()
    if before:  # what another forward has left is there
        loss(net(data(9)[0]), data(9)[1])
    return net, loss


def on_rank(before: bool) -> dict[str, str | float]:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    wh.init()
    found: dict[str, str | float] = {}
    for name in CASES:
        net, loss = built(name, before)
        try:
            step = wh.parallelize(net, optimizer=SGD, loss=loss, batch=data(0))
            losses = [float(step(data(index))["loss"]) for index in range(4)]
            step.close(forget=True)
        except wh.WhaleError as error:
            assert error.hint, error
            found[name] = str(error)
            continue
        plain, loss = built(name, before)
        optimizer, want = SGD(plain.parameters()), []
        for index in range(4):
            x, y = data(index)
            optimizer.zero_grad()
            value = loss(plain(x), y)
            value.backward()
            optimizer.step()
            want.append(value.item())
        found[name] = max(abs(a - b) for a, b in zip(losses, want, strict=True))
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_exact_or_refused(ranks: int, before: bool) -> None:
    for found in run_ranks(ranks, on_rank, before):
        for name, what in found.items():
            exact = CASES[name][1] and (ranks == 1 or name != "a global")
            assert isinstance(what, float) == exact, (name, what)
            assert isinstance(what, str) or what < 1e-12, (name, what)
