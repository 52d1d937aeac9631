"""What a run tells: the progress line, the metrics file."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import pytest

from whale.training import record
from whale.training.progress import Progress, Reading, clock, line
from whale.training.record import Recorder, read

READING = Reading(
    step=50,
    loss=2.34567,
    tokens_per_second=12345.6,
    step_seconds=0.25,
    lr=1e-3,
    balance=1.5,
    dropped=0.0,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_line():
    assert line(READING, 400) == (
        "step  50/400  loss 2.3457  ETA 1:28  0.250 s/step  12,346 tokens/s  busiest expert 1.50x  "
        "dropped 0.0%"
    )
    assert clock(3725) == "1:02:05"


def test_a_dense_model_has_no_experts_to_tell_of():
    reading = Reading(step=1, loss=1.0, tokens_per_second=1.0, step_seconds=1.0, lr=0.1)
    assert "expert" not in line(reading, 2)


def test_lines_every_few_steps_where_there_is_no_terminal():
    out = io.StringIO()
    progress = Progress(400, silent=False, every=10, out=out)
    assert [s for s in range(1, 32) if progress.wants(s)] == [1, 10, 20, 30]
    progress.show(READING)
    progress.say("a word")
    assert out.getvalue() == f"{line(READING, 400)}\na word\n"


def test_one_line_rewritten_on_a_terminal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "60")
    out = Terminal()
    progress = Progress(400, silent=False, every=10, out=out)
    assert progress.wants(7)
    progress.show(READING)
    progress.show(READING)
    progress.say("a word")
    text = line(READING, 400)[:59]
    assert out.getvalue() == f"\r{text}\r{text}\na word\n"


def test_other_ranks_are_silent():
    out = io.StringIO()
    progress = Progress(400, silent=True, every=1, out=out)
    progress.show(READING)
    progress.say("a word")
    assert not out.getvalue()


def test_metrics_go_on_where_the_checkpoint_was(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    first = Recorder(path, done=0)
    for step in (1, 2, 3):
        first.add("train", step, {"loss": float(step)})
    first.add("sample", 3, {"said": "狗"})
    first.close()
    with path.open("a", encoding="utf-8") as file:
        file.write('{"kind": "tra')
    second = Recorder(path, done=2)
    second.add("train", 3, {"loss": 9.0})
    second.close()
    assert [(r["step"], r["loss"]) for r in read(path)] == [(1, 1.0), (2, 2.0), (3, 9.0)]


class Events:
    """Stands for TensorBoard's writer."""

    def __init__(self, folder: str) -> None:
        self.folder, self.added = folder, []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.added.append((name, value, step))

    def add_text(self, name: str, value: str, step: int) -> None:
        self.added.append((name, value, step))

    def close(self) -> None:
        self.added.append("closed")


def test_tensorboard_gets_the_same_where_it_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    module = SimpleNamespace(SummaryWriter=Events)
    monkeypatch.setattr(record, "import_module", lambda name: module)
    recorder = Recorder(tmp_path / "metrics.jsonl", done=0)
    recorder.add("train", 1, {"loss": 2.0, "said": "dog", "more": {}})
    recorder.close()
    assert recorder.note is None
    assert recorder.events.folder == str(tmp_path / "tensorboard")
    assert recorder.events.added == [("train/loss", 2.0, 1), ("train/said", "dog", 1), "closed"]


def test_a_note_where_tensorboard_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(record, "import_module", missing)
    recorder = Recorder(tmp_path / "metrics.jsonl", done=0)
    recorder.close()
    assert "pip install tensorboard" in str(recorder.note)
