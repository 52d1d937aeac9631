"""Calls: what the user's model gives to some of its modules, on rows of a batch.

Place in the flow: asked by trials that run a module alone (`engine.trials.rehearsal_trials`,
`engine.trials.choices`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from whale.engine.state.stillness import Still, as_before
from whale.engine.trace.program import tree_map
from whale.engine.trace.tracer import is_cache
from whale.runtime import batch as batches


def calls_of(
    model: nn.Module,
    paths: set[str],
    batch: Any,
    loss: batches.Loss | None,
    rows: int,
    notes: list[str],
) -> dict[str, tuple[Any, Any]]:
    """What the user's model gives these Layers for a few rows of the batch."""
    if any(t.is_meta for t in (*model.parameters(), *batches.leaves(batch))):
        return {}
    calls: dict[str, tuple[Any, Any]] = {}
    handles = []

    def look(path: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            # A key-value cache keeps what it saw: a second run would go on from there.
            bare = tree_map((args, kwargs), lambda leaf: None if is_cache(leaf) else leaf)
            calls.setdefault(path, bare)

        return hook

    where = next((p.device for p in model.parameters()), torch.device("cpu"))
    try:
        with as_before(model, loss), Still(), torch.no_grad():
            for path in sorted(paths):
                module = model.get_submodule(path)
                handles.append(module.register_forward_pre_hook(look(path), with_kwargs=True))
            few = batches.own(batches.spread_rows(batch, rows, where))
            batches.call_model(model, loss, few)
    except Exception as error:  # noqa: BLE001 - the first step will say it better
        notes.append(f"the model did not run on {rows} rows: {type(error).__name__}: {error}"[:200])
    finally:
        for handle in handles:
            handle.remove()
    return calls
