"""Report -> a table for the terminal, short for any number of devices.

Place in the flow: what `whale plan` and `whale simulate` print. Plain ASCII unless told that the
stream can show block characters.
"""

from __future__ import annotations

import re
import textwrap

from whale.sim.report import DeviceReport, Report
from whale.viz.facts import (
    Compared,
    compute_compared,
    fits_text,
    full,
    gap,
    gap_percent,
    memory_compared,
    needed,
    over_text,
    step_compared,
)
from whale.viz.units import joules, nbytes_of, per_second, percent, ranges, seconds

MAX_ROWS = 40
"""Rows of a table; a longer one is cut, with a line that says so."""
_COLUMNS = ("ranks", "type", "stage", "share", "rows", "busy", "memory", "binds")
_BARS = ((8, 10), (5, 10), (0, 10), (0, 6), (0, 0))
"""Lengths of the bars of busy time and memory, the best first."""
_RIGHT = ("share", "rows")
_INDENT = "  "


def table(report: Report, *, width: int = 100, unicode: bool = False) -> str:
    """The headline, a row per device (equal rows once), where the time goes, and the notes.

    Args:
        report: What to show.
        width: Columns of the terminal; 80 at least to look well.
        unicode: Whether the stream can show block characters; otherwise all is ASCII.
    """
    lines = [
        *_headline(report, width),
        "",
        *_device_lines(report, width, unicode),
        *_time_lines(report, width),
        *_measured_lines(report, width),
        *_note_lines(report, width),
    ]
    text = "\n".join(line.rstrip() for line in lines) + "\n"
    return text if unicode else "".join(c if c.isascii() else "?" for c in text)


def _headline(report: Report, width: int) -> list[str]:
    micro = f"{report.num_micro_batch} micro-batch{'' if report.num_micro_batch == 1 else 'es'}"
    bound = "no lower bound known"
    if gap(report) is not None:
        bound = f"<= {gap_percent(report)} above the bound of {seconds(report.lower_bound_seconds)}"
    pairs = [
        ("strategy", report.strategy),
        ("cluster", report.cluster),
        ("batch", f"{report.batch_rows} rows, {micro}, {report.schedule or 'no pipeline'}"),
        ("step time", f"{seconds(report.step_seconds)}, {bound}"),
        ("samples/s", per_second(report.samples_per_second)),
        ("energy", f"{joules(report.joules_per_step)} per step"),
        ("bubble", percent(report.bubble)),
        ("memory", fits_text(report)),
    ]
    lines = _wrap(report.title or "(no title)", width, first="", rest=_INDENT)
    for name, value in pairs:
        lines += _wrap(value, width, first=f"{_INDENT}{name:<11}", rest=" " * 13)
    return lines


