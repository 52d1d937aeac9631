"""What a device is: its memory, and its speed by kind of work, measured in a few seconds.

Place in the flow: the part of `engine.calibrate` that needs no model. The cost model prices with it
whatever has no measured Layer: glue, parts of a split Layer, the optimizer.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from whale.engine.calibrate.stopwatch import Stopwatch, Synchronize, Work, fit_line
from whale.ir.profile import Rate

Case = tuple[Work, float, float]
"""One call, its FLOPs and the bytes it moves, counted as `engine.trace.work` counts them."""

# How long one size is timed, and the longest call after which no larger size is tried.
_TARGET_S = {"cuda": 4e-3, "cpu": 2e-3}
_LONGEST_S = {"cuda": 20e-3, "cpu": 15e-3}
_ROUNDS = 5
_LOADED_S = 40e-3
"""With all ranks at work: long against the gaps between rounds, in which neighbours have it all."""

_TENSORS_READ_AND_WRITTEN = 7.0
"""By AdamW at its best, per parameter: weight, gradient and 2 states read, weight and states
written. The same as in `cost.compute.CostModel.apply_s`."""


def default_dtypes(device: torch.device) -> tuple[str, ...]:
    """What training on a device computes in."""
    # Without matrix units a CPU's half precision is a trap nobody trains in.
    return ("float32", "bfloat16", "float16") if device.type == "cuda" else ("float32",)


def measure_rates(
    device: torch.device, dtypes: Sequence[str], *, synchronize: Synchronize | None = None
) -> dict[str, dict[str, Rate]]:
    """Speed by kind of work, then by dtype; `tf32` beside `float32` on CUDA.

    A dtype that the device has no kernel for is left out.
    """
    names = list(dtypes)
    if device.type == "cuda" and "float32" in names:
        names.append("tf32")
    watch = Stopwatch(device)
    rates: dict[str, dict[str, Rate]] = {kind: {} for kind in _CASES}
    for kind, cases in _CASES.items():
        for name in names:
            with _products_in(name), torch.no_grad():
                points, work = _timed(cases(device, _dtype(name)), watch)
                if synchronize is not None:
                    # Now all are at it: what they share, memory above all, shows in the largest.
                    going_on = work and partial(_and_wait, work, watch)
                    synchronize(going_on)
                    if work is not None:
                        seconds = watch.seconds(work, target_s=_LOADED_S, rounds=_ROUNDS)
                        points[-1] = (*points[-1][:2], seconds)
                    synchronize(going_on)
                    del going_on
                if points:
                    memory = rates["memory"].get(name)
                    rates[kind][name] = _rate(kind, points, memory)
            del work
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return rates


def _timed(
    cases: Iterator[Case], watch: Stopwatch
) -> tuple[list[tuple[float, float, float]], Work | None]:
    """(FLOPs, bytes, seconds) of ever larger cases, and the largest itself."""
    points: list[tuple[float, float, float]] = []
    largest: Work | None = None
    kind = watch.device.type
    try:
        for work, flops, moved in cases:
            seconds = watch.seconds(work, target_s=_TARGET_S[kind], rounds=_ROUNDS)
            points.append((flops, moved, seconds))
            largest = work
            if seconds > _LONGEST_S[kind]:
                break
    except (RuntimeError, NotImplementedError):
        # Out of memory (larger sizes are no loss), or no kernel for this dtype on this device.
        pass
    return points, largest


def _and_wait(work: Work, watch: Stopwatch) -> None:
    work()
    watch.synchronize()


def _rate(kind: str, points: Sequence[tuple[float, float, float]], memory: Rate | None) -> Rate:
    if kind == "memory":
        # The smallest is the launch; those between are a cache's speed, which is not the memory's.
        _, few, fixed = points[0]
        flops, moved, seconds = points[-1]
        per_byte = max(seconds - fixed, 1e-3 * seconds) / max(moved - few, 0.5 * moved)
        # Elementwise work counts no FLOPs; an addition per element is what was done.
        return Rate(
            flops_per_s=flops / (moved * per_byte), bytes_per_s=1.0 / per_byte, overhead_s=fixed
        )
    fixed, per_flop = fit_line([(flops, seconds) for flops, _, seconds in points])
    bytes_per_s = memory.bytes_per_s if memory else max(m / s for _, m, s in points)
    return Rate(flops_per_s=1.0 / per_flop, bytes_per_s=bytes_per_s, overhead_s=fixed)


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, "float32" if name == "tf32" else name)


@contextmanager
def _products_in(name: str) -> Iterator[None]:
    """Whether float32 products use tensor cores; back to what it was afterwards."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    if name == "tf32":
        torch.backends.cudnn.allow_tf32 = True
        torch.set_float32_matmul_precision("high")
    else:
        # cuDNN's is not turned off: torch allows it by default, so training has it.
        torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def _memory_cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    # Up to far more than a cache holds: 3 x 256 MiB in float32 on a GPU.
    sizes = (1 << 16, 1 << 20, 1 << 23, 1 << 26) if device.type == "cuda" else (1 << 12, 1 << 22)
    for numel in sizes:
        a, b = torch.randn(2, numel, device=device).to(dtype)
        out = torch.empty_like(a)
        yield partial(_add, a, b, out), float(numel), 3.0 * numel * a.element_size()


