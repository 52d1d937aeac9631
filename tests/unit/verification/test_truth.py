"""The verifier's truth, in one process: shares found by trying, losses of joined outputs, masks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import whale as wh
from whale.engine.capture.captured import capture
from whale.verification.masks import Handed, Watch
from whale.verification.shares import shares

ROWS = 7
SPANS = [(0, 3), (3, 5), (5, 7)]


def at(number: int, span: tuple[int, int]) -> Any:
    return nullcontext()


class Own(nn.Module):
    """A model that returns its loss."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
        if norm:
            self.net.insert(1, nn.BatchNorm1d(8))
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.net(x), y)


def batch(ignored: list[int]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(0, 5, (ROWS,), generator=generator)
    y[ignored] = -100
    return torch.randn(ROWS, 6, dtype=torch.float64, generator=generator), y


WEIGHT = torch.tensor([0.2, 1.0, 3.0, 0.5, 2.0], dtype=torch.float64)


def weighted(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y, weight=WEIGHT)


def masked(logits: Tensor, y: Tensor) -> Tensor:
    valid = (y != -100).to(logits.dtype)
    losses = F.cross_entropy(logits, y.clamp(min=0), reduction="none")
    return (losses * valid).sum() / valid.sum().clamp(min=1)


def squared_too(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, y) + logits.square().mean()


def counts_of(y: Tensor, weigh: Callable[[Tensor], Tensor]) -> list[float]:
    parts = [float(weigh(y[low:high])) for low, high in SPANS]
    return [part / sum(parts) for part in parts]


def labels(y: Tensor) -> Tensor:
    return (y != -100).sum()


def weights(y: Tensor) -> Tensor:
    return WEIGHT[y[y != -100]].sum()


@pytest.mark.parametrize("ignored", [[], [1], [0, 1, 2], [3, 4, 6]])
@pytest.mark.parametrize(
    ("loss", "weigh"), [(F.cross_entropy, labels), (weighted, weights), (masked, labels)]
)
def test_shares_are_what_the_loss_divides_by(
    loss: Any, weigh: Callable[[Tensor], Tensor], ignored: list[int]
) -> None:
    given = batch(ignored)
    want = counts_of(given[1], weigh)
    for norm in (False, True):
        model = Own(loss, norm).double()
        found = shares(model, None, given, SPANS, at)
        assert found is not None
        # A part that adds nothing, whatever its share, keeps the share of its rows.
        known = [m for m, share in enumerate(want) if share]
        torch.testing.assert_close([found[m] for m in known], [want[m] for m in known])
        assert model.net[-1].weight.grad is None


def test_a_sum_counts_every_part_once() -> None:
    model = Own(lambda logits, y: F.cross_entropy(logits, y, reduction="sum")).double()
    found = shares(model, None, batch([1]), SPANS, at)
    torch.testing.assert_close(found, [1.0, 1.0, 1.0])


def test_terms_of_different_counts_have_no_shares() -> None:
    assert shares(Own(squared_too).double(), None, batch([1]), SPANS, at) is None
    found = shares(Own(squared_too).double(), None, batch([]), SPANS, at)
    torch.testing.assert_close(found, [3 / 7, 2 / 7, 2 / 7])


class Routed(nn.Module):
    """Experts with limited room and a balance loss: rows meet, but not in the last layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.moe = wh.nn.MoE(6, 8, 4, capacity_factor=1.0, balance="loss")
        self.out = nn.Linear(6, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h, balance = self.moe(x)
        return F.cross_entropy(self.out(h), y) + balance


def test_experts_do_not_hide_the_shares() -> None:
    model = Routed().double()
    given = batch([1])
    torch.testing.assert_close(
        shares(model, None, given, SPANS, at), counts_of(given[1], labels), rtol=1e-6, atol=1e-9
    )
    assert model.moe.capacity_factor == 1.0


# ---- masks ---------------------------------------------------------------------------------------

DROPS: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "dropout": (lambda x: F.dropout(x, 0.4), 1 / 0.6),
    "in place": (lambda x: F.dropout(x.clone(), 0.4, inplace=True), 1 / 0.6),
    "builtin": (lambda x: torch.dropout(x, 0.4, train=True), 1 / 0.6),
    "module": (nn.Dropout(0.4), 1 / 0.6),
    "channels": (lambda x: F.dropout1d(x.unsqueeze(-1), 0.4).squeeze(-1), 1 / 0.6),
    "alpha": (lambda x: F.alpha_dropout(x, 0.4, training=True), 0.0),
}


class Drops(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.weight)


@pytest.mark.parametrize("name", DROPS)
def test_handed_masks(name: str) -> None:
    function, scale = DROPS[name]
    model = Drops(function).double()
    x = 1.0 + torch.rand(8, 200, dtype=torch.float64)
    random = capture(model, (x, torch.zeros(8)), lambda out, y: out.mean()).random
    watch = Watch()
    handed = Handed(model, random, 7, watch)
    before = torch.get_rng_state()
    with handed.at(0, 0, 0, 8):
        whole = model(x)
    with handed.at(0, 0, 0, 3):
        first = model(x[:3])
    with handed.at(0, 1, 3, 8):
        rest = model(x[3:])
    with handed.at(1, 0, 0, 8):
        later = model(x)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(whole, torch.cat([first, rest]))
    assert not torch.equal(whole, later)
    assert not watch.complaints
    if scale:
        kept = whole != 0
        assert 0.5 < kept.double().mean() < 0.7
        torch.testing.assert_close(whole[kept], x[kept] * scale)
    else:
        # Alpha dropout keeps mean 0 and variance 1 of what has them.
        with handed.at(0, 0, 0, 8):
            out = model(torch.randn(8, 4000, dtype=torch.float64)).detach()
        assert abs(float(out.mean())) < 0.05
        assert abs(float(out.var()) - 1) < 0.1


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", [None, "bool", "float"])
def test_handed_attention(causal: bool, kind: str | None) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 2, 5, 4, dtype=torch.float64) for _ in range(3))
    mask = {
        None: None,
        "bool": torch.rand(5, 5) < 0.7,
        "float": torch.randn(5, 5, dtype=torch.float64),
    }[kind]
    if mask is not None and mask.dtype == torch.bool:
        mask = mask | torch.eye(5, dtype=torch.bool)
    masks: dict[str, Any] = {"attn_mask": None if causal else mask, "is_causal": causal}
    calls: list[float] = []

    def function(x: Tensor) -> Tensor:
        p = calls.pop()
        return F.scaled_dot_product_attention(x, k[: len(x)], v[: len(x)], dropout_p=p, **masks)

    model = Drops(function).double()
    calls.extend([0.5] * 8)
    random = capture(model, (q, torch.zeros(3)), lambda out, y: out.mean()).random
    handed = Handed(model, random, 7, Watch())
    # The mean over many masks is what attention gives without dropout.
    total = torch.zeros_like(q)
    calls[:] = [0.5] * 400
    for step in range(400):
        with handed.at(step, 0, 0, 3):
            total += model(q).detach()
    calls[:] = [0.0]
    apart = (total / 400 - model(q)).abs().max()
    assert apart < 0.5
    calls[:] = [1e-12]
    with handed.at(0, 0, 0, 3):
        almost = model(q)
    calls[:] = [0.0]
    torch.testing.assert_close(almost, model(q))


def test_masks_that_do_not_change_are_told() -> None:
    watch = Watch()
    kept = torch.rand(4, 100) < 0.5
    for step in range(2):
        watch.begin(step, 0)
        watch.see(kept, 0.5)
    assert watch.complaints == ["a mask is the same in two steps"]
    watch = Watch()
    watch.see(kept[:1].expand(4, 100), 0.5)
    assert watch.complaints == ["a mask is the same for all samples"]
    watch = Watch()
    watch.see(torch.rand(4, 100) < 0.9, 0.5)
    assert len(watch.complaints) == 1
