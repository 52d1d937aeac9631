"""Recomputed: Layers whose inside is let go after the forward and runs again in the backward.

Place in the flow: put around Layers by `engine.lower` where the plan says so, and by the trials
that look at such a plan. torch's checkpoint does it, followed by `runtime.recompute` as any of the
user's own; what it must not do twice is taken care of here.

[Note: what a forward moves] The second run finds buffers and attributes as the first one did, in
copies, and leaves those of now alone: statistics move once for each micro-batch.

[Note: to the end] torch's checkpoint stops a second run when it has all that was kept. What is kept
may differ from rank to rank (a bias, an empty part), and one that stops early would leave others
waiting in a collective. So it runs to the end.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from whale.runtime import recompute
from whale.runtime.compat import PRODUCTS, outside_dispatch

_NOTHING = object()


@dataclass(frozen=True, slots=True)
class Moved:
    """A buffer or an attribute of a module that its forward changes."""

    module: nn.Module
    name: str

    @property
    def _where(self) -> dict[str, Any]:
        buffers: dict[str, Any] = self.module._buffers
        return buffers if self.name in buffers else self.module.__dict__

    def copied(self) -> Any:
        """As it is now, and stays."""
        value = self._where.get(self.name, _NOTHING)
        if isinstance(value, torch.Tensor):
            return value.detach().clone()
        return copy.copy(value)

    def exchange(self, value: Any) -> Any:
        """Puts another in its place; gives what was there."""
        where = self._where
        before = where.get(self.name, _NOTHING)
        if value is _NOTHING:
            where.pop(self.name, None)
        else:
            where[self.name] = value
        return before


def moved_in(layer: nn.Module, path: str, changes: Iterable[str]) -> list[Moved]:
    """What of a Layer its forward changes; `changes` are names in the whole model.

    Running statistics of torch's norms are among them, whose kernels tell nobody.
    """
    prefix = f"{path}." if path else ""
    found: dict[tuple[int, str], Moved] = {}
    for name in changes:
        if name.startswith(prefix):
            owner, _, key = name.removeprefix(prefix).rpartition(".")
            module = layer.get_submodule(owner)
            if key not in module._parameters:
                found[id(module), key] = Moved(module, key)
    for module in layer.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    found[id(module), key] = Moved(module, key)
    return list(found.values())


def _keeps(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """What products and collectives make stays."""
    packet = getattr(op, "overloadpacket", op)
    name = getattr(packet, "__name__", "")
    kept = name in PRODUCTS or getattr(op, "namespace", "") == "whale"
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


_PRODUCTS_STAY = partial(create_selective_checkpoint_contexts, _keeps)


class RecomputedForward:
    """A Layer's forward that runs again in the backward.

    Args:
        forward: What runs.
        moved: What it changes.
        keep: What stays: "inputs", or "products" beside them.
    """

    def __init__(self, forward: Callable[..., Any], moved: Sequence[Moved], keep: str) -> None:
        self.forward, self.moved = forward, moved
        self._options: dict[str, Any] = {"context_fn": _PRODUCTS_STAY} if keep == "products" else {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The replaced forward."""
        # What is inside another checkpoint is let go by that one.
        if not torch.is_grad_enabled() or recompute.inside():
            return self.forward(*args, **kwargs)
        recompute.install()
        before = [(each, each.copied()) for each in self.moved]

        def run(*args: Any, **kwargs: Any) -> Any:
            if not recompute.rerunning():
                return self.forward(*args, **kwargs)
            with _as_before(before):
                return self.forward(*args, **kwargs)

        # Nothing draws from torch's generators (`runtime.generators`).
        with set_checkpoint_early_stop(False):
            return checkpoint(
                run, *args, use_reentrant=False, preserve_rng_state=False, **self._options, **kwargs
            )


@contextmanager
def _as_before(before: Sequence[tuple[Moved, Any]]) -> Iterator[None]:
    with outside_dispatch():
        copies = [_again(value) for _, value in before]
    now = [(each, each.exchange(own)) for (each, _), own in zip(before, copies, strict=True)]
    try:
        yield
    finally:
        for each, value in now:
            each.exchange(value)


def _again(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)
