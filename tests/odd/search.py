"""search: judges many odd cases and reports those that break the promise.

`python -m tests.odd.search --seeds 0:300 --minutes 2 --out odd.jsonl` goes on where the file ends;
`--case '{...}'` runs one; `--shrink` makes failures small. Each case has ranks of its own, so one
that hangs or dies takes nobody with it.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from tests.odd.generate import describe, generate
from tests.odd.judge import FAILURES, Verdict, judge
from tests.odd.spec import Spec


def smaller(spec: Spec) -> Iterator[Spec]:
    """Simpler cases, the greatest steps first."""
    plain = Spec(seed=spec.seed)
    for index in range(len(spec.blocks)):
        yield spec.but(
            blocks=spec.blocks[:index] + spec.blocks[index + 1 :],
            choices=spec.choices[:index] + spec.choices[index + 1 :],
            glue=spec.glue[:index] + spec.glue[index + 1 :],
        )
    for index, name in enumerate(spec.glue):
        if name:
            yield spec.but(glue=(*spec.glue[:index], "", *spec.glue[index + 1 :]))
    for index in range(len(spec.memory)):
        yield spec.but(memory=spec.memory[:index] + spec.memory[index + 1 :])
    for key in (
        "speeds",
        "max_norm",
        "concat",
        "autocast",
        "head",
        "stem",
        "optimizer",
        "skeleton",
        "rows",
        "eval_rows",
        "eval_length",
        "length",
        "evaluate_at",
    ):
        if getattr(spec, key) != getattr(plain, key):
            yield spec.but(**{key: getattr(plain, key)})
    if spec.inside and spec.batch.startswith("dict"):
        yield spec.but(inside=False)
    for loss in ("tokens-full", "values"):
        if spec.loss != loss:
            yield spec.but(loss=loss)
    if spec.batch != "tuple" and not spec.inside:
        yield spec.but(batch="tuple")
    if spec.micro > 1:
        yield spec.but(micro=1)
    if spec.schedule != "1f1b" and spec.layout != "interleaved":
        yield spec.but(schedule="1f1b")
    if spec.layout != "data" and spec.ranks > 1:
        yield spec.but(layout="data", ranks=2, speeds=())
    if spec.ranks > 1:
        yield spec.but(layout="one", ranks=1, speeds=(), micro=1)
    if spec.ranks > 2 and spec.layout in ("data", "split", "stages", "head", "mixed"):
        yield spec.but(ranks=2, speeds=())


def shrink(spec: Spec, verdict: Verdict, deadline: float) -> tuple[Spec, Verdict]:
    """The smallest case found that still fails in the same way."""
    going = True
    while going and time.monotonic() < deadline:
        going = False
        for candidate in smaller(spec):
            if time.monotonic() > deadline:
                break
            try:
                found = judge(candidate)
            except Exception:  # noqa: BLE001 - a combination that makes no sense
                continue
            if found.kind == verdict.kind:
                spec, verdict, going = candidate, found, True
                break
    return spec, verdict


def known(path: Path | None) -> dict[int, str]:
    """Verdicts by seed that a file holds already."""
    if path is None or not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {line["seed"]: line["kind"] for line in lines}


def search(
    seeds: list[int],
    ranks: tuple[int, ...],
    out: Path | None,
    deadline: float,
    small: bool,
) -> Counter[str]:
    """Judges seeds until the deadline; writes a line of JSON for each; counts verdicts."""
    done = known(out)
    counts = Counter(done[s] for s in seeds if s in done)
    for seed in seeds:
        if seed in done:
            continue
        if time.monotonic() > deadline:
            break
        spec = generate(seed, ranks)
        verdict = judge(spec)
        counts[verdict.kind] += 1
        print(
            f"{seed:5d} {verdict.kind:13s} {verdict.seconds:5.1f}s {spec.layout:12s} "
            f"x{spec.ranks} {','.join(spec.blocks)} | {spec.loss} | {','.join(spec.memory)} | "
            f"{verdict.what[:150]}",
            flush=True,
        )
        line = {
            "seed": seed,
            "kind": verdict.kind,
            "what": verdict.what,
            "detail": verdict.detail[-3000:],
            "spec": spec.to_json(),
            "seconds": round(verdict.seconds, 2),
        }
        if verdict.failed and small:
            least, found = shrink(spec, verdict, min(deadline, time.monotonic() + 25))
            line.update(small=least.to_json(), small_what=found.what)
            print(describe(least), f"  {found.what}", sep="\n", flush=True)
        if out is not None:
            with out.open("a") as file:
                file.write(json.dumps(line) + "\n")
    return counts


def page(lines: list[dict[str, Any]]) -> str:
    """What came of a search, by layout, and how often each word of the vocabulary was met."""
    specs = [Spec.from_json(line["spec"]) for line in lines]
    kinds = ("exact", "refused", *FAILURES, "void")
    by_layout: dict[str, Counter[str]] = {}
    for spec, line in zip(specs, lines, strict=True):
        by_layout.setdefault(spec.layout, Counter())[line["kind"]] += 1
    total = Counter(line["kind"] for line in lines)
    hardware = f"{platform.machine()} CPU, torch {torch.__version__}, gloo"
    blocks = Counter(name for spec in specs for name in spec.blocks)
    losses = Counter(spec.loss for spec in specs)
    rows = [
        f"| {name} | " + " | ".join(str(found[k]) for k in kinds) + " |"
        for name, found in [*sorted(by_layout.items()), ("all", total)]
    ]
    return "\n".join(
        [
            "# A search for silent errors in odd models",
            "",
            f"{datetime.now(UTC):%Y-%m-%d}, {hardware}. Made by `python -m tests.odd.search`: "
            f"{len(lines)} random models,",
            f"seeds {lines[0]['seed']} to {lines[-1]['seed']}, each against plain torch in one "
            "process: losses, every gradient, weights",
            "after 3 steps, evaluation. A model is exact (1e-9), or refused with a hint on all its "
            "ranks; `WRONG` is silent,",
            "`crash` any other error or a hang, `false-refusal` a refusal of what must work, "
            "`void` what torch cannot train.",
            "",
            "| layout | " + " | ".join(kinds) + " |",
            "|---" * (len(kinds) + 1) + "|",
            *rows,
            "",
            f"{len(blocks)} kinds of blocks, each in {min(blocks.values())} models or more; "
            f"{len(losses)} losses, each in {min(losses.values())} or more.",
            "",
        ]
    )


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.odd.search", description=__doc__)
    parser.add_argument("--seeds", default="0:300", help="first:end, or a list 3,17,40")
    parser.add_argument("--ranks", default="1,2,3,4", help="numbers of ranks allowed")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--out", type=Path, help="JSON lines; seeds in it are not run again")
    parser.add_argument("--shrink", action="store_true", help="make every failure small")
    parser.add_argument("--page", type=Path, help="write this table of what `--out` holds")
    parser.add_argument("--case", help="one case as JSON")
    parser.add_argument("--describe", action="store_true", help="say what the cases are, run none")
    given = parser.parse_args()
    deadline = time.monotonic() + 60 * given.minutes
    ranks = tuple(int(n) for n in given.ranks.split(","))
    if given.page:
        lines = [json.loads(line) for line in given.out.read_text().splitlines()]
        given.page.write_text(page(sorted(lines, key=lambda line: line["seed"])))
        return 0
    if given.case:
        spec = Spec.from_json(given.case)
        print(describe(spec))
        verdict = judge(spec)
        print(verdict.detail)
        print(f"{verdict.kind} in {verdict.seconds:.1f} s: {verdict.what}")
        if given.shrink and verdict.failed:
            least, found = shrink(spec, verdict, deadline)
            print(describe(least), found.what, sep="\n")
        return int(verdict.failed)
    low, _, high = given.seeds.partition(":")
    seeds = list(range(int(low), int(high))) if high else [int(s) for s in low.split(",")]
    if given.describe:
        for seed in seeds:
            print(describe(generate(seed, ranks)))
        return 0
    counts = search(seeds, ranks, given.out, deadline, given.shrink)
    total = sum(counts.values())
    print(f"{total} of {len(seeds)} cases: " + ", ".join(f"{n} {k}" for k, n in counts.items()))
    return int(any(counts[kind] for kind in FAILURES))


if __name__ == "__main__":
    sys.exit(main())
