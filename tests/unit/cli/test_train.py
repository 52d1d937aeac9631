"""`whale train`, `whale generate`, `whale search`: a small model through all three, and errors."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.unit.training.tiny import TOML, losses
from whale.cli.main import main
from whale.training.folder import RunFolder
from whale.training.png import find_picture, write_png

EMOJI = "🐶/twemoji"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("train")
    (folder / "tiny.toml").write_text(TOML, encoding="utf-8")
    flags = ["--set", "watch.num_evaluated=2", "--set", "objectives.draw=1"]
    out = str(folder / "out")
    assert main(["train", str(folder / "tiny.toml"), "--out", out, "--steps", "2", *flags]) == 0
    return out


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 2
    return capsys.readouterr().err


# ---- train ----


def test_folders_are_numbered_and_resumed(capsys: pytest.CaptureFixture[str]):
    Path("tiny.toml").write_text(TOML, encoding="utf-8")
    flags = ["--steps", "1", "--set", "watch.num_ranked=0", "--set", "watch.num_evaluated=1"]
    assert main(["train", "tiny.toml", *flags]) == 0
    assert main(["train", "tiny.toml", *flags]) == 0
    assert sorted(os.listdir("runs")) == ["tiny", "tiny-2"]
    assert "runs/tiny-2/report.html" in capsys.readouterr().out
    again = ["train", "tiny.toml", *flags, "--out", "runs/tiny", "--resume"]
    assert "runs/tiny has done 1 of 1 steps" in refused(capsys, *again)
    flags[1] = "3"
    assert main(["train", "tiny.toml", *flags, "--out", "runs/tiny", "--resume"]) == 0
    assert list(losses(RunFolder(Path("runs/tiny")))) == [1, 2, 3]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["m6-tyni"], "did you mean 'm6-tiny'?"),
        (["m6-tiny", "--set", "optimizer.lrr=1"], "did you mean 'lr'?"),
        (["m6-tiny", "--step", "0"], "steps 0"),
        (["m6-tiny", "--stepps", "3"], "did you mean --steps?"),
        (["m6-tiny", "-n", "0"], "-n 0; allowed: 1 or more"),
        (["m6-tiny", "-n", "64"], "batch_rows 32 on 64 rank(s)"),
        (["m6-tiny", "--resume"], "there is no run 'm6-tiny' below runs/"),
        (["m6-tiny", "--out", "full"], "full already holds something else"),
        (["m6-tiny", "--set", "data.folder=nowhere"], "nowhere has no captions.jsonl"),
    ],
)
def test_wrong_runs(capsys: pytest.CaptureFixture[str], flags: list[str], message: str):
    Path("full").mkdir()
    Path("full/x").write_text("")
    error = refused(capsys, "train", *flags)
    assert message in error
    assert "Traceback" not in error
    assert not Path("runs").exists()


def test_a_folder_is_not_overwritten(capsys: pytest.CaptureFixture[str], checkpoint: str):
    error = refused(capsys, "train", "m6-tiny", "--out", checkpoint)
    assert "already holds another run" in error
    assert "--resume" in error


# ---- generate ----


@pytest.mark.parametrize(
    "flags",
    [
        ["--image", EMOJI],
        ["--image", "1F436", "--lang", "zh", "--temperature", "1", "--top-k", "5"],
        ["--image", EMOJI, "--ask", "Which group does this picture belong to?"],
        ["--text", "Once", "--seed", "3", "--length", "4"],
    ],
)
def test_generate_writes_one_text(
    capsys: pytest.CaptureFixture[str], checkpoint: str, flags: list[str]
):
    assert main(["generate", checkpoint, *flags]) == 0
    said = capsys.readouterr().out
    assert said.endswith("\n")
    assert main(["generate", f"{checkpoint}/checkpoint", *flags]) == 0
    assert capsys.readouterr().out == said


def test_generate_draws_a_png_that_can_be_read_again(
    capsys: pytest.CaptureFixture[str], checkpoint: str
):
    assert main(["generate", checkpoint, "--draw", "dog", "--out", "dog.png"]) == 0
    assert capsys.readouterr().out == "dog.png\n"
    image = pytest.importorskip("PIL.Image")
    with image.open("dog.png") as picture:
        assert picture.size == (256, 256)
    assert main(["generate", checkpoint, "--image", "dog.png"]) == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "one of the arguments --image --text --draw is required"),
        (["--image", EMOJI, "--text", "a"], "not allowed with argument"),
        (["--draw", "dog"], "--draw without --out"),
        (["--text", "a", "--out", "x.png"], "--out without --draw"),
        (["--text", "a", "--ask", "b"], "--ask without --image"),
        (["--text", "a", "--lang", "fr"], "--lang 'fr'"),
        (["--text", "a", "--temperature", "-1"], "temperature -1.0"),
        (["--image", "nowhere.png"], "neither a file nor an emoji"),
        (["--image", "🐶/naoto"], "style 'naoto'"),
        (["--draw", "dog", "--out", "no/such/x.png"], "there is no folder"),
    ],
)
def test_generate_refuses(
    capsys: pytest.CaptureFixture[str], checkpoint: str, flags: list[str], message: str
):
    assert message in refused(capsys, "generate", checkpoint, *flags)


def test_a_model_that_never_learned_to_draw(capsys: pytest.CaptureFixture[str], checkpoint: str):
    shutil.copytree(checkpoint, "blind")
    Path("blind/model/image_codes.safetensors").unlink()
    assert "no image codes" in refused(capsys, "generate", "blind", "--draw", "a", "--out", "a.png")


def test_a_checkpoint_that_is_none(capsys: pytest.CaptureFixture[str]):
    assert "there is no folder nowhere" in refused(capsys, "generate", "nowhere", "--text", "a")
    Path("empty").mkdir()
    assert "no model was trained there" in refused(capsys, "search", "empty", "--text", "a")


# ---- search ----


def test_search_ranks_pictures_and_texts(capsys: pytest.CaptureFixture[str], checkpoint: str):
    write_folder(Path("mine"))
    for flags in (["--text", "a dog"], ["--image", "mine/0.png"]):
        assert main(["search", checkpoint, *flags, "--in", "mine", "--top", "2"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines] == ["1", "2"]
        scores = [float(line.split()[1]) for line in lines]
        assert scores == sorted(scores, reverse=True)


def test_search_refuses(capsys: pytest.CaptureFixture[str], checkpoint: str):
    assert "--top 0" in refused(capsys, "search", checkpoint, "--text", "a", "--top", "0")
    error = refused(capsys, "search", checkpoint, "--text", "a", "--style", "nota")
    assert "style 'nota'" in error
    assert "captions.jsonl" in refused(capsys, "search", checkpoint, "--text", "a", "--in", ".")


def write_folder(path: Path) -> None:
    pytest.importorskip("PIL")
    emoji = find_picture(EMOJI, 32)
    path.mkdir()
    for i in range(3):
        write_png(str(path / f"{i}.png"), emoji, 1)
    lines = [f'{{"image": "{i}.png", "en": "dog {i}"}}' for i in range(3)]
    (path / "captions.jsonl").write_text("\n".join(lines), encoding="utf-8")
