"""The CUDA kernels under the mixture of experts against float64, one expert at a time.

Run on a GPU: `PYTHONPATH=. python tests/gpu/moe_check.py`. One line per check; the status is 1 if a
check failed. How fast they are: `python -m benchmarks.moe_layer`.
"""

from __future__ import annotations

import copy
import sys
import time
import traceback
from collections.abc import Callable

import torch

from whale.nn.moe import kernels_permute, kernels_sort, permute
from whale.nn.moe.experts import expert_ffn, moe_ffn
from whale.nn.moe.layer import MoE

# tokens, experts per token, experts, share of slots without an expert, d, f
_SHAPES = [
    (1000, 2, 16, 0.1, 256, 320),
    (777, 1, 40, 0.0, 128, 192),
    (300, 8, 9, 0.3, 128, 64),
    (4096, 1, 3, 0.0, 512, 1024),
    (100, 2, 200, 0.5, 64, 72),
    (50, 1, 4, 1.0, 128, 128),
]


def _ids(tokens: int, k: int, experts: int, dropped: float, device: str) -> torch.Tensor:
    ids = torch.randint(experts, (tokens, k), device=device)
    return ids.masked_fill(torch.rand(tokens, k, device=device) < dropped, -1)


def _off(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.detach().double(), want.detach().double()
    assert bool(got.isfinite().all())
    return float((got - want).norm() / want.norm().clamp(min=1e-9))


def _garbage(device: str) -> None:
    """Leaves NaNs in the memory that the next tensors are made of."""
    for size in (1 << 16, 1 << 20, 1 << 24):
        torch.full((size,), float("nan"), device=device)


def check_gather_and_combine(device: str) -> None:
    for tokens, k, experts, dropped, d, _ in [*_SHAPES, (333, 2, 5, 0.0, 3000, 0)]:
        ids = _ids(tokens, k, experts, dropped, device)
        order, _, offsets = permute.sort_by_expert(ids, experts)
        for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 5e-3)):
            x = torch.randn(tokens, d, device=device).to(dtype).requires_grad_()
            gates = torch.rand(tokens, k, device=device, requires_grad=True)
            rows = permute.gather_rows(x, order, k)
            assert torch.equal(rows, x[order // k])
            out = permute.combine(rows.sin(), order, gates)
            grad = torch.randn_like(out)
            got = [out, *torch.autograd.grad(out, (x, gates), grad)]
            x64, gates64 = (t.detach().double().requires_grad_() for t in (x, gates))
            out64 = (x64.sin().unsqueeze(1) * gates64.unsqueeze(2)).sum(1)
            want = [out64, *torch.autograd.grad(out64, (x64, gates64), grad.double())]
            assert max(_off(a, b) for a, b in zip(got, want, strict=True)) < bound, (tokens, dtype)
            y = torch.randn_like(rows)
            y = kernels_permute.zero_tail(y, offsets)
            assert not y[int(offsets[-1]) :].any()
            assert y[: int(offsets[-1])].count_nonzero() >= 0.9 * int(offsets[-1]) * d


def check_the_layer(device: str) -> None:
    """Every activation, layout of the weights and backend, with rows of no expert."""
    for shape in _SHAPES:
        for turned in (True, False):
            _compare_layer((*shape, "silu", True, turned), device)
    for activation in ("silu", "gelu", "relu"):
        for gated in (True, False):
            _compare_layer((*_SHAPES[0], activation, gated, True), device)


def _compare_layer(case: tuple, device: str) -> None:
    tokens, k, experts, dropped, d, f, activation, gated, turned = case
    ids = _ids(tokens, k, experts, dropped, device)
    x = torch.randn(tokens, d, device=device)
    w_in = torch.randn(experts, d, f * (1 + gated), device=device) / d**0.5
    w_out = torch.randn(experts, *((d, f) if turned else (f, d)), device=device) / f**0.5
    gates = torch.rand(tokens, k, device=device)
    given = [t.bfloat16() for t in (x, w_in, w_out)] + [gates]
    grad = torch.randn(tokens, d, device=device).bfloat16()

    def run(values: list[torch.Tensor], backend: str | None, keep: bool) -> list[torch.Tensor]:
        values = [t.clone().requires_grad_() for t in values]
        x, w_in, w_out, gates = values
        w_out = w_out.transpose(1, 2) if turned else w_out
        how = {"activation": activation, "gated": gated, "backend": backend}
        out = moe_ffn(x, ids, gates, w_in, w_out, **how)
        grad_as = grad.to(out.dtype)
        grads = torch.autograd.grad(out, values, grad_as, retain_graph=keep)
        if keep:
            again = torch.autograd.grad(out, values, grad_as)
            assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True)), case
        return [out, *grads]

    want = run([t.double() for t in given], "loop", False)
    for backend in ("grouped_mm", "triton", None):
        for keep in (False, True):
            _garbage(device)
            errors = [_off(a, b) for a, b in zip(run(given, backend, keep), want, strict=True)]
            assert max(errors) < 1e-2, (case, backend, errors)


