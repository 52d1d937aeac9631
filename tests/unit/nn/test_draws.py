"""Keyed numbers: their distributions, their places, and every random function of torch by name."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from whale.errors import WhaleError
from whale.nn import draws
from whale.nn.random_dropouts import COMPOSED
from whale.nn.randomness import HANDLERS, UNKNOWN, BatchDims, CallNames, Draws, KeyedRandom
from whale.runtime.context import StepContext

MANY = 40_000


def mode_of(dim: int | None, **where: int) -> KeyedRandom:
    context = StepContext(**{"seed": 1, "rows": 8, "micro_rows": 8, **where})
    dims = BatchDims({("", i): (n, dim) for i in range(9) for n in (1,)}, exact=False)
    names = {("", 10 * n): (n, dim) for n in range(1, 6)}
    return KeyedRandom(Draws(CallNames(context), BatchDims({**dims.by_name, **names}, exact=False)))


x = torch.rand(MANY // 2, 2, dtype=torch.float64)
half = torch.full((MANY,), 0.5, dtype=torch.float64)

# What is drawn, its mean and its variance.
MOMENTS: dict[str, tuple[Callable[[], Tensor], float, float]] = {
    "rand": (lambda: torch.rand(MANY), 0.5, 1 / 12),
    "rand_half": (lambda: torch.rand(MANY, dtype=torch.bfloat16), 0.5, 1 / 12),
    "randn": (lambda: torch.randn(MANY, dtype=torch.float64), 0.0, 1.0),
    "randn_like": (lambda: torch.randn_like(half), 0.0, 1.0),
    "complex": (lambda: torch.randn(MANY, dtype=torch.complex128).abs().square(), 1.0, 1.0),
    "randint": (lambda: torch.randint(2, 8, (MANY,)), 4.5, 35 / 12),
    "randint_like": (lambda: torch.randint_like(half, 6), 2.5, 35 / 12),
    "normal": (lambda: torch.normal(half, 2 * half), 0.5, 1.0),
    "normal_size": (lambda: torch.normal(1.0, 3.0, (MANY,)), 1.0, 9.0),
    "bernoulli": (lambda: torch.bernoulli(0.3 * torch.ones(MANY)), 0.3, 0.21),
    "bernoulli_": (lambda: torch.empty(MANY).bernoulli_(0.7), 0.7, 0.21),
    "uniform_": (lambda: torch.empty(MANY).uniform_(-1, 3), 1.0, 16 / 12),
    "normal_": (lambda: torch.empty(MANY).normal_(2, 0.5), 2.0, 0.25),
    "exponential_": (lambda: torch.empty(MANY).exponential_(2.0), 0.5, 0.25),
    "geometric_": (lambda: torch.empty(MANY).geometric_(0.4), 2.5, 0.6 / 0.16),
    "log_normal_": (
        lambda: torch.empty(MANY).log_normal_(0.0, 0.5),
        math.exp(0.125),
        (math.exp(0.25) - 1) * math.exp(0.25),
    ),
    "random_": (lambda: torch.empty(MANY).random_(0, 10), 4.5, 99 / 12),
    "poisson": (lambda: torch.poisson(torch.full((MANY,), 3.5)), 3.5, 3.5),
    "poisson_large": (lambda: torch.poisson(torch.full((MANY,), 300.0)), 300.0, 300.0),
    "binomial": (lambda: torch.binomial(9 * torch.ones(MANY), 0.3 * torch.ones(MANY)), 2.7, 1.89),
    "gamma": (lambda: torch._standard_gamma(torch.full((MANY,), 2.5)), 2.5, 2.5),
    "gamma_small": (lambda: torch._standard_gamma(torch.full((MANY,), 0.2)), 0.2, 0.2),
    "dirichlet": (lambda: torch._sample_dirichlet(torch.ones(MANY, 2))[:, 0], 0.5, 1 / 12),
    "multinomial": (
        lambda: torch.multinomial(torch.tensor([[0.2, 0.3, 0.5]]).expand(MANY, 3), 1), 1.3, 0.61
    ),
    "replaced": (
        lambda: torch.multinomial(torch.tensor([0.2, 0.3, 0.5]), MANY, replacement=True), 1.3, 0.61
    ),
    "dropout": (lambda: F.dropout(torch.ones(MANY), 0.25), 1.0, 1 / 3),
    "dropout1d": (lambda: F.dropout1d(torch.ones(MANY // 8, 8, 1), 0.5), 1.0, 1.0),
    "gumbel": (
        lambda: F.gumbel_softmax(torch.tensor([[0.2, 0.8]]).log().expand(MANY, 2), hard=True)[:, 0],
        0.2,
        0.16,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MOMENTS)
def test_moments(name: str) -> None:
    make, mean, variance = MOMENTS[name]
    before = torch.get_rng_state()
    with mode_of(None):
        drawn = make().double().flatten()
    assert torch.equal(before, torch.get_rng_state())
    assert abs(float(drawn.mean()) - mean) < 6 * math.sqrt(variance / len(drawn)) + 2e-3
    assert abs(float(drawn.var()) - variance) < 0.08 * variance + 1e-3


def test_normal_numbers_have_their_tails() -> None:
    place = draws.Place(
        key=3, shape=(400_000,), offsets=(0,), batch_dim=0, device=torch.device("cpu")
    )
    drawn = draws.normal(place).sort().values
    wanted = torch.special.ndtri((torch.arange(400_000, dtype=torch.float64) + 0.5) / 400_000)
    assert float((drawn - wanted)[400:-400].abs().max()) < 0.1
    assert float(drawn.max()) > 4.0
    assert len(drawn.unique()) == 400_000


def test_alpha_dropout_keeps_mean_and_deviation() -> None:
    y = torch.randn(MANY, dtype=torch.float64)
    with mode_of(None):
        out = F.alpha_dropout(y, 0.3, True)
    assert abs(float(out.mean())) < 0.03
    assert abs(float(out.std()) - 1.0) < 0.03


@pytest.mark.parametrize(
    "draw",
    [
        lambda n: torch.rand(n, 3),
        lambda n: torch.randn(n * 2, 3),
        lambda n: torch.empty(n, 2).uniform_(),
        lambda n: F.dropout2d(torch.ones(n, 3, 2, 2)),
        lambda n: torch.multinomial(torch.ones(n, 5), 2),
        lambda n: torch.multinomial(torch.ones(n, 5), 7, replacement=True),
        lambda n: F.rrelu(-torch.ones(n, 4), training=True),
        lambda n: torch.distributions.Categorical(torch.ones(n, 5)).sample(),
        lambda n: F.scaled_dot_product_attention(
            *(torch.ones(n, 2, 3, 4),) * 3, dropout_p=0.5
        ),
    ],
)  # fmt: skip
def test_rows_are_those_of_the_global_batch(draw: Callable[[int], Tensor]) -> None:
    with mode_of(0):
        whole = draw(8)
    factor = len(whole) // 8
    with mode_of(0, first_row=3, rows=4):
        part = draw(4)
    assert torch.equal(part, whole[3 * factor : 7 * factor])
    assert not torch.equal(part, whole[: 4 * factor])


def test_what_has_no_rows_is_one_for_the_micro_batch() -> None:
    with mode_of(None, first_row=3, rows=4):
        here = torch.rand(())
    with mode_of(None, first_row=0, rows=3):
        there = torch.rand(())
    with mode_of(None, micro_batch=1):
        later = torch.rand(())
    assert here == there
    assert here != later


def test_rows_that_cannot_be_told_are_refused_on_a_replica() -> None:
    dims = BatchDims({("", 0): (2, UNKNOWN)})
    context = StepContext(rows=4, micro_rows=8)
    with KeyedRandom(Draws(CallNames(context), dims)), pytest.raises(WhaleError, match="which row"):
        torch.rand(4, 4)
    context.rows = 8
    with KeyedRandom(Draws(CallNames(context), dims)):
        torch.rand(4, 4)


def test_a_permutation_of_rows_is_refused_on_a_replica() -> None:
    context = StepContext(rows=4, micro_rows=8)
    mode = KeyedRandom(Draws(CallNames(context), BatchDims({("", 0): (1, 0)})))
    with mode, pytest.raises(WhaleError, match="permutation"):
        torch.randperm(4)
    with mode_of(0):
        assert sorted(torch.randperm(8).tolist()) == list(range(8))


def test_multihead_attention_is_keyed_with_and_without_weights() -> None:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
    y = torch.randn(8, 3, 8)
    outs = []
    for need in (True, False):
        with mode_of(0):
            outs.append(attention(y, y, y, need_weights=need)[0])
    torch.testing.assert_close(outs[0], outs[1])


def test_every_random_function_of_torch_is_in_the_table() -> None:
    """By torch's own marks: what is nondeterministic and seeded, and can be called from Python."""
    missing = set()
    for name in torch._C._dispatch_get_all_op_names():
        space, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        if space != "aten" or overload.endswith("out") or base.endswith("_out"):
            continue
        op = getattr(getattr(torch.ops.aten, base), overload or "default", None)
        if op is None or torch.Tag.nondeterministic_seeded not in op.tags:
            continue
        callables = [getattr(owner, base, None) for owner in (torch, Tensor)]
        callables = [c for c in callables if callable(c)]
        if callables and not any(c in HANDLERS or c in COMPOSED for c in callables):
            missing.add(base)
    # Kernels that other functions call; dropout between recurrent layers is refused.
    public = {name for name in missing if not name.startswith("_")}
    assert public <= {"gru", "lstm", "miopen_rnn", "rnn_relu", "rnn_tanh"}, public
