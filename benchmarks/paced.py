"""Unequal devices anywhere: CPU ranks that sleep to a declared speed, equal split against ours.

`python -m benchmarks.paced --out benchmarks/results/heterogeneous-cpu.md` (about 3 minutes on 2
cores). It proves load balance and the planner's arithmetic, not kernel speed: a rank's work is
declared to take its FLOPs over its pace, and it really computes and communicates meanwhile.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.virtual_gpus import start_ranks

PACES = {"2:1": (2.0, 1.0), "2:2:1:1": (2.0, 2.0, 1.0, 1.0), "4:2:2:2": (4.0, 2.0, 2.0, 2.0)}
CASES = (
    ("data", "bert-tiny"),
    ("data", "resnet-tiny"),
    ("data", "gnmt-tiny"),
    ("pipeline", "bert-tiny"),
    ("pipeline", "t5-tiny"),
)


def main() -> int:
    """Runs every mix and writes the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = []
    for mix, paces in PACES.items():
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "rows.jsonl"
            start_ranks(
                [1] * len(paces),
                "benchmarks.paced_rank",
                ["--paces", ",".join(map(str, paces)), "--out", str(out)]
                + ["--cases", ",".join(f"{kind}/{name}" for kind, name in CASES)],
                device="cpu",
                timeout=600.0,
            )
            for line in out.read_text().splitlines():
                rows.append({"mix": mix, **json.loads(line)})
                print(rows[-1], flush=True)
    lines = [
        "# Unequal devices on CPU ranks: hardware-aware against equal",
        "",
        "`python -m benchmarks.paced --out` this file. "
        f"{datetime.now(UTC):%Y-%m-%d}, 2 CPU cores, Gloo over loopback; each rank sleeps to the "
        "time its work is declared to take (`pace_flops`).",
        "",
        "The bound of data parallelism is (equal split's slowest declared compute + c) / (balanced "
        "compute + c), where c is what the equal run takes beside its declared compute.",
        "",
        "| paces | plan | model | equal, ms | aware, ms | gained | bound | of the bound | "
        "predicted, equal | predicted, aware |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        bound = f"{r['bound']:.2f}x | {r['gained'] / r['bound']:.1%}" if r["bound"] else " | "
        lines.append(
            f"| {r['mix']} | {r['kind']} | {r['model']} | {r['equal_s'] * 1e3:.0f} | "
            f"{r['aware_s'] * 1e3:.0f} | {r['gained']:.2f}x | {bound} | "
            f"{r['equal_error']:+.1%} | {r['aware_error']:+.1%} |"
        )
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
