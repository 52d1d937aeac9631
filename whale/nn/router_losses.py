"""Router losses of other libraries: balancing and z-losses over all tokens of a micro-batch.

Place in the flow: transformers' models call them in the code of their loss. They are no means that
could be added up over replicas but products of means, so replicas gather what they are computed
from, and each computes the loss of all tokens: `engine.lower.stages` runs them so. `engine.capture`
runs stand-ins, whose shapes do not depend on values, `engine.trials.parts` tries that gathering is
enough.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from whale.errors import CaptureError, WhaleError
from whale.nn.column_shard import plain
from whale.nn.moe.parallel import Replicas
from whale.runtime import collectives
from whale.runtime.batch import like_sequence

NAMES = ("load_balancing_loss_func", "router_z_loss_func")
"""What they are called in the modules of the models that call them."""

Compute = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Computes such a loss, given its function and what it was called with."""


def plainly(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As it stands: all tokens are here."""
    return function(*args, **kwargs)


_compute: ContextVar[Compute] = ContextVar("router losses", default=plainly)


def router_loss(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call of `function`, computed as `computed_by` says; to a trace it is one operation."""
    tensors = tuple(leaves((args, kwargs)))
    if has_torch_function(tensors):
        try:
            return handle_torch_function(router_loss, tensors, function, *args, **kwargs)
        except CaptureError as error:
            raise CaptureError(
                f"the model's router loss ({function.__module__}.{function.__name__}) reads what "
                "its routers made inside Layers, which cannot travel between stages",
                hint="turn it off (output_router_logits=False), train without stages, or use "
                "wh.nn.MoE, which returns its loss",
            ) from error
    return _compute.get()(function, args, kwargs)


@contextmanager
def computed_by(model: nn.Module, compute: Compute) -> Iterator[None]:
    """Inside, the router losses that the code of `model` calls are computed by `compute`."""
    found = list(_functions(model))
    token = _compute.set(compute)
    for space, name, function in found:
        space[name] = _Called(function)
    try:
        yield
    finally:
        for space, name, function in found:
            space[name] = function
        _compute.reset(token)


class _Called:
    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return router_loss(self.function, *args, **kwargs)


def _functions(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Callable[..., Any]]]:
    """The namespaces of the model's classes that have such functions."""
    names = {base.__module__ for m in model.modules() for base in type(m).__mro__}
    for module in sorted(names):
        space = vars(sys.modules[module]) if module in sys.modules else {}
        for name in NAMES:
            function = space.get(name)
            if callable(function) and not isinstance(function, _Called):
                yield space, name, function


def has_router_losses(model: nn.Module) -> bool:
    """Whether its code could call one."""
    return next(_functions(model), None) is not None


def leaves(value: Any) -> Iterator[Tensor]:
    """The tensors of arguments, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from leaves(item)


def _rebuilt(value: Any, rest: Iterator[Tensor]) -> Any:
    if isinstance(value, Tensor):
        return next(rest)
    if isinstance(value, dict):
        return {key: _rebuilt(item, rest) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return like_sequence(value, [_rebuilt(item, rest) for item in value])
    return value


def shapes_only(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A number of as many gradients, for fake tensors."""
    wide = [t for t in leaves((args, kwargs)) if t.is_floating_point() and t.dim()]
    if not wide:
        return 0
    total = wide[0].float().softmax(-1).mean()
    for tensor in wide[1:]:
        total = total + tensor.float().softmax(-1).mean()
    return total


class Gathered:
    """Computes a router loss from the tokens of all replicas.

    Args:
        replicas: Who has tokens.
        tried: Whether a trial showed that theirs, put together, are those of one device.
    """

    def __init__(self, replicas: Replicas, *, tried: bool) -> None:
        self.replicas, self.tried = replicas, tried

    def __call__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The same on every replica; gradients go back to all of them."""
        if not self.tried:
            raise WhaleError(
                f"the model computes a router loss ({function.__name__}), which it did not on the "
                "batch given to parallelize",
                hint="give parallelize a batch like those it trains on (output_router_logits=True "
                "in it, or in the model's config)",
            )
        args, kwargs = plain(args), plain(kwargs)
        here = list(leaves((args, kwargs)))
        rows = [t for t in here if t.dim()]
        if not rows:
            return function(*args, **kwargs)
        sizes = torch.tensor([t.shape[0] for t in rows], device=rows[0].device)
        by_replica = self.replicas.gather(sizes).t().tolist()
        known = iter(by_replica)
        whole = [self._all(t, next(known)) if t.dim() else t for t in here]
        args, kwargs = _rebuilt((args, kwargs), iter(whole))
        return function(*args, **kwargs)

    def _all(self, tensor: Tensor, sizes: list[int]) -> Tensor:
        if tensor.dtype == torch.bool:
            return self.replicas.rows(tensor.to(torch.uint8), sizes).bool()
        if not tensor.is_floating_point():
            return self.replicas.rows(tensor, sizes)
        return collectives.enter_rows(tensor, 0, sizes, self.replicas.group)
