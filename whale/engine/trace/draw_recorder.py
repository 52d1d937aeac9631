"""DrawRecorder: which random numbers a model draws, seen while it runs at two numbers of rows.

Place in the flow: around both runs of `engine.capture`, inside its tracer. A draw is named as it
will be named in training (`nn.randomness`); what differs between the runs is where its batch is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from whale.nn.random_dropouts import COMPOSED, opened
from whale.nn.randomness import (
    HANDLERS,
    UNKNOWN,
    BatchDims,
    CallNames,
    Draws,
    KeyedRandom,
    Name,
    noted,
)
from whale.runtime.context import StepContext


@dataclass(frozen=True, slots=True)
class Drawn:
    """One call of a random function."""

    function: str
    shape: tuple[int, ...]
    drawn: bool
    """Whether it really drew: dropout at 0 does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Randomness:
    """What capture knows of a model's draws."""

    dims: BatchDims = field(default_factory=BatchDims)
    """Where the batch is in each."""
    drawing: frozenset[str] = frozenset()
    """Paths of the modules that draw themselves."""
    known: bool = False
    """Whether the model ran, so that all its draws were seen."""
    foreign: str = ""
    """Python's or numpy's generators, where the model asks them."""
    foreign_rows: bool = False
    """Whether what it draws from them has to do with the number of rows."""


def is_random(func: Any) -> bool:
    """Whether a function of torch can draw random numbers: exactly these, whatever their names."""
    return func in HANDLERS or func in COMPOSED


class DrawRecorder(KeyedRandom):
    """Runs random functions as they are, and writes down what they draw."""

    def __init__(self) -> None:
        super().__init__(Draws(CallNames(StepContext()), BatchDims()))
        self.calls: dict[Name, Drawn] = {}
        self.last: Name | None = None
        """The name of what the function run last drew; None: nothing."""
        self.quietly: Callable[[Callable[[], Any]], Any] = lambda call: call()
        """Around what is no work of the model's."""
        self._off = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = HANDLERS.get(func)
        if handler is not None:
            shape, drawn = self.quietly(lambda: noted(self, handler, args, kwargs))
            self.last = self.note(func, shape, drawn) if shape is not None else None
        elif func in COMPOSED:
            self.last = None
            with self:
                return opened(func, self)(*args, **kwargs)
        return func(*args, **kwargs)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside, the model's code runs once more and counts for nothing."""
        position, last = self.names.position(), self.last
        self._off = True
        try:
            with self.names.at(position):
                yield
        finally:
            self._off, self.last = False, last

    def note(self, func: Any, shape: Sequence[int], drawn: bool) -> Name | None:
        """A draw by the module now running; its name if it is one."""
        name = self.names.next()
        if not self._off:
            self.calls[name] = Drawn(getattr(func, "__name__", ""), tuple(shape), drawn)
        return name if drawn else None


def randomness(
    first: dict[Name, Drawn],
    second: dict[Name, Drawn],
    rows: tuple[int, int],
    *,
    exact: bool,
    **more: Any,
) -> Randomness:
    """What two runs with different rows show; `exact`: every forward makes these draws."""
    dims = BatchDims(
        {
            name: (len(call.shape), _batch_dim(call, second.get(name), rows))
            for name, call in first.items()
        },
        exact,
    )
    drawing = frozenset(path for (path, _), call in first.items() if call.drawn)
    return Randomness(dims=dims, drawing=drawing, **more)


def _batch_dim(a: Drawn, b: Drawn | None, rows: tuple[int, int]) -> int | None:
    if b is None or len(a.shape) != len(b.shape) or a.function != b.function:
        return UNKNOWN
    changed = [d for d, (x, y) in enumerate(zip(a.shape, b.shape, strict=True)) if x != y]
    if not changed:
        return None
    (dim, *others) = changed
    grows = a.shape[dim] % rows[0] == 0 and a.shape[dim] * rows[1] == b.shape[dim] * rows[0]
    return dim if grows and not others else UNKNOWN
