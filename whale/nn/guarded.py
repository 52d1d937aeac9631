"""Guarded: a rank's part of a weight, which no code but a split's own forward may read.

Place in the flow: put on this rank's copy by `engine.lower`, after all forwards are in place. What
a trace saw of the user's code decides what may be split; code that runs later, or on other batches,
may read `self.proj.weight` all the same, and would compute with a shard and never know. So the
table that a module keeps its parameters in refuses to give one away while a forward runs, unless it
is that of the split.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from whale.errors import WhaleError
from whale.nn.forwards import replace_forward


@dataclass(slots=True)
class Watch:
    """Whether a forward of a rank's stages runs, with code of the user's in it."""

    running: int = 0

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, one runs."""
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1


class _Opened:
    """A forward that may read what its split cuts."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward
        self.depth = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.depth += 1
        try:
            return self.forward(*args, **kwargs)
        finally:
            self.depth -= 1


_MODULES = inspect.getfile(nn.Module)
_ENCODERS = inspect.getfile(nn.TransformerEncoderLayer)


def _by_encoder() -> bool:
    """Whether torch's encoder asks, which looks at weights to choose a path (`nn.encoders`)."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename in (__file__, _MODULES):
        frame = frame.f_back
    return frame.f_code.co_filename == _ENCODERS


class _Parameters(dict[str, Any]):
    """The parameters of a module, some of which are a rank's part, for their `readers` alone."""

    def __init__(self, plain: dict[str, Any], path: str, watch: Watch) -> None:
        super().__init__(plain)
        self.path, self.watch = path, watch
        self.readers: dict[str, list[_Opened]] = {}

    def _check(self, name: str) -> None:
        if not self.watch.running or name not in self.readers:
            return
        if any(reader.depth for reader in self.readers[name]) or _by_encoder():
            return
        raise WhaleError(
            f"{self.path}.{name} is read by other code than the forward of what is split, and this "
            "rank holds a part of it",
            hint="give wh.parallelize a batch on which that code runs, so that it stays whole, or "
            "leave it out of `split`",
        )

    def __getitem__(self, name: str) -> Any:
        self._check(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """As a dict's."""
        self._check(name)
        return super().get(name, default)

    def items(self) -> Any:
        """As a dict's."""
        for name in self.readers:
            self._check(name)
        return super().items()

    def values(self) -> Any:
        """As a dict's."""
        for name in self.readers:
            self._check(name)
        return super().values()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (), None, None, iter(dict.items(self))


def guard_parameters(
    modules: Mapping[str, nn.Module],
    splits: Iterable[tuple[Sequence[str], Sequence[nn.Parameter]]],
    watch: Watch,
) -> None:
    """Lets only the forwards of its split read a parameter.

    `splits`: by split, the paths of the modules whose forwards were replaced, and what it cuts.
    """
    readers: dict[int, list[_Opened]] = {}
    for paths, parameters in splits:
        opened = [_opened(modules[path]) for path in paths]
        for parameter in parameters:
            readers.setdefault(id(parameter), []).extend(opened)
    for path, module in modules.items():
        table = module.__dict__["_parameters"]
        cut = {name: readers[id(p)] for name, p in table.items() if id(p) in readers}
        if cut and not isinstance(table, _Parameters):
            table = module.__dict__["_parameters"] = _Parameters(table, path, watch)
            table.readers = cut


def _opened(module: nn.Module) -> _Opened:
    forward = module.forward
    if not isinstance(forward, _Opened):
        forward = _Opened(forward)
        replace_forward(module, forward)
    return forward
