"""One rank of the overhead benchmark: builds the sides, checks that they agree, times them in turn.

Place in the flow: started by `overhead` through `virtual_gpus`; rank 0 writes the result.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import io
import json
import platform
import pstats
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import whale as wh
from benchmarks import sides
from benchmarks.sides import SIZES, Setting, Side

NUM_CHECKED = 3
"""Steps whose losses are compared: later ones depend on the gradients and updates before them."""

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}

PILOT = 5
"""Repeats by which the fastest way to write the torch side is chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """A Whale side and the ways to write the same by hand."""

    name: str
    setting: Setting
    whale: Callable[[], Side]
    torch: Sequence[Callable[[], Side]]


def main() -> None:
    """Runs what was asked for on this rank."""
    options = _options()
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high" if options.tf32 else "highest")
    wh.init(device=options.device)
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    results = []
    for benchmark in _benchmarks(options, device):
        results.append(_run(benchmark, options, device))
        gc.collect()
    if dist.get_rank() == 0:
        report = {"hardware": _hardware(device), "results": results}
        Path(options.result).write_text(json.dumps(report))
    dist.destroy_process_group()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--which", required=True, choices=("data", "tensor", "pipeline"))
    parser.add_argument("--size", required=True, choices=sorted(SIZES))
    parser.add_argument("--device", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--tf32", type=int, required=True)
    parser.add_argument("--optimizer", required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--micro-batches", type=int, required=True)
    parser.add_argument("--bucket-mib", type=float, required=True)
    parser.add_argument("--profile", type=int, required=True)
    parser.add_argument("--result", required=True)
    return parser.parse_args()


def _benchmarks(options: argparse.Namespace, device: torch.device) -> list[Benchmark]:
    size, num_ranks = SIZES[options.size], dist.get_world_size()

    def setting(rows: int, num_micro_batch: int = 1) -> Setting:
        return sides.make_setting(
            size,
            rows=rows,
            device=device,
            dtype=getattr(torch, options.dtype),
            optimizer=options.optimizer,
            bucket_mib=options.bucket_mib,
            num_micro_batch=num_micro_batch,
        )

    if options.which == "data":
        return [_data(setting(size.batch * num_ranks))]
    if options.which == "tensor":
        return [_tensor(setting(size.batch))]
    shared = setting(size.batch, options.micro_batches)
    return [_pipeline(shared, kind) for kind in ("1f1b", "gpipe")]


def _data(setting: Setting) -> Benchmark:
    return Benchmark(
        name="data",
        setting=setting,
        whale=lambda: sides.whale_side(setting, {"": wh.replicate()}, {}),
        torch=[
            lambda: sides.ddp_side(setting, view=True),
            lambda: sides.ddp_side(setting, view=False),
        ],
    )


def _tensor(setting: Setting) -> Benchmark:
    return Benchmark(
        name="tensor",
        setting=setting,
        whale=lambda: sides.whale_side(setting, {"": wh.split()}, {}),
        torch=[
            partial(sides.tensor_side, setting, prepared=prepared, sharded_ends=sharded_ends)
            for sharded_ends in (True, False)
            for prepared in (True, False)
        ],
    )


def _pipeline(setting: Setting, kind: str) -> Benchmark:
    num_stages = dist.get_world_size()
    config = {
        "pipeline.schedule": kind,
        "pipeline.num_micro_batch": setting.num_micro_batch,
    }
    annotations = sides.stage_annotations(len(setting.model.blocks), num_stages)
    return Benchmark(
        name=f"pipeline-{kind}",
        setting=setting,
        whale=lambda: sides.whale_side(setting, annotations, config),
        torch=[lambda: sides.pipeline_side(setting, schedule=kind)],
    )


# ---- one benchmark -------------------------------------------------------------------------------


def _run(benchmark: Benchmark, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    whale = benchmark.whale()
    ways = [make() for make in benchmark.torch]
    losses = {side.name: _losses(side) for side in (whale, *ways)}
    tolerance = TOLERANCE[getattr(torch, options.dtype)]
    _compare(benchmark.name, losses, tolerance)
    for side in (whale, *ways):
        for index in range(options.warmup):
            side.step(index)
    pilot = _time(ways, PILOT, options.steps, device)[0] if len(ways) > 1 else [[0.0]]
    medians = [statistics.median(times) for times in pilot]
    best = medians.index(min(medians))
    control = benchmark.torch[best]()
    for index in range(NUM_CHECKED + options.warmup):
        control.step(index)
    gc.collect()
    order = [ways[best], whale, control]
    times, cpu = _time(order, options.repeats, options.steps, device)
    profiles = {}
    if options.profile:
        profiles = {s.name: _profile(s, options.profile) for s in (ways[best], whale)}
    for side in (whale, *ways, control):
        side.close()
    if len(ways) > 1:
        others = {w.name: 1e3 * m for w, m in zip(ways, medians, strict=True)}
    else:
        others = {}
    return {
        "name": benchmark.name,
        "torch_side": ways[best].name,
        "num_ranks": dist.get_world_size(),
        "rows": int(benchmark.setting.batches[0][0].shape[0]),
        "num_micro_batch": benchmark.setting.num_micro_batch,
        "torch_ms": 1e3 * statistics.median(times[0]),
        "whale_ms": 1e3 * statistics.median(times[1]),
        "control_ms": 1e3 * statistics.median(times[2]),
        "ratio": _spread([b / a for a, b in zip(times[0], times[1], strict=True)]),
        "control": _spread([b / a for a, b in zip(times[0], times[2], strict=True)]),
        "cpu_ratio": _spread([b / a for a, b in zip(cpu[0], cpu[1], strict=True)]),
        "cpu_control": _spread([b / a for a, b in zip(cpu[0], cpu[2], strict=True)]),
        "cpu_ms": [1e3 * statistics.median(side_times) for side_times in cpu],
        "pilot_ms": others,
        "losses": losses,
        "samples_ms": {
            name: [round(1e3 * t, 4) for t in side_times]
            for name, side_times in zip(("torch", "whale", "control"), times, strict=True)
        },
        "profiles": profiles,
    }


def _losses(side: Side) -> list[float]:
    return [side.loss(side.step(index)) for index in range(NUM_CHECKED)]


def _compare(name: str, losses: dict[str, list[float]], tolerance: float) -> None:
    """Refuses to time sides that do not compute the same."""
    truth = losses["whale"]
    for side, found in losses.items():
        errors = [abs(a - b) / abs(b) for a, b in zip(found, truth, strict=True)]
        if not max(errors) <= tolerance:
            raise SystemExit(
                f"{name}: losses of {side} {found} and of whale {truth} differ by "
                f"{max(errors):.1e}, allowed {tolerance:.0e}"
            )


def _time(
    order: Sequence[Side], repeats: int, steps: int, device: torch.device
) -> tuple[list[list[float]], list[list[float]]]:
    """Seconds per step of each side, the slowest rank's, `repeats` of them; processor time of all.

    The sides take turns; each repeat begins with the next side, so that no side always follows
    the same one.
    """
    times = torch.zeros(2, len(order), repeats, dtype=torch.float64)
    for repeat in range(repeats):
        for turn in range(len(order)):
            which = (repeat + turn) % len(order)
            found = _timed(order[which], repeat * steps, steps, device)
            times[0, which, repeat], times[1, which, repeat] = found
    slowest, total = times.to(device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    dist.all_reduce(total)
    return slowest.tolist(), total.tolist()


def _timed(side: Side, first: int, steps: int, device: torch.device) -> tuple[float, float]:
    """(wall, processor) seconds of this rank per step."""
    _together(device)
    start, used = time.perf_counter(), time.process_time()
    for index in range(first, first + steps):
        side.step(index)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps, (time.process_time() - used) / steps


def _together(device: torch.device) -> None:
    """A barrier, and nothing left to do on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.all_reduce(torch.zeros(1, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize()


def _spread(ratios: Sequence[float]) -> dict[str, float]:
    """Median and quartiles of the ratios of single repeats."""
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {"median": middle, "q1": low, "q3": high}


def _profile(side: Side, steps: int) -> str:
    """The Python functions of some steps of this rank, by own time (the caller's thread only)."""
    profile = cProfile.Profile()
    profile.enable()
    for index in range(steps):
        side.step(index)
    profile.disable()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(40)
    return f"{side.name}, {steps} steps\n{text.getvalue()}"


def _hardware(device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "whale": wh.__version__,
        "threads_per_rank": torch.get_num_threads(),
        "float32_matmul": torch.get_float32_matmul_precision(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        version: Any = torch.cuda.nccl.version()
        found |= {
            "device": properties.name,
            "num_sms_per_rank": properties.multi_processor_count,
            "nccl": ".".join(str(part) for part in version),
        }
    else:
        found["device"] = _cpu_name()
    return found


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor()


if __name__ == "__main__":
    main()
