"""One rank of the heterogeneous benchmark: calibrates, plans and trains, hardware-aware and not.

Place in the flow: started by `heterogeneous` through `virtual_gpus`. Every experiment prints one
JSON line on rank 0. Speeds are measured per model, with all ranks at work, and no run that is
predicted was part of a calibration.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import whale as wh
from benchmarks.paced_sockets import pace_sockets
from whale.annotations import discover
from whale.engine.calibrate.links import Together
from whale.engine.calibrate.profile import calibrate, with_layers
from whale.engine.capture.captured import capture
from whale.errors import PlanError
from whale.models.registry import optimizer_factory, preset

WARM_UP = 2


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model as an experiment trains it."""

    preset: str
    rows: int
    """Of one micro-batch."""
    num_micro_batch: int
    seq: int | None = None
    batch_norm: str = "global"

    @property
    def about(self) -> str:
        """For the table."""
        return self.preset + (", local norms" if self.batch_norm == "local" else "")


SIZES: Mapping[str, Mapping[str, Size]] = {
    "gpu": {
        "bert": Size(preset="bert-large", rows=192, num_micro_batch=6, seq=128),
        "gnmt": Size(preset="gnmt", rows=768, num_micro_batch=10, seq=50),
        "resnet": Size(preset="resnet-50", rows=1024, num_micro_batch=3),
        "resnet-local": Size(preset="resnet-50", rows=1024, num_micro_batch=3, batch_norm="local"),
        "bert-pipeline": Size(preset="bert-large", rows=24, num_micro_batch=16, seq=128),
        "t5-pipeline": Size(preset="t5-large", rows=4, num_micro_batch=12, seq=512),
        "bert-4": Size(preset="bert-large", rows=192, num_micro_batch=6, seq=128),
        "head": Size(preset="resnet-50-100k", rows=768, num_micro_batch=1, batch_norm="local"),
        "head-1m": Size(preset="resnet-50-1m", rows=192, num_micro_batch=1, batch_norm="local"),
        "memory": Size(preset="bert-large", rows=192, num_micro_batch=2, seq=128),
    },
    "tiny": {
        "bert": Size(preset="bert-tiny", rows=24, num_micro_batch=2),
        "gnmt": Size(preset="gnmt-tiny", rows=24, num_micro_batch=2),
        "resnet": Size(preset="resnet-tiny", rows=24, num_micro_batch=2),
        "resnet-local": Size(preset="resnet-tiny", rows=24, num_micro_batch=2, batch_norm="local"),
        "bert-pipeline": Size(preset="bert-tiny", rows=6, num_micro_batch=4),
        "t5-pipeline": Size(preset="t5-tiny", rows=6, num_micro_batch=4),
        "bert-4": Size(preset="bert-tiny", rows=24, num_micro_batch=2),
        "head": Size(preset="resnet-tiny", rows=16, num_micro_batch=1, batch_norm="local"),
        "head-1m": Size(preset="resnet-tiny", rows=16, num_micro_batch=1),
        "memory": Size(preset="bert-tiny", rows=16, num_micro_batch=2),
    },
}


