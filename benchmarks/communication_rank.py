"""One rank of the communication benchmark; rank 0 writes what was measured.

Place in the flow: started by `communication`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import whale as wh
from benchmarks.communication import SETTINGS
from benchmarks.slowest import seconds
from whale.engine.step import Step
from whale.models.m6.annotate import expert_parallel
from whale.models.m6.config import presets
from whale.models.m6.model import M6
from whale.models.m6.objectives import example_batch

CPU = replace(presets["m6-tiny"], dim=128, vocab_size=1024, num_experts=16)
GPU = replace(presets["m6-small"], stem="patch", dropout=0.0, num_experts=32)


def make(config: Any, rows: int, settings: Any) -> Step:
    """A Step of its own, with weights of its own."""
    with torch.device("meta"):
        model = M6(config)
    return wh.parallelize(
        expert_parallel(model),
        optimizer=partial(torch.optim.AdamW, lr=1e-4),
        batch=example_batch(config, rows),
        config={"cluster.balance": "equal", **settings},
    )


@contextmanager
def counted(calls: Counter[str], nbytes: Counter[str]) -> Any:
    """Counts what is handed to `torch.distributed` meanwhile."""
    sum_up, exchange = dist.all_reduce, dist.all_to_all_single

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls["all_reduce"] += 1
        nbytes["all_reduce"] += tensor.nbytes
        return sum_up(tensor, *args, **kwargs)

    def all_to_all(out: torch.Tensor, given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls["all_to_all"] += 1
        nbytes["all_to_all"] += given.nbytes
        return exchange(out, given, *args, **kwargs)

    with patch.multiple(dist, all_reduce=all_reduce, all_to_all_single=all_to_all):
        yield


def main() -> None:
    """All settings, in turns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    wh.init({"timeout_seconds": 120.0}, device=options.device)
    cuda = options.device == "cuda"
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    config, rows = (GPU, 64) if cuda else (CPU, 32)
    batch = example_batch(config, rows)
    steps = {name: make(config, rows, settings) for name, settings in SETTINGS.items()}
    found: dict[str, Any] = {}
    for name, step in steps.items():
        step(batch)
        calls: Counter[str] = Counter()
        nbytes: Counter[str] = Counter()
        with counted(calls, nbytes):
            step(batch)
        found[name] = {"calls": calls, "bytes": nbytes}
    names = list(steps)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(options.rounds):
        at = turn % len(names)
        for name in names[at:] + names[:at]:
            times[name].append(seconds(partial(steps[name], batch), device))
    for name in names:
        ratios = [a / b for a, b in zip(times[name], times["defaults"], strict=True)]
        found[name]["ratio"] = (
            statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
        )
    for step in steps.values():
        step.close()
    if dist.get_rank() == 0:
        about = (
            f"M6 of {config.num_layers} layers, width {config.dim}, {config.num_experts} experts "
            f"in every {config.moe_every}. layer, {rows} rows of {config.seq_len} positions, "
            "experts over 4 ranks, the rest in copies, float32"
        )
        text = json.dumps(
            {
                "torch": torch.__version__,
                "about": about,
                "rounds": options.rounds,
                "settings": found,
            }
        )
        options.out.write_text(text, encoding="utf-8")
    dist.barrier()


if __name__ == "__main__":
    main()
