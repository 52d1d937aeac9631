"""Report -> a Gantt chart of every rank as SVG: computes above, communication below.

Place in the flow: the middle of the page that `viz.html` makes. All x are percentages of the step,
so zooming is nothing but a wider SVG: `page.js` sets that width and shows the labels that then fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import accumulate

from whale.sim.report import Event, Report
from whale.viz.facts import (
    KIND_WORDS,
    SHORT_KINDS,
    Alike,
    computes_and_communication,
    described,
    label,
    lanes,
)
from whale.viz.units import ranges, seconds

MAX_ROWS = 64
"""Groups of alike ranks drawn; more would be no picture any longer."""
MIN_ROWS = 16
"""Rows that are drawn even where their events are more than `MAX_EVENTS`."""
MAX_EVENTS = 10_000
"""Bars drawn: about 2 MB of page. Above it fewer rows, then neighbours as one bar."""
_AXIS, _COMPUTE, _LANE, _PAD = 22, 20, 13, 4
_PRINT_WIDTH = 900
"""Pixels a chart is taken to be wide until the browser has told."""
_LETTER = 6.2
"""Pixels of one letter in a bar."""


def gantt(report: Report, groups: Sequence[Alike]) -> str:
    """The legend, the names of the ranks and the chart beside them."""
    if not report.events:
        return "<p>This report has no events, only totals.</p>"
    span = max([report.step_seconds, *(event.end_s for event in report.events)]) or 1.0
    shown = groups[: _num_rows(groups)]
    drawn = _coarse(shown, span)
    rows, names, top = [], [], _AXIS
    for group, events in zip(shown, drawn, strict=True):
        row, height = _row(group, events, span, top)
        rows.append(row)
        names.append(_name(group, height))
        top += height
    left = sum(len(group.ranks) for group in groups[len(shown) :])
    more = f"<p>{left} more ranks are not drawn; a trace has them all.</p>" if left else ""
    if sum(map(len, drawn)) < sum(len(group.events) for group in shown):
        more += (
            "<p>Drawn coarsely: short neighbours are one bar, in the colour of most of them.</p>"
        )
    head = f"Gantt chart of {len(report.devices)} ranks over {seconds(span)}"
    return (
        f"{_legend(report)}{_zoom()}"
        f'<div class="gantt"><div class="who"><div style="height:{_AXIS}px"></div>'
        f'{"".join(names)}</div><div class="scroll" id="scroll" tabindex="0">'
        f'<svg id="gantt" width="100%" height="{top}" role="img" aria-label="{escape(head)}">'
        f"{_axis(span, top)}{''.join(rows)}</svg></div></div>{more}"
    )


def swatch(css_class: str) -> str:
    """A sample of a fill, for legends."""
    return (
        '<svg class="swatch" width="16" height="12" aria-hidden="true">'
        f'<rect class="{css_class}" width="16" height="12"/></svg>'
    )


def number(value: float) -> str:
    """At most three decimals and no trailing zeros: short in a file of many."""
    return f"{value:.3f}".rstrip("0").rstrip(".") or "0"


def _row(group: Alike, events: Sequence[Event], span: float, top: int) -> tuple[str, int]:
    """One group of ranks: its bars and its height in pixels."""
    computes, communication = computes_and_communication(events)
    many = len(group.device.stages) > 1
    y, bars = top + _PAD, []
    for lane in lanes(computes):
        bars += [_bar(event, span, y, _COMPUTE, many) for event in lane]
        y += _COMPUTE + 1
    y = max(y, top + _PAD + _COMPUTE + 1)
    for lane in lanes(communication):
        bars += [_bar(event, span, y, _LANE, many) for event in lane]
        y += _LANE + 1
    # Room for two lines of names.
    height = max(y + _PAD, top + 38) - top
    rule = f'<line class="rule" x1="0" x2="100%" y1="{top}" y2="{top}"/>'
    return rule + "".join(bars), height


def _bar(event: Event, span: float, y: int, height: int, with_stage: bool) -> str:
    x, width = 100.0 * event.start_s / span, 100.0 * (event.end_s - event.start_s) / span
    text = label(event, with_stage=with_stage)
    hint = f"{described(event)}\nat {seconds(event.start_s)}, "
    hint += f"takes {seconds(event.end_s - event.start_s)}"
    narrow = width / 100.0 * _PRINT_WIDTH < _LETTER * len(text) + 4
    hidden = ' class="n"' if narrow else ""
    return (
        f'<rect class="{escape(event.kind)}" x="{number(x)}%" width="{number(width)}%" y="{y}" '
        f'height="{height}" data-n="{escape(hint)}"/>'
        f'<text x="{number(x + width / 2)}%" y="{y + height // 2 + 4}"{hidden}>'
        f"{escape(text)}</text>"
    )


def _name(group: Alike, height: int) -> str:
    device = group.device
    stages = f"stage {ranges(device.stages, 12)}" if device.stages else "no stage"
    many = f" ({len(group.ranks)} alike)" if len(group.ranks) > 1 else ""
    where = f"rank{'s' if many else ''} {ranges(group.ranks, 16)}"
    hint = f"{where}{many}\n{device.type}, {stages}"
    return (
        f'<div style="height:{height}px" data-n="{escape(hint)}"><b>{escape(where)}</b>'
        f"<small>{escape(stages)}, {escape(device.type)}</small></div>"
    )


def _axis(span: float, bottom: int) -> str:
    """Ticks close enough for the widest zoom; `page.js` shows every n-th."""
    step = _nice(span / 100.0)
    every = max(1, math.ceil(80.0 * span / (_PRINT_WIDTH * step)))
    every = next(n for n in (1, 2, 5, 10, 20, 50, 100, 200) if n >= every)
    marks = []
    for index in range(math.floor(span / step) + 1):
        x = number(100.0 * index * step / span)
        # Nor those so near to the end that their text would be cut.
        hidden = ' class="n"' if index % every or index * step > 0.94 * span else ""
        time = seconds(index * step) if index else "0"
        marks.append(
            f'<g data-i="{index}"{hidden}><line x1="{x}%" x2="{x}%" y1="{_AXIS - 6}" '
            f'y2="{bottom}"/><text x="{x}%" dx="3" y="13">{time}</text></g>'
        )
    return f'<g class="axis" data-percent="{100.0 * step / span:.5f}">{"".join(marks)}</g>'


def _nice(value: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is no less."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(n * power for n in (1, 2, 5, 10) if n * power >= value * 0.999999)


def _legend(report: Report) -> str:
    kinds = {event.kind for event in report.events}
    items = [
        f"<li>{swatch(kind)} <b>{SHORT_KINDS.get(kind, kind)}</b> {words}</li>"
        for kind, words in KIND_WORDS.items()
        if kind in kinds
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'


def _zoom() -> str:
    return (
        '<p class="zoom"><label>Zoom <input id="zoom" type="range" min="0" max="100" value="0" '
        'aria-label="zoom of the Gantt chart"></label> <output id="times">1x</output> '
        "<span>or Ctrl and the wheel over the chart; hover or tap a bar for its name and "
        "times</span></p>"
    )


def _num_rows(groups: Sequence[Alike]) -> int:
    totals = list(accumulate(len(group.events) for group in groups))
    whole = sum(total <= MAX_EVENTS for total in totals)
    return min(MAX_ROWS, max(MIN_ROWS, whole))


def _coarse(groups: Sequence[Alike], span: float) -> list[tuple[Event, ...]]:
    """The events to draw of each group: all, or so many neighbours as one that few are left."""
    drawn = [group.events for group in groups]
    shortest = span / 4096.0
    while sum(map(len, drawn)) > MAX_EVENTS:
        drawn = [
            tuple(
                merged
                for side in computes_and_communication(group.events)
                for lane in lanes(side)
                for merged in _merge(lane, shortest)
            )
            for group in groups
        ]
        shortest *= 2.0
    return drawn


def _merge(lane: Sequence[Event], shortest: float) -> list[Event]:
    """Neighbours joined until each bar is `shortest` long; its kind is what takes most time."""
    merged: list[Event] = []
    run: list[Event] = []
    for event in lane:
        if run and max(run[-1].end_s, event.end_s) - run[0].start_s > shortest:
            merged.append(_joined(run))
            run = []
        run.append(event)
    return [*merged, _joined(run)] if run else merged


def _joined(run: Sequence[Event]) -> Event:
    if len(run) == 1:
        return run[0]
    time: dict[str, float] = {}
    for event in run:
        time[event.kind] = time.get(event.kind, 0.0) + event.end_s - event.start_s
    kind = max(time, key=lambda k: time[k])
    return Event(
        rank=run[0].rank,
        kind=kind,
        name=f"{len(run)} events, most of them {kind}: {run[0].name} to {run[-1].name}",
        start_s=run[0].start_s,
        end_s=max(event.end_s for event in run),
    )