class Bench:
    """What the experiments share: the device, the profile without Layers, a folder."""

    def __init__(
        self,
        sizes: Mapping[str, Size],
        device: torch.device,
        folder: Path,
        out: Path,
        *,
        symmetric: bool,
        bytes_per_s: int | None,
        profiles: Path | None,
    ) -> None:
        self.symmetric, self.profiles = symmetric, profiles
        self.sizes, self.device, self.folder, self.out = sizes, device, folder, out
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.cluster = discover()
        started = time.monotonic()
        self.base = calibrate(device=device, dtypes=("float32",), symmetric_memory=symmetric)
        self._check_network(bytes_per_s)
        self.say(
            "calibrated",
            seconds=time.monotonic() - started,
            links=[[*k, *v] for k, v in self.base.links.items()],
            memory=[d.memory_bytes for d in self.base.devices],
            contention=self.base.contention,
            lost=[d.lost for d in self.base.devices],
        )

    def _check_network(self, bytes_per_s: int | None) -> None:
        """A kernel may take the pace of a socket and not keep it."""
        for (kind, _, _), (_, speed) in self.base.links.items():
            if bytes_per_s and kind == "send" and speed > 1.3 * bytes_per_s:
                raise SystemExit(f"sockets are not paced: {speed:.3g} of {bytes_per_s:.3g} B/s")

    def say(self, name: str, **values: Any) -> None:
        """One JSON line, from rank 0, written at once: a run that is cut short keeps it."""
        if self.rank == 0:
            with self.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"experiment": name, **values}) + "\n")

    def batch(self, size: Size) -> Any:
        """One global batch, on the device: loading is not what is measured."""
        batch = preset(size.preset).batch(size.rows * size.num_micro_batch, size.seq)
        return tuple(tensor.to(self.device) for tensor in batch)

    def profile(
        self, name: str, model: nn.Module, batch: Any, loss: Any, rows: Sequence[int]
    ) -> Path:
        """The profile with this model's Layers, as a file."""
        found = with_layers(
            self.base,
            model,
            batch,
            loss,
            rows,
            device=self.device,
            budget_s=25.0,
            symmetric_memory=self.symmetric,
        )
        lost = [d.lost for d in found.devices]
        self.say(f"{name}: calibrated", contention=found.contention, lost=lost)
        path = self.folder / f"{name}-{self.rank}.json"
        found.write(path)
        if self.profiles is not None and self.rank == 0:
            shutil.copy(path, self.profiles / f"{name}.json")
        return path

    def speeds(self, size: Size, rows: int) -> list[float]:
        """Rows per second of a plain model on each rank, while all of them run."""
        chosen = preset(size.preset)
        torch.manual_seed(0)
        with self.device:
            model = _without_dropout(chosen.build())
        batch = chosen.batch(rows, size.seq)
        batch = tuple(t.to(self.device) for t in batch)

        def once() -> None:
            out = model(*batch[:-1])
            chosen.loss(out, batch[-1]).backward()

        with Together() as together:
            for _ in range(2):
                once()
            self.sync()
            together.wait()
            times = []
            for _ in range(4):
                started = time.perf_counter()
                once()
                self.sync()
                times.append(time.perf_counter() - started)
            together.wait(lambda: (once(), self.sync()))
            found = together.gather(rows / statistics.median(times))
        self.free()
        return found

    def sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def step(self, size: Size, model: nn.Module, batch: Any, plan: Any) -> Any:
        chosen = preset(size.preset)
        return wh.parallelize(
            model,
            optimizer=optimizer_factory(chosen.optimizer),
            batch=batch,
            loss=chosen.loss,
            plan=plan,
            cluster=self.cluster,
            config={
                "check_parts": False,
                "timeout_seconds": 120.0,
                "communication.symmetric_memory": self.symmetric,
            },
        )

    def plan(self, size: Size, model: nn.Module, batch: Any, path: Path, **config: Any) -> Any:
        return plan(size, model, batch, self.cluster, path, **config)

    def race(
        self, size: Size, sides: Mapping[str, tuple[nn.Module, Any]], batch: Any
    ) -> dict[str, Any]:
        """Trains every side, one after the other so that each has its memory alone."""
        found: dict[str, Any] = {}
        for name, (model, plan) in sides.items():
            step = self.step(size, model, batch, plan)
            step._lowered.executor.clock.timed_computes = True
            for _ in range(WARM_UP + _num_steps(plan)):
                step(batch)
            found[name] = _facts(step)
            step.close()
            del step
            self.free()
        return found


def _num_steps(plan: Any) -> int:
    """About eight seconds of them; the same on every rank, because the prediction is."""
    return max(5, min(16, round(8.0 / plan.predicted["step_seconds"])))


def build(size: Size) -> nn.Module:
    """The preset's model on the meta device, without annotations.

    And without dropout, as throughput is usually measured; exact masks under every layout are
    another subject.
    """
    with torch.device("meta"):
        return _without_dropout(preset(size.preset).build())


def annotated(size: Size) -> nn.Module:
    """The same with its large head split."""
    model = build(size)
    chosen = preset(size.preset)
    if chosen.annotate is not None:
        chosen.annotate(model)
    else:
        wh.annotate(model, {"fc": wh.split()})
    return model


