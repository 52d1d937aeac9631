"""Clusters side by side: a row for the best plan of a model on each.

Place in the flow: what `whale plan --compare` prints; `whale.cli.plan` makes the plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from whale.viz.units import joules, per_second, seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The best plan on one cluster, by the keys of its JSON; None where there is no plan at all."""

    cluster: str
    fits: bool
    strategy: str
    step_seconds: float | None = None
    samples_per_second: float | None = None
    joules_per_step: float | None = None
    lower_bound_seconds: float | None = None
    num_micro_batch: int | None = None


COMPARED = tuple(f.name for f in fields(Compared) if f.name != "cluster")
"""The keys of a plan that are compared."""

_HEAD = ("cluster", "step time", "samples/s", "energy/step", "fits", "strategy")
_RIGHT = ("step time", "samples/s", "energy/step")


def compared(rows: Sequence[Compared], width: int) -> list[str]:
    """A line for each cluster, in the order given; a strategy too long for `width` is cut."""
    cells = [_HEAD] + [
        (
            row.cluster,
            "-" if row.step_seconds is None else seconds(row.step_seconds),
            "-" if row.samples_per_second is None else per_second(row.samples_per_second),
            "-" if row.joules_per_step is None else joules(row.joules_per_step),
            "yes" if row.fits else "no",
            _short(row.strategy),
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(size) if name in _RIGHT else cell.ljust(size)
            for name, cell, size in zip(_HEAD, row, widths, strict=True)
        ).rstrip()
        for row in cells
    ]
    return [line if len(line) <= width else f"{line[: width - 2]}.." for line in lines]


def _short(strategy: str) -> str:
    """Of `stage 0: replicate on 8; ... (data parallel)`, the planner's own name for it."""
    *_, name = strategy.partition(" (")
    return name.removesuffix(")") if strategy.endswith(")") and name else strategy
