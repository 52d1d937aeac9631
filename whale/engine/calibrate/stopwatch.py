"""Stopwatch: seconds of work on a device, and the straight line through such measurements.

Place in the flow: under `engine.calibrate` and its parts. A GPU runs behind the host, so its work
is timed by events in its own queue; a CPU by the clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

Work = Callable[[], None]
Synchronize = Callable[[Work | None], None]
"""Called after every section of a measurement, as often on every rank, with the work just timed.

It returns once all ranks are through with theirs, and repeats that work until then."""

WARM_UP = 3
_AHEAD_S = 1e-3
_AHEAD_SIDE = 2048
_MOST_FILLS = 200
"""A GPU's queue holds about a thousand kernels; the host waits where it is full."""


class Stopwatch:
    """Marks points in a device's work and tells the seconds between them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self._filler: torch.Tensor | None = None
        self._fill_s = 0.0

    def mark(self) -> Any:
        """A point after all work given to the device so far."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def between(self, start: Any, end: Any) -> float:
        """Seconds from one mark to another; waits for the device to get there."""
        if not self.cuda:
            return float(end - start)
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def once(self, work: Work) -> float:
        """Seconds of one call, the host's part included."""
        self.synchronize()
        start = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - start

    def seconds(self, work: Work, *, target_s: float, rounds: int) -> float:
        """Seconds the device takes per call: the median of rounds of about `target_s`."""
        for _ in range(WARM_UP - 1):
            work()
        calls = min(max(int(target_s / max(self.once(work), 1e-9)), 1), 20)
        found = []
        for _ in range(rounds):
            self.ahead(_AHEAD_S)
            start = self.mark()
            for _ in range(calls):
                work()
            end = self.mark()
            found.append(self.between(start, end) / calls)
        return statistics.median(found)

    def ahead(self, seconds: float) -> None:
        """Gives a GPU so much to do that the host is ahead of it when the timed work begins.

        Otherwise small kernels would be timed by how fast the host launches them, which is
        measured apart. Products, because neighbours on the card are being timed too: passes over
        memory would take more from them than most work does.
        """
        if not self.cuda:
            return
        if self._filler is None:
            side = _AHEAD_SIDE
            self._filler = torch.zeros((2, side, side), dtype=torch.float32, device=self.device)
            self._fill(WARM_UP)
            self._fill_s = self.once(partial(self._fill, 8)) / 8
        self._fill(min(max(round(seconds / self._fill_s), 1), _MOST_FILLS))

    def _fill(self, count: int) -> None:
        assert self._filler is not None
        a, out = self._filler
        with torch.no_grad():
            for _ in range(count):
                torch.mm(a, a, out=out)


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(fixed, per unit) of seconds over size: the least squares of relative errors.

    Relative, because a size a thousand times smaller must count as much. Neither is negative, and
    the second is above 0.
    """
    last_x, last_y = max(points)
    weights = [1.0 / max(y, 1e-12) ** 2 for _, y in points]
    sw = sum(weights)
    sx = sum(w * x for w, (x, _) in zip(weights, points, strict=True))
    sy = sum(w * y for w, (_, y) in zip(weights, points, strict=True))
    sxx = sum(w * x * x for w, (x, _) in zip(weights, points, strict=True))
    sxy = sum(w * x * y for w, (x, y) in zip(weights, points, strict=True))
    spread = sw * sxx - sx * sx
    if len(points) < 2 or spread <= 1e-9 * sw * sxx:
        return 0.0, max(last_y, 1e-12) / last_x
    slope = (sw * sxy - sx * sy) / spread
    fixed = (sy - slope * sx) / sw
    if fixed < 0.0:
        fixed, slope = 0.0, sxy / sxx
    if slope <= 0.0:
        # Times that do not grow with the size: all of it is fixed, and no size was large enough to
        # show a speed. The largest one's is a safe one.
        fixed, slope = min(y for _, y in points), max(last_y, 1e-12) / last_x
    return fixed, slope
