"""Fits all-reduce times by group size, `seconds = latency + 2 (n - 1) / n * bytes / bandwidth`.

Place in the flow: where `whale/cost/comm.py` has FITS and LAUNCH_S from, and the table of device
types its latency of a hop over NVLink. Least squares of the relative error, so that small messages
count as much as large ones; the latencies of a GPU are then fitted by a launch and 2 (n - 1) hops.

    python benchmarks/fit_nccl.py nccl_allreduce.csv

The CSV has the columns gpu, num_gpus, bytes and seconds (nccl-tests' all_reduce_perf prints them).
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Point = tuple[float, float]
"""x and y of a line; for times, bytes that cross the bus and seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """One group size of one GPU; errors are relative."""

    latency_s: float
    bytes_per_s: float
    mean_error: float
    max_error: float


def fit_line(points: Sequence[Point], *, relative: bool) -> tuple[float, float]:
    """Intercept and slope by least squares; `relative` weighs each point by 1 / y^2."""
    w = [1 / y**2 if relative else 1.0 for _, y in points]
    total = sum(w)
    mean_x = sum(k * x for k, (x, _) in zip(w, points, strict=True)) / total
    mean_y = sum(k * y for k, (_, y) in zip(w, points, strict=True)) / total
    up = sum(k * (x - mean_x) * (y - mean_y) for k, (x, y) in zip(w, points, strict=True))
    down = sum(k * (x - mean_x) ** 2 for k, (x, _) in zip(w, points, strict=True))
    slope = up / down
    return mean_y - slope * mean_x, slope


def fit_group(num_gpus: int, times: Iterable[Point]) -> Fit:
    """The line through (bytes, seconds) of an all-reduce over `num_gpus`."""
    points = [(2 * (num_gpus - 1) / num_gpus * nbytes, seconds) for nbytes, seconds in times]
    latency, per_byte = fit_line(points, relative=True)
    errors = [abs((latency + per_byte * x) / y - 1) for x, y in points]
    return Fit(
        latency_s=latency,
        bytes_per_s=1 / per_byte,
        mean_error=sum(errors) / len(errors),
        max_error=max(errors),
    )


def fit_hops(latencies: Mapping[int, float]) -> tuple[float, float]:
    """Launch and hop of a GPU: a ring of n takes 2 (n - 1) hops after its launch."""
    return fit_line([(2 * (n - 1), s) for n, s in latencies.items()], relative=False)


def main() -> None:
    """Prints the constants as `comm.py` has them, with the error of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("csv", type=Path)
    times: dict[str, dict[int, list[Point]]] = defaultdict(lambda: defaultdict(list))
    with parser.parse_args().csv.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            point = (float(row["bytes"]), float(row["seconds"]))
            times[row["gpu"]][int(row["num_gpus"])].append(point)
    for gpu, groups in times.items():
        fits = {n: fit_group(n, points) for n, points in groups.items()}
        print(f"{gpu}: (latency_s, bytes_per_s) by group size")
        for n, fit in fits.items():
            print(
                f"  {n}: ({fit.latency_s * 1e6:.1f}e-6, {fit.bytes_per_s / 1e9:.1f}e9),"
                f"  # error {fit.mean_error:.1%} mean, {fit.max_error:.1%} at most"
            )
        launch, hop = fit_hops({n: fit.latency_s for n, fit in fits.items()})
        print(f"  launch {launch * 1e6:.1f}e-6 s, hop {hop * 1e6:.2f}e-6 s")


if __name__ == "__main__":
    main()
