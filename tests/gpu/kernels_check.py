"""The CUDA kernels of keyed dropout and batch norm against the plain formulas: right, and fast.

Run on a GPU: `PYTHONPATH=. python tests/gpu/kernels_check.py`. One line per check, then the times;
the status is 1 if a check failed. `--device cpu` runs what does not need a GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from copy import deepcopy
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.unit.nn.members import together
from whale.nn import batch_norm_kernels, dropout_kernel
from whale.nn.batch_norm import SyncedBatchNorm
from whale.nn.dropout import drop, position_mask
from whale.nn.forwards import replace_forward
from whale.nn.keyed_modules import KeyedDropout
from whale.nn.randomness import BatchDims, CallNames, Draws
from whale.runtime import groups
from whale.runtime.collectives import all_sum
from whale.runtime.context import StepContext

# ---- dropout -------------------------------------------------------------------------------------

# shape, how it lies in memory, dtype, the batch's dim, elements per row in it, a dim that is a part
_DROPS: list[tuple[tuple[int, ...], str, torch.dtype, int | None, int, int | None]] = [
    ((96, 128, 64), "plain", torch.float32, 0, 1, 2),
    ((4, 12, 33, 33), "plain", torch.bfloat16, 0, 1, 1),
    ((24, 16, 1024), "plain", torch.bfloat16, 0, 2, 2),
    ((33, 6, 7), "permuted", torch.float16, 1, 3, None),
    ((8, 24, 9, 9), "channels last", torch.float32, 0, 1, 1),
    ((5, 6, 1000), "sliced", torch.float64, 0, 1, 2),
    ((4097,), "plain", torch.float32, 0, 1, None),
    ((1,), "plain", torch.float32, 0, 1, None),
    ((3, 4, 2, 5, 6, 7), "permuted", torch.float32, 2, 1, 5),
    ((2, 3, 4, 5, 6, 16), "plain", torch.float64, 0, 1, 3),
    ((7, 30), "plain", torch.float64, 1, 1, 0),
    ((12, 1, 2050), "plain", torch.bfloat16, 0, 1, 2),
    ((9, 40), "plain", torch.float16, None, 1, None),
]


def _laid_out(shape: tuple[int, ...], how: str, dtype: torch.dtype, device: str) -> torch.Tensor:
    if how == "channels last":
        x = torch.randn(shape, device=device).to(memory_format=torch.channels_last)
    elif how == "permuted":
        x = torch.randn(shape[::-1], device=device).permute(*reversed(range(len(shape))))
    elif how == "sliced":
        x = torch.randn((*shape[:-1], 2 * shape[-1]), device=device)[..., ::2]
    else:
        x = torch.randn(shape, device=device)
    return x.to(dtype) if how != "sliced" else x.double()


def check_dropout_masks(device: str) -> None:
    """Values and gradients are the same bits as the formula's, and the CPU has the same mask."""
    generator = torch.Generator().manual_seed(11)

    def number(below: int) -> int:
        return int(torch.randint(below, (), generator=generator))

    for shape, how, dtype, batch_dim, per_row, part in _DROPS:
        x = _laid_out(shape, how, dtype, device)
        if device == "cuda":
            assert dropout_kernel.takes(x), (shape, how, dtype)
        for first_row in (0, number(1000), 2**31 + number(1000), 10**11):
            rows = shape[batch_dim or 0] // per_row
            context = StepContext(first_row=first_row, rows=rows, micro_batch=number(9))
            sharded = (part, number(500), 5000) if part is not None else None
            place = (0.1, number(2**32), context, batch_dim, sharded)
            mask = position_mask(x, *place)
            assert torch.equal(mask.cpu(), position_mask(x.cpu(), *place)), shape
            leaf = x.detach().requires_grad_()
            out = drop(leaf, *place)
            assert out.dtype == dtype
            assert torch.equal(out, x * mask * (1.0 / 0.9)), (shape, how, dtype, first_row)
            grad = torch.randn_like(out)
            for given in (grad, torch.ones_like(grad).sum().to(dtype).expand(shape)):
                (got,) = torch.autograd.grad(out, leaf, given, retain_graph=True)
                assert torch.equal(got, given * (1.0 / 0.9) * mask), (shape, how, dtype)


def check_dropout_saves_nothing(device: str) -> None:
    if device == "cpu":
        return
    saved: list[torch.Size] = []
    x = torch.randn(8, 64, device=device, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape), lambda t: t):
        drop(x, 0.1, 5, StepContext(rows=8), 0, None)
    assert saved == []


