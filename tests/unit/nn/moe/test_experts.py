"""Experts on sorted rows and the whole layer: every backend against the loop, and the loop against
one token at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from whale.nn.moe.experts import activate, expert_ffn, moe_ffn

D, F = 16, 24


def _layer(experts: int, gated: bool, biases: bool, dtype: torch.dtype) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)

    def value(*shape: int) -> torch.Tensor:
        made = torch.randn(shape, generator=generator, dtype=torch.float64) / shape[-2] ** 0.5
        return made.to(dtype).requires_grad_()

    wide = 2 * F if gated else F
    layer = {"w_in": value(experts, D, wide), "w_out": value(experts, F, D)}
    if biases:
        layer |= {"b_in": value(experts, wide), "b_out": value(experts, D)}
    return layer


def _offsets(counts: list[int]) -> torch.Tensor:
    return torch.tensor(counts).cumsum(0).to(torch.int32)


def _grads(out: torch.Tensor, of: list[torch.Tensor]) -> list[torch.Tensor]:
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out.dtype)
    return list(torch.autograd.grad(out, of, grad))


COUNTS = [[5, 7, 3], [0, 9, 0], [4, 0, 1], [0, 0, 0], [1, 1, 30]]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("activation", ["gelu", "relu", "silu"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("biases", [False, True])
def test_the_loop_is_each_experts_layer(
    counts: list[int], activation: str, gated: bool, biases: bool
) -> None:
    layer = _layer(len(counts), gated, biases, torch.float64)
    x = torch.randn(sum(counts) + 2, D, dtype=torch.float64, requires_grad=True)
    y = expert_ffn(x, _offsets(counts), **layer, activation=activation, gated=gated)
    want = []
    for row, expert in enumerate(e for e, count in enumerate(counts) for _ in range(count)):
        h = x[row] @ layer["w_in"][expert] + (layer["b_in"][expert] if biases else 0)
        out = activate(h, activation, gated) @ layer["w_out"][expert]
        want.append(out + (layer["b_out"][expert] if biases else 0))
    values = [x, *layer.values()]
    routed = sum(counts)
    assert torch.equal(y[routed:], torch.zeros_like(y[routed:]))
    grads = _grads(y, values)
    assert torch.equal(grads[0][routed:], torch.zeros_like(grads[0][routed:]))
    if not want:
        assert all(not g.any() for g in grads)
        return
    torch.testing.assert_close(y[:routed], torch.stack(want))
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y.dtype)
    wanted = torch.autograd.grad(torch.stack(want), values, grad[:routed], allow_unused=True)
    for value, got, one in zip(values, grads, wanted, strict=True):
        torch.testing.assert_close(got, torch.zeros_like(value) if one is None else one)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["gelu", "silu"])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("biases", [False, True])
def test_grouped_mm_is_the_loop(
    counts: list[int],
    dtype: torch.dtype,
    activation: str,
    gated: bool,
    biases: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = _layer(len(counts), gated, biases, dtype)
    x = torch.randn(sum(counts) + 3, D).to(dtype).requires_grad_()
    # On some virtual machines oneDNN's bfloat16 products use AMX, which ends the process there.
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    how = {"activation": activation, "gated": gated}
    y = expert_ffn(x, _offsets(counts), **layer, **how, backend="grouped_mm")
    exact = {name: w.detach().double().requires_grad_() for name, w in layer.items()}
    x64 = x.detach().double().requires_grad_()
    want = expert_ffn(x64, _offsets(counts), **exact, **how, backend="loop")
    found = [y, *_grads(y, [x, *layer.values()])]
    wanted = [want, *_grads(want, [x64, *exact.values()])]
    for got, one in zip(found, wanted, strict=True):
        error = float((got.double() - one).detach().norm() / one.detach().norm().clamp(min=1e-9))
        assert error < (1e-6 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("k", [1, 2, 8])
@pytest.mark.parametrize("tokens", [0, 1, 29])
@pytest.mark.parametrize("dropped", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("biases", [False, True])
def test_the_layer_is_a_sum_over_each_tokens_experts(
    k: int, tokens: int, dropped: float, biases: bool
) -> None:
    experts = 9
    layer = _layer(experts, True, biases, torch.float64)
    x = torch.randn(tokens, D, dtype=torch.float64, requires_grad=True)
    ids = torch.stack([torch.randperm(experts)[:k] for _ in range(tokens)] or [torch.zeros(k)])
    ids = ids[:tokens].long().masked_fill(torch.rand(tokens, k) < dropped, -1)
    gates = torch.rand(tokens, k, dtype=torch.float64, requires_grad=True)
    out = moe_ffn(x, ids, gates, **layer, activation="silu", gated=True)
    want = torch.zeros(tokens, D, dtype=torch.float64) + 0 * x
    for expert in range(experts):
        h = x @ layer["w_in"][expert] + (layer["b_in"][expert] if biases else 0)
        y = activate(h, "silu", True) @ layer["w_out"][expert]
        y = y + (layer["b_out"][expert] if biases else 0)
        want = want + y * ((ids == expert) * gates).sum(1, keepdim=True)
    torch.testing.assert_close(out, want)
    values = [x, gates, *layer.values()]
    for got, one in zip(_grads(out, values), _grads(want, values), strict=True):
        torch.testing.assert_close(got, one)


def test_no_experts_rows_at_all_still_gives_gradients() -> None:
    for backend in ("loop", "grouped_mm"):
        layer = _layer(4, False, True, torch.float32)
        x = torch.randn(0, D, requires_grad=True)
        y = expert_ffn(x, _offsets([0, 0, 0, 0]), **layer, backend=backend)
        y.sum().backward()
        assert all(w.grad is not None and not w.grad.any() for w in layer.values())


def test_the_default_takes_what_grouped_mm_does_not() -> None:
    counts = _offsets([3, 4])
    for dtype, d, f in ((torch.float64, 16, 16), (torch.float32, 3, 5), (torch.bfloat16, 12, 7)):
        w_in, w_out = torch.randn(2, d, f).to(dtype), torch.randn(2, f, d).to(dtype)
        x = torch.randn(7, d).to(dtype)
        got = expert_ffn(x, counts, w_in, w_out)
        assert torch.equal(got, expert_ffn(x, counts, w_in, w_out, backend="loop"))


@pytest.mark.parametrize("backend", ["loop", "grouped_mm"])
def test_weights_may_be_transposed_views(backend: str) -> None:
    layer = _layer(3, True, False, torch.float32)
    x, ids = torch.randn(20, D), torch.randint(3, (20, 2))
    gates = torch.rand(20, 2)
    how = {"activation": "gelu", "gated": True, "backend": backend}
    want = moe_ffn(x, ids, gates, **layer, **how)
    stored = {name: w.detach().transpose(1, 2).contiguous() for name, w in layer.items()}
    views = {name: w.requires_grad_().transpose(1, 2) for name, w in stored.items()}
    got = moe_ffn(x, ids, gates, **views, **how)
    torch.testing.assert_close(got, want)
    wanted = _grads(want, list(layer.values()))
    for one, other in zip(_grads(got, list(stored.values())), wanted, strict=True):
        torch.testing.assert_close(one.transpose(1, 2), other)


def test_an_expanded_gradient() -> None:
    layer = _layer(2, True, False, torch.float32)
    x = torch.randn(7, D, requires_grad=True)
    expert_ffn(x, _offsets([3, 4]), **layer, gated=True, backend="grouped_mm").sum().backward()
    assert x.grad is not None
    assert x.grad.any()


def test_shapes_without_values() -> None:
    with FakeTensorMode():
        x = torch.empty(10, D, dtype=torch.float64, requires_grad=True)
        w_in = torch.empty(4, D, 2 * F, dtype=torch.float64, requires_grad=True)
        w_out = torch.empty(4, F, D, dtype=torch.float64, requires_grad=True)
        gates = torch.empty(10, 2, dtype=torch.float64, requires_grad=True)
        ids = torch.zeros(10, 2, dtype=torch.int64)
        y = moe_ffn(x, ids, gates, w_in, w_out, activation="silu", gated=True)
        assert y.shape == (10, D)
        y.sum().backward()
        assert w_in.grad is not None
        assert w_in.grad.shape == w_in.shape


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": "tanh"}, "activation 'tanh' is not one of gelu, relu, silu"),
        ({"backend": "bmm"}, "backend 'bmm' is not one of loop, grouped_mm, triton"),
        ({"backend": "triton"}, "takes bfloat16 on CUDA, not torch.float32 on cpu"),
        ({"gated": True}, r"\[experts, d, 2 f\]"),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], message: str) -> None:
    layer = _layer(2, False, False, torch.float32)
    with pytest.raises(ValueError, match=message):
        expert_ffn(torch.randn(3, D), _offsets([1, 2]), **layer, **changes)