def plan(
    size: Size, model: nn.Module, batch: Any, cluster: Any, profile: Path, **config: Any
) -> Any:
    """As an experiment plans it; `config` has `__` for dots."""
    chosen = preset(size.preset)
    return wh.plan(
        model,
        cluster=cluster,
        batch=batch,
        loss=chosen.loss,
        optimizer=optimizer_factory(chosen.optimizer),
        config={
            "pipeline.num_micro_batch": size.num_micro_batch,
            "cluster.profile": str(profile),
            "communication.batch_norm": size.batch_norm,
            **{key.replace("__", "."): value for key, value in config.items()},
        },
    )


def _without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    return model


def _facts(step: Any) -> dict[str, Any]:
    report = step.report()
    assert report.measured is not None
    return {
        "strategy": report.strategy,
        "predicted_s": report.step_seconds,
        "measured_s": report.measured.step_seconds,
        "low_s": report.measured.low_seconds,
        "high_s": report.measured.high_seconds,
        "time_error": report.time_error,
        "memory_errors": list(report.memory_errors.values()),
        "predicted_peaks": [d.memory.total for d in report.devices],
        "measured_peaks": [d.peak_bytes for d in report.measured.devices],
        "shares": [d.share for d in report.devices],
        "rows": [d.rows for d in report.devices],
        "stages": [list(d.stages) for d in report.devices],
        "compute_s": [d.compute_s for d in report.devices],
        "measured_compute_s": [d.compute_s for d in report.measured.devices],
        "where": dict(report.where_time_goes),
    }


# ---- experiments ---------------------------------------------------------------------------------