def check_dropout_module_is_the_same_on_cpu_and_gpu(device: str) -> None:
    x = torch.randn(6, 5, 40)
    outs = []
    for where in ("cpu", device):
        context = StepContext(seed=3, step=2, first_row=9, rows=6)
        draws = Draws(CallNames(context), BatchDims({("name", 0): (3, 0)}))
        keyed = KeyedDropout(nn.Dropout(0.2), "name", draws)
        outs.append([keyed(x.to(where)).cpu(), keyed(x.to(where)).cpu()])
    assert torch.equal(outs[0][0], outs[1][0])
    assert torch.equal(outs[0][1], outs[1][1])
    assert not torch.equal(outs[0][0], outs[0][1])


def check_dropout_second_gradient(device: str) -> None:
    x = torch.randn(4, 32, device=device, requires_grad=True)
    place = (0.3, 77, StepContext(rows=4), 0, None)
    out = drop(x, *place)
    (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    mask = position_mask(x, *place)
    torch.testing.assert_close(second, 2 * mask / 0.7**2, rtol=1e-5, atol=1e-6)


# ---- batch norm ----------------------------------------------------------------------------------


def _norm(shape: tuple[int, ...], device: str, dtype: torch.dtype, **options: Any) -> nn.Module:
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)]
    module = kind(shape[1], **options).to(device, dtype)
    generator = torch.Generator().manual_seed(7)
    for value in (*module.parameters(), *module.buffers()):
        if value.is_floating_point():
            value.data.copy_(torch.rand(value.shape, generator=generator) + 0.5)
    return module


def _train(
    module: nn.Module, x: torch.Tensor, grad: torch.Tensor, group: str | None
) -> dict[str, Any]:
    module = deepcopy(module)
    if group is not None:
        replace_forward(module, SyncedBatchNorm(module, group))
    x = x.detach().requires_grad_()
    for factor in (1.0, 2.0):
        out = module(x * factor)
        out.backward(grad)
    parameters = {f"gradient of {name}": p.grad for name, p in module.named_parameters()}
    return {
        "out": out.detach(),
        "gradient of x": x.grad,
        **parameters,
        **dict(module.named_buffers()),
    }


def _worst(
    module: nn.Module,
    x: torch.Tensor,
    rows: list[int],
    tolerance: float,
    *,
    grad_layout: torch.memory_format = torch.preserve_format,
) -> None:
    """Compares members with nn.BatchNorm over all rows, which is taken in float64."""
    grad = torch.randn_like(x)
    grad = grad.clone(memory_format=grad_layout)
    truth = _train(deepcopy(module).double(), x.double(), grad.double(), None)
    parts = list(zip(x.split(rows), grad.split(rows), strict=True))
    found, kinds = together(
        [lambda group, part=part: _train(module, *part, group) for part in parts]
    )
    assert kinds == ["all_gather", "all_reduce"] * 2, kinds
    for name, want in truth.items():
        if name == "num_batches_tracked":
            assert all(int(f[name]) == int(want) for f in found)
            continue
        every = [f[name] for f in found]
        if name in ("out", "gradient of x"):
            assert all(part.dtype == x.dtype for part in every)
            got = [torch.cat(every)]
        elif name.startswith("gradient"):
            got = [torch.stack([part.double() for part in every]).sum(0)]
        else:
            got = every
        for one in got:
            error = float((one.double() - want).abs().max() / want.abs().max().clamp(min=1e-3))
            assert error < tolerance, f"{name}: {error:.1e} for {tuple(x.shape)} in {rows}"


def check_batch_norm_members(device: str) -> None:
    for shape in ((12, 32, 14, 14), (12, 33), (12, 16, 9), (12, 3, 4, 5, 6)):
        module = _norm(shape, device, torch.float32)
        x = torch.randn(shape, device=device) + 0.5
        for rows in ([12], [7, 5], [1, 11], [0, 12], [12, 0], [5, 0, 7], [3, 4, 5]):
            _worst(module, x, rows, 1e-5)


def check_batch_norm_channels_last(device: str) -> None:
    for channels in (8, 33, 64):
        shape = (6, channels, 10, 9)
        module = _norm(shape, device, torch.float32)
        x = torch.randn(shape, device=device).to(memory_format=torch.channels_last)
        for rows in ([6], [4, 2], [0, 6]):
            _worst(module, x, rows, 1e-5)
            _worst(module, x, rows, 1e-5, grad_layout=torch.contiguous_format)
            _worst(module, x.contiguous(), rows, 1e-5, grad_layout=torch.channels_last)
        out = together([lambda g, m=module, y=x: SyncedBatchNorm(m, g)(y)])[0][0]
        assert out.is_contiguous(memory_format=torch.channels_last)
        _worst(module, x.transpose(2, 3), [4, 2], 1e-5)
        _worst(module, x[:, :, ::2], [4, 2], 1e-5)