def _device_lines(report: Report, width: int, unicode: bool) -> list[str]:
    # Folded as printed: ranks that read the same are one row, wherever they stand.
    folded: dict[tuple[str, ...], list[DeviceReport]] = {}
    for device in sorted(report.devices, key=lambda d: d.rank):
        folded.setdefault(_cells(device, report, _BARS[0], unicode), []).append(device)
    groups = list(folded.values())
    shown = groups if len(groups) <= MAX_ROWS else groups[: MAX_ROWS - 1]
    # The longest bars that leave room; failing all, the type gives way, the user's own text.
    for bars in _BARS:
        rows = [_COLUMNS] + [
            (ranges([d.rank for d in group]), *_cells(group[0], report, bars, unicode))
            for group in shown
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        excess = sum(widths) + 2 * (len(widths) - 1) - width
        if excess <= 0:
            break
    widths[1] = max(4, widths[1] - max(0, excess))
    lines = [
        "  ".join(
            _short(cell, size).rjust(size) if name in _RIGHT else _short(cell, size).ljust(size)
            for name, cell, size in zip(_COLUMNS, row, widths, strict=True)
        )
        for row in rows
    ]
    if len(shown) < len(groups):
        left = [device for group in groups[len(shown) :] for device in group]
        num_over = sum(not device.fits for device in left)
        more = f"... and {len(left)} more devices in {len(groups) - len(shown)} rows"
        lines.append(f"{more}, {num_over} of them over" if num_over else more)
    if bars[0]:
        sign, second, _ = _bar_signs(unicode)
        lines.append(f"(busy: {sign} computes, {second} communicates; the whole bar is one step)")
    return lines


def _cells(
    device: DeviceReport, report: Report, bars: tuple[int, int], unicode: bool
) -> tuple[str, ...]:
    """A row but for its ranks; `bars` are the lengths of its two bars."""
    step, capacity = report.step_seconds, device.capacity_bytes
    compute = device.compute_s / step if step else 0.0
    communicate = device.communicate_s / step if step else 0.0
    busy = f"{_bar((compute, communicate), bars[0], unicode)} " if bars[0] else ""
    memory = f"[{_bar((full(device),), bars[1], unicode)}] " if bars[1] else ""
    return (
        _short(_plain(device.type), 20),
        ranges(device.stages, 10) or "-",
        percent(device.share),
        str(device.rows),
        f"{busy}{seconds(device.compute_s + device.communicate_s):>7}",
        f"{memory}{nbytes_of(needed(device), capacity):>12}",
        _plain(device.binds) if device.fits else over_text(device),
    )


def _bar(parts: tuple[float, ...], width: int, unicode: bool) -> str:
    """The parts one after another, each in its sign; what is left is empty."""
    *signs, empty = _bar_signs(unicode)
    text, end = "", 0.0
    for sign, part in zip(signs, parts, strict=False):
        end += part
        text += sign * (min(width, round(end * width)) - len(text))
    return text.ljust(width, empty)


def _bar_signs(unicode: bool) -> tuple[str, str, str]:
    return ("\u2588", "\u2592", "\u2591") if unicode else ("#", "~", ".")


def _time_lines(report: Report, width: int) -> list[str]:
    if not report.where_time_goes:
        return []
    whole = sum(report.where_time_goes.values()) or 1.0
    parts = [
        f"{name} {f'{100 * value / whole:.0f}' if value >= 0.01 * whole else '<1'} %"
        for name, value in sorted(report.where_time_goes.items(), key=lambda item: -item[1])
        if value > 0
    ]
    return ["", *_wrap(", ".join(parts), width, first="where the time goes: ", rest=_INDENT)]


def _measured_lines(report: Report, width: int) -> list[str]:
    step = step_compared(report)
    if step is None or report.measured is None:
        return []
    lines = ["", f"predicted vs measured, {report.measured.num_steps} steps"]
    for name, rows in (
        ("step time", (step,)),
        ("memory", memory_compared(report)),
        ("compute", compute_compared(report)),
    ):
        if rows:
            lines += _wrap(_compared(rows[0]), width, first=f"{_INDENT}{name:<11}", rest=" " * 13)
    return lines


def _compared(row: Compared) -> str:
    where = f"worst at {row.what.partition(', ')[2]}, " if ", " in row.what else ""
    note = f" ({row.note})" if row.note else ""
    return (
        f"{where}{row.predicted} predicted, {row.measured} measured, "
        f"error {percent(row.error, signed=True)}{note}"
    )


def _note_lines(report: Report, width: int) -> list[str]:
    if not report.notes:
        return []
    lines = ["", "notes"]
    for note in report.notes:
        lines += _wrap(note, width, first=f"{_INDENT}- ", rest=_INDENT * 2)
    return lines


def _wrap(text: str, width: int, *, first: str, rest: str) -> list[str]:
    # A number stays with its unit: textwrap does not break at a no-break space.
    glued = re.sub(r"(?<=\d) (?=\S)", "\u00a0", _plain(text))
    lines = textwrap.wrap(glued, width, initial_indent=first, subsequent_indent=rest) or [first]
    return [line.replace("\u00a0", " ") for line in lines]


def _plain(text: str) -> str:
    """No control characters: a title must not move the cursor."""
    return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text)


def _short(text: str, size: int) -> str:
    return text if len(text) <= size else f"{text[: size - 2]}.."
