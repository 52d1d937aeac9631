"""Overhead of Whale: step times against hand-written torch, side by side in one run.

Place in the flow: the command. It starts the ranks (`virtual_gpus`), each of which builds and times
both sides (`overhead_rank`, `sides`), and writes a table, JSON and markdown. Both sides run in the
same processes on the same batches and take turns; a second torch side, timed alike, shows the noise
(the A/A control).

    python benchmarks/overhead.py --ranks 2 --size cpu --out benchmarks/results/overhead-cpu.json
    python benchmarks/overhead.py --device cuda --shares 50,50 --size gpu --out overhead-gpu.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from virtual_gpus import RanksFailedError, start_ranks


def main() -> int:
    """Runs the benchmarks; 0 when all sides agreed and were timed."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ranks and MPS are ended
    shares = [int(s) for s in options.shares.split(",")] if options.shares else []
    shares = shares or [100 // options.ranks] * options.ranks
    # Each in processes of its own: if one fails, the others still have their say.
    runs = [_run(options, shares, which) for which in options.which.split(",")]
    done = [run for run in runs if run is not None]
    if not done:
        return 1
    results = [result for run in done for result in run["results"]]
    profiles = {r["name"]: r.pop("profiles") for r in results}
    report = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": done[0]["hardware"],
        "results": results,
        "settings": {
            **{k: v for k, v in vars(options).items() if k not in ("out", "timeout", "profile")},
            "ranks": len(shares),
            "shares": shares if options.device == "cuda" else None,
        },
        "load_average": os.getloadavg()[0],
    }
    for name, texts in profiles.items():
        for text in texts.values():
            print(f"==== {name}: {text}")
    table = _table(report)
    print(table)
    if options.out:
        out = Path(options.out)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=1) + "\n")
        out.with_suffix(".md").write_text(_page(report, table))
    return 0 if len(done) == len(runs) else 1


def _run(options: argparse.Namespace, shares: list[int], which: str) -> dict[str, Any] | None:
    """One benchmark's report, or None after saying why there is none."""
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        result = Path(folder) / "result.json"
        try:
            start_ranks(
                shares,
                "benchmarks.overhead_rank",
                _arguments(options, which, result),
                memory=options.memory,
                device=options.device,
                timeout=options.timeout,
            )
        except RanksFailedError as error:
            print(f"{which}: {error}", file=sys.stderr)
            return None
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes; --shares overrides it")
    parser.add_argument("--which", default="data,tensor,pipeline")
    parser.add_argument("--size", default="cpu", choices=("cpu", "gpu"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--shares", default="", help="percent of the card per virtual GPU: 50,50")
    parser.add_argument("--memory", default=None, help="memory of each virtual GPU, such as 32G")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--tf32", type=int, default=1, choices=(0, 1), help="for both sides")
    parser.add_argument("--optimizer", default="fused", choices=("fused", "foreach", "default"))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--steps", type=int, default=1, help="steps timed after each barrier")
    parser.add_argument("--warmup", type=int, default=5, help="steps before, beyond the checked")
    parser.add_argument("--micro-batches", type=int, default=4, help="of the pipelines")
    parser.add_argument("--bucket-mib", type=float, default=25, help="of both sides' gradients")
    parser.add_argument("--profile", type=int, default=0, help="steps under cProfile, rank 0")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for each benchmark")
    parser.add_argument("--out", default="", help="JSON file; a .md is written beside it")
    return parser.parse_args()


def _arguments(options: argparse.Namespace, which: str, result: Path) -> list[str]:
    ours = ("which", "ranks", "shares", "memory", "timeout", "out")
    found = [f"--{n.replace('_', '-')}={v}" for n, v in vars(options).items() if n not in ours]
    return [f"--which={which}", *found, f"--result={result}"]


def _table(report: dict[str, Any]) -> str:
    """Ratios above 1 mean that Whale is slower."""
    rows = [
        "| benchmark | ranks | torch side | torch ms | whale ms | whale / torch (IQR) | "
        "torch / torch (IQR) | CPU: whale / torch (IQR) | CPU: torch / torch (IQR) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in report["results"]:
        spreads = (r[key] for key in ("ratio", "control", "cpu_ratio", "cpu_control"))
        ratios = [f"{s['median']:.3f} ({s['q1']:.3f} to {s['q3']:.3f})" for s in spreads]
        rows.append(
            f"| {r['name']} | {r['num_ranks']} | {r['torch_side']} | {r['torch_ms']:.2f} | "
            f"{r['whale_ms']:.2f} | {' | '.join(ratios)} |"
        )
    return "\n".join(rows)


def _page(report: dict[str, Any], table: str) -> str:
    hardware, settings = report["hardware"], report["settings"]
    lines = [
        "# Overhead: Whale against hand-written torch",
        "",
        f"{report['date']}, {hardware['device']}, torch {hardware['torch']}, "
        f"load average {report['load_average']:.1f} at the end. "
        f"Size `{settings['size']}`, {settings['dtype']}, AdamW ({settings['optimizer']}), "
        f"{settings['repeats']} repeats of {settings['steps']} step(s) after a barrier, in turn.",
        "",
        table,
        "",
        "A step's time is the slowest rank's. A ratio is the median, with the quartiles, over",
        "repeats of one side's time by the other's in the same repeat; above 1, Whale is slower.",
        "torch / torch is a second torch side against the first: what differs from 1 there is",
        "noise. The CPU columns count processor time of all ranks instead of the clock, which",
        "neighbours on the machine disturb less.",
    ]
    pilots = [r for r in report["results"] if r["pilot_ms"]]
    if pilots:
        lines += ["", "Ways to write the torch side (the fastest in the pilot was taken), ms:", ""]
        for r in pilots:
            each = ", ".join(f"{name} {ms:.2f}" for name, ms in r["pilot_ms"].items())
            lines.append(f"- {r['name']}: {each}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
