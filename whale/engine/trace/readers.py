"""Readers: which code reads each parameter, seen in a run of the whole model on fake tensors.

Place in the flow: watches the runs of `engine.capture`; `engine.capture.graph` asks it about every
split option. A rule replaces the forward of its modules, and only they may read a parameter that it
cuts: `w.norm()` in a block, `F.linear(x, self.proj.weight)` or a penalty in the loss would read a
shard and never know. Who reads is told by the stack: the innermost module whose method is running,
and the file that method is in. Hooks run in the call of a module, not in its forward, and do not
count as the module's own.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from whale.engine.trace.program import tensors_in
from whale.engine.trace.tracer import HARMLESS, user_line
from whale.ir.model_graph import SplitOption
from whale.ir.sharding import DimSharding
from whale.nn.moe import layer as experts
from whale.nn.sharded import is_linear
from whale.runtime.compat import in_transform, watch_functions

# The files whose code the rules were written for.
_KNOWN_FILES = frozenset(
    [
        *(inspect.getfile(kind) for kind in (nn.Linear, nn.Embedding, nn.Conv2d)),
        inspect.getfile(nn.MultiheadAttention),
        inspect.getfile(experts),
    ]
)
_KNOWN_MODULES = frozenset(["transformers.pytorch_utils"])
_WITHOUT_TRACE = ("user", "stacked experts", "stacked columns", "batched experts")
"""Rules whose module may read its own parameters as it likes: a user's own, one that ran on fakes
in another form, and one whose reads were followed."""

_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")
"""Methods of tensors that give code to the backward."""

_PARTS_INSIDE = ("pair", "attention")
"""Rules whose modules make parts of a value, which no code outside of their Layer may read."""


@dataclass(frozen=True, slots=True)
class Read:
    """One place in which a parameter is read."""

    module: str | None
    """Path of the innermost module whose method is running; None: code outside of all modules."""
    known: bool
    """Whether that method is one a rule was written for, not a subclass's or a hook."""
    function: str
    where: str
    inside: bool = True
    """Whether a Layer that holds the module is running."""


class Readers(TorchFunctionMode):
    """Keeps who reads each parameter; `names` are parameters by the id of their tensor."""

    def __init__(self, names: Mapping[int, str], paths: Mapping[int, str]) -> None:
        super().__init__()
        self.names, self.paths = names, paths
        self.reads: dict[str, dict[Read, None]] = {}
        self.watching = True
        self.differentiates = False
        """Whether a forward asked for gradients itself."""
        self.running: frozenset[int] = frozenset()
        """Modules of the Layer that runs."""
        self.layer: str | None = None
        """Its path."""
        self.backwards: set[str] = set()
        """Layers that have code of the user's in their backward: what it reads nobody sees."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        self.differentiates |= func is torch.autograd.grad
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name not in HARMLESS:
            self._note(name, (args, kwargs or {}))
        if name in _HOOKS:
            self._note_backward()
        return func(*args, **(kwargs or {}))

    def _note_backward(self) -> None:
        if self.watching and self.layer is not None:
            self.backwards.add(self.layer)

    @contextmanager
    def functions(self) -> Iterator[None]:
        """Inside, what a user's autograd.Functions are given counts as read too."""

        def around(kind: type, run: Any, args: Any, kwargs: Any) -> Any:
            self._note(kind.__name__, (args, kwargs))
            if kind.__module__.partition(".")[0] not in ("torch", "whale"):
                self._note_backward()
            return run(*args, **kwargs)

        with watch_functions(around):
            yield

    @contextmanager
    def within(self, path: str, modules: frozenset[int]) -> Iterator[None]:
        """Around the forward of the Layer at a path, which has these modules."""
        before = self.running, self.layer
        self.running, self.layer = self.running | modules, path
        try:
            yield
        finally:
            self.running, self.layer = before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around code that is not the model's."""
        self.watching = False
        try:
            yield
        finally:
            self.watching = True

    def _note(self, function: str, args: Any) -> None:
        if not self.watching:
            return
        for tensor in tensors_in(args):
            name = self.names.get(id(tensor))
            if name is not None:
                self.reads.setdefault(name, {})[self._reader(function)] = None

    def _reader(self, function: str) -> Read:
        frame = sys._getframe(2)
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and id(owner) in self.paths:
                file = frame.f_code.co_filename
                known = file in _KNOWN_FILES or frame.f_globals.get("__name__") in _KNOWN_MODULES
                # A Linear that writes itself out reads what torch's would.
                known = known or (is_linear(owner) and frame.f_code.co_name == "forward")
                # A transform of torch.func knows nothing of the ranks that a rule works with.
                known = known and _is_called(frame, owner) and not in_transform()
                inside = id(owner) in self.running
                where = "" if known and inside else user_line()
                return Read(self.paths[id(owner)], known, function, where, inside)
            frame = frame.f_back  # type: ignore[assignment]
        return Read(None, False, function, user_line())


