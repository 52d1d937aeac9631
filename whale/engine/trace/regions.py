"""Regions: checkpoints (`torch.utils.checkpoint`) in the glue between stages.

Place in the flow: `engine.trace` sees through a checkpoint and marks the operations inside;
`engine.lower.stages` runs them under a checkpoint again, stage by stage, so that a pipeline keeps
the memory it saves. Inside a Layer a checkpoint is the user's own and runs as it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from whale.engine.trace.program import Op
from whale.errors import CaptureError


@dataclass(frozen=True, slots=True)
class Region:
    """One call of checkpoint: its number in the forward, and its own way to save some values."""

    number: int
    context_fn: Callable[[], Any] | None


class Regions:
    """The checkpoints of one run of the glue."""

    def __init__(self) -> None:
        self.current: Region | None = None
        self._count = 0

    @contextmanager
    def enter(
        self, inputs: list[torch.Tensor], options: dict[str, Any], where: str
    ) -> Iterator[None]:
        """The function of a checkpoint runs inside; one in another belongs to the outer."""
        nothing = torch.is_grad_enabled() and not any(t.requires_grad for t in inputs)
        if options["use_reentrant"] and nothing:
            raise CaptureError(
                "a checkpoint between stages has use_reentrant=True and no input that requires a "
                "gradient: torch gives no gradient to what is inside",
                hint="checkpoint(..., use_reentrant=False) has no such limit",
                where=where,
            )
        outer = self.current
        if outer is None:
            self.current = Region(self._count, options.get("context_fn"))
            self._count += 1
        try:
            yield
        finally:
            self.current = outer


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive operations of a stage; those of a region, with what others read of them."""

    ops: list[Op]
    region: Region | None
    reads: tuple[int, ...] = ()
    makes: tuple[int, ...] = ()


def segments(ops: Sequence[Op], kept: set[int]) -> list[Segment]:
    """A stage's operations, cut at the borders of regions; `kept` are values read after all."""
    runs: list[list[Op]] = []
    for op in ops:
        if runs and runs[-1][0].region == op.region:
            runs[-1].append(op)
        else:
            runs.append([op])
    found = []
    for index, run in enumerate(runs):
        region = run[0].region
        if region is None:
            found.append(Segment(run, None))
            continue
        made = {value for op in run for value in op.outputs}
        later = {v for other in runs[index + 1 :] for op in other for v in op.inputs} | kept
        reads = dict.fromkeys(v for op in run for v in op.inputs if v not in made)
        found.append(Segment(run, region, tuple(reads), tuple(sorted(made & later))))
    return found


def run_region(
    segment: Segment,
    values: dict[int, torch.Tensor],
    run: Callable[[Sequence[Op], dict[int, torch.Tensor]], Any],
) -> None:
    """Runs a region's operations under a checkpoint; `values` gets what others read."""
    region = segment.region
    assert region is not None

    def inside(*read: torch.Tensor) -> tuple[torch.Tensor, ...]:
        own = dict(zip(segment.reads, read, strict=True))
        run(segment.ops, own)
        return tuple(own[value] for value in segment.makes)

    more: dict[str, Any] = {} if region.context_fn is None else {"context_fn": region.context_fn}
    made = checkpoint(
        inside,
        *(values[value] for value in segment.reads),
        use_reentrant=False,
        preserve_rng_state=False,
        **more,
    )
    values.update(zip(segment.makes, made, strict=True))
