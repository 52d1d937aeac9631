"""A run on two ranks learns what it learns on one, in both layouts, and goes on after a stop."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.ranks import run_ranks
from tests.unit.training.tiny import losses, tiny_run, trained
from whale.training import folder as folders
from whale.training.folder import RunFolder, load_trained, start
from whale.training.loop import train
from whale.training.run import Run

pytestmark = pytest.mark.usefixtures("untried")

WATCH = {
    "print_every": 1,
    "num_evaluated": 2,
    "num_ranked": 0,
    "sample_every": 2,
    "evaluate_every": 3,
}


def on_rank(run: Run, path: str, resume: bool, until: int | None) -> None:
    train(run, RunFolder(Path(path)), resume=resume, until=until)


@pytest.mark.every(2)
@pytest.mark.parametrize("layout", ["data", "expert"])
def test_two_ranks_are_one(tmp_path: Path, layout: str):
    run = tiny_run(watch=WATCH, parallel={"layout": layout, "num_ranks": 2})
    alone = trained(tiny_run(watch=WATCH), tmp_path / "alone")
    pair = start(run, str(tmp_path / "pair"))
    run_ranks(2, on_rank, run, str(pair.path), False, 3)
    folders.resume(run, str(pair.path))
    run_ranks(2, on_rank, run, str(pair.path), True, None)
    ours, theirs = losses(pair), losses(alone)
    assert ours == pytest.approx(theirs, rel=2e-4)
    a, b = (load_trained(f.path).model.state_dict() for f in (pair, alone))
    worst = max(float((a[name] - b[name]).abs().max()) for name in b)
    assert worst < 2e-2 * max(float(x.abs().max()) for x in b.values())
    assert all(torch.isfinite(x).all() for x in a.values())


@pytest.mark.full
@pytest.mark.parametrize("layout", ["data", pytest.param("expert", marks=pytest.mark.full)])
def test_shared_layers_on_two_ranks(tmp_path: Path, layout: str):
    model = {**tiny_run().model, "num_layers": 4}
    parallel = {"layout": layout}
    run = tiny_run(model=model, pseudo_steps=2, steps=4, watch=WATCH, parallel=parallel)
    alone = trained(run, tmp_path / "alone")
    pair = start(run, str(tmp_path / "pair"))
    run_ranks(2, on_rank, run, str(pair.path), False, None)
    assert losses(pair) == pytest.approx(losses(alone), rel=2e-4)
