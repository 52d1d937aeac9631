"""Left behind: does code read what a forward leaves in the user's own modules and objects?

Place in the flow: the first trial of `engine.trials.look`. What runs is a copy of the model. A loss
or a hook that names the user's module, directly or through other functions, objects and containers,
finds there what another forward has left, or nothing. So a few rows run through a copy, and whoever
reads one of the things that forwards change from the user's own modules meanwhile is refused. The
same of a list, dict, object or tensor that a module holds and that code names beside: in the copy
it would be another one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from whale.engine.state.boxes import PLAIN, Box, box_of, children, inside_of
from whale.engine.state.changes import attributes, changed, spare, state_of
from whale.engine.state.outside import Outside, as_it_was
from whale.engine.trace.tracer import user_line
from whale.errors import WhaleError
from whale.runtime import batch as batches
from whale.runtime import generators

_ROWS = 4
_MOST = 3000
"""Things that are looked at, nearest first."""


def check_left_behind(model: nn.Module, loss: batches.Loss | None, batch: Any) -> None:
    """Raises WhaleError, with file and line, for the first such read.

    Nothing is tried on the meta device, nor where a forward does not run on a few rows.
    """
    tensors = [*model.parameters(), *model.buffers(), *batches.leaves(batch)]
    total = batches.num_rows(batch)
    if any(t.is_meta for t in tensors) or not total:
        return
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    few = batches.spread_rows(batch, min(_ROWS, total), device)
    memo: dict[int, Any] = {}
    with as_it_was(model, loss), generators.kept(), torch.enable_grad():
        tried = spare(model, None, memo)
        parted = [each for each in _named_twice(model, loss) if id(each.thing) in memo]
        copies = [box_of(memo[id(each.thing)], each.name) for each in parted]
        before = [(box, box.read()) for box in (*parted, *copies) if box is not None]
        state = state_of(tried, values=True)
        reads: list[tuple[str, str]] = []
        # It may raise because of what it found there.
        with _watched(model, reads), suppress(Exception):
            batches.call_model(tried, loss, batches.own(few))
        left = changed(state, state_of(tried, values=True))
        moved = [box.name for box, values in before if not box.holds(values)]
    if moved:
        raise WhaleError(
            f"{moved[0]} of the model is changed in a step, and is also what other code names (a "
            "loss, a closure, a global): what trains is a copy of the model, in which it is "
            "another one",
            hint="let the model return what the loss needs; or name it in one way: as an attribute "
            "of the modules alone, or as a global alone",
        )
    for name, where in reads:
        if name not in left:
            continue
        raise WhaleError(
            f"code that runs in a step reads {name}, which a forward sets, from the model that was "
            "given to parallelize; what trains is a copy of it",
            hint="let the model return it: as its loss (parallelize without `loss`) or as a part "
            "of its output; and let hooks use the module they are called with",
            where=where,
        )


def _named_twice(model: nn.Module, loss: Any) -> list[Box]:
    """Things that modules hold in attributes, and that code reaches in another way too."""
    own = [*model.modules(), *model.parameters(), *model.buffers()]
    apart = {id(thing) for thing in own}
    elsewhere = {id(box.thing) for box in Outside(model, loss, objects=False).boxes} - apart
    found: dict[int, Box] = {}
    waiting: deque[tuple[Any, str]] = deque()
    seen: dict[int, Any] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        waiting.extend((value, f"{prefix}{key}") for key, value in attributes(module).items())
    while waiting and len(seen) < _MOST:
        thing, name = waiting.popleft()
        if isinstance(thing, PLAIN) or id(thing) in apart or id(thing) in seen:
            continue
        seen[id(thing)] = thing
        box = box_of(thing, name) if id(thing) in elsewhere else None
        if box is not None:
            found[id(thing)] = box
        waiting.extend((value, inside_of(name, key, thing)) for key, value in children(thing))
    return list(found.values())


@contextmanager
def _watched(model: nn.Module, reads: list[tuple[str, str]]) -> Iterator[None]:
    """Inside, whoever reads an attribute of the model's modules is noted."""
    paths = {id(module): path for path, module in model.named_modules()}
    kinds = [(module, type(module)) for module in model.modules()]
    noting = {kind: _noting(kind, paths, reads) for kind in {kind for _, kind in kinds}}
    for module, kind in kinds:
        _set_class(module, noting[kind])
    try:
        yield
    finally:
        for module, kind in kinds:
            _set_class(module, kind)


def _noting(kind: Any, paths: Mapping[int, str], reads: list[tuple[str, str]]) -> type:
    def get(module: Any, name: str) -> Any:
        path = paths.get(id(module))
        if path is not None and not name.startswith("__"):
            reads.append((f"{path}.{name}" if path else name, user_line()))
        return kind.__getattribute__(module, name)

    try:
        return type(
            kind.__name__, (kind,), {"__getattribute__": get, "__module__": kind.__module__}
        )
    except Exception:  # noqa: BLE001 - a class that is not to be derived from
        return kind  # type: ignore[no-any-return]


def _set_class(module: nn.Module, kind: type) -> None:
    object.__setattr__(module, "__class__", kind)
