"""One rank of the overlap benchmark: trains data parallel and reads rank 0's profiler trace.

Place in the flow: started by `overlap` through `virtual_gpus`; rank 0 writes the result.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import whale as wh
from benchmarks import sides
from benchmarks.sides import SIZES, Side

WARMUP = 4

SMALL = 64
"""Elements under which a collective is not of gradients (Whale sums the loss and its count)."""

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same stretches of time, disjoint and in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Their sum."""
    return sum(end - start for start, end in intervals)


def intersection(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """Where two disjoint, ordered lists are both."""
    found: list[Interval] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            found.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def read_trace(events: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Microseconds of gradient collectives, of compute, and of both at once, from trace events.

    Where kernels name their collective's size (torch records it on most), small ones are left out.
    """
    kernels = [e for e in events if e.get("cat") == "kernel"]
    sums, compute = [], []
    for kernel in kernels:
        interval = (float(kernel["ts"]), float(kernel["ts"]) + float(kernel["dur"]))
        if "nccl" not in kernel["name"].lower():
            compute.append(interval)
        elif int(kernel.get("args", {}).get("In msg nelems", SMALL)) >= SMALL:
            sums.append(interval)
    sums, compute = union(sums), union(compute)
    return {
        "communication_us": length(sums),
        "compute_us": length(compute),
        "overlapped_us": length(intersection(sums, compute)),
        "num_kernels": float(len(kernels)),
    }


def main() -> None:
    """Runs every combination on this rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", required=True, choices=sorted(SIZES))
    parser.add_argument("--device", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--tf32", type=int, required=True)
    parser.add_argument("--buckets", required=True)
    parser.add_argument("--communicators", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--result", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high" if options.tf32 else "highest")
    wh.init(device=options.device)
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    size = SIZES[options.size]
    setting = sides.make_setting(
        size,
        rows=size.batch * dist.get_world_size(),
        device=device,
        dtype=getattr(torch, options.dtype),
        optimizer="fused",
    )
    rows = []
    buckets = [float(text) for text in options.buckets.split(",")]
    pools = [int(text) for text in options.communicators.split(",")]
    for mib, pool in itertools.product(buckets, pools):
        config = {
            "communication.bucket_bytes": int(mib * 2**20),
            "communication.num_communicators": pool,
        }
        side = sides.whale_side(setting, {"": wh.replicate()}, config)
        found = measure(side, options.steps, device)
        rows.append({"side": "whale", "bucket_mib": mib, "num_communicators": pool, **found})
        side.close()
    side = sides.ddp_side(setting, view=True)
    found = measure(side, options.steps, device)
    rows.append({"side": "ddp", "bucket_mib": sides.BUCKET_MIB, "num_communicators": 1, **found})
    if dist.get_rank() == 0:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        report = {
            "hardware": {"device": name, "torch": torch.__version__},
            "num_ranks": dist.get_world_size(),
            "results": rows,
        }
        Path(options.result).write_text(json.dumps(report))
    dist.destroy_process_group()


def measure(side: Side, steps: int, device: torch.device) -> dict[str, float | None]:
    """Step time without the profiler, then the shares of a profiled run, per step, on rank 0."""
    for index in range(WARMUP):
        side.step(index)
    times = [_timed(side, index, device) for index in range(steps)]
    found: dict[str, float] = {}
    if dist.get_rank() == 0:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
                _train(side, range(steps), device)
            profiler.export_chrome_trace(str(path))
            found = read_trace(json.loads(path.read_text())["traceEvents"])
    else:
        _train(side, range(steps), device)
    result: dict[str, float | None] = {"step_ms": 1e3 * statistics.median(times)}
    for key in ("communication", "compute", "overlapped"):
        result[f"{key}_ms"] = found.get(f"{key}_us", 0.0) / 1e3 / steps
    total = found.get("communication_us", 0.0)
    result["overlapped_fraction"] = found["overlapped_us"] / total if total else None
    return result


def _train(side: Side, indices: range, device: torch.device) -> None:
    for index in indices:
        side.step(index)
    if device.type == "cuda":
        torch.cuda.synchronize()


def _timed(side: Side, index: int, device: torch.device) -> float:
    dist.all_reduce(torch.zeros(1, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    _train(side, range(index, index + 1), device)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
