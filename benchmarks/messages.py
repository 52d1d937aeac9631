"""Messages of a pipeline on a slow network: what a step takes beside its computes.

`python -m benchmarks.messages --to benchmarks/results/messages-cpu.md` on two cores: two stages on
CPU ranks, cut at three places, on networks of two speeds, with gradients received right before they
are needed and one compute earlier (as Whale does); predicted from a calibration on the same
network, and measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.virtual_gpus import start_ranks

SPEEDS = (10_000_000, 20_000_000)


def main() -> int:
    """Runs all and writes the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--to", type=Path)
    options = parser.parse_args()
    lines = [
        "# Messages of a pipeline on a slow network",
        "",
        "`python -m benchmarks.messages --to` this file. "
        f"{datetime.now(UTC):%Y-%m-%d}, two CPU ranks on two cores (Gloo), eight blocks in two "
        "stages, 1F1B, 8 micro-batches; sockets paced to the speed of the network. Gradients are "
        "received right before they are needed (late) or one compute earlier (early, as Whale "
        "does). *Beside* is the step without the longest rank's computes: messages, waiting and "
        "update.",
        "",
        "| network, MB/s | blocks | gradients | step predicted, s | measured, s "
        "| beside predicted, s | measured, s | gained |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for speed in SPEEDS:
        outputs = start_ranks(
            [50, 50], "benchmarks.messages_rank", [str(speed)], device="cpu", timeout=200.0
        )
        late_s = 0.0
        for text in outputs[0].stdout.splitlines():
            row = json.loads(text)
            gained = f"{late_s / row['measured_s']:.2f}x" if row["early"] else ""
            late_s = row["measured_s"]
            lines.append(
                f"| {speed / 1e6:.0f} | {row['blocks'][0]} + {row['blocks'][1]} "
                f"| {'early' if row['early'] else 'late'} "
                f"| {row['predicted_s']:.3f} | {row['measured_s']:.3f} "
                f"| {row['predicted_s'] - row['predicted_compute_s']:.3f} "
                f"| {row['measured_s'] - row['measured_compute_s']:.3f} | {gained} |"
            )
            print(lines[-1], flush=True)
    if options.to is not None:
        options.to.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
