"""What a trace does not see between stages: exact, or refused at build."""

from __future__ import annotations

import re
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import whale as wh
from tests.distributed.beside import beside
from tests.ranks import run_ranks

WIDTH = 5
STAGES = ("first", "second", "third")
Forward = Callable[[Any, Tensor], Tensor]


class Dense(nn.Module):
    """A Layer; what it does beside its product is given."""

    def __init__(self, run: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.run = run
        self.gain = self.size = 1.0
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        out = torch.tanh(self.linear(x)) * self.gain
        return out if self.run is None else self.run(self, out, *more)


class Net(nn.Module):
    """Three Layers; the code between them is given."""

    def __init__(self, forward: Forward, **runs: Callable[..., Tensor]) -> None:
        super().__init__()
        for name in STAGES:
            setattr(self, name, Dense(runs.get(name)))
        self.code = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self, x)


# ---- code that works as it does on one device --------------------------------------------------


def in_place_first(net: Any, x: Tensor) -> Tensor:
    return net.third(torch.relu_(net.second(torch.sigmoid_(net.first(x)))))


def rows_by_numpy(net: Any, x: Tensor) -> Tensor:
    h = net.first(x).reshape(np.prod(x.shape[:1]), -1)
    return net.third(net.second(h) / np.float64(x.shape[1]))


def rows_by_range(net: Any, x: Tensor) -> Tensor:
    return net.third(
        net.second(net.first(x))[range(len(x) - 1, -1, -1)][range(-1, -len(x) - 1, -1)]
    )


def checkpointed(net: Any, x: Tensor) -> Tensor:
    h = checkpoint(lambda v: v + net.second(net.first(v)), x, use_reentrant=False)
    return net.third(h)


Pair = namedtuple("Pair", "left right")


def by_name(layer: Any, out: Tensor, pair: Any, table: Any, size: Any) -> Tensor:
    named = pair.right if isinstance(pair, Pair) else pair[0]
    order = 2.0 if isinstance(table, OrderedDict) else 3.0
    return out + named * order / size.numel()


def containers(net: Any, x: Tensor) -> Tensor:
    h = net.first(x)
    return net.third(net.second(h, Pair(h, h * h), OrderedDict(a=1), torch.Size([2, 3])))


EXACT: dict[str, Callable[[], nn.Module]] = {
    "in place first": lambda: Net(in_place_first),
    "rows by numpy": lambda: Net(rows_by_numpy),
    "rows by range": lambda: Net(rows_by_range),
    "several values in a checkpoint": lambda: Net(checkpointed),
    "containers": lambda: Net(containers, second=by_name),
}


# ---- code that other stages do not see ---------------------------------------------------------


def edits_view(net: Any, x: Tensor) -> Tensor:
    h = net.first(x) * 1.0
    side = h.detach().view(-1, WIDTH)
    out = net.second(h.clone())
    side[:, 1:3] += out[:, 1:3].detach()
    return net.third(h.clone() + out)


def edits_rows(net: Any, x: Tensor) -> Tensor:
    mask = torch.ones_like(x)
    mask[:, -1].fill_(0.0)
    return net.third(net.second(net.first(x)) * mask)


def takes_last(layer: Any, out: Tensor, kept: list[Tensor]) -> Tensor:
    return out + kept.pop()


def u_shape(net: Any, x: Tensor) -> Tensor:
    kept = [x]
    h = net.first(x)
    kept.append(h)
    h = net.second(h, kept)
    return net.third(h + kept[-1])


def counts_depth(layer: Any, out: Tensor, state: dict[str, int]) -> Tensor:
    state["depth"] = state["depth"] + 1
    return out * state["depth"]


def depth(net: Any, x: Tensor) -> Tensor:
    state = {"depth": 1}
    return net.third(net.second(net.first(x, state), state) * state["depth"])


def louder(net: Any, x: Tensor) -> Tensor:
    net.second.gain = 3.0
    h = net.second(net.first(x))
    net.second.gain = 1.0
    return net.third(net.second(h))


def edits_argument(layer: Any, out: Tensor, mask: Tensor) -> Tensor:
    mask[:, :2] = 0.0
    return out


def mask_of_layer(net: Any, x: Tensor) -> Tensor:
    mask = torch.ones_like(x)
    return net.third(net.second(net.first(x, mask)) * mask)


def counts(layer: Any, out: Tensor) -> Tensor:
    layer.calls += 1
    return out


def after_two(net: Any, x: Tensor) -> Tensor:
    h = net.first(x)
    return net.third(net.second(h * 2 if int(net.first.calls) > 1 else h))


def left_for_backward(layer: Any, out: Tensor) -> Tensor:
    layer.size = out.detach().abs().mean()
    if out.requires_grad:
        out.register_hook(lambda gradient: gradient * layer.size)
    return out


def plain(net: Any, x: Tensor) -> Tensor:
    return net.third(net.second(net.first(x)))


REFUSED: dict[str, Callable[[], nn.Module]] = {
    "a view is edited": lambda: Net(edits_view),
    "a view of a mask is filled": lambda: Net(edits_rows),
    "a list is emptied": lambda: Net(u_shape, second=takes_last),
    "a dict counts": lambda: Net(depth, first=counts_depth, second=counts_depth),
    "an attribute for one call": lambda: Net(louder),
    "a Layer edits its argument": lambda: Net(mask_of_layer, first=edits_argument),
    "a counter of a Layer": lambda: Net(after_two, first=counts),
}
IN_FLIGHT = {"left for the backward": lambda: Net(plain, second=left_for_backward)}


def batches() -> list[tuple[Tensor, Tensor]]:
    made = []
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        made.append(tuple(torch.randn(8, WIDTH, generator=g, dtype=torch.float64) for _ in "xy"))
    return made  # type: ignore[return-value]


