"""Away: code of a forward that reads a weight while it is not there, or may be updated meanwhile.

Place in the flow: around the forwards of a Step whose plan brings weights for their Layer alone
(`Home.zero` 3, `Home.fetched`) or updates them inside the backward. The trials at build saw the
code of one batch; a counter, a flag, another length or evaluation may lead to code that reads a
weight elsewhere, and what stands in for it has no number. Such a read is refused.

Of weights that are updated inside the backward, what autograd does not follow is refused too: a use
of `weight.data`, and a read in a hook that a forward hung on a value, once the weight is new.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from whale.engine.trace.program import tensors_in
from whale.engine.trace.tracer import user_line
from whale.engine.watch.outsiders import LOOKS, name_of
from whale.errors import WhaleError
from whale.runtime.signature import Context
from whale.runtime.store import ParameterStore
from whale.runtime.units import Unit

_HARMLESS = LOOKS | frozenset("grad __set__ requires_grad_ retain_grad".split())


class Away(TorchFunctionMode):
    """Refuses such reads.

    Args:
        store: Of this rank.
        early: Whether the plan updates inside the backward.
    """

    def __init__(self, store: ParameterStore, *, early: bool) -> None:
        super().__init__()
        self._units: Mapping[int, tuple[str, Unit | None]] = {
            id(store.params[name]): (name, store.unit_of(name)) for name in store.absent
        }
        trained = (n for n, p in store.params.items() if early and p.requires_grad)
        self._early = {id(store.params[name]): name for name in trained}
        self._updated = store.updater.is_done
        self.needed = bool(self._units or self._early)

    def around(self, inner: Context) -> Context:
        """`inner`, with this around the forward inside."""
        if not self.needed:
            return inner

        @contextmanager
        def watched() -> Iterator[None]:
            with inner(), self:
                yield

        return watched

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        what = name_of(func)
        if what not in _HARMLESS:
            for parameter in _parameters((args, kwargs)):
                self._check(parameter, what)
        if self._early and what == "register_hook" and len(args) > 1 and _is_users():
            args = (args[0], _guarded(args[1], self._early, self._updated), *args[2:])
        return func(*args, **kwargs)

    def _check(self, parameter: nn.Parameter, what: str) -> None:
        name, unit = self._units.get(id(parameter), ("", None))
        if name and (unit is None or not unit.is_here) and _is_users():
            raise WhaleError(
                f"{name} is read by code outside of its Layer, or in a Layer that did not run when "
                "the step was built; it is here only while its Layer runs",
                hint="give wh.parallelize a batch that leads there; or leave zero.level below v2, "
                "and weights out of offload.level (offload.layers names those that may go)",
                where=user_line(),
            )
        name = self._early.get(id(parameter), "")
        if name and what == "data" and torch.is_grad_enabled() and _is_users():
            raise WhaleError(
                f"a forward reads {name}.data, which autograd does not follow: its backward may "
                "find the weight updated already (optimizer.apply_in_backward)",
                hint=f"compute with a copy ({name}.detach().clone()), or leave "
                "optimizer.apply_in_backward out",
                where=user_line(),
            )


class _Updated(TorchFunctionMode):
    """Inside a hook of a backward: refuses reads of weights that are new already."""

    def __init__(self, names: Mapping[int, str], updated: Callable[[str], bool]) -> None:
        super().__init__()
        self.names, self.updated = names, updated

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if name_of(func) not in _HARMLESS:
            for parameter in _parameters((args, kwargs)):
                name = self.names.get(id(parameter), "")
                if name and self.updated(name):
                    raise WhaleError(
                        f"a hook reads {name} in the backward, when it is updated already "
                        "(optimizer.apply_in_backward)",
                        hint="leave optimizer.apply_in_backward out for this model",
                        where=user_line(),
                    )
        return func(*args, **kwargs)


def _guarded(
    hook: Callable[..., Any], names: Mapping[int, str], updated: Callable[[str], bool]
) -> Callable[..., Any]:
    @functools.wraps(hook)
    def called(*args: Any, **kwargs: Any) -> Any:
        with _Updated(names, updated):
            return hook(*args, **kwargs)

    return called


def _parameters(values: Any) -> Iterator[nn.Parameter]:
    return (tensor for tensor in tensors_in(values) if isinstance(tensor, nn.Parameter))


def _is_users() -> bool:
    """Whether who calls torch is code of the model, by itself or through a module of torch or ours.

    Else it is what brings the weights, updates them and keeps what a backward needs.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        code = frame.f_code
        if code.co_name == "__torch_function__" or code.co_filename.startswith(_BETWEEN):
            continue
        return not code.co_filename.startswith(_MACHINERY)
    return True


_MACHINERY = tuple(
    os.path.join(Path(__file__).resolve().parents[2], name, "") for name in ("runtime", "engine")
)
_BETWEEN = (os.path.dirname(str(torch.__file__)), str(functools.__file__), str(contextlib.__file__))
