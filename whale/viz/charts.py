"""Report -> the other charts of the page: cluster, memory, where the time goes.

Place in the flow: pieces of the page that `viz.html` puts together; each is a pure function that
returns HTML with every string of the user's escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from html import escape

from whale.ir.memory import MemoryParts
from whale.sim.report import DeviceReport, Report
from whale.viz.facts import Alike, needed, over_text
from whale.viz.gantt import number, swatch
from whale.viz.units import nbytes, nbytes_of, percent, ranges, seconds

MAX_NODES = 32
MAX_BARS = 64
MAX_CURVES = 16
NUM_COLOURS = 6
"""Fills `c0` to `c5` of `page.css`."""
PARTS = tuple(part.name for part in fields(MemoryParts))
# The fills of the Gantt chart for the same things; the first word found decides.
_FILLS = (
    ("bubble", "idle"),
    ("wait", "idle"),
    ("idle", "idle"),
    ("apply", "apply"),
    ("update", "apply"),
    ("optimizer", "apply"),
    ("message", "message"),
    ("sum", "reduce"),
    ("reduce", "reduce"),
    ("collective", "collective"),
    ("communicat", "message"),
    ("backward", "B"),
    ("forward", "F"),
    ("compute", "F"),
)
_CURVE_WIDTH, _CURVE_HEIGHT = 200, 60


def cluster(report: Report) -> str:
    """Nodes with their devices as boxes, filled as high as their share; equal nodes once."""
    kinds = sorted({device.type for device in report.devices})
    colour = {kind: f"c{index % NUM_COLOURS}" for index, kind in enumerate(kinds)}
    most = max((device.share for device in report.devices), default=0.0) or 1.0
    nodes: dict[int, list[DeviceReport]] = {}
    for device in sorted(report.devices, key=lambda d: d.rank):
        nodes.setdefault(device.node, []).append(device)
    folded: dict[tuple[object, ...], list[int]] = {}
    for node, devices in sorted(nodes.items()):
        key = tuple((d.type, d.stages, round(d.share, 5), d.fits) for d in devices)
        folded.setdefault(key, []).append(node)
    shown = list(folded.values())[:MAX_NODES]
    cards = [
        f'<div class="node"><h3>{_nodes(same)}</h3><div class="boxes">'
        f"{''.join(_box(d, colour[d.type], d.share / most) for d in nodes[same[0]])}</div></div>"
        for same in shown
    ]
    size = "nodes small" if len(cards) > 4 else "nodes"
    left = len(nodes) - sum(map(len, shown))
    more = f"<p>{left} more nodes are not drawn.</p>" if left else ""
    legend = "".join(f"<li>{swatch(colour[kind])} {_devices(report, kind)}</li>" for kind in kinds)
    return f'<ul class="legend">{legend}</ul><div class="{size}">{"".join(cards)}</div>{more}'


def memory_bars(groups: Sequence[Alike]) -> str:
    """What each device holds at its peak, part by part, against its capacity."""
    widest = max((max(needed(g.device), g.device.capacity_bytes) for g in groups), default=0)
    rows = [_memory_row(group, widest * 1.02 or 1.0) for group in groups[:MAX_BARS]]
    left = sum(len(group.ranks) for group in groups[MAX_BARS:])
    more = f"<p>{left} more ranks are not drawn.</p>" if left else ""
    legend = "".join(f"<li>{swatch(part)} {part}</li>" for part in PARTS)
    legend += f"<li>{swatch('limit')} capacity</li>"
    return f'<ul class="legend">{legend}</ul><div class="bars">{"".join(rows)}</div>{more}'


def memory_curves(report: Report, groups: Sequence[Alike]) -> str:
    """Memory through the step, one small chart per group of ranks; empty where unknown."""
    with_curve = [group for group in groups if group.device.memory_curve]
    if not with_curve:
        return ""
    span = max([report.step_seconds, *(g.device.memory_curve[-1][0] for g in with_curve)])
    charts = "".join(_curve(group, span or 1.0) for group in with_curve[:MAX_CURVES])
    left = sum(len(group.ranks) for group in with_curve[MAX_CURVES:])
    more = f"<p>{left} more ranks are not drawn.</p>" if left else ""
    return f'<div class="curves">{charts}</div>{more}'


def time_bar(report: Report) -> str:
    """Where a step's time goes, on average over the devices; empty where unknown."""
    parts = sorted(report.where_time_goes.items(), key=lambda part: -part[1])
    whole = sum(value for _, value in parts)
    if whole <= 0:
        return ""
    rects, items, x, index = [], [], 0.0, 0
    for name, value in parts:
        known = next((fill for word, fill in _FILLS if word in name.lower()), None)
        fill = known or f"c{index % NUM_COLOURS}"
        index += known is None
        width = 100.0 * value / whole
        text = f"{name}: {seconds(value)}, {percent(value / whole)}"
        rects.append(
            f'<rect class="{fill}" x="{number(x)}%" width="{number(width)}%" height="32" '
            f'data-n="{escape(text)}"/>'
        )
        items.append(
            f"<li>{swatch(fill)} {escape(name)} <b>{percent(value / whole)}</b> "
            f"({seconds(value)})</li>"
        )
        x += width
    return (
        '<svg class="stack" width="100%" height="32" role="img" '
        f'aria-label="where the time goes">{"".join(rects)}</svg>'
        f'<ul class="legend">{"".join(items)}</ul>'
    )


