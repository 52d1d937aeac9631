"""Once: why a Layer's forward cannot run a second time, in the backward, as if it were the first.

Place in the flow: under `engine.capture.graph`. What is said here the planner believes when it
chooses what is recomputed; `engine.trials.again` tries what it chose on real rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import nn

from whale.runtime.generators import Asked

_PLAIN = (type(None), bool, int, float, complex, str, bytes, tuple, torch.Tensor)
_HOLDING = (list, dict, set, deque)
"""What a copy of tells how it was."""


class Seen(Protocol):
    """What a run on fakes showed."""

    order: list[str]
    once: dict[str, str]
    transformed: set[str]
    differentiates: bool
    changes: frozenset[str] | None
    asked: Asked


def once(path: str, layer: nn.Module, runs: Iterable[Seen]) -> str:
    """Why the forward of a Layer must not run again; empty: it may."""
    for run in runs:
        if run.changes is None or path not in run.order:
            return "its forward does not run on shapes alone"
        if path in run.once:
            return run.once[path]
        if path in run.transformed:
            return "it is called inside torch.func"
        if run.differentiates:
            return "a forward of the model asks for gradients itself"
        if run.asked.moved:
            return f"the model draws from {run.asked.moved[0]}"
        for name in sorted(run.changes):
            reason = _unsteady(path, layer, name)
            if reason:
                return reason
    return ""


def _unsteady(path: str, layer: nn.Module, name: str) -> str:
    """Whether what the forward changes is something of the Layer that cannot be put back."""
    prefix = f"{path}." if path else ""
    if not name.startswith(prefix):
        return ""
    owner, _, key = name.removeprefix(prefix).rpartition(".")
    try:
        module = layer.get_submodule(owner)
    except AttributeError:
        return f"its forward changes {name}"
    if key in module._parameters:
        return f"its forward writes to the parameter {name}"
    if key in module._buffers or key not in module.__dict__:
        return ""
    value: Any = module.__dict__[key]
    if isinstance(value, _PLAIN) or type(value) in _HOLDING:
        return ""
    return f"its forward changes {name}, a {type(value).__name__}"
