"""Faults that a comparison of a few plain steps does not show; odd models that are healthy.

Beside `faults`: here are those in masks, in what micro-batches count, in single buffers, in what a
script does between and after its first steps. Faults in what the truth might share with Whale
(masks, counts) are planted everywhere, also in the one-device process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import whale as wh
from tests.distributed.faults import (
    MICRO_2,
    Case,
    Language,
    Plant,
    Skip,
    _scale,
    dropping,
    plain,
    rank,
    replicated,
    split,
    staged,
    tokens,
    vectors,
)
from whale.engine import step, updating
from whale.engine.lower import lowered as lower
from whale.nn import dropout
from whale.runtime import batch as batches
from whale.runtime import data, executor, grads

# ---- models --------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Dropout in all its forms, on tensors wide enough to judge a mask by."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.mix = nn.Linear(6, 64), nn.Linear(64, 64)
        self.drop, self.out = nn.Dropout(0.4), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.inp(x).relu())
        h = F.dropout(self.mix(h), 0.3, self.training)
        return self.out(self.drop(h))


class Attention(nn.Module):
    """Attention with dropout: as a function, causal and with a mask, and as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.qkv = nn.Embedding(12, 8), nn.Linear(8, 24)
        self.multi = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(8, 12)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb(ids)
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        p = 0.25 if self.training else 0.0
        x = x + F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True).transpose(
            1, 2
        ).flatten(2)
        x = x + self.multi(x, x, x, need_weights=False)[0]
        return self.head(x)


class Noisy(nn.Module):
    """Draws that are no dropout, and a checkpoint that runs its dropout again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mean, self.spread = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.last = nn.Linear(8, 5)

    def _inner(self, x: Tensor) -> Tensor:
        return F.dropout(self.first(x).relu(), 0.3, self.training)

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self._inner, x, use_reentrant=False)
        mean, spread = self.mean(h), self.spread(h).exp()
        jitter = torch.empty_like(mean).uniform_(0.9, 1.1) if self.training else 1.0
        return self.last(mean * jitter + spread * torch.randn_like(spread) * 0.1)


class Odd(nn.Module):
    """Buffers of every sort, among them huge, infinite, boolean and complex ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)
        self.register_buffer("huge", torch.full((3, 3), torch.finfo(torch.float32).min).triu(1))
        self.register_buffer("shut", torch.full((3, 3), -torch.inf).triu(1))
        self.register_buffer("hole", torch.tensor([1.0, torch.nan]))
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("whole", torch.arange(4, dtype=torch.int16))
        self.register_buffer("waves", torch.polar(torch.ones(8), torch.arange(8.0)))
        self.register_buffer("halves", torch.linspace(0, 1, 8, dtype=torch.float16))
        self.register_buffer("nothing", torch.zeros(2))
        self.register_buffer("turned", torch.arange(12.0).reshape(3, 4).T)
        self.frozen = nn.Parameter(torch.full((2,), -1e38), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x)) * self.halves
        h = torch.view_as_real(torch.complex(h, h) * self.waves).sum(-1)
        masked = torch.where(self.flags, self.shut[0].exp(), self.huge[0].exp())
        return self.last(h) + masked.sum()


class OwnLoss(nn.Module):
    """A model that returns its loss, a mean by counts of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = plain()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Unused(nn.Module):
    """Parameters without a gradient: unused, and frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.spare, self.kept = plain(), nn.Linear(3, 3), nn.Linear(6, 6)
        self.kept.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.kept(x))


class Float32Inside(nn.Module):
    """Makes a float32 tensor of its own, so that it cannot run in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.out = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        rotation = torch.eye(8, dtype=torch.float32) * 0.5
        return self.out((self.net(x) @ rotation).relu())


class Weighted(nn.Module):
    """Cross-entropy with class weights; a module, so that they are float64 with the model."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.tensor([1.2, 1.0, 3.0, 1.5, 2.0]))

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels, weight=self.weight)


def keyed(rows: int) -> dict[str, Tensor]:
    x, labels = vectors(rows)
    return {"x": x, "labels": labels}


