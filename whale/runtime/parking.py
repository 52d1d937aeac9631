"""Parking: what a Layer's forward keeps for its backward, in host memory in between.

Place in the flow: put around Layers by `engine.lower` where the plan says so. Tensors that autograd
keeps are copied out while the next Layers compute, and brought back one Layer ahead of the
backward. Parameters stay where they are; so do small tensors, which cost more to move than to hold.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from whale.errors import WhaleError
from whale.runtime import recompute
from whale.runtime.compat import enclosing_saved_hooks, in_backward, in_transform
from whale.runtime.moving import HostMemory, Mover

SMALL_BYTES = 1 << 16
"""Below it a tensor stays."""


@dataclass(slots=True, weakref_slot=True)
class _Parked:
    """One tensor on the host."""

    host: torch.Tensor
    shape: torch.Size
    stride: tuple[int, ...]
    done: Callable[[], None]
    coming: Callable[[], torch.Tensor] | None = None


@dataclass(slots=True, weakref_slot=True)
class _Run:
    """One forward of a Layer, and what it parked."""

    before: weakref.ref[_Run] | None
    tensors: list[weakref.ref[_Parked]] = field(default_factory=list)
    asked: bool = False


class Garage:
    """Where one rank parks what all its Layers keep."""

    def __init__(self, device: torch.device, params: Mapping[str, nn.Parameter]) -> None:
        self.memory, self.mover = HostMemory(device), Mover(device)
        self.params = params
        self._free: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = {}
        self._last: weakref.ref[_Run] | None = None
        self.parked_bytes = 0
        """In all, so far."""

    def run(self) -> _Run:
        """A forward begins."""
        made = _Run(self._last)
        self._last = weakref.ref(made)
        return made

    def takes(self, tensor: torch.Tensor, here: frozenset[int]) -> bool:
        """Whether a tensor is to be parked; `here` are the storages of parameters."""
        return (
            tensor.numel() * tensor.element_size() >= SMALL_BYTES
            and tensor.untyped_storage().data_ptr() not in here
            and tensor.layout == torch.strided
            and type(tensor) in (torch.Tensor, nn.Parameter)
        )

    def park(self, tensor: torch.Tensor, run: _Run) -> _Parked:
        """Begins to copy a tensor out."""
        dense = tensor.is_contiguous()
        source = tensor if dense else tensor.contiguous()
        free = self._free.setdefault((source.shape, source.dtype), [])
        host = free.pop() if free else self.memory.like(source)
        done = self.mover.park(source, host)
        parked = _Parked(host, tensor.shape, source.stride(), done)
        self.parked_bytes += host.numel() * host.element_size()
        weakref.finalize(parked, free.append, host)
        run.tensors.append(weakref.ref(parked))
        return parked

    def back(self, parked: _Parked, run: _Run) -> torch.Tensor:
        """A tensor again, with the others of its run and of the run before on their way."""
        if not run.asked:
            run.asked = True
            before = run.before() if run.before is not None else None
            for each in (run, before):
                for reference in each.tensors if each is not None else ():
                    other = reference()
                    if other is not None:
                        self._begin(other)
        self._begin(parked)
        assert parked.coming is not None
        return parked.coming()

    def _begin(self, parked: _Parked) -> None:
        if parked.coming is None:
            self.mover.after_parking()
            parked.coming = self.mover.fetch(parked.host, parked.host.dtype)


class ParkedForward:
    """A Layer's forward whose kept tensors wait on the host."""

    def __init__(self, forward: Callable[..., Any], garage: Garage) -> None:
        self.forward, self.garage = forward, garage

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs it."""
        # What runs again in a backward is needed at once.
        if not torch.is_grad_enabled() or in_backward() or recompute.rerunning():
            return self.forward(*args, **kwargs)
        garage, outer = self.garage, enclosing_saved_hooks()
        # A checkpoint around it keeps nothing of its inside; torch.func takes no such hooks.
        if outer is not None or in_transform():
            return self.forward(*args, **kwargs)
        run = garage.run()
        here = frozenset(
            p.untyped_storage().data_ptr() for p in garage.params.values() if p.numel()
        )

        def pack(tensor: torch.Tensor) -> Any:
            if garage.takes(tensor, here):
                return garage.park(tensor, run), run
            return tensor

        def unpack(packed: Any) -> torch.Tensor:
            return garage.back(*packed) if isinstance(packed, tuple) else packed

        with _transforms_said(), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return self.forward(*args, **kwargs)


@contextmanager
def _transforms_said() -> Iterator[None]:
    """Around a Layer: torch.func inside of it says what it cannot do in the user's words."""
    try:
        yield
    except RuntimeError as error:
        if "support saved tensor hooks" not in str(error):
            raise
        raise WhaleError(
            "a Layer uses torch.func, under which what it keeps for its backward cannot be moved "
            f"to the host: {str(error).splitlines()[0]}",
            hint="leave the Layer out of offload.layers, or offload.activations out",
        ) from error
