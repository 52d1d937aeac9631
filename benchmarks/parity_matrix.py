"""The whole parity matrix as a table: every model under every layout against one device, float64.

`make test-full` runs the same pairs as tests. `python -m benchmarks.parity_matrix --out
benchmarks/results/parity-matrix.md` writes the errors; `--minutes` stops in time and says what is
missing.
"""

from __future__ import annotations

import argparse
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

from tests.parity.layouts import LAYOUTS
from tests.parity.matrix import MATRIX, REFUSED
from tests.parity.parity import compare

TOLERANCE = 1e-9


def main() -> int:
    """Runs the pairs in turn and writes the table after each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--only", default="", help="model/layout pairs, by commas; default: all")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    rows: list[str] = []
    failed = missing = 0
    chosen = options.only.split(",") if options.only else []
    for case, layout in MATRIX:
        if chosen and f"{case}/{layout}" not in chosen:
            continue
        ranks = LAYOUTS[layout].num_ranks
        if (case, layout) in REFUSED:
            rows.append(f"| {case} | {layout} | {ranks} | refused, with the reason | | | |")
            continue
        if time.monotonic() > deadline:
            missing += 1
            continue
        worst = compare(case, layout)
        ok = max(worst["loss"], worst["gradient"], worst["weight"]) < TOLERANCE
        failed += not ok
        split = ", ".join(f"{share:.0%}" for share in worst["split_share"])
        rows.append(
            f"| {case} | {layout} | {ranks} | {worst['loss']:.1e} | {worst['gradient']:.1e} "
            f"| {worst['weight']:.1e}{'' if ok else ' FAILED ' + worst['where']} | {split} |"
        )
        _write(options.out, rows, failed, missing)
        print(rows[-1], flush=True)
    _write(options.out, rows, failed, missing)
    return 1 if failed else 0


def _write(path: Path, rows: list[str], failed: int, missing: int) -> None:
    head = [
        "# The parity matrix",
        "",
        f"{datetime.now(UTC).isoformat(timespec='seconds')}, torch {torch.__version__}, CPU ranks "
        "(Gloo), float64, 3 AdamW steps, 7 rows.",
        "Error = max|a-b| / max(max|b| of the tensor, 1e-3 of the largest over all tensors); the "
        f"largest over all tensors and ranks. {failed} above {TOLERANCE:g}; {missing} not run for "
        "lack of time.",
        "",
        "| model | layout | ranks | loss | gradient | weight | split |",
        "|---|---|---|---|---|---|---|",
    ]
    path.write_text("\n".join([*head, *rows]) + "\n")


if __name__ == "__main__":
    sys.exit(main())
