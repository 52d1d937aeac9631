"""Training in one process: files, resuming, pseudo-to-real, a user's own data."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.unit.training.tiny import losses, tiny_run, trained
from whale.errors import ConfigError
from whale.training import folder as folders
from whale.training.evaluate import END, Unigram
from whale.training.folder import load_trained
from whale.training.loop import phases, rate, train
from whale.training.png import write_png
from whale.training.record import read
from whale.training.run import Optimizer


def test_a_run_leaves_all_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = tiny_run(
        objectives={},
        watch={
            "print_every": 2,
            "num_evaluated": 4,
            "num_ranked": 3,
            "evaluate_every": 2,
            "sample_every": 3,
            "num_drawn": 2,
        },
    )
    folder = trained(run, tmp_path / "a")
    records = list(read(folder.metrics))
    kinds = [r["kind"] for r in records]
    assert kinds.count("train") == 6
    assert kinds.count("sample") == 4  # after step 3, and three at the end
    assert [r["step"] for r in records if r["kind"] == "held_out"] == [2, 4, 6]
    (scores,) = [r for r in records if r["kind"] == "scores"]
    assert scores["loss"]["unigram"] > 0
    assert set(scores["recall"]["text for a picture"]) == {"1", "5"}
    assert set(scores["questions"]) == {"groups en", "tags en"}
    assert 0 <= scores["other_style_match"] <= 1
    (drawings,) = [r for r in records if r["kind"] == "drawings"]
    assert len(drawings["names"]) == 2
    assert scores["drawn_match"] == np.mean(drawings["right"])
    # Two rows of twenty columns, twice as large.
    head = folder.drawings.read_bytes()[:24]
    assert struct.unpack(">II", head[16:]) == (20 * 32 * 2, 2 * 32 * 2)
    first = next(r for r in records if r["kind"] == "train")
    assert {"loss", "tokens_per_second", "step_seconds", "lr", "grad_norm", "balance"} <= set(first)
    assert folder.report.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    out = capsys.readouterr().out
    for text in ("nats per character, unigram", "predicted:", "measured:", "not seen", "report"):
        assert text in out
    model = load_trained(folder.path).model
    assert torch.isfinite(torch.cat([p.flatten() for p in model.parameters()])).all()


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path):
    run = tiny_run(watch={"print_every": 1, "num_evaluated": 2, "num_ranked": 0})
    whole = trained(run, tmp_path / "whole")
    half = trained(run, tmp_path / "half", until=3)
    assert list(losses(half)) == [1, 2, 3]
    train(run, folders.resume(run, str(half.path)), resume=True)
    assert losses(half) == losses(whole)
    ours, theirs = (load_trained(f.path).model.state_dict() for f in (half, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_another_run_is_not_resumed(tmp_path: Path):
    run = tiny_run(watch={"num_evaluated": 2, "num_ranked": 0})
    folder = trained(run, tmp_path / "a", until=2)
    with pytest.raises(ConfigError, match="--resume: batch_rows was 4 in .*, now it is 8"):
        folders.resume(tiny_run(batch_rows=8), str(folder.path))
    with pytest.raises(ConfigError, match="already holds another run"):
        folders.start(run, str(folder.path))
    with pytest.raises(ConfigError, match="holds no run"):
        folders.resume(run, str(tmp_path))


def test_layers_are_shared_first_and_then_their_own(tmp_path: Path):
    model = {**tiny_run().model, "num_layers": 4}
    run = tiny_run(model=model, pseudo_steps=3, watch={"num_evaluated": 2, "num_ranked": 0})
    shared = trained(run, tmp_path / "shared", until=2)
    weights = load_trained(shared.path).model
    a, b = (weights.blocks[i].attention.q_proj.weight for i in (0, 2))
    assert torch.equal(a, b)
    train(run, folders.resume(run, str(shared.path)), resume=True)
    weights = load_trained(shared.path).model
    a, b = (weights.blocks[i].attention.q_proj.weight for i in (0, 2))
    assert not torch.equal(a, b)
    assert losses(shared) == losses(trained(run, tmp_path / "whole"))


def test_a_folder_of_ones_own(tmp_path: Path):
    pytest.importorskip("PIL")
    rng = np.random.default_rng(0)
    lines = []
    for i in range(40):
        write_png(str(tmp_path / f"{i}.png"), rng.integers(0, 256, (32, 32, 3), np.uint8), 1)
        line = {"image": f"{i}.png", "question": "What?", "answer": f"number {i}"}
        lines.append(json.dumps(line | ({"en": f"picture {i}"} if i % 2 else {})))
    (tmp_path / "captions.jsonl").write_text("\n".join(lines), encoding="utf-8")
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(30):
        (texts / f"{i}.txt").write_text(f"A text of mine, number {i}.", encoding="utf-8")
    data = {"styles": [], "texts": [], "folder": str(tmp_path), "text_folder": str(texts)}
    run = tiny_run(steps=3, data=data, objectives={"ask": 1.0})
    folder = trained(run, tmp_path / "run")
    (scores,) = [r for r in read(folder.metrics) if r["kind"] == "scores"]
    assert set(scores["losses"]) == {"captions en", "text_folder"}
    assert set(scores["questions"]) == {"folder"}


def test_the_learning_rate_warms_up_and_falls():
    run = tiny_run(steps=100)
    (phase,) = phases(run)
    optimizer = Optimizer(lr=1.0, warmup_steps=9, final_share=0.1)
    rates = [rate(optimizer, step, phase, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9]
    assert rates[-1] == pytest.approx(0.1)
    assert rates[10:] == sorted(rates[10:], reverse=True)


def test_phases_cover_all_steps():
    run = tiny_run(pseudo_steps=2)
    assert [(p.start, p.stop, p.shared) for p in phases(run)] == [(0, 2, True), (2, 6, False)]


@pytest.mark.full
def test_the_seed_decides_weights_and_data(tmp_path: Path):
    watch = {"num_evaluated": 1, "num_ranked": 0}
    runs = [tiny_run(steps=1, seed=seed, watch=watch) for seed in (0, 0, 1)]
    first, same, other = (losses(trained(r, tmp_path / str(i))) for i, r in enumerate(runs))
    assert first == same
    assert first != other


def test_the_unigram_model_is_a_distribution():
    unigram = Unigram([["a", "a", "b", END]])
    seen = [2.718281828459045 ** -unigram.nats([c]) for c in ("a", "b", END, "never seen")]
    assert sum(seen) == pytest.approx(1.0)