def _add(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    torch.add(a, b, out=out)


def _matmul_cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    sizes = (256, 512, 1024, 2048, 4096, 8192)
    for n in sizes if device.type == "cuda" else (32, 64, 128, 256, 512):
        a, b = torch.randn(2, n, n, device=device).to(dtype)
        yield partial(_call, torch.mm, a, b), 2.0 * n**3, 3.0 * n * n * a.element_size()


def _conv_cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    # A residual network's middle: 3 x 3 over 28 x 28 positions.
    channels, rows = (128, (1, 8, 32, 128)) if device.type == "cuda" else (32, (1, 4, 16))
    weight = torch.randn(channels, channels, 3, 3, device=device).to(dtype)
    for n in rows:
        x = torch.randn(n, channels, 28, 28, device=device).to(dtype)
        flops = 2.0 * weight.numel() * n * 28 * 28
        moved = (2.0 * x.numel() + weight.numel()) * x.element_size()
        yield partial(_call, partial(F.conv2d, padding=1), x, weight), flops, moved


def _attention_cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    heads = 16 if device.type == "cuda" else 4
    sizes = ((1, 128), (8, 128), (8, 512), (16, 1024))
    for n, length in sizes if device.type == "cuda" else ((1, 32), (2, 64), (4, 128)):
        q, k, v = torch.randn(3, n, heads, length, 64, device=device).to(dtype)
        flops = 4.0 * n * heads * length * length * 64
        call = partial(_call, F.scaled_dot_product_attention, q, k, v)
        yield call, flops, 4.0 * q.numel() * q.element_size()


def _rnn_cases(device: torch.device, dtype: torch.dtype) -> Iterator[Case]:
    width, length, rows = (1024, 50, (4, 32, 128)) if device.type == "cuda" else (64, 16, (1, 8))
    lstm = nn.LSTM(width, width, device=device, dtype=dtype)
    weights = 8.0 * width * width
    for n in rows:
        x = torch.randn(length, n, width, device=device).to(dtype)
        moved = (2.0 * x.numel() + weights) * x.element_size()
        yield partial(_call, lstm, x), 2.0 * length * n * weights, moved


def _call(function: Callable[..., object], *args: torch.Tensor) -> None:
    function(*args)


# Memory first: its speed bounds the other kinds.
_CASES: dict[str, Callable[[torch.device, torch.dtype], Iterator[Case]]] = {
    "memory": _memory_cases,
    "matmul": _matmul_cases,
    "conv": _conv_cases,
    "attention": _attention_cases,
    "rnn": _rnn_cases,
}


def measure_launch(device: torch.device) -> float:
    """Seconds the host takes per small operation that autograd records."""
    watch = Stopwatch(device)
    x = torch.randn(8, 8, device=device)
    weight = torch.randn(8, 8, device=device, requires_grad=True)
    found = []
    with torch.enable_grad():
        for _ in range(7):
            watch.synchronize()
            y = x
            start = time.perf_counter()
            # Fewer than a GPU's queue holds, or the host would wait for it.
            for _ in range(50):
                y = torch.mul(F.linear(y, weight), 0.1)
            found.append((time.perf_counter() - start) / 100)
    watch.synchronize()
    return statistics.median(found[2:])


def measure_apply(device: torch.device, *, synchronize: Synchronize | None = None) -> float:
    """AdamW's speed in bytes of weights, gradients and states per second.

    Dividing the gradients before it and zeroing them after it are parts of the update.
    """
    count, numel = (24, 1 << 22) if device.type == "cuda" else (8, 1 << 18)
    if device.type == "cuda":
        # At most a twentieth of the device; the update's own scratch comes on top.
        numel = min(numel, available_memory(device)[0] // 20 // (4 * 4 * count))
    params = [nn.Parameter(torch.randn(numel, device=device)) for _ in range(count)]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer = torch.optim.AdamW(params, lr=1e-6)
    watch = Stopwatch(device)

    def step() -> None:
        # As a Step does: gradients are divided by the count, applied, and zeroed for the next one.
        for p in params:
            assert p.grad is not None
            p.grad.mul_(1.0)
        optimizer.step()
        for p in params:
            assert p.grad is not None
            p.grad.zero_()

    # It is memory that binds, and ranks may share it: all of them begin together.
    if synchronize is not None:
        synchronize(partial(_and_wait, step, watch))
    seconds = watch.seconds(step, target_s=_LOADED_S, rounds=_ROUNDS)
    if synchronize is not None:
        synchronize(partial(_and_wait, step, watch))
    params.clear()
    optimizer.param_groups.clear()
    optimizer.state.clear()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return _TENSORS_READ_AND_WRITTEN * 4.0 * count * numel / seconds


def available_memory(device: torch.device) -> tuple[int, int]:
    """(bytes this process's tensors can have, bytes of them that something else takes).

    On CUDA what is free once the context is there, and what torch holds already: a limit of CUDA's
    MPS shows in what is free and not in the card's total. The context and the communicators opened
    so far are taken off by that, so the second figure is 0. On the CPU it is this rank's share of
    the memory that the machine, or the container, has left.
    """
    if device.type == "cuda":
        torch.zeros(1, device=device)
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device), 0
    share = _host_bytes() // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    # What is left changes by the moment; equal ranks should read the same.
    return share >> 26 << 26, 0


def _host_bytes() -> int:
    left = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    meminfo, limit = Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max")
    if meminfo.exists():
        for line in meminfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                left = int(line.split()[1]) * 1024
    if limit.exists():
        text = limit.read_text(encoding="utf-8").strip()
        left = min(left, int(text)) if text.isdecimal() else left
    return left
