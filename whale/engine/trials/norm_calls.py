"""Norm calls: does every call of a batch norm see rows of its own, and all of them?

Place in the flow: asked by the trial of parts (`engine.trials.parts`). Replicas join the statistics
of the first call, of the second, and so on. That is what one device computes only if a call of the
whole micro-batch sees what the same calls of its parts see together: not where a norm is called on
groups of rows (ghost batch norm), row by row, or on values that have no rows beside those that
have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from whale.errors import WhaleError
from whale.ir.plan import Plan

_NORM = nn.modules.batchnorm._BatchNorm
_HINT = (
    "call it once on all rows; or let every replica normalise its own rows (Config "
    "communication.batch_norm='local'); or give its stage one replica"
)

Calls = dict[str, list[Tensor]]
"""By path, for every call the sums of its input by channel, then how many were summed."""


def joins_norms(plan: Plan) -> bool:
    """Whether batch norms of several replicas meet."""
    return any(
        "norm" in layer.meets and len(stage.virtual_device.replicas) > 1
        for stage in plan.stages
        for layer in stage.layers
    )


@contextmanager
def noted(model: nn.Module, joins: bool) -> Iterator[Calls]:
    """What batch norms of the model are called with inside; nothing where they do not join."""
    calls: Calls = {}
    handles = []
    for path, module in model.named_modules():
        if joins and isinstance(module, _NORM):

            def note(_: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
                x = (args or (*kwargs.values(),))[0].detach()
                sums = x.double().transpose(0, 1).flatten(1).sum(1)
                count = sums.new_tensor([x.numel() // max(1, x.shape[1])])
                calls.setdefault(path, []).append(torch.cat([sums, count]))

            handles.append(module.register_forward_pre_hook(note, with_kwargs=True))
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def compare(whole: Calls, parts: Sequence[Calls], tolerance: float, about: str) -> None:
    """Raises where calls of the parts, put together, are not those of the whole."""
    for path, calls in whole.items():
        found = [part.get(path, []) for part in parts]
        numbers = [len(calls), *map(len, found)]
        if len(set(numbers)) > 1:
            raise WhaleError(
                f"{path} (a batch norm) is called {numbers[0]} times on some rows, "
                f"and {' and '.join(map(str, numbers[1:]))} times on two parts of them{about}: "
                "replicas cannot join its statistics",
                hint=_HINT,
            )
        for number, call in enumerate(calls):
            total = torch.stack([part[number] for part in found]).sum(0)
            scale = call.abs().amax().clamp(min=1e-12)
            if not bool(((total - call).abs() <= max(tolerance, 1e-9) * scale).all()):
                raise WhaleError(
                    f"call {number} of {path} (a batch norm) normalises "
                    f"{int(call[-1])} values by channel of some rows, and "
                    f"{' and '.join(str(int(part[number][-1])) for part in found)} of two parts of "
                    f"them, not the same together{about}: replicas cannot join its statistics",
                    hint=_HINT,
                )