def data(bench: Bench, name: str) -> dict[str, Any]:
    """Data parallel: equal shares against hardware-aware ones."""
    size = bench.sizes[name]
    chosen = preset(size.preset)
    equal_rows = size.rows // bench.num_ranks
    model, batch = build(size), bench.batch(size)
    low, high = max(1, equal_rows // 4), size.rows
    rows = (low, equal_rows, (equal_rows + high) // 2)
    speeds = bench.speeds(size, equal_rows)
    path = bench.profile(name, model, batch, chosen.loss, rows)
    plans = {
        "equal": bench.plan(size, model, batch, path, cluster__balance="equal"),
        "aware": bench.plan(size, model, batch, path),
    }
    found = bench.race(size, {k: (model, p) for k, p in plans.items()}, batch)
    equal, aware = found["equal"], found["aware"]
    total = size.rows * size.num_micro_batch
    slowest = max(equal["measured_compute_s"])
    exposed = equal["measured_s"] - slowest
    balanced = total / sum(speeds)
    bound = (slowest + exposed) / (balanced + exposed)
    gained = equal["measured_s"] / aware["measured_s"]
    return {
        "model": size.about,
        "sides": found,
        "rows_per_s": speeds,
        "exposed_s": exposed,
        "bound": bound,
        "without_communication": slowest / balanced,
        "gained": gained,
        "of_bound": gained / bound,
    }


def pipeline(bench: Bench, name: str) -> dict[str, Any]:
    """A pipeline with as many blocks on every device, against one cut by cost."""
    size = bench.sizes[name]
    chosen = preset(size.preset)
    model, even, batch = build(size), build(size), bench.batch(size)
    paths = [layer.path for layer in capture(model, batch, chosen.loss).graph.layers]
    even_stages(even, paths, bench.num_ranks)
    path = bench.profile(name, model, batch, chosen.loss, (size.rows // 2, size.rows))
    plans = {
        "even": (even, bench.plan(size, even, batch, path, cluster__balance="equal")),
        "aware": (
            model,
            bench.plan(
                size,
                model,
                batch,
                path,
                auto__auto_parallel=True,
                pipeline__num_stages=bench.num_ranks,
            ),
        ),
    }
    found = bench.race(size, plans, batch)
    gained = found["even"]["measured_s"] / found["aware"]["measured_s"]
    stages = [[len(s.layers), list(s.virtual_device.ranks)] for s in plans["aware"][1].stages]
    return {"model": size.about, "sides": found, "gained": gained, "stages": stages}


def even_stages(model: nn.Module, paths: Sequence[str], count: int) -> None:
    """As many blocks in every stage; what comes before and after them goes to the ends."""
    kinds = [path.rpartition(".")[0] for path in paths]
    block = max(set(kinds), key=kinds.count)
    prefixes = {k for k in kinds if k and kinds.count(k) > 1} or {block}
    blocks = [i for i, k in enumerate(kinds) if k in prefixes]
    points = [0]
    for stage in range(1, count):
        points.append(blocks[round(stage * len(blocks) / count)])
    points.append(len(paths))
    wh.annotate(
        model, {"|".join(paths[a:b]): wh.stage() for a, b in zip(points, points[1:], strict=False)}
    )


def head(bench: Bench, name: str) -> dict[str, Any]:
    """A very large classification head: replicate + split against data parallel."""
    size = bench.sizes[name]
    chosen = preset(size.preset)
    plain, split, batch = build(size), annotated(size), bench.batch(size)
    rows = size.rows // bench.num_ranks
    path = bench.profile(name, split, batch, chosen.loss, (rows, size.rows))
    sides = {"split": (split, bench.plan(size, split, batch, path))}
    whole = bench.plan(size, plain, batch, path)
    fits = whole.predicted["fits"]
    if fits:
        sides["data"] = (plain, whole)
    found = bench.race(size, sides, batch)
    gained = found["data"]["measured_s"] / found["split"]["measured_s"] if fits else None
    return {
        "model": size.about,
        "sides": found,
        "gained": gained,
        "data_parallel_fits": fits,
        "data_parallel_peaks": list(whole.peak_bytes),
        "capacities": [d.capacity_bytes for d in whole.prices.devices],
    }


def memory(bench: Bench, name: str) -> dict[str, Any]:
    """Unequal memory: the equal split overflows, the aware one trains."""
    size = bench.sizes[name]
    chosen = preset(size.preset)
    model, batch = build(size), bench.batch(size)
    rows = size.rows // bench.num_ranks
    path = bench.profile(name, model, batch, chosen.loss, (rows // 4, rows // 2, rows))
    aware = bench.plan(size, model, batch, path)
    equal = bench.plan(size, model, batch, path, cluster__balance="equal")
    found = bench.race(size, {"aware": (model, aware)}, batch)
    failure = ""
    try:
        step = bench.step(size, model, batch, equal)
        step(batch)
        step.close()
    except (RuntimeError, ValueError) as error:
        failure = f"{type(error).__name__}: {error}"[:300]
    everyone: list[Any] = [None] * bench.num_ranks
    if not failure:
        dist.all_gather_object(everyone, failure)
    return {
        "model": size.about,
        "sides": found,
        "equal_predicted_fits": equal.predicted["fits"],
        "equal_predicted_peaks": list(equal.peak_bytes),
        "capacities": [d.capacity_bytes for d in equal.prices.devices],
        "equal_failure_on_this_rank": failure,
        "binds": [d.binds for d in aware.prices.devices],
    }


EXPERIMENTS: Mapping[str, Callable[[Bench, str], dict[str, Any]]] = {
    "bert": data,
    "bert-4": data,
    "gnmt": data,
    "resnet": data,
    "resnet-local": data,
    "bert-pipeline": pipeline,
    "t5-pipeline": pipeline,
    "head": head,
    "head-1m": head,
    "memory": memory,
}


def main() -> None:
    """Runs the experiments asked for, one after the other."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--experiments", required=True)
    parser.add_argument("--size", default="gpu", choices=tuple(SIZES))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--symmetric", action="store_true", help="sums through shared memory")
    parser.add_argument("--bytes-per-s", type=int, help="of the network between hosts")
    parser.add_argument("--profiles", type=Path, help="keeps the calibrations in this folder")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = False
    if options.bytes_per_s:
        pace_sockets(options.bytes_per_s)
    wh.init({"timeout_seconds": 120.0}, device=options.device)
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(
            SIZES[options.size],
            device,
            Path(folder),
            options.out,
            symmetric=options.symmetric,
            bytes_per_s=options.bytes_per_s,
            profiles=options.profiles,
        )
        for name in options.experiments.split(","):
            started = time.monotonic()
            try:
                found = EXPERIMENTS[name](bench, name)
            except PlanError as error:
                bench.say(name, error=str(error))
                continue
            except Exception:
                print(f"rank {bench.rank}: {name}", flush=True)
                traceback.print_exc()
                os._exit(1)
            bench.say(name, **found, wall_s=time.monotonic() - started)
            if found.get("equal_failure_on_this_rank"):
                break
    # A rank that ran out of memory leaves its peers inside a collective: none of them waits.
    os._exit(0)


if __name__ == "__main__":
    main()
