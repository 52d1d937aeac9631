"""Recomputed: Layers whose inside is let go after the forward and runs again in the backward.

Place in the flow: put around Layers by `engine.lower` where the plan says so, and by the trials
that look at such a plan. torch's checkpoint does it, followed by `runtime.recompute` as any of the
user's own; what it must not do twice is taken care of here.

[Note: what a forward moves] The second run finds buffers and attributes as the first one did, in
copies, and leaves those of now alone: statistics move once for each micro-batch.

[Note: the second run] What it reads must be what the first read. Parameters and buffers that were
exchanged for the call (torch.func.functional_call) are put there again. What else it may read, a
flag that was up around the call, nobody knows: so it is compared what both runs gave, and what the
second changes that no build has seen, and a difference is an error before anything is updated.

[Note: to the end] torch's checkpoint stops a second run when it has all that was kept. What is kept
may differ from rank to rank (a bias, an empty part), and one that stops early would leave others
waiting in a collective. So it runs to the end.
"""

from __future__ import annotations

import copy
import math
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

from whale.errors import WhaleError
from whale.runtime import recompute
from whale.runtime.batch import leaves
from whale.runtime.compat import PRODUCTS, outside_dispatch

_NOTHING = object()
HINT = (
    "a Layer that is recomputed may read its arguments, weights and buffers, and nothing that "
    "changes in between; leave it out of gradient_checkpoint.layers"
)


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
        layer: Of which module.
        path: Where it is in the model.
        moved: What it changes.
        keep: What stays: "inputs", or "products" beside them.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        layer: nn.Module,
        path: str,
        moved: Sequence[Moved],
        keep: str,
    ) -> None:
        self.forward, self.moved = forward, moved
        self._inside = _Inside(layer, path, moved)
        self._options: dict[str, Any] = {"context_fn": _PRODUCTS_STAY} if keep == "products" else {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The replaced forward."""
        # What is inside another checkpoint is let go by that one.
        if not torch.is_grad_enabled() or recompute.inside():
            return self.forward(*args, **kwargs)
        recompute.install()
        before = [(each, each.copied()) for each in self.moved]
        inside = self._inside
        read, gave = inside.tensors(), list[torch.Tensor]()

        def run(*args: Any, **kwargs: Any) -> Any:
            if not recompute.rerunning():
                out = self.forward(*args, **kwargs)
                gave.extend(_marks(out))
                return out
            with _as_before(before), inside.as_called(read), inside.unmoved():
                out = self.forward(*args, **kwargs)
            inside.compare(gave, _marks(out))
            return out

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


class _Inside:
    """What a Layer has inside, as its two runs find and leave it."""

    def __init__(self, layer: nn.Module, path: str, moved: Sequence[Moved]) -> None:
        self.path = path
        self.modules = [(name, module) for name, module in layer.named_modules()]
        self.known = {(id(each.module), each.name) for each in moved}
        self._runs = 0

    def tensors(self) -> list[tuple[dict[str, Any], str, Any]]:
        """Parameters and buffers, by where they stand; but not what is known to move."""
        return [
            (where, name, tensor)
            for _, module in self.modules
            for where in (module._parameters, module._buffers)
            for name, tensor in where.items()
            if (id(module), name) not in self.known
        ]

    @contextmanager
    def as_called(self, read: Sequence[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
        """Inside, those that the first run found are there again."""
        others = [(w, n, w.get(n), tensor) for w, n, tensor in read if w.get(n) is not tensor]
        for where, name, _, tensor in others:
            where[name] = tensor
        try:
            yield
        finally:
            for where, name, now, _ in others:
                where[name] = now

    @contextmanager
    def unmoved(self) -> Iterator[None]:
        """Raises WhaleError where a second run changes what would then have changed twice."""
        before = self._state()
        yield
        for name, (value, version) in self._state().items():
            was, before_version = before.get(name, (_NOTHING, 0))
            if was is not value or version != before_version:
                raise WhaleError(
                    f"the forward of {self._called} changes {name}, which it did not when the step "
                    "was built: it is recomputed, and would change it twice",
                    hint=HINT,
                )

    def _state(self) -> dict[str, tuple[Any, int]]:
        found: dict[str, tuple[Any, int]] = {}
        for path, module in self.modules:
            prefix = ".".join(part for part in (self.path, path) if part)
            for where in (module._buffers, module.__dict__):
                for key, value in where.items():
                    if (id(module), key) in self.known or key.startswith("_"):
                        continue
                    version = value._version if isinstance(value, torch.Tensor) else 0
                    found[f"{prefix}.{key}" if prefix else key] = value, version
        return found

    @property
    def _called(self) -> str:
        return self.path or "the model"

    def compare(self, first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> None:
        """Raises WhaleError where the second run gave something else.

        On a GPU, which the host would have to wait for, ever more rarely.
        """
        self._runs += 1
        often = self._runs & (self._runs - 1) == 0
        for one, other in zip(first, second, strict=False):
            if (often or not one.is_cuda) and not _alike(one, other):
                raise WhaleError(
                    f"{self._called}, run again in the backward, gives something else than in the "
                    "forward: it reads what changed in between",
                    hint=HINT,
                )


_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4}
_COARSE = 3e-2
"""Of half precision: sums on a GPU come in another order each time."""


@torch.no_grad()
def _marks(out: Any) -> list[torch.Tensor]:
    """By which it shows whether two runs gave the same: sums, and sums of absolute values."""
    found = []
    with outside_dispatch():
        for tensor in leaves(out):
            if tensor.is_floating_point() and tensor.layout == torch.strided and tensor.numel():
                tolerance = _TOLERANCES.get(tensor.dtype, _COARSE)
                wide = tensor.detach().double() if not tensor.is_cuda else tensor.detach().float()
                size = wide.abs().sum()
                found.append(torch.stack([wide.sum(), size, size * tolerance]))
    return found


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    total, size, allowed = one.tolist()
    now, now_size, _ = other.tolist()
    if not math.isfinite(size):
        return True
    return abs(total - now) <= allowed and abs(size - now_size) <= allowed