def who(group: Alike) -> str:
    """`ranks 0-7`, escaped."""
    return escape(f"rank{'s' if len(group.ranks) > 1 else ''} {ranges(group.ranks)}")


def _nodes(same: Sequence[int]) -> str:
    if len(same) == 1:
        return f"node {same[0]}"
    return f"nodes {ranges(same)} <small>({len(same)} alike, the first is drawn)</small>"


def _devices(report: Report, kind: str) -> str:
    same = [device for device in report.devices if device.type == kind]
    capacities = sorted({nbytes(device.capacity_bytes) for device in same})
    return f"{len(same)} x {escape(kind)}, {' or '.join(capacities)}"


def _box(device: DeviceReport, colour: str, fill: float) -> str:
    stages = f"stage {ranges(device.stages, 10)}" if device.stages else "no stage"
    hint = (
        f"rank {device.rank}: {device.type}\n{stages}, {percent(device.share)} of the work, "
        f"{device.rows} rows\n{nbytes_of(needed(device), device.capacity_bytes)}"
    )
    state = "" if device.fits else f"\n{over_text(device)}"
    return (
        f'<div class="box {colour}{" over" if state else ""}" style="--fill:{100 * fill:.0f}%" '
        f'data-n="{escape(hint + state)}"><small>rank {device.rank}</small>'
        f"<b>{percent(device.share)}</b><small>{escape(stages)}</small>"
        f"{'<small>OVER</small>' if state else ''}</div>"
    )


def _memory_row(group: Alike, widest: float) -> str:
    device, x, rects = group.device, 0.0, []
    for part in PARTS:
        size = getattr(device.memory, part)
        width = 100.0 * size / widest
        rects.append(
            f'<rect class="{part}" x="{number(x)}%" width="{number(width)}%" y="3" height="16" '
            f'data-n="{part}: {nbytes(size)}"/>'
        )
        x += width
    limit = number(100.0 * device.capacity_bytes / widest)
    state = "" if device.fits else f' <strong class="bad">{escape(over_text(device))}</strong>'
    return (
        f'<div class="bar"><span class="name"><b>{who(group)}</b> {escape(device.type)}</span>'
        f'<svg width="100%" height="22" role="img" aria-label="memory of {who(group)}">'
        f'{"".join(rects)}<line class="capacity" x1="{limit}%" x2="{limit}%" y1="0" y2="22"/></svg>'
        f'<span class="value">{nbytes_of(needed(device), device.capacity_bytes)}{state}</span>'
        "</div>"
    )


def _curve(group: Alike, span: float) -> str:
    device = group.device
    peak = max(size for _, size in device.memory_curve)
    # The curve is of tensors: its limit is what the reserve leaves.
    room = device.capacity_bytes - device.memory.reserve
    top = 1.04 * max(peak, room) or 1.0
    points = [
        (_CURVE_WIDTH * time / span, _CURVE_HEIGHT * (1.0 - size / top))
        for time, size in _thinned(device.memory_curve)
    ]
    path = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
    path += "".join(f"H{x:.1f}V{y:.1f}" for x, y in points[1:]) + f"H{_CURVE_WIDTH}"
    limit = f"{_CURVE_HEIGHT * (1.0 - room / top):.1f}"
    hint = f"peak {nbytes(peak)} of {nbytes(room)}"
    return (
        f'<figure><svg viewBox="0 0 {_CURVE_WIDTH} {_CURVE_HEIGHT}" preserveAspectRatio="none" '
        f'role="img" aria-label="{escape(hint)}"><path class="area" '
        f'd="{path}V{_CURVE_HEIGHT}H{points[0][0]:.1f}Z"/><path class="edge" d="{path}"/>'
        f'<line class="capacity" x1="0" x2="{_CURVE_WIDTH}" y1="{limit}" y2="{limit}"/></svg>'
        f"<figcaption><b>{who(group)}</b> {escape(device.type)}<br>{hint}</figcaption></figure>"
    )


def _thinned(curve: Sequence[tuple[float, int]], most: int = 800) -> list[tuple[float, int]]:
    """At most `most` steps, each the highest of those it stands for: no peak is lost."""
    size = -(-len(curve) // most)
    return [
        (curve[at][0], max(b for _, b in curve[at : at + size]))
        for at in range(0, len(curve), size)
    ]
