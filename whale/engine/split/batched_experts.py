"""Batched experts: modules whose rows are sorted by expert, found by following them.

Place in the flow: asked by `engine.split.match` for the trace of a Layer. A module that counts its
experts, whose parameters are stacks of one matrix each, and that is called with one tensor, is
followed with experts as units (`engine.split.units`): where they stay apart from the input's rows
to the output's, each member can run its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

from torch import nn

from whale.engine.split.heads import Cut, Inside
from whale.engine.split.rerun import reruns
from whale.engine.split.units import UnitFollower
from whale.ir.model_graph import SplitOption
from whale.ir.sharding import DimSharding


def batched_options(inside: Inside, names: dict[int, str]) -> Iterator[SplitOption]:
    """Batched experts, by expert."""
    for path, calls in inside.calls.items():
        module = inside.modules[path]
        if len(calls) != 1 or not _looks_like(module):
            continue
        count = int(module.num_experts)  # type: ignore[arg-type]
        follower = UnitFollower(inside, path, count)
        follower.cut_state = {names[id(p)]: Cut(0, 1) for p in module.parameters()}
        if not follower.follow_rows():
            continue
        cut = DimSharding(dim=0, sections=(count,), units=count)
        option = SplitOption(
            rule="batched experts",
            path=path,
            modules=tuple(f"{path}.{n}" if n else path for n, _ in module.named_modules()),
            units=count,
            unit="experts",
            params=tuple((names[id(p)], cut) for p in module.parameters()),
        )
        found = reruns(option, inside, follower, path)
        if found is not None:
            yield found


def _looks_like(module: nn.Module) -> bool:
    count = getattr(module, "num_experts", None)
    held = list(module.parameters())
    if type(count) is not int or count < 2 or not held:
        return False
    if any(p.dim() != 3 or p.shape[0] != count for p in held):
        return False
    return len(inspect.signature(type(module).forward).parameters) == 2
