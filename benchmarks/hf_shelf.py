"""Hugging Face, the whole shelf: every architecture under every layout, against plain torch.

`python -m benchmarks.hf_shelf --out benchmarks/results/hf-shelf` writes a table (.md) and what it
is made of (.json). `--only` and `--layouts` run a part of it, and merge it into what is there;
`--plan` asks for the plans alone: what is split and how, in one process.

A cell is what a run on real ranks showed: `exact` with the worst relative error of losses,
gradients and weights over some steps of AdamW in float64, `refused` with the reason, `WRONG`, or
`crash`. The truth is torch in one process, which knows nothing of Whale.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import re
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

import whale as wh
from benchmarks.hf_models import SHELF, Shelved
from tests.parity.layouts import Layout, layer_paths, pipeline, staged, whole
from tests.parity.reference import Reference, greatest_entry, relative_error, train_reference
from tests.ranks import RankFailure, run_ranks
from whale.errors import WhaleError
from whale.ir.plan import Plan
from whale.ir.virtual_device import micro_batch_cuts

ROWS = 5
STEPS = 2
TOLERANCE = 1e-9
# A larger eps than usual: where a gradient is next to nothing, AdamW makes its rounding a step.
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, eps=1e-4)


def _none() -> tuple[Any, ...]:
    return ()


def _split2() -> tuple[Any, ...]:
    return (wh.split(2),)


LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout("data", 2, whole(wh.replicate), speeds=(2.0, 1.0)),
        Layout("split", 2, whole(wh.split)),
        Layout("stage", 2, staged(_none, _none), pipeline("1f1b", 2)),
        Layout("stage-split", 4, staged(_split2, _split2), pipeline("1f1b", 2), nested=True),
        Layout("data-split", 4, whole(lambda: wh.replicate(4), lambda: wh.split(2)), nested=True),
    )
}


# ---- one rank --------------------------------------------------------------------------------


def run_cell(name: str, layout_name: str) -> dict[str, Any]:
    """One rank's part of a cell; every rank compares what it gathered with the truth."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    began = time.perf_counter()
    shelved, layout = SHELF[name], LAYOUTS[layout_name]
    try:
        found = _train(shelved, layout)
    except WhaleError as error:
        found = {"state": "refused", "why": _first_line(str(error))}
    except Exception as error:  # noqa: BLE001 - a crash is a row of the table
        found = {
            "state": "crash",
            "why": _first_line(f"{type(error).__name__}: {error}"),
            "traceback": traceback.format_exc()[-3000:],
        }
    return {**found, "seconds": round(time.perf_counter() - began, 2)}


def _first_line(message: str) -> str:
    """Without where packages are installed."""
    return re.sub(r"\S*site-packages/", "", message.strip().split("\n")[0])[:300]


