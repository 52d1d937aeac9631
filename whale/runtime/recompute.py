"""Recompute: a forward that `torch.utils.checkpoint` runs again in backward, as it ran at first.

Place in the flow: below everything that keeps a position or moves a number in a forward. torch's
checkpoint is told of nothing: the two things it calls (an autograd.Function, a generator) are
wrapped, so it does not matter how user code imported it. The wrapper knows three things of the
first run and brings them back for every later one:

* where the rank was (step, micro-batch, rows, numbers of draws): a Scope's position;
* which of our function modes were around it;
* what modules asked to `remember` (the bias a router chose by).

A pipeline runs other micro-batches between the two, and backward has no forward's surroundings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from torch.overrides import TorchFunctionMode

from whale.runtime import compat

_T = TypeVar("_T")


class RerunMode(TorchFunctionMode):
    """A function mode of ours: what runs again under it runs under it again."""

    def again(self) -> TorchFunctionMode:
        """The mode for the second run: itself, unless it must not see anything twice."""
        return self


class Scope(Protocol):
    """Something with a position in the step, which code under it reads."""

    def position(self) -> Any:
        """Where it is now."""
        ...

    def at(self, position: Any) -> AbstractContextManager[None]:
        """Inside, it is where it was."""
        ...


class Watcher(Protocol):
    """Capture, which sees through checkpoints: see `engine.trace.regions`."""

    def region(
        self, function: Any, args: tuple[Any, ...], options: dict[str, Any]
    ) -> AbstractContextManager[None] | None:
        """Around a checkpoint's function, which then just runs; None: as torch has it."""
        ...


@dataclass(slots=True)
class _Record:
    """What one checkpointed call remembers."""

    kept: list[Any] = field(default_factory=list)
    next: int | None = None
    """Which of them comes now, in a later run; None in the first."""


WHOLE: dict[type, Callable[[Any], Any]] = {}
"""Tensors of ours whose gradient an autograd.Function would not see: how to make them plain."""


@dataclass(slots=True)
class _Calls:
    reentrant: int = 0


_calls = _Calls()
_records: list[_Record] = []
_scopes: list[Scope] = []
_watchers: list[Watcher] = []


def rerunning() -> bool:
    """Whether the code now running runs for the second time, inside a backward."""
    return any(record.next is not None for record in _records)


def inside() -> bool:
    """Whether the code now running is a checkpoint's, in its first or a later run."""
    return bool(_records)


def num_reentrant() -> int:
    """Checkpoints of the reentrant kind so far: each runs a backward inside the backward."""
    return _calls.reentrant


def remember(now: Callable[[], _T]) -> _T:
    """`now()`, and in a later run of the same code what it was in the first."""
    known = None
    for record in _records:
        if record.next is not None:
            known = record
            break
    if known is None:
        value = now()
    else:
        assert known.next is not None
        value = known.kept[known.next]
        known.next += 1
    for record in _records:
        if record.next is None:
            record.kept.append(value)
    return value


@contextmanager
def scope(current: Scope) -> Iterator[None]:
    """Around a forward: checkpoints in it come back to the position they were called at."""
    push(current)
    try:
        yield
    finally:
        pop()


def push(current: Scope) -> None:
    """The beginning of `scope`, for what runs too often for a generator."""
    install()
    _scopes.append(current)


def pop() -> None:
    """The end of it."""
    _scopes.pop()


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Around a forward on fake tensors: its checkpoints are shown to `watcher`."""
    install()
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.pop()


class _Rerun:
    """A checkpointed function: its first run, and its later ones as if they were the first."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.record = _Record()
        self.scopes = [(scope, scope.position()) for scope in _scopes]
        self.modes = [m for m in compat.function_modes() if isinstance(m, RerunMode)]
        self.ran = False

    @contextmanager
    def first(self) -> Iterator[None]:
        self.ran = True
        _records.append(self.record)
        try:
            yield
        finally:
            _records.remove(self.record)

    def again(self, *args: Any, **kwargs: Any) -> Any:
        outer = (_records[:], _scopes[:])
        self.record.next = 0
        _records[:] = [self.record]
        _scopes[:] = [scope for scope, _ in self.scopes]
        try:
            with ExitStack() as stack:
                for scope, position in self.scopes:
                    stack.enter_context(scope.at(position))
                for mode in self.modes:
                    stack.enter_context(mode.again())
                return self.function(*args, **kwargs)
        finally:
            self.record.next = None
            _records[:], _scopes[:] = outer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the reentrant kind calls, both times."""
        if self.ran:
            return self.again(*args, **kwargs)
        with self.first():
            return self.function(*args, **kwargs)


class _Reentrant:
    """Stands where checkpoint looks for its autograd.Function."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def apply(self, run: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        args = tuple(WHOLE[type(arg)](arg) if type(arg) in WHOLE else arg for arg in args)
        region = _region(run, args, {"use_reentrant": True})
        if region is not None:
            with region:
                return run(*args)
        _calls.reentrant += 1
        return self._function.apply(_Rerun(run), preserve, *args)


def _region(
    function: Any, args: tuple[Any, ...], options: dict[str, Any]
) -> AbstractContextManager[None] | None:
    return _watchers[-1].region(function, args, options) if _watchers else None


def _frames(original: Callable[..., Any]) -> Callable[..., Iterator[None]]:
    """Stands where checkpoint looks for what runs before and after the other kind's forward."""

    def frames(
        function: Callable[..., Any],
        preserve: bool,
        context_fn: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Iterator[None]:
        options = {"use_reentrant": False, "context_fn": context_fn}
        region = _region(function, args, options)
        if region is not None:
            with region:
                yield
            return
        rerun = _Rerun(function)
        inner = original(rerun.again, preserve, context_fn, *args, **kwargs)
        next(inner)
        with rerun.first():
            try:
                yield
            except BaseException as error:
                inner.throw(error)
                raise
        for _ in inner:
            break

    return frames


def install() -> None:
    """Wraps what torch's checkpoint calls, once; outside of our forwards nothing changes by it."""
    compat.wrap_checkpoint(_Reentrant, _frames)
