"""Stillness: the user's code run for a look, without dropout, and put back as it was.

Place in the flow: around what `engine.rehearsal` runs. A forward may change more than buffers:
counters, lists and caches that modules keep as attributes. All of it is as before afterwards, and
so are the generators of torch, numpy and Python.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

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
    """Nothing is dropped; `drew` says whether other random numbers were drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.drew = False

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
        return func(*args, **kwargs)


@contextmanager
def as_before(model: nn.Module) -> Iterator[None]:
    """Inside, modules may change what they hold; afterwards it is what it was.

    Dropout that modules draw inside torch's kernels (attention, recurrent layers) is off.
    """
    parameters = [(p, p.data, p.grad) for p in model.parameters()]
    buffers = [(b, b.clone()) for b in model.buffers() if not b.is_meta]
    modules = [(m, attributes(m)) for m in model.modules()]
    states = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices=devices):
            for module, _ in modules:
                if isinstance(module, nn.MultiheadAttention | nn.RNNBase):
                    module.dropout = 0.0
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        for module, kept in modules:
            module.__dict__.clear()
            module.__dict__.update(kept)
        with torch.no_grad():
            for buffer, value in buffers:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)
        for parameter, data, grad in parameters:
            parameter.data, parameter.grad = data, grad


def attributes(module: nn.Module) -> dict[str, Any]:
    """What it holds, with containers of its own copied."""
    kept = {}
    for name, value in module.__dict__.items():
        plain = type(value) in (list, dict, set, deque) or name in ("_buffers", "_modules")
        kept[name] = copy.copy(value) if plain else value
    return kept