def _is_called(frame: FrameType, owner: nn.Module) -> bool:
    """Whether the method runs in a call of its module.

    `nn.Linear.forward(module, x)` would pass by what a rule puts in the place of its forward.
    """
    caller = frame.f_back
    if caller is None:
        return False
    if caller.f_locals.get("self") is owner:  # a subclass calls super
        return _is_called(caller, owner) if caller.f_code.co_name == "forward" else True
    return caller.f_code.co_filename.startswith(_CALLERS)


_CALLERS = (os.path.dirname(inspect.getfile(torch)), str(Path(__file__).resolve().parents[2]))
"""Where modules are called from: torch's `__call__`, and what capture puts in its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offers:
    """The options of one Layer, and what is needed to judge who reads their parameters."""

    path: str
    options: tuple[SplitOption, ...]
    layers: Mapping[str, frozenset[str]]
    """The parameters of every Layer, by path."""

    def without_readers(
        self, reads: Mapping[str, Mapping[Read, None]]
    ) -> tuple[tuple[SplitOption, ...], tuple[str, ...]]:
        """The options whose parameters no other code reads, and why the others are left out."""
        kept = self.options
        why: dict[str, None] = {}
        while True:
            found = {id(o): self._foreign(o, kept, reads) for o in kept}
            why.update({line: None for line in found.values() if line is not None})
            if not any(found.values()):
                break
            kept = tuple(o for o in kept if found[id(o)] is None)
        others = {id(o): tuple(x for x in o.instead if self.unread(x, reads)) for o in kept}
        return tuple(replace(o, instead=others[id(o)]) for o in kept), tuple(why)

    def unread(self, option: SplitOption, reads: Mapping[str, Mapping[Read, None]]) -> bool:
        """Whether no other code reads what the option cuts."""
        return self._foreign(option, self.options, reads) is None

    def _foreign(
        self,
        option: SplitOption,
        options: tuple[SplitOption, ...],
        reads: Mapping[str, Mapping[Read, None]],
    ) -> str | None:
        for param in option.params:
            for read in reads.get(param[0], ()):
                if not self._allows(option, param, options, read):
                    return (
                        f"{option.path} is not split by {option.unit}: other code "
                        f"({read.where or read.module}) reads its {param[0]} "
                        f"(`{read.function}`), which must be whole there"
                    )
        return None

    def _allows(
        self,
        option: SplitOption,
        param: tuple[str, DimSharding],
        options: tuple[SplitOption, ...],
        read: Read,
    ) -> bool:
        if read.module == option.path and ("cut", param[0]) in option.marks:
            return True
        if option.rule in _PARTS_INSIDE and not read.inside:
            return False
        if read.module in option.modules:
            return read.known or option.rule in _WITHOUT_TRACE
        layer = layer_of(read.module, self.layers)
        if layer is not None and layer != self.path:
            # A tied weight: the planner sees to it that no rank needs it both cut and whole.
            return param[0] in self.layers[layer]
        return read.known and any(read.module in o.modules and param in o.params for o in options)


def layer_of(path: str | None, layers: Iterable[str]) -> str | None:
    """The Layer a module is in; None: glue."""
    if path is None:
        return None
    return next((p for p in layers if path == p or path.startswith(f"{p}.") or p == ""), None)
