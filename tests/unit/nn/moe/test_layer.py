"""The MoE layer on one device against the plainest code that says what it should do."""

from __future__ import annotations

import copy
import math
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import whale as wh
from whale.errors import WhaleError
from whale.nn.moe.layer import MoE

CASES = [
    (router, k, balance, capacity)
    for (router, k), balance, capacity in product(
        [("top-k", 1), ("top-k", 2), ("prototype", 2), ("prototype", 1)],
        ["bias", "loss", "none"],
        [None, 0.5, 1.25],
    )
]


def make(router: str, k: int, balance: str, capacity: float | None, **more: object) -> MoE:
    torch.manual_seed(3)
    moe = MoE(
        6,
        10,
        4,
        top_k=k,
        router=router,
        balance=balance,
        capacity_factor=capacity,
        **more,  # type: ignore[arg-type]
    ).double()
    moe.bias.copy_(torch.tensor([0.3, -0.2, 0.1, 0.0]))
    return moe


def one_expert(moe: MoE, expert: int, x: Tensor) -> Tensor:
    h = x @ moe.w_in[expert]
    if moe.gated:
        left, right = h.chunk(2, -1)
        h = F.gelu(left) * right
    else:
        h = F.gelu(h)
    return h @ moe.w_out[expert].t()


def choices(moe: MoE, logits: Tensor) -> list[list[tuple[int, Tensor]]]:
    """For each token its experts in the order of choice, with their gates."""
    bias = moe.bias if moe.balance == "bias" else torch.zeros_like(moe.bias)
    found = []
    for row in logits:
        if moe.router_kind == "prototype":
            size = moe.num_experts // moe.top_k
            mine = []
            for g in range(moe.top_k):
                scores = row[g * size : (g + 1) * size].softmax(0)
                best = int((scores + bias[g * size : (g + 1) * size]).argmax())
                mine.append((g * size + best, scores[best]))
        else:
            scores = row.softmax(0)
            order = (scores + bias).argsort(descending=True)[: moe.top_k].tolist()
            total = sum(scores[e] for e in order) if moe.top_k > 1 else 1.0
            mine = [(e, scores[e] / total) for e in order]
        found.append(mine)
    return found


