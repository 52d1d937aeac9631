"""Parity on GPUs with NCCL: layouts on 2, 3 and 4 virtual GPUs against one device, float32.

`python -m benchmarks.parity_gpu --out benchmarks/results/parity-gpu.json` on a machine with a GPU
and CUDA MPS; `--device cpu` tries the script itself with Gloo.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.virtual_gpus import RanksFailedError, start_ranks

CASES: dict[int, str] = {
    2: "gpt/data gpt/accumulate-uneven gpt/tensor-uneven gpt/gpipe gpt/interleaved gpt/colocated "
    "resnet/accumulate-uneven resnet/head hf_bert/tensor lstm/gpipe",
    3: "gpt/zero-bubble gpt/1f1b resnet/data-uneven gpt/widths",
    4: "gpt/data-tensor-uneven gpt/data-pipeline-uneven gpt/pipeline-tensor-uneven "
    "gpt/tensor-pipeline gpt/interleaved-tensor resnet/head-part hf_bert/pipeline-tensor "
    "hf_gpt2/data-tensor",
}
WAITING = {
    2: "gpt/gpipe gpt/interleaved",
    3: "gpt/zero-bubble gpt/1f1b",
    4: "gpt/tensor-pipeline gpt/interleaved-tensor",
}
"""With `--synchronize`: pipelines, whose messages are under way while a compute waits."""
SHARES = {2: [66, 33], 3: [50, 25, 25], 4: [40, 20, 20, 20]}


def main() -> int:
    """Runs all sizes and writes JSON and a markdown table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--ranks", default="2,3,4")
    parser.add_argument(
        "--synchronize", action="store_true", help="every module waits for its device"
    )
    parser.add_argument("--timeout", type=float, default=240.0)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    rows = []
    cases = WAITING if options.synchronize else CASES
    for size in map(int, options.ranks.split(",")):
        try:
            outputs = start_ranks(
                SHARES[size],
                "tests.gpu.parity_rank",
                ["--cases", ",".join(cases[size].split())]
                + (["--synchronize"] if options.synchronize else []),
                device=options.device,
                timeout=options.timeout,
            )
        except RanksFailedError as error:
            # What the ranks finished still counts; what they did not is missing from the table.
            print(str(error)[-6000:], file=sys.stderr)
            outputs = error.outputs
        rows += [json.loads(line) for line in outputs[0].stdout.splitlines() if line[:1] == "{"]
    for row in rows:
        print(
            f"{'ok ' if row['ok'] else 'BAD'} {row['ranks']} ranks {row['case']:8} "
            f"{row['layout']:24} "
            f"loss {row['loss']:.1e} gradient {row['gradient']:.1e} weight {row['weight']:.1e}"
            f"{'' if row['ok'] else ' ' + row['where']}"
        )
    expected = sum(len(cases[size].split()) for size in map(int, options.ranks.split(",")))
    if options.out is not None:
        _write(options.out, rows)
    return 0 if len(rows) == expected and all(row["ok"] for row in rows) else 1


def _write(path: Path, rows: list[dict]) -> None:
    date = datetime.now(UTC).isoformat(timespec="seconds")
    path.write_text(json.dumps({"date": date, "rows": rows}, indent=1) + "\n")
    lines = [
        "# Parity on virtual GPUs (NCCL), float32 against one device in float64",
        "",
        f"{date}, {rows[0]['device']}, virtual GPUs by CUDA MPS ({SHARES}). Error = max|a-b| / "
        "max(max|b|, 1e-3 of the "
        "largest entry), after 3 AdamW steps for weights. Tolerance: loss 2e-5, gradient and "
        "weight 1e-3.",
        "",
        "| model | layout | ranks | loss | gradient | weight | within |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['case']} | {r['layout']} | {r['ranks']} | {r['loss']:.1e} | {r['gradient']:.1e} | "
        f"{r['weight']:.1e} "
        f"| {'yes' if r['ok'] else 'NO: ' + r['where']} |"
        for r in rows
    ]
    path.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
