"""Pipelines: what is computed in which stage, and what crosses from one to the next."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import whale as wh
from tests.covering import part
from tests.ranks import run_ranks

STEPS = 3
Case = dict[str, Any]


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1, momentum=0.9)


class Head(nn.Module):
    """A Layer that makes a loss itself."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 4)

    def forward(self, h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = self.out(h)
        return F.cross_entropy(out, y), out


class Net(nn.Module):
    """`a` is the first stage, the others are the second."""

    def __init__(self, code: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.head, self.code = Head(), code

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.code(self, torch.tanh(self.a(x)), y)


def labels() -> list[Any]:
    """Few of them count, and not as many in each part."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(STEPS):
        x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
        y = torch.randint(0, 4, (8,), generator=generator)
        y[[0, 1, 2, 5]] = -100
        found.append((x, y))
    return found


def probed(net: Net, h: Tensor, y: Tensor) -> Any:
    return {"loss": F.cross_entropy(net.b(h), y), "probe": net.c(h)}


def penalty(net: Net, h: Tensor, y: Tensor) -> Tensor:
    value = F.cross_entropy(net.b(h), y)
    net.c(h)
    return value + 0.01 * net.c.weight.norm()


def own_loss(net: Net, h: Tensor, y: Tensor) -> Any:
    value, out = net.head(h, y)
    return {"loss": value, "more": net.c(h) + out}


def two_heads(net: Net, h: Tensor, y: Tensor) -> Tensor:
    value, _ = net.head(h, y)
    return value + 0.5 * F.cross_entropy(net.c(h), y)


def two_means(net: Net, h: Tensor, y: Tensor) -> Tensor:
    """One of them of what the first stage made."""
    return 0.3 * F.cross_entropy(h[:, :4], y) + F.cross_entropy(net.b(h), y)


class Scaled(torch.autograd.Function):
    """Its input, with a smaller gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.scale, None


class Glue(nn.Module):
    """Code between Layers that counts the rows."""

    def __init__(self, code: Callable[..., Tensor]) -> None:
        super().__init__()
        self.a, self.norm, self.code = nn.Linear(6, 8), nn.BatchNorm1d(8), code
        self.drop, self.b = nn.Dropout(0.4), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return F.mse_loss(self.b(self.code(self, h, max(1, len(h) // 2))), y)


def rows(*shapes: tuple[int, ...]) -> Callable[[], list[Any]]:
    def made() -> list[Any]:
        generator = torch.Generator().manual_seed(1)
        return [
            tuple(torch.randn(*s, generator=generator, dtype=torch.float64) for s in shapes)
            for _ in range(STEPS)
        ]

    return made


def counting(code: Callable[..., Tensor]) -> Case:
    return {
        "build": partial(Glue, code),
        "batches": rows((8, 6), (8, 3)),
        "refused": "the glue for . rows differs",
        "only": lambda replicas, micro: replicas == (1, 1) and micro == 1,
    }


class Mean(nn.Linear):
    """A Layer that gives something without rows."""

    def forward(self, x: Tensor) -> Any:
        h = super().forward(x)
        return h, h.mean(0)


class Two(nn.Module):
    """What crosses is made by `code`, and taken apart by `after`."""

    def __init__(self, code: Callable[..., Any], after: Callable[..., Any], mean: bool) -> None:
        super().__init__()
        self.a, self.b = (Mean if mean else nn.Linear)(6, 8), nn.Linear(8, 3)
        self.code, self.after = code, after

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.after(self.b(torch.tanh(self.code(self.a, x))), y)


def mean_first(a: Any, x: Tensor) -> Tensor:
    h, mean = a(x)
    return h + mean


class Late(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Mean(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h, mean = self.a(x)
        return F.mse_loss(self.b(torch.tanh(h)) * mean.sum(), y)


def alike() -> list[Any]:
    """Rows whose mean is their value, so that parts and whole agree."""
    return [(x[:1].repeat(8, 1), y) for x, y in rows((8, 6), (8, 3))()]


def crossing(code: Any, after: Any, refused: str = "", *, mean: bool = False) -> Case:
    return {
        "build": partial(Two, code, after, mean),
        "batches": rows((8, 5, 6), (8, 3)) if not mean else rows((8, 6), (8, 3)),
        "refused": lambda replicas: refused if replicas[0] != replicas[1] else None,
    }


def called(net: Glue, h: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    changed = {name: change(p) for name, p in net.b.named_parameters()}
    return torch.func.functional_call(net.b, changed, (h,))


def swapped(net: Glue, h: Tensor) -> Tensor:
    own = net.b._parameters.pop("weight")
    net.b.weight = own * 2  # type: ignore[assignment, operator]
    out: Tensor = net.b(h)
    del net.b.weight
    net.b._parameters["weight"] = own
    return out


class Called(Glue):
    """Calls its last Layer as `code` says."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        h = torch.tanh(self.a(x))
        out = self.code(self, h)
        return {"loss": F.mse_loss(out, y), "early": h.mean(1)}


class Later(nn.Module):
    """Changes a buffer in later batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, x: Tensor, y: Tensor, moves: bool) -> Tensor:
        out = self.b(torch.tanh(self.a(x)))
        if moves and self.training:
            with torch.no_grad():
                self.centre.lerp_(out.mean(0), 0.1)
        return F.mse_loss(out, y)


def kinds() -> list[Any]:
    return [(*pair, i > 1) for i, pair in enumerate(rows((8, 6), (8, 3))())]


def calling(code: Callable[..., Tensor], **more: Any) -> Case:
    return {
        "build": partial(Called, code),
        "batches": rows((8, 6), (8, 3)),
        "only": lambda replicas, micro: replicas == (1, 1),
        **more,
    }


WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)


def logits(net: Net, h: Tensor, y: Tensor) -> Tensor:
    return net.b(h)


class Plain(Net):
    """Its loss is a function of its own."""

    def __init__(self) -> None:
        super().__init__(logits)

    def forward(self, x: Tensor) -> Any:
        return self.b(torch.tanh(self.a(x)))


def module_loss() -> Any:
    return nn.CrossEntropyLoss(weight=WEIGHTS.clone(), label_smoothing=0.1)


def closure_loss() -> Any:
    weights = WEIGHTS.clone()

    def weigh(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y, weight=weights * 2)

    return lambda out, y: weigh(out * WEIGHTS, y)


def remembering_loss() -> Any:
    seen = torch.zeros(4, dtype=torch.float64)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        nonlocal seen
        before, seen = seen, 0.9 * seen + 0.1 * out.detach().mean(0)
        return F.cross_entropy(out - before, y)

    return loss


def writing_loss() -> Any:
    seen = torch.zeros(4, dtype=torch.float64)

    def loss(out: Tensor, y: Tensor) -> Tensor:
        seen.mul_(0.9)
        return F.cross_entropy(out - seen, y)

    return loss


CASES: dict[str, Case] = {
    "weights of a loss module": {"build": Plain, "batches": labels, "loss": module_loss},
    "weights in a closure": {"build": Plain, "batches": labels, "loss": closure_loss},
    "a loss that remembers": {
        "build": Plain,
        "batches": labels,
        "loss": remembering_loss,
        "refused": "keeps tensors|two parts|changed by",
    },
    "a loss that writes": {
        "build": Plain,
        "batches": labels,
        "loss": writing_loss,
        "refused": "in place|changed by",
    },
    "a head after the loss": {"build": partial(Net, probed), "batches": labels},
    "a weight after the loss": {"build": partial(Net, penalty), "batches": labels},
    "a Layer that makes its loss": {"build": partial(Net, own_loss), "batches": labels},
    "two heads": {"build": partial(Net, two_heads), "batches": labels},
    "a mean of the first stage": {"build": partial(Net, two_means), "batches": labels},
}
CASES |= {
    "a half without gradient": counting(
        lambda net, h, n: torch.cat([h[:n].detach(), h[n:]]),
    ),
    "a scaled gradient": counting(
        lambda net, h, n: Scaled.apply(h, 1 / max(len(h), 4)),
    ),
    "a half that drops": counting(lambda net, h, n: torch.cat([net.drop(h[:n]), h[n:]])),
    "a half that drops all": counting(
        lambda net, h, n: torch.cat([F.dropout(h[:n], 1.0), h[n:]]),
    ),
    "a half that is normed": counting(
        lambda net, h, n: torch.cat([net.norm(h.flip(1)[:n].repeat(2, 1))[:n], h[n:]]),
    ),
}
CASES |= {
    "two views in one batch": crossing(
        lambda a, x: a(torch.cat([x[:, 0], x[:, 1]])),
        lambda z, y: F.mse_loss(z[: len(y)], z[len(y) :]) + F.mse_loss(z[: len(y)], y),
        "test_borders.*alone give other numbers",
    ),
    "time first": crossing(
        lambda a, x: a(x).transpose(0, 1).reshape(-1, 8),
        lambda z, y: F.mse_loss(z.view(5, -1, 3)[-1], y),
        "test_borders.*alone give other numbers",
    ),
    "rows turned round": crossing(
        lambda a, x: a(x).flip(0), lambda z, y: F.mse_loss(z.flip(0)[:, 0], y), "alone give other"
    ),
    "batch first": {
        **crossing(
            lambda a, x: a(x).reshape(-1, 8), lambda z, y: F.mse_loss(z.view(-1, 5, 3)[:, 2], y)
        ),
        "refused": None,
    },
    "a mean out of a Layer": {
        **crossing(mean_first, F.mse_loss, "two parts|no rows itself", mean=True),
        "only": lambda replicas, micro: micro == 1,
    },
    "a mean out of a Layer for the next stage": {
        "build": Late,
        "batches": alike,
        "refused": "no rows itself",
        "only": lambda replicas, micro: replicas == (1, 2) and micro == 1,
    },
}
CASES |= {
    "a Layer with its own weights": calling(lambda net, h: called(net, h, lambda p: p)),
    "a Layer with other weights": calling(
        lambda net, h: called(net, h, lambda p: p + 0.1 * p.detach().sign()),
        refused="test_borders.py:.* b is called with another bias than its own",
    ),
    "a Layer with a weight exchanged": calling(
        swapped, refused="test_borders.py:.* b is called with another weight than its own"
    ),
    "an output of an earlier stage": calling(
        lambda net, h: net.b(h),
        outputs={"early": wh.concat},
        refused="'early' is made in another stage than the loss",
    ),
    "a list as long as the batch": calling(
        lambda net, h: net.b(h * torch.tensor([2.0] * len(h), dtype=h.dtype)[:, None]),
        refused="test_borders.py:.* 2 items for 2 rows and 3 for 3",
    ),
    "a buffer of a later kind of batch": {
        "build": Later,
        "batches": kinds,
        "refused": "centre is changed by the forward",
        "only": lambda replicas, micro: replicas == (1, 1),
    },
}
"""What `refused` does not match is exact."""


def build(case: Case) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = case["build"]().double()
    return model


def plainly(case: Case) -> list[float]:
    model, loss = build(case), case.get("loss", lambda: None)()
    optimizer = sgd(list(model.named_parameters()))
    losses = []
    for batch in case["batches"]():
        optimizer.zero_grad()
        out = loss(model(*batch[:-1]), batch[-1]) if loss is not None else model(*batch)
        value = out["loss"] if isinstance(out, dict) else out
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def trained(case: Case, replicas: tuple[int, int], micro: int) -> list[float]:
    model = build(case)
    rest = "|".join(name for name, _ in model.named_children() if name != "a")
    first, second = (wh.replicate(n) for n in replicas)
    wh.annotate(model, {"a": (wh.stage(), first), rest: (wh.stage(), second)})
    given = case["batches"]()
    step = wh.parallelize(
        model,
        optimizer=sgd,
        batch=given[0],
        loss=case.get("loss", lambda: None)(),
        config={"timeout_seconds": 20, "pipeline.num_micro_batch": micro},
        outputs=case.get("outputs"),
    )
    try:
        return [float(step(batch)["loss"]) for batch in given]
    finally:
        step.close(forget=True)


def on_rank(layouts: list[tuple[tuple[int, int], int]]) -> dict[Any, str | float]:
    torch.set_num_threads(1)
    wh.init()
    found: dict[Any, str | float] = {}
    every = [
        (name, layout)
        for name, case in CASES.items()
        for layout in layouts
        if case.get("only", lambda replicas, micro: True)(*layout)
    ]
    for name, (replicas, micro) in part(every):
        case = CASES[name]
        want = plainly(case)
        try:
            got = trained(case, replicas, micro)
        except wh.WhaleError as error:
            found[name, replicas, micro] = str(error)
        else:
            apart = max(abs(a - b) for a, b in zip(got, want, strict=True))
            found[name, replicas, micro] = apart
    return found


def check(ranks: int, layouts: list[tuple[tuple[int, int], int]]) -> None:
    for found in run_ranks(ranks, on_rank, layouts, timeout=110.0):
        for key, result in found.items():
            refused = CASES[key[0]].get("refused")
            refused = refused(key[1]) if callable(refused) else refused
            if refused is None:
                assert isinstance(result, float) and result < 1e-9, (key, result)
            else:
                assert isinstance(result, str) and re.search(refused, result), (key, result)
                assert "hint:" in result, (key, result)


def test_two_stages() -> None:
    check(2, [((1, 1), 1), ((1, 1), 2)])


def test_stages_of_other_widths() -> None:
    check(3, [((1, 2), 1), ((2, 1), 1), ((1, 2), 2)])
