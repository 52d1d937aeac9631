"""Probe: the draws of a model that cannot run on fake tensors, seen on a few real rows.

Place in the flow: end of `engine.capture`. A forward that reads values (how many rows chose an
expert, whether anything is padded) has no run on fakes, and data parallelism needs none; but where
its random numbers have their batch must be known, or replicas would draw the same ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from whale.engine.capture.graph import Run
from whale.engine.state.copies import copied
from whale.engine.trace.draw_recorder import Drawn, DrawRecorder, Randomness, randomness
from whale.nn.randomness import Name, follow_all
from whale.runtime import batch as batches
from whale.runtime import generators
from whale.runtime.generators import Asked

ROWS = (2, 3)
_MORE_ROWS = (5, 7, 11)
"""Tried as well: a size that depends on values may grow like the rows once, by chance."""


def seen_draws(
    first: Run,
    second: Run,
    model: nn.Module,
    batch: Any,
    loss: batches.Loss | None,
    training: bool,
    *,
    traced: bool,
) -> Randomness:
    """What capture's runs saw the model draw, or a run on real rows where there were none."""
    calls, asked = (first.calls, second.calls), (first.asked, second.asked)
    known = bool(first.result)
    if not known:
        found = [_probed(model, batch, loss, rows, training) for rows in (*ROWS, *_MORE_ROWS)]
        known = all(done for _, _, done in found)
        calls = (found[0][0], found[1][0])
        asked = (found[0][1], found[1][1])
        for rows, (more, _, _) in zip(_MORE_ROWS, found[2:], strict=True):
            calls = (calls[0], _consistent(calls[1], more, rows))
    return randomness(
        calls[0],
        calls[1],
        ROWS,
        exact=traced,
        known=known,
        foreign=" and ".join(asked[0].moved),
        foreign_rows=asked[0].end != asked[1].end,
    )


def _consistent(known: dict[Name, Drawn], more: dict[Name, Drawn], rows: int) -> dict[Name, Drawn]:
    """The draws of ROWS[1] rows that have as many numbers per row with other rows."""
    kept = {}
    for name, call in known.items():
        other = more.get(name)
        if other is not None and len(other.shape) == len(call.shape):
            pairs = zip(call.shape, other.shape, strict=True)
            if all(a == b or a * rows == b * ROWS[1] for a, b in pairs):
                kept[name] = call
    return kept


def _probed(
    model: nn.Module, batch: Any, loss: batches.Loss | None, rows: int, training: bool
) -> tuple[dict[Name, Drawn], Asked, bool]:
    """The draws of one forward on `rows` real rows, and whether it came to its end."""
    recorder = DrawRecorder()
    tensors = [*model.parameters(), *model.buffers(), *batches.leaves(batch)]
    if any(t.is_meta for t in tensors) or not batches.num_rows(batch):
        return recorder.calls, Asked(), False
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    twin = copied(model)
    if training and not twin.training:
        twin.train()
    few = batches.spread_rows(batch, rows, device)
    follow_all(recorder.names, twin.named_modules())
    with generators.seeded(0) as asked:
        try:
            with torch.no_grad(), recorder:
                batches.call_model(twin, loss, few)
        except Exception:  # noqa: BLE001 - whatever a user's forward raises on so few rows
            return recorder.calls, asked, False
    return recorder.calls, asked, True