STAGED = staged("0|1|2", "3|4")
WIDE = vectors(5)
CASES: dict[str, Case] = {
    "dropout": Case(dropping, replicated, vectors(5)),
    "wide": Case(Wide, replicated, WIDE),
    "wide-split": Case(Wide, split, WIDE),
    "wide-stages": Case(Wide, staged("inp|mix|drop", "out"), vectors(5), config=MICRO_2),
    "attention": Case(Attention, replicated, tokens(5)),
    "attention-nested": Case(
        Attention, lambda: {"": (wh.replicate(4), wh.split(2))}, tokens(5), num_ranks=4
    ),
    "noisy": Case(Noisy, replicated, vectors(5), config=MICRO_2),
    "odd": Case(Odd, replicated, vectors(5)),
    "own-loss": Case(OwnLoss, replicated, keyed(6), config=MICRO_2, loss=None),
    "weighted": Case(plain, replicated, vectors(6), 1, config=MICRO_2, loss=Weighted()),
    "stages": Case(plain, STAGED, vectors(6), config=MICRO_2),
    "data": Case(plain, replicated, vectors(5)),
    "tensor": Case(Language, split, tokens(5)),
    "skip": Case(Skip, replicated, vectors(5)),
    "float32": Case(Float32Inside, replicated, vectors(5)),
}  # fmt: skip
QUICK_CASES = frozenset({"noisy", "attention-nested", "odd", "own-loss", "stages", "float32"})
UNUSED = Case(Unused, replicated, vectors(5))


# ---- in what the truth might share ---------------------------------------------------------------


def _drop_scale(factor: Callable[[float], float]) -> Plant:
    """The kept elements are scaled by another factor, in every process."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        true = dropout.drop

        def faulty(x: Tensor, p: float, *rest: Any) -> Tensor:
            return true(x, p, *rest) * (1 - p) * factor(p)

        _everywhere(monkeypatch, "drop", faulty)

    return plant


def _everywhere(monkeypatch: pytest.MonkeyPatch, name: str, value: Any) -> None:
    """In every module that has imported it from `whale.nn.dropout`."""
    true = getattr(dropout, name)
    for module in [m for n, m in sys.modules.items() if n.startswith("whale.")]:
        if getattr(module, name, None) is true:
            monkeypatch.setattr(module, name, value)


def _same_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks do not change from step to step, in any process."""
    true = dropout.key_of
    _everywhere(monkeypatch, "key_of", lambda seed, step, name, call: true(seed, 0, name, call))


def _other_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    true = dropout.keep_mask
    monkeypatch.setattr(dropout, "keep_mask", lambda shape, p, **rest: true(shape, p / 2, **rest))


def _same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sample has the mask of the first, in every process."""
    true = dropout.keep_mask

    def faulty(shape: Any, p: float, *, batch_dim: int, **rest: Any) -> Tensor:
        return true(shape, p, batch_dim=batch_dim, **rest).narrow(batch_dim, 0, 1).expand(shape)

    monkeypatch.setattr(dropout, "keep_mask", faulty)


def _replicas_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every replica draws the masks of the first rows."""
    true = dropout._placed

    def faulty(x: Tensor, key: int, context: Any, dim: Any) -> Any:
        key, first, rows, dim = true(x, key, context, dim)
        return key, 0 if rank() >= 0 else first, rows, dim

    monkeypatch.setattr(dropout, "_placed", faulty)


# ---- buffers -------------------------------------------------------------------------------------


def spoil_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The buffers of one rank begin otherwise."""
    copy = lower.local_copy

    def faulty(*args: Any) -> Any:
        made = copy(*args)
        if rank() == 1:
            for name, spoil in BUFFERS.items():
                spoil(made[0].get_buffer(name))
        return made

    monkeypatch.setattr(lower, "local_copy", faulty)


# ---- later ---------------------------------------------------------------------------------------


def _from_step(number: int, every: int = 1) -> Plant:
    """Gradients are wrong from a step on, or in every so manyth."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        scale = grads.GradientBuckets.scale
        calls = [0]

        def faulty(self: Any, factor: Tensor, names: Any) -> None:
            calls[0] += 1
            wrong = calls[0] >= number and calls[0] % every == 0
            scale(self, factor / 2 if wrong else factor, names)

        monkeypatch.setattr(grads.GradientBuckets, "scale", faulty)

    return plant


