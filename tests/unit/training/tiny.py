"""A run so small that it trains in a second: what the tests of training share."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from whale.training.folder import RunFolder, start
from whale.training.loop import train
from whale.training.record import read
from whale.training.run import Run, run_of

TOML = """
steps = 6
batch_rows = 4

[model]
preset = "m6-tiny"
vocab_size = 700
num_codes = 16
dim = 16
num_layers = 2
num_heads = 2
ffn_dim = 32
num_experts = 4
moe_every = 2
dropout = 0.1

[parallel]
num_ranks = 1

[optimizer]
lr = 1e-2
warmup_steps = 1

[data]
styles = ["noto"]
languages = ["en"]
texts = []

# Image codes take a second to learn: only for the tests that draw.
[objectives]
draw = 0

[watch]
print_every = 2
num_evaluated = 4
num_ranked = 3
"""

TABLE: dict[str, Any] = {"name": "tiny", **tomllib.loads(TOML)}


def tiny_run(**changes: Any) -> Run:
    """The run with whole keys changed."""
    return run_of({**TABLE, **changes})


def trained(run: Run, path: Path, **how: Any) -> RunFolder:
    """Its folder, after training in this process."""
    folder = start(run, str(path))
    train(run, folder, **how)
    return folder


def losses(folder: RunFolder) -> dict[int, float]:
    """By step."""
    return {r["step"]: r["loss"] for r in read(folder.metrics) if r["kind"] == "train"}