def by_hand(moe: MoE, x: Tensor) -> tuple[Tensor, list[int], int]:
    """The output, the load, and how many choices were dropped."""
    tokens = x.reshape(-1, moe.dim)
    chosen = choices(moe, tokens @ moe.router.weight.t())
    room = math.inf
    if moe.capacity_factor is not None:
        slots = len(tokens) * moe.top_k
        room = max(1, math.ceil(moe.capacity_factor * slots / moe.num_experts))
    used, load, dropped = [0] * moe.num_experts, [0] * moe.num_experts, 0
    out = [torch.zeros(moe.dim, dtype=x.dtype) for _ in tokens]
    for j in range(moe.top_k):
        for t, mine in enumerate(chosen):
            expert, gate = mine[j]
            load[expert] += 1
            if used[expert] < room:
                used[expert] += 1
                out[t] = out[t] + gate * one_expert(moe, expert, tokens[t])
            else:
                dropped += 1
    return torch.stack(out).view_as(x), load, dropped


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("router", "k", "balance", "capacity"), CASES)
def test_output_and_gradients(
    router: str, k: int, balance: str, capacity: float | None, gated: bool
) -> None:
    moe = make(router, k, balance, capacity, gated=gated)
    x = torch.randn(3, 7, 6, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(3, 7, 6, dtype=torch.float64)
    wanted, load, dropped = by_hand(moe, x)
    inputs = [x, *moe.parameters()]
    expected = torch.autograd.grad((wanted * weights).sum(), inputs, allow_unused=True)
    before = moe.bias.clone()
    made = moe(x)
    out = made[0] if isinstance(made, tuple) else made
    torch.testing.assert_close(out, wanted)
    found = torch.autograd.grad((out * weights).sum(), inputs, allow_unused=True)
    for got, due in zip(found, expected, strict=True):
        torch.testing.assert_close(got, due if due is not None else torch.zeros_like(got))
    assert moe.tokens_seen.tolist() == load
    assert int(moe.tokens_dropped) == dropped
    if capacity == 0.5:
        assert dropped > 0
    even = sum(load) / len(load)
    moved = torch.tensor([math.copysign(1, even - n) if n != even else 0.0 for n in load])
    expected_bias = before + (1e-3 * moved if balance == "bias" else 0.0)
    torch.testing.assert_close(moe.bias, expected_bias.to(moe.bias.dtype))


@pytest.mark.parametrize(("router", "k"), [("top-k", 1), ("top-k", 2), ("prototype", 2)])
def test_losses_are_returned(router: str, k: int) -> None:
    moe = make(router, k, "loss", None, z_loss=0.1, loss_weight=0.3)
    x = torch.randn(11, 6, dtype=torch.float64)
    logits = x @ moe.router.weight.t()
    groups = k if router == "prototype" else 1
    scores = logits.view(11, groups, -1).softmax(-1).view(11, -1)
    _, load, _ = by_hand(moe, x)
    shares = torch.tensor(load, dtype=torch.float64) / (11 * k)
    expected = 0.3 * 4 / groups * (shares * scores.mean(0)).sum()
    expected = expected + 0.1 * logits.logsumexp(-1).square().mean()
    torch.testing.assert_close(moe(x)[1], expected)
    # Balanced to the last token it is the weight itself, whatever the router.
    assert moe.has_loss and moe.rows_interact


@pytest.mark.parametrize("capacity", [None, 1.0, 3.0])
def test_expert_choice(capacity: float | None) -> None:
    moe = make("expert-choice", 2, "none", capacity)
    x = torch.randn(9, 6, dtype=torch.float64, requires_grad=True)
    scores = (x @ moe.router.weight.t()).softmax(-1)
    room = math.ceil((capacity or 2.0) * 9 / 4)
    wanted = torch.zeros_like(x)
    for expert in range(4):
        for token in scores[:, expert].argsort(descending=True)[:room].tolist():
            gate = scores[token, expert]
            row = gate * one_expert(moe, expert, x[token])
            wanted = wanted.index_add(0, torch.tensor([token]), row.unsqueeze(0))
    out = moe(x)
    torch.testing.assert_close(out, wanted)
    weights = torch.randn(9, 6, dtype=torch.float64)
    inputs = [x, *moe.parameters()]
    due = torch.autograd.grad((wanted * weights).sum(), inputs)
    got = torch.autograd.grad((out * weights).sum(), inputs)
    for a, b in zip(got, due, strict=True):
        torch.testing.assert_close(a, b)
    assert moe.tokens_seen.tolist() == [room] * 4


@pytest.mark.parametrize(("router", "k"), [("top-k", 2), ("prototype", 2), ("expert-choice", 2)])
@pytest.mark.parametrize("capacity", [None, 0.75])
def test_padding_counts_nowhere(router: str, k: int, capacity: float | None) -> None:
    """With some tokens not valid, the others get what they would get without them."""
    balance = "none" if router == "expert-choice" else "loss"
    moe = make(router, k, balance, capacity, z_loss=0.1)
    alone = make(router, k, balance, capacity, z_loss=0.1)
    x = torch.randn(2, 8, 6, dtype=torch.float64)
    valid = torch.rand(2, 8) < 0.6
    out, loss = moe(x, valid)
    due, due_loss = alone(x[valid])
    torch.testing.assert_close(out[valid], due)
    assert not out[~valid].any()
    torch.testing.assert_close(loss, due_loss)
    assert torch.equal(moe.tokens_seen, alone.tokens_seen)
    assert torch.equal(moe.tokens_dropped, alone.tokens_dropped)


def test_the_router_is_wide_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bfloat16 layer chooses as a float32 one with the same weights does."""
    # On some virtual machines oneDNN's bfloat16 products use AMX, which ends the process there.
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    moe = MoE(8, 16, 4).bfloat16()
    wide = MoE(8, 16, 4)
    wide.load_state_dict({n: v.float() for n, v in moe.state_dict().items()})
    x = torch.randn(64, 8).bfloat16()
    moe(x)
    wide(x.float())
    assert moe.tokens_seen.tolist() == wide.tokens_seen.tolist()
    assert moe.bias.dtype == torch.float32


@pytest.mark.parametrize("router", ["top-k", "expert-choice"])
def test_autocast(monkeypatch: pytest.MonkeyPatch, router: str) -> None:
    """Under autocast a float32 layer gives what a bfloat16 one does, and keeps its gradients."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    moe = MoE(8, 16, 4, router=router, balance="none")
    half = copy.deepcopy(moe).bfloat16()
    half.router.float()
    half.router.weight.data.copy_(moe.router.weight.data)
    x = torch.randn(64, 8).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        y = moe(x.float())
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, half(x))
    y.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in moe.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        assert moe.double()(x.double()).dtype == torch.float64