def _optimizer_at(number: int, spoil: Callable[[dict[str, Any]], None]) -> Plant:
    """After some update rank 1's optimizer has forgotten something; no weight shows it yet."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        make = updating._made

        def faulty(*args: Any) -> torch.optim.Optimizer:
            made = make(*args)
            calls = [0]

            def after(*_: Any) -> None:
                calls[0] += 1
                if rank() == 1 and calls[0] == number:
                    for state in made.state.values():
                        spoil(state)

            made.register_step_post_hook(after)
            return made

        monkeypatch.setattr(updating, "_made", faulty)

    return plant


# ---- what a script does --------------------------------------------------------------------------


def _around_evaluate(change: Callable[[Any, Any], Any]) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        true = step.Step._evaluate
        monkeypatch.setattr(
            step.Step, "_evaluate", lambda self, batch: change(self, lambda: true(self, batch))
        )

    return plant


def _in_training_mode(self: Any, evaluate: Any) -> Any:
    self._lowered.model.eval = lambda: self._lowered.model
    return evaluate()


def _own_rows_only(self: Any, evaluate: Any) -> Any:
    self._sum = lambda numbers: numbers
    try:
        return evaluate()
    finally:
        del self._sum


def _trains_on(self: Any, evaluate: Any) -> Any:
    """Evaluation that leaves a trace in the weights."""
    result = evaluate()
    with torch.no_grad():
        for parameter in self._lowered.params.values():
            parameter.mul_(1 + 1e-6)
    return result


def _merged(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        true = step.merge
        monkeypatch.setattr(step, "merge", lambda *args: change(true(*args)))

    return plant


def _loaded(spoil: Callable[[Any], Any]) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        true = step.Step.load

        def faulty(self: Any, path: Any) -> Any:
            extra = true(self, path)
            if rank() == 1 or spoil is _no_count:
                spoil(self)
            return extra

        monkeypatch.setattr(step.Step, "load", faulty)

    return plant


def _no_count(self: Any) -> None:
    self.num_steps = 0


def _no_buffers(self: Any) -> None:
    for buffer in self._lowered.model.buffers():
        buffer.zero_()


def _shifted_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """wh.shard gives each rank its rows in another order: labels beside other inputs."""
    true = data._cut

    def faulty(batch: Any, reader: Any) -> Any:
        local = true(batch, reader)
        local.data[0].copy_(local.data[0].roll(1, 0))
        return local

    monkeypatch.setattr(data, "_cut", faulty)


def _rows(count: int) -> Plant:
    """The loss of a batch of so many rows is wrong."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        run = executor.Executor.run

        def faulty(self: Any, batch: Any, *rest: Any) -> Any:
            totals = run(self, batch, *rest)
            if batches.num_rows(batch) == count:
                totals.sums[0] *= 2
            return totals

        monkeypatch.setattr(executor.Executor, "run", faulty)

    return plant