def check_batch_norm_options(device: str) -> None:
    shape = (10, 12, 6, 5)
    x = torch.randn(shape, device=device)
    for options in ({"momentum": None}, {"affine": False}, {"track_running_stats": False}):
        _worst(_norm(shape, device, torch.float32, **options), x, [6, 4], 1e-5)
    _worst(_norm(shape, device, torch.float64), x.double(), [6, 4], 1e-11)
    _worst(_norm(shape, device, torch.float64), x.double(), [0, 10], 1e-11)


def check_batch_norm_half_precision(device: str) -> None:
    shape = (10, 12, 8, 8)
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.randn(shape, device=device).to(dtype)
        for rows in ([6, 4], [0, 10]):
            _worst(_norm(shape, device, torch.float32), x, rows, 2e-2)
            _worst(_norm(shape, device, dtype), x, rows, 2e-2)
            last = x.to(memory_format=torch.channels_last)
            _worst(_norm(shape, device, torch.float32), last, rows, 2e-2)


def check_batch_norm_large_mean(device: str) -> None:
    shape = (8, 6, 20, 20)
    x = torch.randn(shape, device=device) + 1000.0
    # x in float32 has 1e-4 of its spread left.
    _worst(_norm(shape, device, torch.float32), x, [5, 3], 1e-3)


def check_batch_norm_of_few_channels(device: str) -> None:
    """Our own kernels, which are for large tensors, on small ones of every kind."""
    if device == "cpu":
        return
    with mock.patch.object(batch_norm_kernels, "LEAST_ELEMENTS", 1):
        for shape in ((12, 33, 14, 14), (5, 64, 9), (12, 3, 4, 5, 6), (2, 70, 40, 40)):
            x = torch.randn(shape, device=device) + 0.5
            assert batch_norm_kernels.takes(x)
            count = shape[0]
            for rows in ([count], [count - 1, 1], [0, count]):
                _worst(_norm(shape, device, torch.float32), x, rows, 1e-5)
        x = torch.randn((9, 12, 8, 8), device=device)
        _worst(_norm(x.shape, device, torch.float32, affine=False), x, [5, 4], 1e-5)
        _worst(_norm(x.shape, device, torch.float64), x.double(), [5, 4], 1e-11)
        _worst(_norm(x.shape, device, torch.float32), x.bfloat16(), [5, 4], 2e-2)
        _worst(_norm(x.shape, device, torch.float16), x.half(), [5, 4], 2e-2)
        _worst(_norm(x.shape, device, torch.float32), x + 1000.0, [5, 4], 1e-3)


def check_batch_norm_of_more_elements_than_int32_counts(device: str) -> None:
    if device == "cpu" or torch.cuda.get_device_properties(0).total_memory < 60 << 30:
        return
    x = torch.empty(2700, 64, 112, 112, device=device).normal_(3.0, 2.0)
    assert x.numel() > 1 << 31 and batch_norm_kernels.takes(x)
    found = batch_norm_kernels.statistics(x, 1e-5)
    mean, invstd, count = found[:64], found[64:128], found[128:]
    weight, bias = torch.rand(64, device=device) + 0.5, torch.randn(64, device=device)
    y = batch_norm_kernels.normalized(x, weight, bias, mean, invstd)
    sums, _, _ = batch_norm_kernels.reduced(y, x, weight, mean, invstd)
    grad = batch_norm_kernels.input_gradient(y, x, weight, mean, invstd, sums, count)
    for sample, c in ((0, 0), (1400, 17), (2699, 63)):
        values, dy = x[:, c].double(), y[:, c].double()
        center, scale = values.mean(), (values.var(correction=0) + 1e-5).rsqrt()
        of_both = (dy * (values - center)).sum()
        _near(mean[c], center)
        _near(invstd[c], scale)
        _near(sums[c], dy.sum())
        _near(sums[64 + c], of_both)
        off = values[sample] - center
        _near(y[sample, c], off * scale * weight[c] + bias[c])
        wanted = dy[sample] - dy.mean() - off * scale.square() * of_both / values.numel()
        _near(grad[sample, c], wanted * scale * weight[c])


def _near(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=2e-6)


