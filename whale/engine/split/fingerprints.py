"""Fingerprints: whether two Layers run the same code, by their traces.

Place in the flow: made by `engine.split.match` while it looks into a Layer, read by
`engine.trials.rehearsal_trials`. Blocks of one class and size may still differ in an attribute that
their code branches on (every other block frozen, or with a window); blocks that only know their own
number do not. Numbers with a fraction lead to no other operations, and are left out.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from whale.engine.split.heads import Inside, name_of
from whale.engine.trace.program import Op, Ref, State, tree_map


def fingerprint(inside: Inside, path: str) -> str:
    """The same for Layers whose operations are: functions, their places, shapes and gradients."""
    prefix = f"{path}." if path else ""
    specs = inside.program.specs

    def leaf(value: Any) -> Any:
        if isinstance(value, State):
            return value.name.removeprefix(prefix)
        if value is None or isinstance(value, bool | int | str | Ref | torch.dtype):
            return value
        return type(value).__name__

    def said(op: Op) -> str:
        called = op.layer.removeprefix(prefix) if op.layer is not None else name_of(op)
        made = [(specs[v].shape, specs[v].dtype, specs[v].grad) for v in op.outputs]
        return repr((called, tree_map((op.args, op.kwargs), leaf), made, op.mode))

    found = hashlib.sha256()
    for op in inside.program.ops:
        found.update(said(op).encode())
    return found.hexdigest()
