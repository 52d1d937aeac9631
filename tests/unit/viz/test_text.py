"""The table: short, within its width, and it says what does not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.viz import reports
from whale.sim.report import Report
from whale.viz.text import MAX_ROWS, table
from whale.viz.units import joules, nbytes, nbytes_of, percent, ranges, seconds

GOLDEN = Path(__file__).parents[2] / "goldens" / "report-table.txt"
REPORTS = {
    "pipeline": reports.pipeline,
    "large": reports.large,
    "too big": reports.too_big,
    "measured": reports.measured,
    "uneven": reports.uneven,
}


def test_goldens() -> None:
    made = "\n".join(
        f"=== {name}\n{table(REPORTS[name]())}" for name in ("measured", "too big", "large")
    )
    assert made == GOLDEN.read_text(encoding="utf-8"), (
        f"the table has changed; if it should, write this to {GOLDEN}:\n{made}"
    )


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("width", [80, 100])
def test_fits_the_terminal_in_plain_ascii(name: str, width: int) -> None:
    made = table(REPORTS[name](), width=width)
    assert made.isascii()
    assert max(map(len, made.splitlines())) <= width
    assert len(made.splitlines()) <= MAX_ROWS + 30


def test_blocks_only_where_the_stream_has_them() -> None:
    report = replace(reports.pipeline(), title="M6 \u4e2d\u6587")
    assert "\u2588" in table(report, unicode=True)
    assert table(report, unicode=True).startswith("M6 \u4e2d\u6587\n")
    assert table(report).startswith("M6 ??\n")


def test_equal_rows_are_one() -> None:
    report = reports.pipeline()
    twins = tuple(replace(report.devices[0], rank=rank) for rank in range(8))
    made = table(replace(report, devices=twins))
    assert "\n0-7 " in made
    assert "\n0,8..504 " in table(reports.large())
    assert table(reports.large()).count("V100-32GB  ") == 8


def test_what_is_cut_is_said() -> None:
    made = table(reports.uneven())
    assert f"... and {512 - MAX_ROWS + 1} more devices" in made


def test_a_device_over_its_capacity_is_marked() -> None:
    made = table(reports.too_big())
    assert "OVER by 1.5 GB" in made
    assert "does not fit: 1 of 4 devices is over, rank 3 by 1.5 GB" in made
    assert "OVER" not in table(reports.pipeline())


def test_measured_lines_only_after_a_run() -> None:
    assert "predicted vs measured" not in table(reports.pipeline())
    made = table(reports.measured())
    assert "384 ms predicted, 402 ms measured, error -4.4 %" in made
    assert "worst at rank 3" in made


def test_the_gap_is_rounded_up() -> None:
    report = replace(reports.pipeline(), step_seconds=1.031, lower_bound_seconds=1.0)
    assert "<= 4 % above the bound of 1.00 s" in table(report)
    assert "no lower bound known" in table(replace(report, lower_bound_seconds=0.0))


def test_a_title_can_not_move_the_cursor() -> None:
    report = replace(reports.pipeline(), title="a\x1b[2Jb\nc", notes=("d\x07\r\ne",))
    made = table(report)
    assert made.startswith("a?[2Jb c\n")
    assert "- d? e" in made.replace("  e", " e")


def test_an_empty_report() -> None:
    empty = Report(
        title="",
        strategy="",
        cluster="",
        batch_rows=0,
        num_micro_batch=1,
        schedule="",
        step_seconds=0.0,
        lower_bound_seconds=0.0,
        joules_per_step=0.0,
        bubble=0.0,
        devices=(),
    )
    assert table(empty).startswith("(no title)\n")


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((3,), "3"),
        ((0, 1, 2), "0-2"),
        ((0, 4), "0,4"),
        ((0, 8, 16, 24), "0,8..24"),
        ((0, 1, 8, 9), "0-1,8-9"),
        (tuple(x for x in range(256) if x % 8 < 2), "0-1,8-9,.. (64)"),
        ((), ""),
    ],
)
def test_ranges(numbers: tuple[int, ...], text: str) -> None:
    assert ranges(numbers) == text


def test_units() -> None:
    assert [seconds(x) for x in (0, 8.5e-4, 0.01234, 0.99996, 1.234, 345.6)] == [
        "0 ms",
        "850 us",
        "12.3 ms",
        "1.00 s",
        "1.23 s",
        "346 s",
    ]
    assert [nbytes(x) for x in (0, 1.5e3, 23.4e6, 12.34e9, 1.5e12)] == [
        "0.0 GB",
        "1.5 kB",
        "23.4 MB",
        "12.3 GB",
        "1.5 TB",
    ]
    assert nbytes_of(12.3e9, 16e9) == "12.3/16.0 GB"
    assert nbytes_of(5e6, 16e9) == "5.0 MB/16.0 GB"
    assert [joules(x) for x in (5.0, 1234.0, 2.5e6)] == ["5.00 J", "1.23 kJ", "2.50 MJ"]
    assert [percent(x) for x in (0.25, 0.00196, 0.0)] == ["25.0 %", "0.20 %", "0.0 %"]
