"""Units: parameters that are not there until their Layer runs, and gone again after it.

Place in the flow: made by `runtime.store` for Layers whose parameters are shared out or live on the
host (`Home.zero` 3, `Home.tier`), put around their forwards by `engine.lower`. A unit is acquired
for a forward, released after it, and acquired again when a backward asks for one of its tensors.

[Note: what a backward needs] While a Layer runs, each tensor that autograd keeps goes through
`Use.pack`. Of a parameter only its place is kept; `Use.unpack` brings the parameter back, and the
last of these places that autograd lets go of releases it. So nothing has to be guessed about the
order of a backward, and a tensor that user code holds by other means stays valid: it owns its
memory, and a parameter that is released is given other memory, never emptied.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from whale.errors import WhaleError
from whale.runtime import recompute
from whale.runtime.compat import (
    enclosing_saved_hooks,
    forward_mode,
    in_backward,
    outside_dispatch,
)

Fetch = Callable[[], Callable[[], dict[str, torch.Tensor]]]
"""Begins to bring a unit's parameters here; what it gives waits for them."""


def stand_in(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """What a parameter holds that is not here: its shape and dtype on one element, no number."""
    number = like.is_floating_point() or like.is_complex()
    one = torch.full((), float("nan") if number else 0, dtype=like.dtype, device=like.device)
    return one.expand(shape)


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor that autograd keeps, as a place in a parameter."""

    use: Use
    name: str
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _Other:
    """Any other tensor, as what encloses the Layer (a checkpoint) keeps it."""

    packed: Any
    unpack: Callable[[Any], torch.Tensor]


class Unit:
    """The parameters of one Layer."""

    def __init__(self, name: str, params: Mapping[str, nn.Parameter], fetch: Fetch) -> None:
        self.name, self.params = name, dict(params)
        self._fetch = fetch
        self._coming: Callable[[], dict[str, torch.Tensor]] | None = None
        self._held: dict[str, torch.Tensor] | None = None
        """While a backward needs it."""
        self.asked = False
        """Whether a backward ever needed it."""
        self.changed: set[str] = set()
        """Parameters that were updated inside the backward that runs."""
        self._depth = 0
        self._runs = 0
        """Forwards whose backward is to come."""
        self.after: Unit | None = None
        """The unit that a forward is likely to want next; `before`: a backward."""
        self.before: Unit | None = None
        self.on_fetch: Callable[[str], None] | None = None
        self.outlives: Callable[[Unit], bool] | None = None
        """Whether what a backward had is wanted once more, for an update."""

    def start(self) -> None:
        """Begins to bring it here, where it is not."""
        if self._coming is None and not self._held and not self._depth:
            self._begin()

    def _begin(self) -> None:
        if self._coming is None:
            # A checkpoint that keeps some results follows what its forward computes: not this.
            with outside_dispatch():
                self._coming = self._fetch()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Its parameters' values, whole."""
        if self._held is not None and len(self._held) == len(self.params):
            return self._held
        if self.on_fetch is not None:
            self.on_fetch(self.name)
        self._begin()
        assert self._coming is not None
        coming, self._coming = self._coming, None
        # A rehearsal computes in another dtype than the one it is kept in.
        with outside_dispatch():
            return {name: t.to(self.params[name].dtype) for name, t in coming().items()}

    def keep(self, name: str | None = None) -> dict[str, torch.Tensor]:
        """The same for a backward, until `drop`; at least the one of that name."""
        self.asked = True
        if self._held is not None and name in self._held:
            return self._held
        first = self._held is None
        self._held = self.tensors()
        # One that no backward asks for (an embedding's) is not brought for it.
        if first and self.before is not None and self.before.asked:
            self.before.start()
        return self._held

    def begun(self) -> None:
        """A forward has run whose backward will want it."""
        self._runs += 1

    def ended(self) -> None:
        """Autograd has let go of all that such a forward kept."""
        self._runs -= 1
        if self.outlives is None or not self.outlives(self):
            self._held = None

    def drop(self) -> None:
        """Nobody wants any more what a backward had."""
        self._held = None

    def ended_again(self) -> None:
        """The same of code that ran again in a backward: its first run may want the unit next."""
        if not self._runs:
            self._held = None

    def held(self, name: str, dtype: torch.dtype) -> torch.Tensor | None:
        """What a backward has of a parameter, if it has it."""
        found = None if self._held is None else self._held.get(name)
        return found if found is not None and found.dtype == dtype else None

    def settle(self, names: AbstractSet[str] | None = None) -> None:
        """The values of these have changed: what was brought of them is good no more."""
        if self._coming is not None:
            self._coming()
        self._coming = None
        changed = self.params.keys() if names is None else self.params.keys() & names
        self._held = {n: t for n, t in (self._held or {}).items() if n not in changed} or None
        if in_backward():
            self.changed |= changed

    def forget(self) -> None:
        """Nothing is waited for any more: what is on its way holds on to connections."""
        self._coming = None

    @property
    def is_here(self) -> bool:
        """Whether its parameters hold their values now."""
        return self._depth > 0

    @contextmanager
    def here(self) -> Iterator[Mapping[str, torch.Tensor]]:
        """Inside, its parameters hold their values."""
        if self._depth:
            self._depth += 1
            try:
                yield {}
            finally:
                self._depth -= 1
            return
        if forward_mode():
            raise WhaleError(
                f"{self.name or 'the model'} runs inside forward-mode differentiation "
                "(torch.func.jvp), where its weights cannot be brought to it",
                hint="leave zero.level below v2, and weights out of offload.level",
            )
        found = self.keep() if in_backward() else self.tensors()
        self._depth = 1
        absent = {name: param.data for name, param in self.params.items()}
        for name, param in self.params.items():
            param.data = found[name]
        if self.after is not None and not in_backward():
            self.after.start()
        try:
            yield found
        finally:
            self._depth = 0
            for name, param in self.params.items():
                param.data = absent[name]


class Use:
    """One run of a Layer with its unit: what autograd keeps of it."""

    def __init__(self, unit: Unit, found: Mapping[str, torch.Tensor]) -> None:
        self.unit = unit
        self.names = {t.untyped_storage().data_ptr(): n for n, t in found.items() if t.numel()}
        self.outer = enclosing_saved_hooks()
        if in_backward():
            weakref.finalize(self, unit.ended_again)
        else:
            unit.begun()
            weakref.finalize(self, unit.ended)

    def pack(self, tensor: torch.Tensor) -> Any:
        """What autograd keeps for a tensor."""
        name = self.names.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
        if name is not None and tensor.dtype == self.unit.params[name].dtype:
            offset = int(tensor.storage_offset())
            return _Place(self, name, tensor.shape, tensor.stride(), offset)
        if self.outer is not None:
            return _Other(self.outer[0](tensor), self.outer[1])
        return tensor

    def unpack(self, packed: Any) -> torch.Tensor:
        """The tensor again."""
        if isinstance(packed, _Other):
            return packed.unpack(packed.packed)
        if isinstance(packed, _Place):
            if packed.name in self.unit.changed:
                raise WhaleError(
                    f"the backward of {self.unit.name or 'the model'} reads {packed.name} once "
                    "more after its gradient was complete and it was updated",
                    hint="leave optimizer.apply_in_backward out for this model",
                )
            whole = self.unit.keep(packed.name)[packed.name]
            return whole.as_strided(packed.shape, packed.stride, packed.offset)
        found: torch.Tensor = packed
        return found


class AcquiredForward:
    """A Layer's forward that has its parameters while it runs."""

    def __init__(self, forward: Callable[..., Any], unit: Unit) -> None:
        self.forward, self.unit = forward, unit

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs it."""
        with self._running(keeps=True):
            return self.forward(*args, **kwargs)

    @contextmanager
    def _running(self, *, keeps: bool) -> Iterator[None]:
        recompute.push(self)
        try:
            with self.unit.here() as found:
                if not keeps or not found or not torch.is_grad_enabled():
                    yield
                    return
                use = Use(self.unit, found)
                with torch.autograd.graph.saved_tensors_hooks(use.pack, use.unpack):
                    yield
        finally:
            recompute.pop()

    # A checkpoint inside the Layer runs its code again when the Layer is long over.

    def position(self) -> None:
        """Nothing to come back to but the parameters."""

    @contextmanager
    def at(self, position: None) -> Iterator[None]:
        """Inside, a part of the Layer runs again.

        One kind of checkpoint keeps tensors itself, the other makes a graph of its own.
        """
        with self._running(keeps=enclosing_saved_hooks() is None):
            yield
        self.unit.ended_again()
