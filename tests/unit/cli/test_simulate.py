"""`whale simulate`: the same figures as the plan, its files, and what is refused."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from whale.cli.main import main
from whale.sim.report import Report

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    """A plan of two stages in `p.json`, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    words = ["gpt-tiny", "--cluster", "1x4xV100-32GB", "--stages", "2", "--micro-batches", "4"]
    assert main(["plan", *words, "--json", "p.json"]) == 0
    capsys.readouterr()
    return json.loads(Path("p.json").read_text())


def test_it_says_what_the_plan_said(plan: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "p.json", "--json", "-"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    report = Report.from_dict(json.loads(shown.out))
    for key in ("fits", "step_seconds", "samples_per_second", "joules_per_step"):
        assert getattr(report, key) == plan[key]
    needed = [d.memory.total + d.memory.reserve for d in report.devices]
    assert needed == [d["peak_bytes"] for d in plan["devices"]]
    assert {event.kind for event in report.events} >= {"F", "B"}


def test_its_files(plan: Any, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--html", "r.html", "--trace", "t.json", "--json", "r.json"]
    assert main(["simulate", "p.json", *files]) == 0
    out = capsys.readouterr().out
    assert f"p.json, model {plan['model_hash']}" in out
    assert "written: r.json, r.html, t.json" in out
    assert "stage" in Path("r.html").read_text()
    names = {e["name"] for e in json.loads(Path("t.json").read_text())["traceEvents"]}
    assert "thread_name" in names
    assert json.loads(Path("r.json").read_text())["num_micro_batch"] == 4


def test_standard_input(
    plan: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(plan)))
    assert main(["simulate", "-"]) == 0
    assert "step time" in capsys.readouterr().out


def test_it_needs_no_torch(plan: Any) -> None:
    code = (
        "import sys\nfrom whale.cli.main import main\nassert main(['simulate', 'p.json']) == 0\n"
        "sys.exit('torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_a_plan_that_does_not_fit(plan: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for device in plan["prices"]["devices"]:
        device["capacity_bytes"] = 1000
    Path("p.json").write_text(json.dumps(plan))
    assert main(["simulate", "p.json"]) == 1
    shown = capsys.readouterr()
    assert "OVER by" in shown.out
    assert shown.err.startswith("whale simulate: does not fit: rank ")
    assert "(and 3 more of 4 devices)" in shown.err


def without_prices(plan: Any) -> Any:
    return {**plan, "prices": None}


def of_another_schema(plan: Any) -> Any:
    return {**plan, "schema": 99}


def with_a_price_missing(plan: Any) -> Any:
    return {**plan, "prices": {**plan["prices"], "stages": plan["prices"]["stages"][1:]}}


def with_a_rank_that_is_not_there(plan: Any) -> Any:
    stages = [{**s, "replicas": [{"ranks": [77], "weight": 1}]} for s in plan["stages"]]
    return {**plan, "stages": stages}


def with_a_key_missing(plan: Any) -> Any:
    return {key: value for key, value in plan.items() if key != "homes"}


def with_a_text_for_a_bound(plan: Any) -> Any:
    return {**plan, "prices": {**plan["prices"], "lower_bound_s": "abc"}}


def with_a_time_that_is_no_number(plan: Any) -> Any:
    first, *others = plan["prices"]["stages"]
    stages = [{**first, "forward_s": float("nan")}, *others]
    return {**plan, "prices": {**plan["prices"], "stages": stages}}


def with_rows_missing(plan: Any) -> Any:
    return {**plan, "batch_rows": -9}


def a_list(plan: Any) -> Any:
    return [plan]


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (without_prices, "the plan has no prices"),
        (of_another_schema, "the plan has schema 99"),
        (with_a_price_missing, "is not a plan: KeyError"),
        (with_a_rank_that_is_not_there, "uses rank 77"),
        (with_a_key_missing, "the plan has no key 'homes'"),
        (with_a_text_for_a_bound, "lower_bound_s = 'abc'"),
        (with_a_time_that_is_no_number, "forward_s = nan"),
        (with_rows_missing, "plan"),
        (a_list, "is not a plan"),
    ],
)
def test_a_broken_plan_is_refused(
    broken: Any, message: str, plan: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("p.json").write_text(json.dumps(broken(plan)))
    assert main(["simulate", "p.json"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message in shown.err
    assert "hint: " in shown.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no.json"], "plan 'no.json': No such file"),
        (["p.json", "--html", "no/f"], "--html no/f: there is no folder"),
        (["p.json", "--json", "."], "--json .: is a folder"),
        (["p.json", "--html", "-"], "only --json can go to standard output"),
        ([], "required: PLAN.json"),
        (["text"], "is not a plan: JSONDecodeError"),
    ],
)
def test_bad_input(
    words: list[str], message: str, plan: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    del plan
    Path("text").write_text("hello")
    assert main(["simulate", *words]) == 2
    assert message in capsys.readouterr().err