def test_the_bias_balances() -> None:
    """A router that favours one expert is brought to even loads."""
    torch.manual_seed(0)
    moe = MoE(8, 8, 4, balance_rate=0.002)
    with torch.no_grad():
        moe.router.weight.mul_(0.1)
    x = torch.randn(512, 8) + torch.randn(8)
    first = None
    for _ in range(60):
        moe.reset_counters()
        moe(x)
        load = moe.counters()["load"]
        first = load if first is None else first
    assert float(load.max()) < 0.35 < float(first.max())


def test_counters_and_evaluation() -> None:
    moe = MoE(8, 8, 4, capacity_factor=0.5)
    x = torch.randn(40, 8)
    moe(x)
    counters = moe.counters()
    assert float(counters["load"].sum()) == pytest.approx(1.0)
    assert 0.4 <= float(counters["dropped"]) < 1.0
    moe.eval()
    bias, seen = moe.bias.clone(), moe.tokens_seen.clone()
    moe(x)
    assert torch.equal(moe.bias, bias) and torch.equal(moe.tokens_seen, seen)
    moe.reset_counters()
    assert int(moe.counters()["dead"]) == 4


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"router": "topk"}, "router = 'topk'; allowed: 'top-k', 'prototype', 'expert-choice'"),
        ({"top_k": 9}, "top_k = 9 with 4 experts"),
        ({"top_k": 3, "router": "prototype"}, "top_k = 3 with 4 experts and router 'prototype'"),
        ({"capacity_factor": 0.0}, "capacity_factor = 0.0; allowed: above 0, or None"),
        ({"balance": "loss", "router": "expert-choice"}, "whose experts are balanced"),
        ({"activation": "tanh"}, "activation = 'tanh'"),
    ],
)
def test_wrong_options(options: dict[str, object], text: str) -> None:
    with pytest.raises(WhaleError, match=text.replace("(", r"\(")):
        MoE(8, 8, 4, **options)  # type: ignore[arg-type]


def test_shapes_alone() -> None:
    """A trillion parameters cost nothing on the meta device."""
    with torch.device("meta"):
        moe = MoE(1024, 21248, 960, top_k=2, router="prototype")
        out = moe(torch.empty(2, 5, 1024))
    assert out.shape == (2, 5, 1024)
    assert moe.w_in.numel() + moe.w_out.numel() == 2 * 960 * 1024 * 21248


def test_a_step_tells_the_counters() -> None:
    model = nn.Sequential(MoE(8, 16, 4), nn.Linear(8, 2))
    batch = (torch.randn(6, 8), torch.randn(6, 2))
    step = wh.parallelize(
        wh.replicate()(model),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        loss=F.mse_loss,
        batch=batch,
    )
    step(batch)
    (path,) = step.expert_counters(reset=True)
    assert path == "0"
    assert not any(step.expert_counters()["0"]["load"].tolist())
    step(batch)
    found = step.expert_counters()["0"]
    assert float(found["load"].sum()) == pytest.approx(1.0) and float(found["dropped"]) == 0
    step.close()
