"""Stillness: the user's code run for a look, without dropout, and put back as it was.

Place in the flow: around what `engine.trials.rehearsal` runs. A forward may change more than
buffers: counters, lists and caches that modules keep as attributes. All of it is as before
afterwards, and so are the generators of torch, numpy and Python.
"""

from __future__ import annotations

import functools
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from whale.engine.state.outside import as_it_was
from whale.errors import WhaleError
from whale.runtime.compat import about_fakes
from whale.runtime.recompute import RerunMode

_DROPOUTS = frozenset(
    "dropout dropout_ dropout1d dropout2d dropout3d alpha_dropout feature_dropout "
    "feature_alpha_dropout alpha_dropout_ feature_dropout_ feature_alpha_dropout_".split()
)
_DRAWS = frozenset(
    "rand randn rand_like randn_like randint randint_like randperm bernoulli bernoulli_ normal "
    "normal_ uniform_ multinomial poisson exponential_ cauchy_ log_normal_ geometric_ random_ "
    "rrelu rrelu_ gumbel_softmax native_dropout".split()
)


class Still(RerunMode):
    """Nothing is dropped.

    Attributes:
        drew: Whether other random numbers were drawn.
        narrow: Whether anything was computed in less than float64.
    """

    def __init__(self) -> None:
        super().__init__()
        self.drew = self.narrow = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = {**kwargs, "dropout_p": 0.0} if "dropout_p" in kwargs else kwargs
        self.drew = self.drew or name in _DRAWS
        out = func(*args, **kwargs)
        if isinstance(out, torch.Tensor) and out.is_floating_point():
            self.narrow = self.narrow or out.dtype != torch.float64
        return out


@contextmanager
def as_before(model: nn.Module, loss: Any = None) -> Iterator[None]:
    """Inside, modules may change what they hold; afterwards it is what it was.

    Dropout that modules draw inside torch's kernels (attention, recurrent layers) is off.
    """
    parameters = [(p, p.data, p.grad) for p in model.parameters()]
    buffers = [(b, b.clone()) for b in model.buffers() if not b.is_meta]
    kept = [Attributes(module) for module in model.modules()]
    states = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices), as_it_was(model, loss):
            for module in model.modules():
                if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
                    module.dropout = 0.0
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        for each in kept:
            each.put_back()
        with torch.no_grad():
            for buffer, value in buffers:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
        for parameter, data, grad in parameters:
            parameter.data, parameter.grad = data, grad


_Built = TypeVar("_Built", bound=Callable[..., Any])


def leaves_no_trace(build: _Built) -> _Built:
    """A function that runs the user's code to look at it: what that code changes is as before.

    Nor may that code keep tensors of the trace for its real runs.
    """

    @functools.wraps(build)
    def called(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            with as_it_was(model, kwargs.get("loss")):
                return build(model, *args, **kwargs)
        except Exception as error:
            if not about_fakes(error):
                raise
            raise WhaleError(
                "the model's code keeps a tensor outside of its modules (a global, a closure): it "
                "is one of the trace, which has shapes and no values",
                hint="keep it in a buffer, or make it anew in every forward",
            ) from error

    return cast(_Built, called)


_CONTAINERS = (list, dict, set, deque, OrderedDict)


def _items(value: Any) -> tuple[Any, ...]:
    """What is in a container. Most are empty: a module has a dozen of them, for hooks."""
    if not value:
        return ()
    return tuple(value.items() if isinstance(value, dict) else value)


def _refill(value: Any, items: tuple[Any, ...]) -> None:
    if not value and not items:
        return
    value.clear()
    if isinstance(value, list | deque):
        value.extend(items)
    else:
        value.update(items)


class Attributes:
    """What a module holds, to be put back: the same objects, containers with what was in them.

    Hooks are among it: code that installs some in its first forward notes that in an attribute.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.held = dict(module.__dict__)
        self.inside = [(v, _items(v)) for v in self.held.values() if type(v) in _CONTAINERS]

    def put_back(self) -> None:
        """The module is as it was."""
        self.module.__dict__.clear()
        self.module.__dict__.update(self.held)
        for value, items in self.inside:
            _refill(value, items)


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Inside, a model evaluates; afterwards every module is in the mode it was in."""
    flags = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        if flags[model]:
            model.train()  # modules may do more then than to turn a flag
        for module, flag in flags.items():
            module.training = flag