def tried(build: Callable[[], nn.Module], micro: int, schedule: str = "1f1b") -> str | float:
    torch.manual_seed(0)
    return beside(
        build().double(),
        batches(),
        {name: wh.stage() for name in STAGES},
        config={"pipeline.num_micro_batch": micro, "pipeline.schedule": schedule},
    )


def on_rank() -> dict[str, dict[int, str | float]]:
    torch.set_num_threads(1)
    wh.init()
    found = {name: {2: tried(build, 2)} for name, build in {**EXACT, **REFUSED}.items()}
    return found | {n: {m: tried(build, m) for m in (1, 2)} for n, build in IN_FLIGHT.items()}


def test_stages_are_the_model() -> None:
    for found in run_ranks(3, on_rank, timeout=100.0):
        for name in EXACT:
            for micro, far in found[name].items():
                assert isinstance(far, float) and far < 1e-12, (name, micro, far)
        for name in REFUSED:
            for micro, said in found[name].items():
                assert isinstance(said, str) and "hint:" in said, (name, micro, said)
                assert re.search("stages|Layer|changed by the forward", said), (name, said)
        for name in IN_FLIGHT:
            alone, overlapping = found[name][1], found[name][2]
            assert isinstance(alone, float) and alone < 1e-12, (name, alone)
            assert isinstance(overlapping, str) and "do not compute" in overlapping, overlapping


def sets_of_words() -> str:
    """Each rank iterates in its own order, as sets of strings do in each process."""
    torch.set_num_threads(1)
    wh.init()
    turned = bool(torch.distributed.get_rank())

    def code(net: Any, x: Tensor) -> Tensor:
        h = net.first(x)
        parts = {"a": h * 2, "b": h + 1}
        order = sorted(parts, reverse=turned)
        return net.third(net.second(sum((parts[k] * (i + 1) for i, k in enumerate(order)))))

    torch.manual_seed(0)
    found = beside(Net(code).double(), batches(), {name: wh.stage() for name in STAGES})
    return str(found)


def test_ranks_that_trace_in_another_order_are_refused() -> None:
    for found in run_ranks(3, sets_of_words):
        assert "in another order" in found and "hint:" in found, found


# ---- gradients that come in several parts ------------------------------------------------------


def again(net: Any, x: Tensor) -> Tensor:
    h = net.first(x)
    for _ in range(3):
        h = net.second(h)
    return net.third(h)


def again_in_checkpoints(net: Any, x: Tensor) -> Tensor:
    h = net.first(x)
    for _ in range(3):
        h = checkpoint(net.second, h, use_reentrant=True)
    return net.third(h + net.second(h))


class Reversing(torch.autograd.Function):
    """Runs its module again in the backward, and leaves its gradients there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            out = ctx.module(x)
        torch.autograd.backward(out, grads[0])
        return x.grad, None


def again_in_functions(net: Any, x: Tensor) -> Tensor:
    h = net.first(x)
    for _ in range(3):
        h = Reversing.apply(h, net.second)
    return net.third(h)


SMALL = {"communication.bucket_bytes": 8}


def in_parts() -> dict[str, str | float]:
    torch.set_num_threads(1)
    wh.init()
    found: dict[str, str | float] = {}
    data = {"": wh.replicate()}
    split = {"": (wh.replicate(4), wh.split(2))}
    for code in (again, again_in_checkpoints, again_in_functions):
        for name, layout in (("data", data), ("split", split)):
            torch.manual_seed(0)
            key = f"{code.__name__} {name}"
            found[key] = beside(Net(code).double(), batches(), layout, config=SMALL)
    stages = {"first|second": (wh.stage(), wh.replicate(2)), "third": (wh.stage(), wh.replicate(2))}
    for micro in (1, 3):
        torch.manual_seed(0)
        config = {"pipeline.num_micro_batch": micro, "pipeline.schedule": "zero-bubble", **SMALL}
        found[f"stages {micro}"] = beside(Net(again).double(), batches(), stages, config=config)
    return found


def test_gradients_in_parts_are_summed_once() -> None:
    for found in run_ranks(4, in_parts, timeout=100.0):
        for name, far in found.items():
            if name == "again_in_functions data":
                assert isinstance(far, str) and "came after those of all ranks" in far, far
            elif "functions" not in name:
                assert isinstance(far, float) and far < 1e-12, (name, far)


class OwnCheckpoint(torch.autograd.Function):
    """Runs its function again in the backward, with the generator as it was."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module, ctx.state = module, torch.get_rng_state()
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            x = ctx.saved_tensors[0].detach().requires_grad_()
            out = ctx.module(x)
        torch.autograd.backward(out, grads[0])
        return x.grad, None


def test_a_recompute_of_ones_own_that_draws_is_refused() -> None:
    def code(net: Any, x: Tensor) -> Tensor:
        return net.third(OwnCheckpoint.apply(net.first(x), net.second))

    net = Net(code, second=lambda layer, out: torch.nn.functional.dropout(out, 0.5)).double()
    found = beside(net, batches(), {"": wh.replicate()})
    assert isinstance(found, str) and "draws random numbers (dropout)" in found, found


def other_modes() -> str:
    torch.set_num_threads(1)
    wh.init()

    def on_one(model: Any, index: int) -> None:
        if index == 1 and torch.distributed.get_rank() == 0:
            model.second.eval()

    torch.manual_seed(0)
    return str(beside(Net(plain).double(), batches(), {"": wh.replicate()}, before=on_one))


def test_modes_are_those_of_all_ranks() -> None:
    for found in run_ranks(2, other_modes):
        assert "training or eval mode" in found and "hint:" in found, found