def _length(change: Callable[[Tensor], Tensor]) -> Plant:
    """Inputs are brought to the length of the example, which only another length shows."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        take = batches.take_rows

        def faulty(batch: Any, *rest: Any) -> Any:
            part = take(batch, *rest)
            if rank() < 0:
                return part
            return batches.rebuild(part, [change(leaf) for leaf in batches.leaves(part)])

        monkeypatch.setattr(batches, "take_rows", faulty)

    return plant


def _in_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    scale, train = grads.GradientBuckets.scale, wh.Step._train
    cast: list[Any] = [None]

    def noted(self: Any, taken: Any) -> Any:
        cast[0] = taken.signature.autocast
        return train(self, taken)

    def faulty(self: Any, factor: Tensor, names: Any) -> None:
        scale(self, factor * 1.5 if cast[0] is not None else factor, names)

    monkeypatch.setattr(wh.Step, "_train", noted)
    monkeypatch.setattr(grads.GradientBuckets, "scale", faulty)


# ---- the table -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subtle:
    """A fault, which check must find it, and as what."""

    case: str
    plant: Plant
    kind: str
    check: str = "steps"
    tensor: str = ""
    ranks: tuple[int, ...] | None = (0, 1)
    also: str = ""
    """Another check that must be made for it to show."""


QUICK = frozenset({
    "halved gradients, dropout", "kept elements over p, split", "replicas draw alike in attention",
    "the same masks in every step", "every fourth step wrong", "first moment lost at the end",
    "evaluated in training mode", "outputs joined in another order", "count of steps not loaded",
    "wh.shard moves rows", "one row", "cut to the example's length", "wrong in autocast",
})  # fmt: skip
"""Faults of each sort that every run of the tests plants; the others are for long runs."""

HALF = _scale(lambda factor: factor / 2)
NEGATED = _scale(lambda factor: -factor)

BUFFERS: dict[str, Callable[[Tensor], Any]] = {
    "waves": lambda b: b.imag[3:4].mul_(1.001),
    "flags": lambda b: b[1].logical_not_(),
    "whole": lambda b: b[1].add_(1),
    "shut": lambda b: b[0, 1].fill_(-1e30),
    "hole": lambda b: b[1].fill_(0.0),
    "nothing": lambda b: b[1].fill_(1e-8),
    "turned": lambda b: b[1, 2].add_(1e-6),
    "norm.running_var": lambda b: b[2].mul_(1 + 1e-8),
}
"""What is changed in which buffer of one rank; the huge one beside them hides none of it."""

FAULTS: dict[str, Subtle] = {
    "halved gradients, dropout": Subtle("dropout", HALF, "gradient"),
    "negated gradients, dropout": Subtle("wide", NEGATED, "gradient"),
    "halved gradients, attention dropout": Subtle("attention", HALF, "gradient"),
    "kept elements not scaled": Subtle("dropout", _drop_scale(lambda p: 1.0), "loss"),
    "kept elements over p, split": Subtle("wide-split", _drop_scale(lambda p: 1 / p), "loss"),
    "kept elements not scaled, stages": Subtle("wide-stages", _drop_scale(lambda p: 1.0), "loss"),
    "attention's probabilities not scaled": Subtle(
        "attention", _drop_scale(lambda p: 1.0), "loss"
    ),
    "replicas draw alike": Subtle("wide", _replicas_alike, "loss"),
    "replicas draw alike in attention": Subtle("attention", _replicas_alike, "loss"),
    "the same masks in every step": Subtle("wide", _same_key, "mask", ranks=(-1,)),
    "masks of another rate": Subtle("wide", _other_rate, "mask", ranks=(-1,)),
    "the same mask for every sample": Subtle("wide", _same_rows, "mask", ranks=(-1,)),
    "wrong from step 4 on": Subtle("data", _from_step(4), "gradient", "later steps"),
    "every fourth step wrong": Subtle("tensor", _from_step(4, 4), "gradient", "later steps"),
    "first moment lost at the end": Subtle(
        "data", _optimizer_at(2, lambda s: s["exp_avg"].zero_()), "state", "optimizer state",
        ranks=(1,),
    ),
    "optimizer's count off": Subtle(
        "tensor", _optimizer_at(2, lambda s: s["step"].add_(1)), "state", "optimizer state",
        ranks=(1,),
    ),
    "evaluated in training mode": Subtle(
        "wide", _around_evaluate(_in_training_mode), "evaluation", "evaluate"
    ),
    "evaluated on own rows only": Subtle(
        "data", _around_evaluate(_own_rows_only), "evaluation", "evaluate"
    ),
    "evaluation that trains": Subtle(
        "data", _around_evaluate(_trains_on), "loss", also="evaluate"
    ),
    "outputs joined in another order": Subtle(
        "data", _merged(lambda named: {k: v.flip(0) for k, v in named.items()}), "output",
        "outputs",
    ),
    "outputs of own rows only": Subtle(
        "tensor", _merged(lambda named: {k: v[:2] for k, v in named.items()}), "output", "outputs"
    ),
    "optimizer not loaded": Subtle(
        "data", _loaded(lambda self: self.optimizer.state.clear()), "state", "checkpoint",
        ranks=(1,),
    ),
    "buffers not loaded": Subtle("odd", _loaded(_no_buffers), "buffer", "checkpoint", ranks=(1,)),
    "count of steps not loaded": Subtle("wide", _loaded(_no_count), "loss", "checkpoint"),
    "wh.shard moves rows": Subtle("data", _shifted_read, "loss", "later steps"),
    "a row less": Subtle("data", _rows(4), "evaluation", "fewer rows"),
    "one row": Subtle("data", _rows(1), "evaluation", "one row"),
    "cut to the example's length": Subtle(
        "tensor", _length(lambda t: t[:, :3]), "loss", "longer"
    ),
    "filled to the example's length": Subtle(
        "tensor", _length(lambda t: F.pad(t, (0, 3 - t.shape[1])) if t.shape[1] < 3 else t),
        "loss", "shorter",
    ),
    "wrong in autocast": Subtle("data", _in_autocast, "gradient", "autocast"),
}  # fmt: skip
