"""ResNet-50 with 100,000 classes: replicate + split against data parallel, predicted on V100s.

`python -m benchmarks.large_head --out benchmarks/results/large-head.md` (under a minute, no GPU).
The paper measured this (Whale, ATC'22, figure 13); it does not give the batch, here 32 rows a GPU.
"""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path

import torch

import whale as wh
from whale.models.registry import optimizer_factory, preset

PAPER = {8: 1.13, 16: 1.66, 32: 2.43}
ROWS_PER_DEVICE = 32


def seconds(classes: str, num_devices: int, *, split: bool) -> tuple[float, bool]:
    """The predicted step, and whether it fits."""
    chosen = preset(f"resnet-50-{classes}")
    with torch.device("meta"):
        model, batch = chosen.build(), chosen.batch(ROWS_PER_DEVICE * num_devices, None)
    if split:
        assert chosen.annotate is not None
        chosen.annotate(model)
    plan = wh.plan(
        model,
        cluster=f"{num_devices // 8}x8xV100-32GB",
        batch=batch,
        loss=chosen.loss,
        optimizer=optimizer_factory("sgd"),
    )
    return float(plan.predicted["step_seconds"]), bool(plan.predicted["fits"])


def main() -> None:
    """Writes the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    lines = [
        "# A head of 100,000 and 1,000,000 classes on V100-32GB, predicted",
        "",
        "`python -m benchmarks.large_head --out` this file. "
        f"{datetime.now(UTC):%Y-%m-%d}; figures from data sheets, {ROWS_PER_DEVICE} rows a GPU, "
        "float32, SGD with momentum.",
        "",
        "| classes | GPUs | data parallel, ms | replicate + split, ms | gained | paper |",
        "|---|---|---|---|---|---|",
    ]
    for classes in ("100k", "1m"):
        for count, paper in PAPER.items():
            whole, fits = seconds(classes, count, split=False)
            split, split_fits = seconds(classes, count, split=True)
            data = f"{whole * 1e3:.0f}" if fits else "does not fit"
            gained = f"{whole / split:.2f}x" if fits else ""
            ours = f"{split * 1e3:.0f}" if split_fits else "does not fit"
            published = f"{paper:.2f}x" if classes == "100k" else ""
            lines.append(f"| {classes} | {count} | {data} | {ours} | {gained} | {published} |")
            print(lines[-1], flush=True)
    options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