def run_cells(cells: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """One rank's part of several cells."""
    wh.init()
    return [run_cell(name, layout) for name, layout in cells]


def _batches(shelved: Shelved) -> list[dict[str, torch.Tensor]]:
    return [shelved.batch(seed, ROWS) for seed in range(STEPS)]


def _annotate(shelved: Shelved, layout: Layout, model: nn.Module) -> None:
    needs_paths = "stage" in layout.name
    paths = layer_paths(model, shelved.batch(0, ROWS), None) if needs_paths else []
    layout.annotate(model, paths)


def _train(shelved: Shelved, layout: Layout) -> dict[str, Any]:
    batches = _batches(shelved)
    model = shelved.build()
    _annotate(shelved, layout, model)
    step = wh.parallelize(
        model,
        optimizer=ADAMW,
        batch=batches[0],
        config={**layout.config, "timeout_seconds": 60},
        cluster=layout.cluster(),
    )
    losses, gradients = [], {}
    for index, batch in enumerate(batches):
        losses.append(float(step(batch)["loss"]))
        if index == 0:
            gradients = step.gradients()
    state = step.state_dict()
    described = describe(step.plan)
    step.close()
    truth = _truth(shelved, layout.config.get("pipeline.num_micro_batch", 1))
    error, where = worst_error(losses, gradients, state, truth)
    return {
        "state": "exact" if error <= TOLERANCE else "WRONG",
        "error": error,
        "where": where,
        **described,
    }


class _Case:
    """A model of the shelf as the reference wants it: every row counts alike."""

    def __init__(self, shelved: Shelved) -> None:
        self.build = shelved.build
        self.loss = None

    @staticmethod
    def count(batch: Any) -> int:
        """Labels of a batch."""
        return int(batch["labels"].shape[0])


def _truth(shelved: Shelved, micro: int) -> Reference:
    points = micro_batch_cuts(ROWS, micro)
    sizes = [b - a for a, b in zip(points, points[1:], strict=False)]
    return train_reference(_Case(shelved), _batches(shelved), [sizes] * STEPS, ADAMW)


def worst_error(
    losses: list[float],
    gradients: dict[str, torch.Tensor],
    state: dict[str, torch.Tensor],
    truth: Reference,
) -> tuple[float, str]:
    """The largest relative error of all, and where it is."""
    errors = [
        (abs(got - want) / max(abs(want), 1e-12), "loss")
        for got, want in zip(losses, truth.losses, strict=True)
    ]
    for kind, got_all, want_all in (
        ("gradient", gradients, truth.gradients),
        ("weight", state, truth.state_dict),
    ):
        largest = greatest_entry(t for t in want_all.values() if t.is_floating_point())
        for name, want in want_all.items():
            if name not in got_all:
                errors.append((float("inf"), f"{kind} {name} missing"))
                continue
            error = relative_error(got_all[name].double(), want.double(), largest)
            errors.append((float("inf") if error != error else error, f"{kind} {name}"))
    return max(errors)


# ---- what a plan splits ----------------------------------------------------------------------

_ATTENTION = ("attn", "attention", "query", "key", "value", "q_proj", "k_proj", "v_proj")


def describe(plan: Plan) -> dict[str, Any]:
    """How much of a plan's split TaskGraphs is truly split, and how."""
    split = [t for t in plan.taskgraphs if t.kind == "split"]
    if not split:
        return {}
    sizes = {home.name: torch.Size(home.shape).numel() for home in plan.homes}
    cut = {name for t in split for s in t.splits for name, _ in s.params}
    rules = Counter(s.rule for t in split for s in t.splits)
    lone = [
        s.path
        for t in split
        for s in t.splits
        if s.rule in ("row", "conv") or (s.rule == "column" and s.joined != "loss")
    ]
    heads = [s.path for t in split for s in t.splits if s.rule in ("attention", "multihead")]
    columns = [
        path
        for path in lone
        if any(word in path.lower() for word in _ATTENTION)
        and not path.startswith(tuple(f"{at}." for at in heads))
    ]
    return {
        "share": sum(sizes[name] for name in cut) / max(1, sum(sizes.values())),
        "rules": dict(rules),
        "gathers": lone,
        "attention": _how(len(heads), bool(columns)),
        "whole": [path for t in split for path in t.whole],
    }


def _how(heads: int, columns: bool) -> str:
    if heads:
        return "heads, some columns" if columns else "heads"
    return "columns" if columns else "none"


def plan_only(name: str) -> dict[str, Any]:
    """A cell of the plan alone, in this process."""
    shelved, layout = SHELF[name], LAYOUTS["split"]
    model = shelved.build()
    try:
        _annotate(shelved, layout, model)
        plan = wh.plan(model, batch=shelved.batch(0, ROWS), cluster=layout.cluster())
    except WhaleError as error:
        return {"state": "refused", "why": _first_line(str(error))}
    except Exception as error:  # noqa: BLE001 - a crash is a row of the table
        return {"state": "crash", "why": f"{type(error).__name__}: {error}"[:300]}
    return {"state": "planned", **describe(plan)}


# ---- the table -------------------------------------------------------------------------------

AT_ONCE = 12


def run_groups(
    names: Sequence[str], layouts: Sequence[str]
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Runs all cells, several on one set of ranks; a set that dies is run again one by one."""
    for ranks in sorted({LAYOUTS[name].num_ranks for name in layouts}):
        cells = [(n, y) for n in names for y in layouts if LAYOUTS[y].num_ranks == ranks]
        for low in range(0, len(cells), AT_ONCE):
            group = cells[low : low + AT_ONCE]
            try:
                results = run_ranks(ranks, run_cells, group, timeout=100.0 + 20.0 * len(group))
                for cell, of_ranks in zip(group, zip(*results, strict=True), strict=True):
                    yield (*cell, _worst_of(of_ranks))
            except RankFailure:
                for cell in group:
                    yield (*cell, _alone(ranks, cell))


def _alone(ranks: int, cell: tuple[str, str]) -> dict[str, Any]:
    try:
        results = run_ranks(ranks, run_cells, [cell], timeout=90.0)
    except RankFailure as failure:
        return {"state": "crash", "why": str(failure).split("\n")[0][:300]}
    return _worst_of([of_rank[0] for of_rank in results])


def _worst_of(of_ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    order = {"exact": 0, "refused": 1, "WRONG": 2, "crash": 3}
    return max(of_ranks, key=lambda r: (order[r["state"]], r.get("error", 0.0)))


def cell_text(cell: dict[str, Any] | None) -> str:
    """A cell of the table."""
    if cell is None:
        return ""
    if cell["state"] == "exact":
        return f"exact ({cell['error']:.0e})"
    if cell["state"] == "WRONG":
        return f"**WRONG** ({cell['error']:.0e}, {cell['where']})"
    return f"{cell['state']}: {cell['why']}".replace("|", "/").replace("\n", " ")


def table(found: dict[str, dict[str, Any]], layouts: Sequence[str]) -> list[str]:
    """The rows of the table."""
    lines = [
        "| model | kind | " + " | ".join(layouts) + " | share split | attention | gathers |",
        "|---" * (len(layouts) + 5) + "|",
    ]
    for name, row in found.items():
        if name not in SHELF:
            continue
        split = next((row[y] for y in ("split", "plan") if "share" in row.get(y, {})), {})
        share = f"{split['share']:.0%}" if split else ""
        cells = " | ".join(cell_text(row.get(layout)) for layout in layouts)
        gathers = len(split.get("gathers", ())) if split else ""
        attention = split.get("attention", "")
        kind = SHELF[name].family
        lines.append(f"| {name} | {kind} | {cells} | {share} | {attention} | {gathers} |")
    return lines


def summary(found: dict[str, dict[str, Any]], layouts: Sequence[str]) -> list[str]:
    """What the table says in a few lines."""
    rows = [row for name, row in found.items() if name in SHELF]
    lines = [f"{len(rows)} architectures.", ""]
    for layout in layouts:
        states = Counter(row[layout]["state"] for row in rows if layout in row)
        lines.append(f"- {layout}: " + ", ".join(f"{n} {s}" for s, n in states.most_common()))
    done = [row for row in rows if all(y in row for y in layouts)]
    everywhere = sum(all(row[y]["state"] == "exact" for y in layouts) for row in done)
    shares = [row["split"]["share"] for row in rows if "share" in row.get("split", {})]
    heads = sum(row.get("split", {}).get("attention") == "heads" for row in rows)
    lines.append(f"- exact in all of them: {everywhere}")
    if shares:
        high = sum(share >= 0.9 for share in shares)
        mean = sum(shares) / len(shares)
        lines.append(f"- at least 90 % of the parameters split: {high} (mean {mean:.0%})")
        lines.append(f"- attention by heads throughout: {heads}")
    return lines


def write(out: Path, found: dict[str, dict[str, Any]], layouts: Sequence[str]) -> None:
    """The table and its data."""
    ordered = {name: found[name] for name in SHELF if name in found}
    versions = f"torch {torch.__version__}, transformers {version('transformers')}"
    hardware = f"{platform.machine()} CPU, {versions}, gloo"
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    data = {"date": date, "hardware": hardware, "rows": ordered}
    out.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    text = [
        "# Hugging Face, the whole shelf",
        "",
        f"{date}, {hardware}. Made by `python -m benchmarks.hf_shelf`; tiny configs, float64,",
        f"{STEPS} steps of AdamW on {ROWS} rows; relative errors above {TOLERANCE:.0e} are wrong.",
        "",
        *summary(ordered, layouts),
        "",
        *table(ordered, layouts),
    ]
    out.with_suffix(".md").write_text("\n".join(text) + "\n")


PAGE = """# Hugging Face, the whole shelf

What Whale makes of the architectures of `transformers`, measured: every model below was made from a
tiny config, annotated as a whole, and trained under each layout on real processes against plain
torch in one process, in float64.

| column | meaning |
|---|---|
| `data` | data parallel on 2 unequal devices |
| `split` | `wh.split()` over the whole model, 2 devices |
| `stage` | 2 stages, 2 micro-batches |
| `stage-split` | 2 stages of `split` over 2 devices each |
| `data-split` | 2 replicas of `split` over 2 devices each |
| share split | parameters of the `split` that are cut; the rest is whole on every device |
| attention | by heads (nothing is gathered inside), or by columns (exact too, with gathers) |
| gathers | modules split alone, whose output or input is gathered |

A cell is `exact` with the worst relative error of losses, gradients and weights over some steps of
AdamW, or `refused` with the reason. `print(step.plan)` says for your own model what stays whole and
why; less than half truly split is a warning.

transformers computes norms, softmaxes and losses in float32 whatever the weights are in. For this
table those casts are casts to float64, so that anything above 1e-9 is an error; nothing else of the
models is changed but dropout, which is 0.

The table is made by `python -m benchmarks.hf_shelf`, and this page of it by `--page
docs/reference/hugging-face.md`. A part of it runs with the tests.
"""


def write_page(page: Path, out: Path, layouts: Sequence[str]) -> None:
    """The page of the documentation, of the data at `out`."""
    data = json.loads(out.with_suffix(".json").read_text())
    lines = [
        PAGE,
        f"Measured {data['date']} on {data['hardware']}.",
        "",
        *summary(data["rows"], layouts),
        "",
        *table(data["rows"], layouts),
    ]
    page.write_text("\n".join(lines) + "\n")


def main() -> int:
    """Runs what was asked for and writes the table after each cell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names by commas; default: all")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/hf-shelf"))
    parser.add_argument("--plan", action="store_true", help="plans only, in one process")
    parser.add_argument("--missing", action="store_true", help="only cells that are not there")
    parser.add_argument("--minutes", type=float, default=600.0)
    parser.add_argument("--page", type=Path, help="write this page of what is known, run nothing")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    names = options.only.split(",") if options.only else list(SHELF)
    layouts = options.layouts.split(",")
    known = options.out.with_suffix(".json")
    found: dict[str, dict[str, Any]] = {}
    if known.exists():
        found = json.loads(known.read_text())["rows"]
    if options.page is not None:
        write_page(options.page, options.out, list(LAYOUTS))
        return 0
    if options.plan:
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        torch.set_default_dtype(torch.float64)
        for name in names:
            cell = plan_only(name)
            share = f"{cell['share']:.0%}" if "share" in cell else ""
            print(name, cell["state"], share, cell.get("attention", ""), cell.get("rules", ""),
                  cell.get("why", ""), cell.get("gathers", ""), flush=True)  # fmt: skip
        return 0
    if options.missing:
        names = [n for n in names if any(y not in found.get(n, {}) for y in layouts)]
    for low in range(0, len(names), AT_ONCE):
        if time.monotonic() > deadline:
            break
        for name, layout, cell in run_groups(names[low : low + AT_ONCE], layouts):
            found.setdefault(name, {})[layout] = cell
            told = cell.get("share", ""), cell.get("attention", ""), cell.get("seconds", "")
            print(name, layout, cell_text(cell), *told, flush=True)
        write(options.out, found, list(LAYOUTS))
    states = Counter(cell["state"] for row in found.values() for cell in row.values())
    return 1 if states["WRONG"] or states["crash"] else 0


if __name__ == "__main__":
    sys.exit(main())