def check_nothing_waits_for_the_device(device: str) -> None:
    if device == "cpu":
        return
    with _alone() as group:
        norm = SyncedBatchNorm(nn.BatchNorm2d(16).to(device), group)
        x = torch.randn(4, 16, 8, 8, device=device, requires_grad=True)
        grad = torch.ones_like(x)
        place = (0.1, 5, StepContext(rows=4), 0, None)
        drop(norm(x), *place).backward(grad)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            drop(norm(x), *place).backward(grad)
            norm(x[:0]).backward(grad[:0])
        finally:
            torch.cuda.set_sync_debug_mode("default")


class _alone:  # noqa: N801 - used as a function
    """A group of one."""

    def __enter__(self) -> str:
        groups._open["alone"] = groups.Communicator("alone", (0,), 0, None)
        return "alone"

    def __exit__(self, *_: Any) -> None:
        del groups._open["alone"]


CHECKS: dict[str, Callable[[str], None]] = {
    name.removeprefix("check_").replace("_", " "): check
    for name, check in list(globals().items())
    if name.startswith("check_")
}


# ---- times ---------------------------------------------------------------------------------------


def _old_norm(module: Any, group: str, x: torch.Tensor) -> torch.Tensor:
    """Batch norm as differentiable sums: what was there before."""
    dims = [d for d in range(x.dim()) if d != 1]
    shape = [1, -1] + [1] * (x.dim() - 2)
    first = all_sum(torch.cat([x.sum(dims), x.new_tensor([x.numel() // x.shape[1]])]), group)
    count = first[-1].detach()
    mean = first[:-1] / count
    centered = x - mean.view(shape)
    var = all_sum(centered.square().sum(dims), group) / count
    with torch.no_grad():
        module.num_batches_tracked.add_(1)
        unbiased = var * (count / (count - 1).clamp(min=1))
        module.running_mean.lerp_(mean, module.momentum)
        module.running_var.lerp_(unbiased, module.momentum)
    out = centered * torch.rsqrt(var + module.eps).view(shape)
    return out * module.weight.view(shape) + module.bias.view(shape)


def _ms(forward: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, runs: int = 10) -> float:
    """Milliseconds of a forward and backward."""
    x = x.detach().requires_grad_()
    grad = torch.randn_like(x)
    for _ in range(3):
        forward(x).backward(grad)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(runs):
        forward(x).backward(grad)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / runs


def _line(what: str, old: float, new: float, torch_ms: float, name: str) -> None:
    print(
        f"TIME {what}: formula {old:.3f} ms, kernel {new:.3f} ms, {name} {torch_ms:.3f} ms: "
        f"{old / new:.1f} x faster, {new / torch_ms:.2f} of torch",
        flush=True,
    )


def times() -> None:
    """Forward and backward of one layer: the formula, the kernel, torch's own."""
    with _alone() as group:
        for layout in (torch.contiguous_format, torch.channels_last):
            module = nn.BatchNorm2d(256).cuda()
            x = torch.randn(128, 256, 56, 56, device="cuda").contiguous(memory_format=layout)
            old = _ms(lambda t, m=module: _old_norm(m, group, t), x)
            new = _ms(SyncedBatchNorm(module, group), x)
            plain = _ms(module, x)
            name = str(layout).removeprefix("torch.").replace("_", " ")
            _line(f"batch norm {list(x.shape)} {name}", old, new, plain, "nn.BatchNorm2d")
            del x
    for shape, dtype in (
        ((96, 128, 1024), torch.float32),
        ((96, 128, 1024), torch.bfloat16),
        ((96, 16, 128, 128), torch.bfloat16),
    ):
        x = torch.randn(shape, device="cuda").to(dtype)
        place = (0.1, 123456789, StepContext(rows=shape[0], first_row=7), 0, None)
        old = _ms(lambda t, p=place: t * position_mask(t, *p) * (1.0 / (1.0 - p[0])), x)
        new = _ms(lambda t, p=place: drop(t, *p), x)
        plain = _ms(lambda t: F.dropout(t, 0.1), x)
        _line(f"dropout {list(shape)} {str(dtype)[6:]}", old, new, plain, "F.dropout")


def main() -> int:
    """Runs every check, then the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    device = parser.parse_args().device
    torch.manual_seed(0)
    failed = 0
    for name, check in CHECKS.items():
        began = time.time()
        try:
            check(device)
        except Exception as error:  # every other check is still worth running
            failed += 1
            print(f"FAIL {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            traceback.print_exc()
        else:
            print(f"PASS {name} ({time.time() - began:.1f} s)", flush=True)
    if device == "cuda":
        times()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
