"""What a run tells while it trains: one line that is rewritten on a terminal, lines elsewhere.

Place in the flow: rank 0 of the loop; `Reading` is also what `record` writes.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from typing import TextIO


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A stretch of steps, as measured."""

    step: int
    """The last of them, from 1."""
    loss: float
    tokens_per_second: float
    """Positions of the model: patches, text and padding."""
    step_seconds: float
    lr: float
    grad_norm: float | None = None
    balance: float | None = None
    """Tokens of the busiest expert over the mean, in the worst layer; 1 is even."""
    dropped: float | None = None
    """Share of tokens that found no room, in the worst layer."""


class Progress:
    """Shows a run on a stream; on all ranks but 0 nothing."""

    def __init__(self, steps: int, *, silent: bool, every: int, out: TextIO | None = None) -> None:
        self.steps, self.silent, self.every = steps, silent, every
        self.out = out if out is not None else sys.stdout
        self.live = self.out.isatty()
        self._width = 0

    def wants(self, step: int) -> bool:
        """Whether a step is to be shown."""
        return self.live or step in (1, self.steps) or step % self.every == 0

    def show(self, reading: Reading) -> None:
        """The line of a step."""
        if self.silent or not self.wants(reading.step):
            return
        text = line(reading, self.steps)
        if not self.live:
            print(text, file=self.out, flush=True)
            return
        # A line that wraps cannot be rewritten.
        text = text[: shutil.get_terminal_size().columns - 1]
        # What is left of a longer line before it is wiped with spaces.
        print(f"\r{text:{self._width}}", end="", file=self.out, flush=True)
        self._width = len(text)

    def say(self, text: str) -> None:
        """A line that stays."""
        if self.silent:
            return
        if self._width:
            print(file=self.out)
            self._width = 0
        print(text, file=self.out, flush=True)


def line(reading: Reading, steps: int) -> str:
    """One line: where it is, how well, how fast, how even, how long still."""
    # By importance: a narrow terminal cuts the end off.
    parts = [
        f"step {reading.step:{len(str(steps))}}/{steps}",
        f"loss {reading.loss:.4f}",
        f"ETA {clock((steps - reading.step) * reading.step_seconds)}",
        f"{reading.step_seconds:.3f} s/step",
        f"{reading.tokens_per_second:6,.0f} tokens/s",
    ]
    if reading.balance is not None:
        parts.append(f"busiest expert {reading.balance:.2f}x")
        parts.append(f"dropped {reading.dropped or 0.0:.1%}")
    return "  ".join(parts)


def clock(seconds: float) -> str:
    """Minutes and seconds, with hours where there are any."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
