"""What a run measured, in files: a JSON line for each step and evaluation, and for TensorBoard.

Place in the flow: rank 0 of the loop. `metrics.jsonl` is always written; event files are where the
package `tensorboard` is installed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any


class Recorder:
    """Appends to the files of a run."""

    def __init__(self, metrics: Path, *, done: int) -> None:
        """Goes on after step `done`.

        What was written of later steps, by a run that was cut off after its checkpoint, will come
        again and is dropped.
        """
        kept = [record for record in read(metrics) if record["step"] <= done] if done else []
        self._file = metrics.open("w", encoding="utf-8")
        for record in kept:
            self._write(record)
        self._file.flush()
        self.events = _events(metrics.parent / "tensorboard")

    @property
    def note(self) -> str | None:
        """Why there are no event files, if there are none."""
        if self.events is not None:
            return None
        return "no TensorBoard files: `pip install tensorboard` to have them"

    def add(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """One record; numbers among the values also become TensorBoard's scalars."""
        self._write({"kind": kind, "step": step, **values})
        if self.events is None:
            return
        for name, value in values.items():
            if isinstance(value, int | float):
                self.events.add_scalar(f"{kind}/{name}", value, step)
            elif isinstance(value, str):
                self.events.add_text(f"{kind}/{name}", value, step)

    def flush(self) -> None:
        """What was added can now be read by others."""
        self._file.flush()

    def close(self) -> None:
        """Ends the files."""
        self._file.close()
        if self.events is not None:
            self.events.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record, ensure_ascii=False) + "\n")


def read(metrics: Path) -> Iterator[dict[str, Any]]:
    """The records of a file; a last line that was cut off is left out."""
    if not metrics.is_file():
        return
    for text in metrics.read_text(encoding="utf-8").split("\n"):
        try:
            yield json.loads(text)
        except ValueError:
            continue


def _events(folder: Path) -> Any:
    try:
        module = import_module("torch.utils.tensorboard")
    except ImportError:
        return None
    return module.SummaryWriter(str(folder))
