"""Recomputing: Layers of a copy whose forward runs again in the backward, as a plan says.

Place in the flow: a step of `engine.lower`, and of the trial of such a plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from whale.ir.plan import StageLayer
from whale.nn.forwards import replace_forward, take_hooks
from whale.runtime.recomputed import RecomputedForward, moved_in


def recompute_layers(
    layers: Iterable[StageLayer], modules: Mapping[str, nn.Module], changes: Iterable[str]
) -> None:
    """Puts it around those that do; `changes` are what forwards change in the model."""
    again = {layer.path: layer.recompute for layer in layers if layer.recompute}
    for path, keep in again.items():
        module = modules[path]
        moved = moved_in(module, path, changes)
        replace_forward(module, RecomputedForward(take_hooks(module), module, path, moved, keep))
