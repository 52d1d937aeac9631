"""How tokens travel to their experts: one level against two, half precision against full.

`python -m benchmarks.token_travel --out benchmarks/results/token-travel.md` (about a minute, 8 CPU
ranks as 2 nodes of 4; `--device cuda` takes 8 virtual GPUs). Bytes and messages are counted, times
are ratios measured side by side; what 60 nodes would take is predicted.
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
from whale.cost.comm import Fabric
from whale.ir.cluster import Cluster

NUM_RANKS, PER_NODE = 8, 4
WAYS = ("flat", "two-level", "flat bf16", "flat fp16", "two-level bf16")
CLUSTERS = ("2x4xV100-32GB", "16x8xV100-32GB", "60x8xV100-32GB")
TOKENS, WIDTH = 8 * 272, 1024
"""M6: 8 samples of 272 positions a GPU, 1,024 wide."""


def main() -> int:
    """Measures, predicts and writes the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        start_ranks(
            [12] * NUM_RANKS,
            "benchmarks.token_travel_rank",
            ["--out", str(found), "--device", options.device],
            device=options.device,
            timeout=300.0,
        )
        rows = json.loads(found.read_text())
    options.out.write_text(page(rows, options.device), encoding="utf-8")
    print(options.out.read_text())
    return 0


def page(rows: list[Mapping[str, Any]], device: str) -> str:
    """The results as markdown."""
    where = (
        "2 CPU cores, Gloo over loopback" if device == "cpu" else "virtual GPUs of an H200, NCCL"
    )
    lines = [
        "# How tokens travel to their experts",
        "",
        f"`python -m benchmarks.token_travel --device {device} --out` this file. "
        f"{datetime.now(UTC):%Y-%m-%d}, {NUM_RANKS} ranks as 2 nodes of {PER_NODE}, {where}.",
        "",
        "One journey of random tokens with a random router; between nodes counts what leaves a "
        "rank's node, per rank. Times are ratios to the flat journey in full precision, medians of "
        "interleaved repeats, forward and backward; both nodes are one machine here, so that what "
        "two levels save between nodes does not show in them.",
        "",
        "| tokens a rank | way | MB between nodes | messages between nodes | time |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['tokens']} | {r['way']} | {r['megabytes']:.2f} | {r['messages']} | "
        f"{r['ratio']:.2f} |"
        for r in rows
    ]
    lines += [
        "",
        "## Predicted",
        "",
        f"Seconds for {TOKENS} tokens of {WIDTH} a GPU (M6's 8 samples), one journey, by the cost "
        "model from data sheets; `auto` takes the cheaper of flat and two-level.",
        "",
        "| cluster | bytes an element | flat, ms | two-level, ms |",
        "|---|---|---|---|",
    ]
    for name in CLUSTERS:
        cluster = Cluster.parse(name)
        fabric = Fabric.of(cluster)
        for width, size in (("4 (float32)", 4), ("2 (half)", 2)):
            flat, two = (
                fabric.all_to_all(range(cluster.num_devices), TOKENS * WIDTH * size, two_level=two)
                for two in (False, True)
            )
            lines.append(f"| {name} | {width} | {flat * 1e3:.2f} | {two * 1e3:.2f} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
