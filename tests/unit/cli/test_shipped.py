"""Graphs of presets that come with the package: what a capture gives, and no torch to load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from whale.cli import shipped
from whale.cli.captured import captured
from whale.engine.capture.layers import find_layers
from whale.models.registry import PRESETS

ROOT = Path(__file__).resolve().parents[3]
CHEAP = [name for name in PRESETS if name.endswith(("-tiny", "-nano"))]
REGENERATE = "write them again: PYTHONPATH=. python scripts/preset_graphs.py"


def started(*words: str, code: str = "sys.exit(main(sys.argv[1:]))") -> Any:
    """A command in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", f"import sys\nfrom whale.cli.main import main\n{code}", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_every_preset_is_shipped() -> None:
    abouts = {name: preset.about for name, preset in PRESETS.items()}
    assert shipped.shipped() == dict(sorted(abouts.items())), REGENERATE
    assert shipped.load("no-such-preset") is None


@pytest.mark.every(3)
@pytest.mark.parametrize("name", [*CHEAP, "gnmt", "resnet-50-100k"])
def test_shipped_graphs_are_what_a_capture_gives(name: str) -> None:
    assert shipped.load(name) == captured(name), REGENERATE


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in CHEAP])
def test_shipped_graphs_are_of_the_presets_models(name: str) -> None:
    """The figures are compared on the small siblings, built of the same modules."""
    preset, found = PRESETS[name], shipped.load(name)
    assert found is not None
    with torch.device("meta"):
        model = preset.build()
    if preset.annotate is not None:  # what is tagged apart is a Layer of its own
        preset.annotate(model)
    ours = {p.name: p.shape for p in found.graph.parameters}
    assert ours == {n: tuple(p.shape) for n, p in model.named_parameters()}, REGENERATE
    kinds = {path: type(layer).__name__ for path, layer in find_layers(model).items()}
    assert {x.path: x.kind for x in found.graph.layers} == kinds, REGENERATE
    assert (found.rows, found.seq) == (preset.rows, preset.seq), REGENERATE
    assert (found.precision, found.optimizer) == (preset.precision, preset.optimizer), REGENERATE
    assert found.num_micro_batch == preset.num_micro_batch, REGENERATE
    assert found.annotated == (preset.annotate is not None), REGENERATE


def test_a_shipped_graph_needs_no_torch() -> None:
    code = "status = main(sys.argv[1:])\nassert 'torch' not in sys.modules\nsys.exit(status)"
    done = started(
        "plan", "bert-large", "--cluster", "1x8xV100-32GB+1x8xP100-16GB", "--json", "-", code=code
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_ranks"] == 16
    assert started("plan", "bert-large", code=code).returncode == 2
