"""Opaque: a Layer whose code reads values, so that it has no run on fake tensors.

Place in the flow: asked by `engine.capture` where a Layer's forward fails on fakes (`nonzero`,
`y[mask] = expert(x[mask])`, `.item()`). All that stages need of a Layer is what it gives: its real
module runs on random rows, twice, and the shapes of what it gives are taken. It stays whole.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from whale.engine.capture.graph import Run
from whale.engine.capture.seen import Seen
from whale.engine.state.changes import changed, state_of
from whale.engine.state.copies import copied
from whale.engine.trace.program import tensors_in, tree_map
from whale.engine.trace.work import WorkCounter
from whale.runtime.compat import about_fakes, real_tensors

REASON = "sizes inside depend on values, which no trace can follow"
_TRIES = 2


def or_opaque(
    path: str,
    fake: nn.Module,
    own: Callable[..., Any],
    layer: nn.Module,
    counter: WorkCounter,
    run: Run,
    seen: Seen,
) -> Callable[..., Any]:
    """A Layer's forward on fakes, `own`; where it has none, what the user's `layer` gives."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        def on_real_rows(error: Exception) -> Any:
            made = outputs_of(layer, fake, args, kwargs, counter) if about_fakes(error) else None
            if made is None:
                raise error
            run.opaque.add(path)
            seen.called.update(name for name, _ in layer.named_modules(prefix=path))
            return made

        return counter.instead(lambda: own(*args, **kwargs), on_real_rows)

    return forward


def outputs_of(
    layer: nn.Module, fake: nn.Module, args: Any, kwargs: Any, counter: WorkCounter
) -> Any:
    """What a Layer gives for arguments without memory, as tensors without memory.

    None where that cannot be said: it needs values that only the model gives it, its sizes differ
    from run to run, it draws random numbers, whose places nobody has seen, or it changes its state.

    Args:
        layer: The user's own.
        fake: Its copy on fake tensors, in the mode that it runs in.
        args: As it was called.
        kwargs: Likewise.
        counter: Counts the last of the runs.
    """
    if any(t.is_meta for t in (*layer.parameters(), *layer.buffers())):
        return None
    shapes: list[Any] = []
    states: list[dict[str, Any]] = []
    with real_tensors():
        module = counter.paused(lambda: copied(layer))
        counter.lies_there([*module.parameters(), *module.buffers()])
        for own, other in zip(module.modules(), fake.modules(), strict=True):
            own.training = other.training
        for seed in range(_TRIES):
            generator = torch.Generator().manual_seed(seed)
            given, named = counter.paused(
                partial(tree_map, (args, kwargs), partial(_filled, generator))
            )
            drawn = torch.get_rng_state()
            call = partial(module, *given, **named)
            try:
                out = call() if seed == _TRIES - 1 else counter.paused(call)
            except Exception:  # noqa: BLE001 - the error on fakes says enough
                return None
            if not torch.equal(drawn, torch.get_rng_state()):
                torch.set_rng_state(drawn)
                return None
            states.append(state_of(module, values=True))
            shapes.append([(t.shape, t.dtype, t.requires_grad) for t in tensors_in(out)])
        # What the first run alone sets (a dtype, a cache) says nothing of the rows.
        if shapes[0] != shapes[1] or changed(*states):
            return None
    return tree_map(out, lambda leaf: _empty(leaf) if isinstance(leaf, torch.Tensor) else leaf)


def _filled(generator: torch.Generator, leaf: Any) -> Any:
    """An argument with values: any numbers, ids that every table has."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.is_floating_point():
        made = torch.randn(leaf.shape, generator=generator, dtype=torch.float64).to(leaf.dtype)
        return made.requires_grad_(leaf.requires_grad)
    if leaf.dtype == torch.bool:
        return torch.ones(leaf.shape, dtype=leaf.dtype)
    return torch.zeros(leaf.shape, dtype=leaf.dtype)


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty(tensor.shape, dtype=tensor.dtype)
    return made.requires_grad_() if tensor.requires_grad else made
