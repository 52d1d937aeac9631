"""Report -> one page to show a colleague: a single file, no network, light and dark, printable.

Place in the flow: what `whale plan --html`, `whale simulate --html` and `whale train` write. This
file orders the page; `gantt` and `charts` draw, `page.css` and `page.js` are inlined.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from whale.sim.report import Report
from whale.viz.charts import cluster, memory_bars, memory_curves, time_bar
from whale.viz.facts import (
    Compared,
    alike,
    compute_compared,
    fits_text,
    full,
    fullest,
    gap,
    gap_percent,
    memory_compared,
    over,
    step_compared,
)
from whale.viz.gantt import gantt
from whale.viz.units import joules, per_second, percent, ranges, seconds

MAX_COMPARED = 64
_LAYERS = re.compile(r"\bstage (\d+)\D{1,20}(\d+) layers?\b")
# Patterns beside the colours: the kinds can be told apart in print and by every eye.
_PATTERNS = {
    "I": ("B", '<path d="M-1 1l2-2M0 6l6-6M5 7l2-2"/>'),
    "W": ("W", '<path d="M3 0V6"/>'),
    "message": ("message", '<circle cx="3" cy="3" r="1"/>'),
    "collective": ("message", '<path d="M0 0l6 6M6 0L0 6"/>'),
    "reduce": ("reduce", '<path d="M-1 5l2 2M0 0l6 6M5-1l2 2"/>'),
    "reserve": ("reserve", '<path d="M-1 1l2-2M0 6l6-6M5 7l2-2"/>'),
    "apply": ("apply", '<path d="M0 3H6"/>'),
}


def html(report: Report) -> str:
    """The whole page."""
    groups = alike(report)
    sections = [
        ("Cluster", "Boxes are filled by share of the step's FLOPs.", cluster(report)),
        ("Stages", "", _stages(report)),
        ("Timeline", "One step, computes above and communication below.", gantt(report, groups)),
        ("Where the time goes", "Average over the devices.", time_bar(report)),
        ("Memory", "The peak of each device against its capacity.", memory_bars(groups)),
        (
            "Memory over time",
            "What tensors take; each chart to its own limit, the dashed line.",
            memory_curves(report, groups),
        ),
        ("Predicted and measured", "", _measured(report)),
        ("Notes", "", _notes(report)),
    ]
    body = "".join(
        f"<section><h2>{title}</h2>{f'<p>{text}</p>' if text else ''}{content}</section>"
        for title, text, content in sections
        if content
    )
    title = escape(report.title or "Whale report")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{title}</title>\n<style>\n{_asset('page.css')}</style></head>\n"
        f"<body>{_patterns()}<main><header><h1>{title}</h1>{_about(report)}</header>"
        f'{_cards(report)}{body}</main><div id="tip" role="tooltip" hidden></div>\n'
        f"<script>\n{_asset('page.js')}</script></body></html>\n"
    )


def _about(report: Report) -> str:
    micro = f"{report.num_micro_batch} micro-batch{'' if report.num_micro_batch == 1 else 'es'}"
    pairs = [
        ("strategy", report.strategy),
        ("cluster", report.cluster),
        ("batch", f"{report.batch_rows} rows in {micro}"),
        ("schedule", report.schedule),
        ("bubble", percent(report.bubble)),
    ]
    items = "".join(
        f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs if value
    )
    return f"<dl>{items}</dl>"


def _cards(report: Report) -> str:
    step = step_compared(report)
    ran = f"measured {step.measured}, {percent(step.error, signed=True)}" if step else "predicted"
    rows = report.batch_rows or 1
    bound = f"the bound is {seconds(report.lower_bound_seconds)}"
    most = fullest(report)
    memory = f"rank {most.rank} is {percent(full(most))} full" if most else "no devices"
    worst = over(report)
    cards = [
        ("Step time", seconds(report.step_seconds), ran, ""),
        ("Samples per second", per_second(report.samples_per_second), f"batch of {rows}", ""),
        (
            "Energy per step",
            joules(report.joules_per_step),
            f"{joules(report.joules_per_step / rows)} per sample",
            "",
        ),
        (
            "Above the bound",
            "unknown" if gap(report) is None else f"\u2264 {gap_percent(report)}",
            "no bound known" if gap(report) is None else bound,
            "",
        ),
        (
            "Memory",
            "does not fit" if worst else "fits",
            fits_text(report).partition(": ")[2] if worst else memory,
            "bad" if worst else "good",
        ),
    ]
    items = "".join(
        f'<div class="card {state}"><h2>{name}</h2><b>{value}</b><small>{detail}</small></div>'
        for name, value, detail, state in cards
    )
    return f'<div class="cards">{items}</div>'


def _stages(report: Report) -> str:
    """A row for each set of stages that the same devices run."""
    layers = {
        int(match[1]): int(match[2]) for note in report.notes for match in _LAYERS.finditer(note)
    }
    placed: dict[tuple[int, ...], list[int]] = {}
    for device in sorted(report.devices, key=lambda d: d.rank):
        placed.setdefault(device.stages, []).append(device.rank)
    devices = {device.rank: device for device in report.devices}
    rows = []
    for stages, ranks in sorted(placed.items()):
        own = [devices[rank] for rank in ranks]
        slowest = max(device.compute_s for device in own)
        counts = [layers[stage] for stage in stages if stage in layers]
        rows.append(
            [
                ranges(stages) or "none",
                ranges(ranks, 24),
                ", ".join(sorted({device.type for device in own})),
                *([str(sum(counts)) if counts else "?"] if layers else []),
                percent(sum(device.share for device in own)),
                seconds(slowest),
            ]
        )
    head = ["stage", "ranks", "devices", *(["layers"] if layers else []), "share of FLOPs"]
    return _table([*head, "slowest compute"], rows)


def _measured(report: Report) -> str:
    step = step_compared(report)
    if step is None or report.measured is None:
        return "<p>It has not run yet: every number on this page is predicted.</p>"
    memory, compute = memory_compared(report), compute_compared(report)
    worst = [step, *memory[:1], *compute[:1]]
    every = [*memory[:MAX_COMPARED], *compute[:MAX_COMPARED]]
    left = len(memory) + len(compute) - len(every)
    more = f"<p>{left} more rows, with smaller errors, are not shown.</p>" if left else ""
    details = (
        f"<details><summary>every rank</summary>{_compared(every)}{more}</details>" if every else ""
    )
    return (
        f"<p>{report.measured.num_steps} steps; step time {escape(step.note)}. For memory and "
        f"compute, the rank with the largest error.</p>{_compared(worst)}{details}"
    )


def _compared(rows: Sequence[Compared]) -> str:
    return _table(
        ["what", "predicted", "measured", "error"],
        [[r.what, r.predicted, r.measured, percent(r.error, signed=True)] for r in rows],
    )


def _notes(report: Report) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in report.notes)
    return f"<ul>{items}</ul>" if items else ""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    return (
        f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _patterns() -> str:
    marks = "".join(
        f'<pattern id="p-{name}" width="6" height="6" patternUnits="userSpaceOnUse">'
        f'<rect class="solid-{base}" width="6" height="6"/><g class="mark">{mark}</g></pattern>'
        for name, (base, mark) in _PATTERNS.items()
    )
    return f'<svg class="defs" width="0" height="0" aria-hidden="true"><defs>{marks}</defs></svg>'


def _asset(name: str) -> str:
    return files("whale.viz").joinpath(name).read_text(encoding="utf-8")
