"""The folder of a run: what is where, whether it may be written to, and the model it holds.

Place in the flow: made by `whale train` before ranks start, filled by rank 0, read again by
`--resume`, `whale generate` and `whale search`.

    run.json                 the Run
    model/                   config.json, tokenizer.json, image_codes.safetensors
    checkpoint/              weights, optimizer, where the data stream is: what `Step.save` writes
    metrics.jsonl            a line for each step and each evaluation
    profile.json             what was measured of the machine first, if the run says so
    report.html              the plan, predicted against measured
    drawings.png             what it draws for names it learned, over the real pictures
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from whale.engine.checkpoint import read_state_dict
from whale.engine.checkpoint.load import Reader
from whale.errors import CheckpointError, ConfigError
from whale.models.m6.config import M6Config
from whale.models.m6.image_codes import ImageCodes
from whale.models.m6.model import M6
from whale.models.m6.tokenizer import Tokenizer
from whale.models.m6.trained import CODES, CONFIG, TOKENIZER, WEIGHTS, Trained
from whale.training.run import Run

RUNS = Path("runs")
"""Where folders go that nobody named."""

MAY_CHANGE = frozenset({"name", "steps", "parallel", "watch", "timeout_seconds"})
"""Keys of a Run that may be others when it is resumed: they change nothing that was learned."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths of a run."""

    path: Path

    @property
    def run(self) -> Path:
        """The Run, as JSON."""
        return self.path / "run.json"

    @property
    def model(self) -> Path:
        """What it takes, beside weights, to use the model."""
        return self.path / "model"

    @property
    def checkpoint(self) -> Path:
        """What `Step.save` writes."""
        return self.path / "checkpoint"

    @property
    def metrics(self) -> Path:
        """One JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def profile(self) -> Path:
        """What was measured of the machine, if it was."""
        return self.path / "profile.json"

    @property
    def report(self) -> Path:
        """The page."""
        return self.path / "report.html"

    @property
    def drawings(self) -> Path:
        """The sheet."""
        return self.path / "drawings.png"

    def extra(self) -> dict[str, Any]:
        """What the training loop saved with the checkpoint."""
        extra: dict[str, Any] = Reader(self.checkpoint).index["extra"]
        return extra


def start(run: Run, out: str | None) -> RunFolder:
    """A folder for a new run: the one named, or the first free one below `runs`."""
    if out is None:
        names = [run.name, *(f"{run.name}-{i}" for i in range(2, 10_000))]
        path = next(p for name in names if not (p := RUNS / name).exists())
    else:
        path = Path(out)
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            what = "another run" if (path / "run.json").is_file() else "something else"
            raise ConfigError(
                f"--out {path} already holds {what}",
                hint="name a new folder, or add --resume to go on with the run that is there",
            )
    folder = RunFolder(path)
    try:
        folder.model.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"--out {path}: {error.strerror}", hint="name a folder that can be made"
        ) from error
    folder.run.write_text(json.dumps(run.to_dict(), indent=1) + "\n", encoding="utf-8")
    return folder


def resume(run: Run, out: str | None) -> RunFolder:
    """The folder of a run that goes on: the one named, or the newest of this name below `runs`."""
    path = Path(out) if out is not None else _newest(run.name)
    folder = RunFolder(path)
    if not folder.run.is_file():
        raise ConfigError(
            f"--resume: {path} holds no run (it has no {folder.run.name})",
            hint="name the run's folder with --out, or leave --resume out",
        )
    done: int = folder.extra()["done"]
    if done >= run.steps:
        raise ConfigError(
            f"--resume: {path} has done {done} of {run.steps} steps",
            hint=f"there is nothing left to do; --steps {2 * done} would go on",
        )
    before = json.loads(folder.run.read_text(encoding="utf-8"))
    now = json.loads(json.dumps(run.to_dict()))
    for key in now:
        if key not in MAY_CHANGE and now[key] != before.get(key):
            raise ConfigError(
                f"--resume: {key} was {before.get(key)!r} in {path}, now it is {now[key]!r}",
                hint="give the same RUN and --set as before; steps, parallel and watch may differ",
            )
    folder.run.write_text(json.dumps(run.to_dict(), indent=1) + "\n", encoding="utf-8")
    return folder


def _newest(name: str) -> Path:
    found = [
        (p.stat().st_mtime, p)
        for p in (RUNS / name, *RUNS.glob(f"{name}-*"))
        if (p / "run.json").is_file()
    ]
    if not found:
        raise ConfigError(
            f"--resume: there is no run {name!r} below {RUNS}/", hint="name its folder with --out"
        )
    return max(found)[1]


# ---- the model -----------------------------------------------------------------------------------


def write_model(
    folder: RunFolder, config: M6Config, tokenizer: Tokenizer, codes: ImageCodes | None
) -> None:
    """What the checkpoint does not hold."""
    folder.model.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config.to_dict(), indent=1)
    (folder.model / CONFIG).write_text(text + "\n", encoding="utf-8")
    tokenizer.save(folder.model / TOKENIZER)
    if codes is not None:
        codes.save(folder.model / CODES)


def read_parts(folder: RunFolder) -> tuple[M6Config, Tokenizer, ImageCodes | None]:
    """What `write_model` wrote."""
    for name in (CONFIG, TOKENIZER):
        if not (folder.model / name).is_file():
            raise CheckpointError(
                f"{folder.path} has no {folder.model.name}/{name}: no model was trained there",
                hint="name the folder of a run: what `whale train` calls `run folder`",
            )
    values: Mapping[str, Any] = json.loads((folder.model / CONFIG).read_text(encoding="utf-8"))
    codes = folder.model / CODES
    return (
        M6Config.from_dict(values),
        Tokenizer.load(folder.model / TOKENIZER),
        ImageCodes.load(codes) if codes.is_file() else None,
    )


def load_trained(path: str | Path, device: str | torch.device = "cpu") -> Trained:
    """The model of a run's folder, of its checkpoint, or of a folder that `Trained.save` wrote."""
    path = Path(path)
    if not path.is_dir():
        raise CheckpointError(
            f"there is no folder {path}", hint="name the folder of a run, such as runs/m6-tiny"
        )
    if (path / WEIGHTS).is_file():
        return Trained.load(path, device)
    folder = RunFolder(path if (path / "model").is_dir() else path.resolve().parent)
    config, tokenizer, codes = read_parts(folder)
    with torch.device("meta"):
        model = M6(config)
    model = model.to_empty(device=device)
    missing, _ = model.load_state_dict(read_state_dict(folder.checkpoint), strict=False)
    # Counters of experts are not kept, but they have no values yet.
    for name, buffer in model.named_buffers():
        if name not in model.state_dict():
            buffer.zero_()
    if missing:
        raise CheckpointError(
            f"{folder.checkpoint} lacks {missing[0]}", hint="was it written by another model?"
        )
    return Trained(model=model.eval(), tokenizer=tokenizer, codes=codes)