def check_the_experts(device: str) -> None:
    """`expert_ffn` on sorted rows, the last ones of no expert, with and without biases."""
    for counts in ([100, 0, 333, 1], [0, 0, 64, 128], [300] * 5):
        offsets = torch.tensor(counts, device=device).cumsum(0).int()
        rows, d, f = sum(counts) + 70, 128, 192
        x = torch.randn(rows, d, device=device).bfloat16()
        w_in = (torch.randn(len(counts), d, 2 * f, device=device) / d**0.5).bfloat16()
        w_out = (torch.randn(len(counts), f, d, device=device) / f**0.5).bfloat16()
        biases = {
            "b_in": torch.randn(len(counts), 2 * f, device=device).bfloat16(),
            "b_out": torch.randn(len(counts), d, device=device).bfloat16(),
        }
        grad = torch.randn(rows, d, device=device).bfloat16()
        for more in ({}, biases):
            found = []
            for double, backend in ((True, "loop"), (False, None), (False, "triton")):
                values = {"x": x, "w_in": w_in, "w_out": w_out, **more}
                values = {n: t.double() if double else t.clone() for n, t in values.items()}
                for value in values.values():
                    value.requires_grad_()
                _garbage(device)
                out = expert_ffn(
                    offsets=offsets, activation="silu", gated=True, backend=backend, **values
                )
                grads = torch.autograd.grad(out, list(values.values()), grad.to(out.dtype))
                found.append([out, *grads])
                assert not out[sum(counts) :].any()
                assert not grads[0][sum(counts) :].any()
            for got in found[1:]:
                errors = [_off(a, b) for a, b in zip(got, found[0], strict=True)]
                assert max(errors) < 1e-2, (counts, list(more), errors)


def check_the_sort(device: str) -> None:
    for tokens, k, experts, dropped in (
        (1, 1, 1, 0.0),
        (37, 1, 5, 0.2),
        (70000, 1, 512, 0.0),
        (9000, 8, 128, 0.1),
        (5000, 2, 4000, 0.5),
        (3000, 2, 4500, 0.5),
        (2000, 2, 3, 1.0),
    ):
        ids = _ids(tokens, k, experts, dropped, device)
        ids = ids.int() if experts == 128 else ids
        assert kernels_sort.takes(ids, experts) == (experts <= kernels_sort.MAX_EXPERTS)
        got, inverse = permute.route(ids, experts)
        want, inverse_want = permute.route(ids.cpu(), experts)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True))
        assert torch.equal(inverse.cpu(), inverse_want)


def check_nothing_waits_for_the_device(device: str) -> None:
    x = torch.randn(512, 128, device=device).bfloat16().requires_grad_()
    w_in = torch.randn(4, 128, 256, device=device).bfloat16().requires_grad_()
    w_out = torch.randn(4, 128, 128, device=device).bfloat16().requires_grad_()
    gates = torch.rand(512, 2, device=device, requires_grad=True)
    ids = _ids(512, 2, 4, 0.1, device)
    grad = torch.randn(512, 128, device=device).bfloat16()
    for backend in ("grouped_mm", "triton"):
        for checked in (False, True):
            if checked:
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
            try:
                out = moe_ffn(x, ids, gates, w_in, w_out, gated=True, backend=backend)
                out.backward(grad)
                order, _, offsets = permute.sort_by_expert(ids, 4)
                rows = permute.gather_rows(x, order, 2)
                y = expert_ffn(rows, offsets, w_in, w_out, gated=True, backend=backend)
                permute.combine(y, order, gates).backward(grad)
            finally:
                torch.cuda.set_sync_debug_mode("default")


def check_autocast(device: str) -> None:
    """Weights of float32 under autocast: what they give in bfloat16, gradients in float32."""
    for router, top_k in (("top-k", 2), ("expert-choice", 2)):
        moe = MoE(128, 192, 8, top_k=top_k, router=router, balance="none").to(device)
        half = copy.deepcopy(moe).bfloat16()
        half.router.float()
        half.router.weight.data.copy_(moe.router.weight.data)
        x = torch.randn(500, 128, device=device).bfloat16().float()
        with torch.autocast("cuda", torch.bfloat16):
            y = moe(x)
        want = half(x.bfloat16())
        assert y.dtype == torch.bfloat16
        assert _off(y, want) < 2e-2, _off(y, want)
        y.float().square().sum().backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in moe.parameters())


CHECKS: dict[str, Callable[[str], None]] = {
    name.removeprefix("check_").replace("_", " "): check
    for name, check in list(globals().items())
    if name.startswith("check_")
}


def main() -> int:
    """Runs every check."""
    torch.manual_seed(0)
    failed = 0
    for name, check in CHECKS.items():
        began = time.time()
        try:
            check("cuda")
        except Exception as error:  # every other check is still worth running
            failed += 1
            print(f"FAIL {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            traceback.print_exc()
        else:
            print(f"PASS {name} ({time.time() - began:.1f} s)", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
