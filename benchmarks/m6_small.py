"""m6-small learns one drawing style on a GPU: does it name the other, and can it draw?

`python -m benchmarks.m6_small --out DIR` trains (nine minutes on an H200) and keeps in DIR the
metrics, the drawings and the page. `--metrics F --hardware NAME --to PAGE` writes the page again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

KEPT = ("metrics.jsonl", "drawings.png", "report.html")


def main() -> int:
    """Trains, or writes the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--metrics", type=Path)
    parser.add_argument("--hardware", default="")
    parser.add_argument("--minutes", type=float, help="what the training took")
    parser.add_argument("--to", type=Path)
    options = parser.parse_args()
    if options.out is None:
        options.to.write_text(
            page(options.metrics, options.hardware, options.minutes), encoding="utf-8"
        )
        return 0
    import torch  # noqa: PLC0415 - the page needs none

    folder = options.out / "run"
    began = time.monotonic()
    command = [sys.executable, "-m", "whale", "train", "m6-small", "--out", str(folder)]
    subprocess.run(command, check=True)
    minutes = (time.monotonic() - began) / 60
    for name in KEPT:
        shutil.copy(folder / name, options.out / name)
    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    text = page(folder / "metrics.jsonl", hardware, minutes)
    (options.out / "m6-small.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


def page(metrics: Path, hardware: str, minutes: float) -> str:
    """The results as markdown."""
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    train = [row for row in rows if row["kind"] == "train"]
    scores: dict[str, Any] = next(row for row in reversed(rows) if row["kind"] == "scores")
    seconds = sorted(row["step_seconds"] for row in train)[len(train) // 2]
    lines = [
        "# m6-small: one drawing style learned, the other named",
        "",
        f"`python -m benchmarks.m6_small --out DIR`. {datetime.now(UTC):%Y-%m-%d}, {hardware}, "
        f"bfloat16 products. {len(train):,} steps of `whale train m6-small` on Noto's pictures "
        f"alone, English and Chinese names; {minutes:.1f} minutes with everything (start, "
        f"evaluation, files), {1e3 * seconds:.0f} ms a step.",
        "",
        "| asked | model | beside it |",
        "|---|---|---|",
        f"| Twemoji's pictures, named exactly in English, without flags | "
        f"{scores['other_style_match']:.1%} | nearest Noto picture by pixels "
        f"{scores['other_style_nearest']:.1%} |",
        f"| names it learned, drawn: one of that name among the five nearest real pictures | "
        f"{scores['drawn_match']:.1%} | |",
    ]
    for kind, (share, least) in scores["questions"].items():
        lines.append(
            f"| held-out pictures, questions about {kind} | {share:.1%} | always the most frequent "
            f"answer {least:.1%} |"
        )
    for name, by_k in scores["recall"].items():
        for k, share in by_k.items():
            chance = int(k) / scores["num_ranked"]
            lines.append(
                f"| held-out: the right {name}, among the first {k} of {scores['num_ranked']} | "
                f"{share:.1%} | chance {chance:.1%} |"
            )
    lines += [
        "",
        "Of the pictures to be named, one in ten shows an emoji that no picture of the training "
        "has: those cannot be named, and count as wrong; the pixels' gallery has them all.",
        "",
        f"It learns names by heart: of captions it has never read the loss is "
        f"{scores['loss']['model']:.2f} nats per character, a unigram model's "
        f"{scores['loss']['unigram']:.2f}.",
        "",
        "| step | training loss |",
        "|---|---|",
    ]
    for i in range(8):
        row = train[round(i * (len(train) - 1) / 7)]
        lines.append(f"| {row['step']} | {row['loss']:.3f} |")
    lines += ["", "Pictures it has not seen, while it trained:", ""]
    lines += [
        f'- step {row["step"]}, "{row["right"]}": "{row["said"]}"'
        for row in rows
        if row["kind"] == "sample"
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
