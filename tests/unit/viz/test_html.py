"""The page: one well-formed file that loads nothing, escapes everything and stays small."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from tests.unit.viz import reports
from whale.sim.report import Event, Report
from whale.viz import gantt
from whale.viz.facts import alike
from whale.viz.html import html

VOID = {"meta", "br", "input"}
EVIL = "<script>alert('x')</script>\"&'"


class Page(HTMLParser):
    """Tags that open and close in order, with the text and attributes between them."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.words: list[str] = []
        self.attributes: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.attributes if key == name]


def read(report: Report) -> Page:
    page = Page()
    page.feed(html(report))
    page.close()
    assert page.open == []
    return page


REPORTS = {
    "pipeline": reports.pipeline(),
    "zero-bubble": reports.pipeline(kind="zero-bubble"),
    "too big": reports.too_big(),
    "measured": reports.measured(),
    "large": reports.large(),
    "uneven": reports.uneven(),
    "bare": replace(
        reports.pipeline(),
        events=(),
        where_time_goes={},
        notes=(),
        lower_bound_seconds=0.0,
        step_seconds=0.0,
        devices=tuple(replace(d, memory_curve=()) for d in reports.pipeline().devices),
    ),
    "nothing": replace(reports.pipeline(), events=(), devices=()),
}


@pytest.mark.parametrize("name", REPORTS)
def test_is_one_well_formed_file_of_its_own(name: str) -> None:
    page = read(REPORTS[name])
    text = html(REPORTS[name])
    assert "http" not in text
    assert "@import" not in text
    assert page.tags.count("script") == 1
    assert page.tags.count("style") == 1
    assert not {"link", "img", "iframe", "object"} & set(page.tags)
    assert not page.values("src")
    assert not page.values("href")
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    # Whatever a fill names is defined in this very page.
    assert set(re.findall(r"url\(#([^)]*)\)", text)) <= set(ids)


@pytest.mark.parametrize("name", ["large", "uneven"])
def test_stays_small_with_512_devices(name: str) -> None:
    assert len(html(REPORTS[name]).encode()) < 3e6


def test_many_events_are_drawn_coarser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gantt, "MAX_EVENTS", 100)
    page = read(reports.large())
    bars = [hint for hint in page.values("data-n") if "takes" in hint]
    assert 8 <= len(bars) <= 100
    assert any("events, most of them" in hint for hint in bars)
    assert "Drawn coarsely" in page.text


def test_fewer_ranks_are_drawn_before_any_is_drawn_coarser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gantt, "MAX_EVENTS", 2000)
    page = read(reports.uneven())
    assert "Drawn coarsely" not in page.text
    assert f"{512 - 27} more ranks are not drawn" in page.text


def test_every_string_is_escaped() -> None:
    report = reports.measured()
    evil = replace(
        report,
        title=EVIL,
        strategy=EVIL,
        cluster=EVIL,
        schedule=EVIL,
        notes=(EVIL,),
        where_time_goes={EVIL: 1.0},
        devices=tuple(replace(device, type=EVIL, binds=EVIL) for device in report.devices),
        events=tuple(replace(event, name=EVIL) for event in report.events),
    )
    page = read(evil)
    assert page.tags.count("script") == 1
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert page.words.count(EVIL) >= 5
    assert any(hint.startswith(EVIL) for hint in page.values("data-n"))


def test_headline_and_parts() -> None:
    text = read(reports.pipeline()).text
    for expected in ("384 ms", "167", "400 J", "\u2264 25 %", "fits", "node 0", "node 1"):
        assert expected in text
    for title in ("Cluster", "Stages", "Timeline", "Where the time goes", "Memory", "Notes"):
        assert title in text
    assert "It has not run yet" in text
    # The number of layers comes from the notes.
    assert "layers" in text


def test_what_does_not_fit_is_said_everywhere() -> None:
    text = read(reports.too_big()).text
    assert "does not fit" in text
    assert text.count("OVER") == 2


def test_measured_is_set_against_predicted() -> None:
    text = read(reports.measured()).text
    assert "measured 402 ms, -4.4 %" in text
    assert "It has not run yet" not in text
    assert "memory, rank 0" in text


def test_every_event_has_a_bar_a_label_and_a_hint() -> None:
    report = reports.pipeline()
    page = read(report)
    hints = [hint for hint in page.values("data-n") if "takes" in hint]
    assert len(hints) == len(report.events)
    assert "0F0: forward\nstage 0, micro-batch 0\nat 0 ms, takes 10.0 ms" in hints
    assert {"F0", "B7", "sum", "apply", "msg"} <= set(page.words)


def test_several_stages_on_a_device_are_told_apart() -> None:
    report = reports.pipeline()
    devices = tuple(replace(device, stages=(device.rank, 4)) for device in report.devices)
    assert {"0F0", "3B7"} <= set(read(replace(report, devices=devices)).words)


def test_alike_ranks_are_drawn_once() -> None:
    report = reports.large()
    groups = alike(report)
    assert [group.ranks[:2] for group in groups] == [(s, s + 8) for s in range(8)]
    forwards = [hint for hint in read(report).values("data-n") if ": forward" in hint]
    assert len(forwards) == 8 * 32
    # A millionth of the step is no difference, a thousandth is.
    for shift, num_groups in ((1e-8, 8), (1e-2, 9)):
        moved = tuple(
            replace(e, end_s=e.end_s + shift) if e.rank == 511 and e.kind == "apply" else e
            for e in report.events
        )
        assert len(alike(replace(report, events=moved))) == num_groups


def test_overlapping_communication_is_stacked() -> None:
    report = reports.pipeline()
    beside = Event(rank=0, kind="collective", name="all-gather", start_s=0.0, end_s=0.3)
    page = read(replace(report, events=(*report.events, beside)))
    plain = read(report)
    assert int(page.values("height")[_gantt(page)]) > int(plain.values("height")[_gantt(plain)])


def _gantt(page: Page) -> int:
    """The position of the chart's height among all heights."""
    at = page.attributes.index(("id", "gantt"))
    return sum(name == "height" for name, _ in page.attributes[:at])
