"""Unequal GPUs out of one card: hardware-aware plans against equal ones, predicted and measured.

`python -m benchmarks.heterogeneous --out F.jsonl` on a machine with a GPU and CUDA MPS runs all of
it (about 15 minutes); `--runs 66-33` one part. `--device cpu --size tiny` tries the script itself.
Ranks are the GPUs of one node, whose sums go through shared memory, or (`hosts`) each a host of its
own on a network of 10 Gbit/s.
`python -m benchmarks.heterogeneous --page F.jsonl --to benchmarks/results/heterogeneous-gpu.md`
writes the page.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.virtual_gpus import RanksFailedError, one_node, start_ranks

NETWORK_BYTES_PER_S = 1_250_000_000


@dataclass(frozen=True, kw_only=True)
class Run:
    """Ranks with their shares of the card, and what they do."""

    shares: tuple[int, ...]
    experiments: str
    memory: tuple[str, ...] | None = None
    hosts: bool = False
    """Whether each rank is a host of its own, or all are GPUs of one node."""


RUNS: Mapping[str, Run] = {
    "66-33": Run(shares=(66, 33), experiments="bert,gnmt,resnet"),
    "70-30": Run(shares=(70, 30), experiments="resnet-local"),
    "40-20-20-20": Run(shares=(40, 20, 20, 20), experiments="bert-4,head"),
    "66-33-hosts": Run(shares=(66, 33), experiments="bert-pipeline,t5-pipeline", hosts=True),
    "40-20-20-20-hosts": Run(shares=(40, 20, 20, 20), experiments="bert-pipeline,head", hosts=True),
    "25x4-memory": Run(shares=(25, 25, 25, 25), experiments="head-1m", memory=("22G",) * 4),
    "50-50-memory": Run(shares=(50, 50), experiments="memory", memory=("70G", "14G"), hosts=True),
}


def main() -> int:
    """Runs, or writes the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", default=",".join(RUNS))
    parser.add_argument("--experiments", help="instead of all of a run's")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--size", default="gpu", choices=("gpu", "tiny"))
    parser.add_argument("--timeout", type=float, default=500.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--profiles", type=Path, help="keeps the calibrations in this folder")
    parser.add_argument("--page", type=Path, nargs="+")
    parser.add_argument("--to", type=Path)
    options = parser.parse_args()
    if options.page:
        rows = [json.loads(line) for path in options.page for line in path.read_text().splitlines()]
        options.to.write_text(page(rows), encoding="utf-8")
        return 0
    failed = 0
    for name in options.runs.split(","):
        chosen = RUNS[name]
        with tempfile.TemporaryDirectory() as folder:
            lines = Path(folder) / "lines.jsonl"
            arguments = ["--experiments", options.experiments or chosen.experiments]
            arguments += ["--size", options.size, "--device", options.device, "--out", str(lines)]
            if options.profiles is not None:
                kept = options.profiles / name
                kept.mkdir(parents=True, exist_ok=True)
                arguments += ["--profiles", str(kept)]
            environment = {}
            if chosen.hosts:
                arguments += ["--bytes-per-s", str(NETWORK_BYTES_PER_S)]
                # A socket is what is paced, and a channel has one.
                environment = {"NCCL_MAX_NCHANNELS": "1"}
            elif options.device == "cuda":
                arguments.append("--symmetric")
                environment = one_node(len(chosen.shares))
            try:
                start_ranks(
                    chosen.shares,
                    "benchmarks.heterogeneous_rank",
                    arguments,
                    memory=chosen.memory if options.device == "cuda" else None,
                    device=options.device,
                    environment=environment,
                    timeout=options.timeout,
                )
            except RanksFailedError as error:
                print(str(error)[-5000:], file=sys.stderr)
                failed += 1
            found = lines.read_text().splitlines() if lines.exists() else []
        for line in found:
            row = {"run": name, "shares": chosen.shares, "memory": chosen.memory}
            row["network"] = "hosts, 10 Gbit/s" if chosen.hosts else "one node"
            row |= json.loads(line)
            print(_line(row), flush=True)
            if options.out is not None:
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    return 1 if failed else 0


def _line(row: Mapping[str, Any]) -> str:
    text = f"{row['run']:17} {row['experiment']:14}"
    if "error" in row:
        return f"{text} {row['error']}"
    for name, side in row.get("sides", {}).items():
        memory = max((abs(e) for e in side["memory_errors"]), default=0.0)
        text += (
            f" | {name} {side['measured_s']:.3f} s (predicted {side['time_error']:+.1%}, "
            f"memory {memory:.1%})"
        )
    if row.get("gained"):
        text += f" | gained {row['gained']:.3f}"
    if "bound" in row:
        text += f" of {row['bound']:.3f}: {row['of_bound']:.1%}, exposed {row['exposed_s']:.3f} s"
    return f"{text} | {row.get('wall_s', row.get('seconds', 0.0)):.0f} s"


def page(rows: Iterable[Mapping[str, Any]]) -> str:
    """The results as markdown."""
    rows = list(rows)
    found = [row for row in rows if "sides" in row]
    lines = [
        "# Unequal GPUs: hardware-aware against equal",
        "",
        "`python -m benchmarks.heterogeneous --out F.jsonl`, then `--page F.jsonl --to` this file.",
        f"{datetime.now(UTC):%Y-%m-%d}, one NVIDIA H200 as several virtual GPUs (CUDA MPS: the "
        "shares are percent of its SMs), torch 2.11, TF32 products. Network: in one node sums go "
        "through `communication.symmetric_memory`, as over NVLink; between hosts it is NCCL over "
        "sockets of the loopback device, each paced to 10 Gbit/s. (Bare, the loopback device moves "
        "between 1.6 and 4.1 GB/s from one run to the next: heterogeneous-gpu-loopback.jsonl.)",
        "",
        "## Data parallel",
        "",
        "The bound is (slowest compute under the equal split + c) / (balanced compute + c). The "
        "slowest compute is measured in the equal run, and c is what its step takes beside it: "
        "communication that nothing hides, and the update. Balanced compute is the batch over the "
        "sum of the ranks' speeds, each measured with the plain model while all ranks run. (In the "
        "equal run itself a slow rank is faster than that while its neighbours on the card wait.) "
        "The plain model has `nn.BatchNorm2d`, and norms over all replicas other kernels: of "
        "ResNet-50 with those, marked *, it is not a bound.",
        "",
        "| ranks | network | model | equal, s | aware, s | gained | bound | of the bound | c, s "
        "| rows |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        if "bound" in row:
            equal, aware = row["sides"]["equal"], row["sides"]["aware"]
            lines.append(
                f"| {_ranks(row)} | {row['network']} | {row['model']}{_mark(row)} | "
                f"{equal['measured_s']:.3f} | "
                f"{aware['measured_s']:.3f} | {row['gained']:.2f}x | {row['bound']:.2f}x | "
                f"{row['of_bound']:.1%} | {row['exposed_s']:.3f} | "
                f"{' / '.join(map(str, aware['rows']))} |"
            )
    lines += [
        "",
        "## Pipelines",
        "",
        "| ranks | model | even cut, s | by cost, s | gained | stages (Layers on rank) |",
        "|---|---|---|---|---|---|",
    ]
    for row in found:
        if "stages" in row:
            even, aware = row["sides"]["even"], row["sides"]["aware"]
            stages = ", ".join(f"{n} on {r[0]}" for n, r in row["stages"])
            lines.append(
                f"| {_ranks(row)} | {row['model']} | {even['measured_s']:.3f} | "
                f"{aware['measured_s']:.3f} | {row['gained']:.2f}x | {stages} |"
            )
    lines += ["", "## Large heads and tight memory", ""]
    for row in found:
        if "data_parallel_fits" in row:
            split = row["sides"]["split"]
            text = f"- {_ranks(row)}, {row['network']}, {row['model']}: replicate + split "
            text += f"{split['measured_s']:.3f} s"
            if row["data_parallel_fits"]:
                data = row["sides"]["data"]
                text += f", data parallel {data['measured_s']:.3f} s: {row['gained']:.2f}x."
            else:
                need, there = max(row["data_parallel_peaks"]), min(row["capacities"])
                text += (
                    f"; data parallel would need {need / 1e9:.1f} GB of {there / 1e9:.1f} GB and "
                    "is refused."
                )
            lines.append(text)
        if "equal_failure_on_this_rank" in row:
            aware = row["sides"]["aware"]
            needs = " / ".join(f"{b / 1e9:.1f}" for b in row["equal_predicted_peaks"])
            limits = " / ".join(f"{b / 1e9:.1f}" for b in row["capacities"])
            lines.append(
                f"- {_ranks(row)}, {row['model']}: the equal split is predicted to need {needs} GB "
                f"of {limits} GB and fails ({row['equal_failure_on_this_rank'].split(':')[0]}); "
                f"ours trains with rows {' / '.join(map(str, aware['rows']))}, "
                f"{aware['measured_s']:.3f} s a step."
            )
    lines += [
        "",
        "## Predicted against measured",
        "",
        "Predictions come from a calibration of single Layers and links, none from these runs.",
        "",
        "| ranks | network | model | plan | predicted, s | measured, s | error "
        "| peak memory, worst error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        for name, side in row["sides"].items():
            worst = max(side["memory_errors"], key=abs, default=None)
            memory = f"{worst:+.1%}" if worst is not None else "not measured"
            lines.append(
                f"| {_ranks(row)} | {row['network']} | {row['model']} | {name} "
                f"| {side['predicted_s']:.3f} | "
                f"{side['measured_s']:.3f} | {side['time_error']:+.1%} | {memory} |"
            )
    lines += [
        "",
        "## Sums and compute side by side",
        "",
        "As calibrated before each run, with the Layer that takes most of the model's step: the "
        "share of its speed that each loses while the other runs.",
        "",
        "| ranks | network | run | sums lose | compute loses, by rank |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        name, calibrated, _ = row["experiment"].partition(": calibrated")
        if calibrated:
            lost = " / ".join(f"{part:.0%}" for part in row["lost"])
            lines.append(
                f"| {_ranks(row)} | {row['network']} | {name} | {row['contention']:.0%} | {lost} |"
            )
    return "\n".join(lines) + "\n"


def _mark(row: Mapping[str, Any]) -> str:
    """Of a model whose norms run over all replicas."""
    return "*" if row["model"] == "resnet-50" else ""


def _ranks(row: Mapping[str, Any]) -> str:
    text = "/".join(map(str, row["shares"]))
    return f"{text} ({'/'.join(row['memory'])})" if row.get("memory") else text


if __name__ == "__main__":
    sys.exit(main())
