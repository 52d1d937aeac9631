"""One rank of `benchmarks.paced`: trains a small preset under an equal and an aware plan."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import whale as wh
from benchmarks.heterogeneous_rank import even_stages
from whale.engine.capture.captured import capture
from whale.ir.cluster import Cluster, Device, Node
from whale.models.registry import optimizer_factory, preset

STEP_SECONDS = 0.6
"""Declared time of a balanced step: far above what the real compute takes on a shared core."""
NUM_MICRO_BATCH = {"data": 1, "pipeline": 8}
ROWS = 48


def cluster_of(paces: Sequence[float], flops: float) -> Cluster:
    """Ranks whose balanced step of `flops` is declared to take STEP_SECONDS."""
    unit = flops / sum(paces) / STEP_SECONDS
    return Cluster(
        devices=tuple(
            Device(rank=r, node=0, type="CPU", memory_bytes=8 * 10**9, pace_flops=p * unit)
            for r, p in enumerate(paces)
        ),
        nodes=(Node(index=0),),
    )


def run(kind: str, name: str, paces: Sequence[float]) -> dict[str, Any]:
    """Both sides of one case."""
    chosen = preset(name)
    torch.manual_seed(0)
    batch = chosen.batch(ROWS, chosen.seq)
    graph = capture(chosen.build(), batch, chosen.loss).graph
    flops = 3.0 * sum(layer.flops_per_row for layer in graph.layers) * ROWS
    cluster = cluster_of(paces, flops)
    config: dict[str, Any] = {
        "pipeline.num_micro_batch": NUM_MICRO_BATCH[kind],
        "check_parts": False,
        "timeout_seconds": 60.0,
    }
    aware: dict[str, Any] = {}
    if kind == "pipeline":
        aware = {"auto.auto_parallel": True, "pipeline.num_stages": len(paces)}
    found: dict[str, Any] = {"kind": kind, "model": name}
    for side, more in (("equal", {"cluster.balance": "equal"}), ("aware", aware)):
        torch.manual_seed(0)
        model = chosen.build()
        if kind == "pipeline" and side == "equal":
            even_stages(model, [layer.path for layer in graph.layers], len(paces))
        step = wh.parallelize(
            model,
            optimizer=optimizer_factory(chosen.optimizer),
            batch=batch,
            loss=chosen.loss,
            cluster=cluster,
            config={**config, **more},
        )
        for _ in range(7):
            step(batch)
        report = step.report()
        found[f"{side}_s"] = report.measured.step_seconds
        found[f"{side}_error"] = report.time_error
        if side == "equal":
            slowest = max(d.compute_s for d in report.devices)
        step.close()
    found["gained"] = found["equal_s"] / found["aware_s"]
    exposed = max(0.0, found["equal_s"] - slowest)
    found["bound"] = (slowest + exposed) / (STEP_SECONDS + exposed) if kind == "data" else None
    return found


def main() -> None:
    """All cases, one after the other."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--paces", required=True)
    parser.add_argument("--cases", required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    wh.init({"timeout_seconds": 60.0}, device="cpu")
    paces = [float(p) for p in options.paces.split(",")]
    for case in options.cases.split(","):
        kind, _, name = case.partition("/")
        found = run(kind, name, paces)
        if torch.distributed.get_rank() == 0:
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
