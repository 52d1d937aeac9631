"""Overlap of gradient sums with the backward pass, on virtual GPUs, from a profiler trace.

Place in the flow: the command; `overlap_rank` runs on each rank. For each bucket size and number of
communicators it says how much of the time in which NCCL reduces gradients is covered by compute
kernels of the same rank (rank 0), beside the step's time; a row of DDP stands below for comparison.
An NCCL kernel also lasts while it waits for its peer, so its time is not the link's alone.

    python benchmarks/overlap.py --shares 50,50 --size gpu --out benchmarks/results/overlap-gpu.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from virtual_gpus import RanksFailedError, start_ranks


def main() -> int:
    """Runs the benchmark; 0 when every combination was measured."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ranks and MPS are ended
    shares = [int(share) for share in options.shares.split(",")]
    ours = ("shares", "timeout", "out")
    arguments = [f"--{name}={v}" for name, v in vars(options).items() if name not in ours]
    with tempfile.TemporaryDirectory(prefix="overlap-") as folder:
        result = Path(folder) / "result.json"
        try:
            start_ranks(
                shares,
                "benchmarks.overlap_rank",
                [*arguments, f"--result={result}"],
                device=options.device,
                timeout=options.timeout,
            )
        except RanksFailedError as error:
            print(error, file=sys.stderr)
            return 1
        report = json.loads(result.read_text())
    report = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **report,
        "settings": {k: v for k, v in vars(options).items() if k not in ("out", "timeout")},
    }
    table = _table(report)
    print(table)
    if options.out:
        out = Path(options.out)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=1) + "\n")
        hardware = report["hardware"]
        title = "# Overlap of gradient sums with the backward pass"
        where = f"{report['date']}, {hardware['device']}, torch {hardware['torch']}, "
        where += f"{report['num_ranks']} ranks, size `{options.size}`, {options.dtype}."
        out.with_suffix(".md").write_text(f"{title}\n\n{where}\n\n{table}\n")
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shares", default="50,50", help="percent of the card per virtual GPU")
    parser.add_argument("--size", default="gpu", choices=("cpu", "gpu"))
    parser.add_argument(
        "--device", default="cuda", choices=("cpu", "cuda"), help="cpu: a dry run, no kernels"
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--tf32", type=int, default=1, choices=(0, 1))
    parser.add_argument("--buckets", default="1,25,1024", help="MiB, comma-separated")
    parser.add_argument("--communicators", default="1,2", help="comma-separated")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=400.0)
    parser.add_argument("--out", default="", help="JSON file; a .md is written beside it")
    return parser.parse_args()


def _table(report: dict[str, Any]) -> str:
    rows = [
        "| side | bucket MiB | communicators | step ms | NCCL ms | compute ms | overlapped | "
        "exposed NCCL ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in report["results"]:
        fraction = r["overlapped_fraction"]
        share = "-" if fraction is None else f"{100 * fraction:.0f} %"
        exposed = r["communication_ms"] - r["overlapped_ms"]
        rows.append(
            f"| {r['side']} | {r['bucket_mib']:g} | {r['num_communicators']} | {r['step_ms']:.1f} "
            f"| {r['communication_ms']:.1f} | {r['compute_ms']:.1f} | {share} | {exposed:.1f} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
