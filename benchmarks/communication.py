"""What each switch of communication does to a step of an expert-parallel M6: calls, bytes, time.

`python -m benchmarks.communication --out benchmarks/results/communication-cpu.md` (two minutes, 4
CPU ranks); `--device cuda` takes 4 virtual GPUs and a larger model. All settings train in turns in
the same processes; times are ratios to the defaults in the same round. Calls and bytes are what a
rank hands to `torch.distributed` in one step. How tokens travel on two levels is in
`token_travel.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.virtual_gpus import start_ranks

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "defaults": {},
    "the defaults again": {},
    "a bucket per parameter": {"communication.bucket_bytes": 1},
    "small buckets": {"communication.bucket_bytes": 200_000},
    "small buckets, at most two": {
        "communication.bucket_bytes": 200_000,
        "communication.max_splits": 2,
    },
    "two communicators": {"communication.num_communicators": 2},
    "gradients in bf16": {"communication.bf16": True},
    "gradients in fp16": {"communication.fp16": True},
    "tokens in bf16": {"communication.token_dtype": "bf16"},
    "tokens in fp16": {"communication.token_dtype": "fp16"},
    "tokens in 2 parts": {"communication.token_chunks": 2},
    "tokens in 4 parts": {"communication.token_chunks": 4},
}
SHARES = (25, 25, 25, 25)


def main() -> int:
    """Measures and writes the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        start_ranks(
            SHARES,
            "benchmarks.communication_rank",
            ["--out", str(found), "--device", options.device, "--rounds", str(options.rounds)],
            device=options.device,
            timeout=500.0,
        )
        measured = json.loads(found.read_text(encoding="utf-8"))
    options.out.write_text(page(measured, options.device), encoding="utf-8")
    print(options.out.read_text(encoding="utf-8"))
    return 0


def page(measured: Mapping[str, Any], device: str) -> str:
    """The results as markdown."""
    where = (
        "4 CPU ranks, Gloo over loopback, on 2 cores"
        if device == "cpu"
        else "4 virtual GPUs of an H200, NCCL over loopback"
    )
    lines = [
        "# What each switch of communication does",
        "",
        f"`python -m benchmarks.communication --device {device} --out` this file. "
        f"{datetime.now(UTC):%Y-%m-%d}, {where}, torch {measured['torch']}.",
        "",
        f"{measured['about']}. Settings in turns in the same processes, {measured['rounds']} "
        "rounds; times are ratios to the defaults in the same round, median and quartiles; the "
        "second row is the defaults once more, whose distance from 1 is noise. Calls and MB are "
        "what a rank hands over in one step: gradients (all-reduce), tokens (all-to-all).",
        "",
        "| setting | gradient calls | MB | token calls | MB | time |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in measured["settings"].items():
        low, middle, high = row["ratio"]
        lines.append(
            f"| {name} | {row['calls']['all_reduce']} | {row['bytes']['all_reduce'] / 1e6:.2f} | "
            f"{row['calls']['all_to_all']} | {row['bytes']['all_to_all'] / 1e6:.2f} | "
            f"{middle:.2f} ({low:.2f} - {high:.2f}) |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
