"""Run files: presets, settings on top, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.training.tiny import TOML, tiny_run
from whale.errors import ConfigError
from whale.training.run import find_run, preset_names, run_of


def test_every_preset_reads_and_survives_json():
    assert {"m6-tiny", "m6-small"} <= set(preset_names())
    for name in preset_names():
        run = find_run(name)
        assert run.name == name
        assert run_of(json.loads(json.dumps(run.to_dict()))) == run


def test_the_preset_of_make_train_is_data_and_expert_parallel_on_four_ranks():
    run = find_run("m6-tiny")
    assert (run.parallel.layout, run.parallel.num_ranks) == ("expert", 4)


def test_a_file_with_settings_on_top(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_text(TOML, encoding="utf-8")
    run = find_run(
        str(path),
        ["optimizer.lr=0.5", "parallel.layout=expert", "data.weights.pictures=2", "seed=3"],
        steps=9,
    )
    assert run.name == "mine"
    assert (run.steps, run.optimizer.lr, run.parallel.layout, run.seed) == (9, 0.5, "expert", 3)
    assert run.data.weights == {"pictures": 2.0}
    assert run.config().dim == 16


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["optimizer.lrr=1"], r"unknown key 'lrr' in \[optimizer\]\n  hint: did you mean 'lr'"),
        (["step=1"], "unknown key 'step'\n  hint: did you mean 'steps'"),
        (["model.num_expert=1"], "unknown key 'num_expert' in .*\n.*'num_experts'"),
        (["model.preset=m6-tin"], "model.preset 'm6-tin'\n  hint: did you mean 'm6-tiny'"),
        (["parallel.layout=experts"], "layout 'experts'\n  hint: did you mean 'expert'"),
        (["data.styles=['nota']"], "data.styles 'nota'\n  hint: did you mean 'noto'"),
        (["precision=bfloat"], "precision 'bfloat'\n  hint: did you mean 'bfloat16'"),
        (["data.vary=true"], "data.vary is True"),
        (["data.vary=strang"], "data.vary 'strang'\n  hint: did you mean 'strong'"),
        (["model.stem=conv", "model.image_size=24", "model.patch_size=6"], "patch_size 6 with"),
        (["steps=0"], "steps 0\n  hint: allowed: 1 or more"),
        (["steps=x"], "steps is 'x'\n  hint: it must be of the kind int"),
        (["steps=true"], "steps is True"),
        (["optimizer=1"], "optimizer is 1; it has keys of its own"),
        (["seed.x=1", "seed.y.z=1"], "seed"),
        (["optimizer.beta1=1.5"], "beta1 1.5\n  hint: allowed: 0 to 1"),
        (["pseudo_steps=6"], "pseudo_steps 6 of 6 steps"),
        (["objectives.captions=1"], "did you mean 'caption'"),
        (["data.styles=[]"], "nothing to learn from"),
        (["model.num_experts=0", "parallel.layout=expert"], "no experts"),
        (["steps"], "--set 'steps'; allowed: key=value"),
    ],
)
def test_what_is_refused(tmp_path: Path, settings: list[str], message: str):
    path = tmp_path / "mine.toml"
    path.write_text(TOML, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        find_run(str(path), settings)


def test_names_and_files_that_are_not_there(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"presets: m6-small, m6-tiny\n.*did you mean 'm6-tiny'"):
        find_run("m6-tyni")
    broken = tmp_path / "broken.toml"
    broken.write_text("steps =", encoding="utf-8")
    with pytest.raises(ConfigError, match="broken.toml cannot be read"):
        find_run(str(broken))
    broken.write_text("steps = 1", encoding="utf-8")
    with pytest.raises(ConfigError, match="'model' is missing"):
        find_run(str(broken))


def test_a_run_is_checked_however_it_is_made():
    with pytest.raises(ConfigError, match="batch_rows 0"):
        tiny_run(batch_rows=0)
