"""Sorting tokens by expert, gathering and combining: against plain indexing, with gradients."""

from __future__ import annotations

import pytest
import torch

from whale.nn.moe.permute import combine, gather_rows, inverse_of, sort_by_expert


def _ids(tokens: int, k: int, experts: int, dropped: float, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(experts, (tokens, k), generator=generator)
    gone = torch.rand(tokens, k, generator=generator) < dropped
    return ids.masked_fill(gone, -1)


CASES = [
    (tokens, k, experts, dropped)
    for tokens in (0, 1, 37)
    for k in (1, 2, 8)
    for experts, dropped in ((1, 0.0), (5, 0.0), (5, 0.3), (64, 0.1), (3, 1.0))
]


@pytest.mark.parametrize(("tokens", "k", "experts", "dropped"), CASES)
def test_the_order_is_by_expert_then_by_slot(
    tokens: int, k: int, experts: int, dropped: float
) -> None:
    ids = _ids(tokens, k, experts, dropped)
    order, counts, offsets = sort_by_expert(ids, experts)
    flat = ids.flatten().tolist()
    want = sorted(range(len(flat)), key=lambda s: (flat[s] if flat[s] >= 0 else experts, s))
    assert order.tolist() == want
    assert counts.tolist() == [flat.count(e) for e in range(experts)]
    assert offsets.tolist() == torch.tensor(counts.tolist()).cumsum(0).tolist()
    assert (order.dtype, offsets.dtype) == (torch.int64, torch.int32)
    assert inverse_of(order)[order].tolist() == list(range(len(flat)))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_any_integer_dtype_and_many_experts(dtype: torch.dtype) -> None:
    ids = torch.tensor([[40000, 3], [-1, 40000], [39999, 0]]).to(dtype)
    order, counts, offsets = sort_by_expert(ids, 40001)
    assert order.tolist() == [5, 1, 4, 0, 3, 2]
    assert int(counts[40000]) == 2
    assert int(offsets[-1]) == 5


@pytest.mark.parametrize(("tokens", "k", "experts", "dropped"), CASES)
def test_gather_and_combine_in_float64(tokens: int, k: int, experts: int, dropped: float) -> None:
    ids = _ids(tokens, k, experts, dropped)
    order, _, offsets = sort_by_expert(ids, experts)
    x = torch.randn(tokens, 6, dtype=torch.float64, requires_grad=True)
    gates = torch.rand(tokens, k, dtype=torch.float64, requires_grad=True)
    scale = torch.randn(experts, 6, dtype=torch.float64)
    routed = (torch.arange(tokens * k) < offsets[-1]).unsqueeze(1)
    expert = ids.flatten()[order].clamp(min=0)

    rows = gather_rows(x, order, k)
    assert torch.equal(rows, x[order // k])
    out = combine(rows.sin() * scale[expert] * routed, order, gates)

    by_slot = x.unsqueeze(1).sin() * scale[ids.clamp(min=0)] * (ids >= 0).unsqueeze(2)
    want = (by_slot * gates.unsqueeze(2)).sum(1)
    torch.testing.assert_close(out, want)
    grad = torch.randn_like(out)
    got = torch.autograd.grad(out, (x, gates), grad)
    for one, other in zip(got, torch.autograd.grad(want, (x, gates), grad), strict=True):
        torch.testing.assert_close(one, other)


def test_gradcheck_twice() -> None:
    order, _, _ = sort_by_expert(_ids(4, 2, 3, 0.2), 3)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    gates = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)

    def layer(x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        return combine(gather_rows(x, order, 2).sin(), order, gates)

    assert torch.autograd.gradcheck(layer, (x, gates))
    assert torch.autograd.gradgradcheck(layer, (x, gates))


def test_half_precision_rows_with_float32_gates() -> None:
    order, _, _ = sort_by_expert(_ids(50, 8, 7, 0.0), 7)
    y = torch.randn(400, 16).bfloat16().requires_grad_()
    gates = torch.rand(50, 8, requires_grad=True)
    out = combine(y, order, gates)
    want = (y.float()[inverse_of(order)].view(50, 8, 16) * gates.unsqueeze(2)).sum(1)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, want.bfloat16())
    out.backward(torch.randn_like(out))
    assert y.grad is not None
    assert gates.grad is not None
    assert (y.grad.dtype, gates.grad.dtype) == (torch.bfloat16, torch.float32)


def test_meta_tensors_keep_their_shapes() -> None:
    ids = torch.zeros(6, 2, dtype=torch.int64, device="meta")
    order, counts, offsets = sort_by_expert(ids, 4)
    rows = gather_rows(torch.empty(6, 3, device="meta"), order, 2)
    out = combine(rows, order, torch.empty(6, 2, device="meta"))
    assert [tuple(t.shape) for t in (order, counts, offsets, rows, out)] == [
        (12,), (4,), (4,), (12, 3), (6, 3),
    ]  # fmt: skip
