"""The functions of torch that give random numbers, one by one, from keyed ones.

Place in the flow: half of the table that `nn.randomness` looks functions up in, by identity and not
by name (`nn.random_dropouts` is the other); capture uses the same table to see what a model draws.
A random function that is in neither moves torch's generator, which `runtime.generators` notices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from whale.nn import draws
from whale.runtime.compat import sample_dirichlet, standard_gamma

CALLS: dict[Any, Callable[..., Any]] = {}
"""Function -> handler(mode, *its arguments); the mode gives the place."""

_Device = Any


def _handles(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        CALLS.update(dict.fromkeys(functions, handler))
        return handler

    return register


# ---- tensors of random numbers -------------------------------------------------------------------


def _made(
    numbers: Tensor, dtype: torch.dtype | None, out: Tensor | None, requires_grad: bool
) -> Tensor:
    """A draw as the factory gives it."""
    if out is not None:
        return out.resize_(numbers.shape).copy_(numbers)
    made = numbers.to(dtype or torch.get_default_dtype())
    return made.requires_grad_() if requires_grad else made


def _factory(number: Callable[[draws.Place, torch.dtype], Tensor]) -> Callable[..., Tensor]:
    def made(
        mode: Any,
        *size: Any,
        dtype: torch.dtype | None = None,
        device: _Device = None,
        out: Tensor | None = None,
        requires_grad: bool = False,
        **rest: Any,
    ) -> Tensor:
        size = rest.get("size", size)
        kind = dtype or (out.dtype if out is not None else torch.get_default_dtype())
        place = mode.place(draws.size_of(size), out.device if out is not None else device)
        return _made(number(place, kind), kind, out, requires_grad)

    return made


def _like(number: Callable[[draws.Place, torch.dtype], Tensor]) -> Callable[..., Tensor]:
    def made(
        mode: Any,
        input: Tensor,
        *,
        dtype: torch.dtype | None = None,
        device: _Device = None,
        requires_grad: bool = False,
        **_: Any,
    ) -> Tensor:
        kind = dtype or input.dtype
        place = mode.place(input.shape, device if device is not None else input.device)
        return _made(number(place, kind), kind, None, requires_grad)

    return made


def _normal_as(place: draws.Place, dtype: torch.dtype) -> Tensor:
    if not dtype.is_complex:
        return draws.normal(place)
    parts = draws.normal(place.wider(2)) * math.sqrt(0.5)
    return torch.view_as_complex(parts)


def _uniform_as(place: draws.Place, dtype: torch.dtype) -> Tensor:
    if not dtype.is_complex:
        return draws.uniform(place, dtype)
    return torch.view_as_complex(draws.uniform(place.wider(2)))


CALLS[torch.rand] = _factory(_uniform_as)
CALLS[torch.randn] = _factory(_normal_as)
CALLS[torch.rand_like] = _like(_uniform_as)
CALLS[torch.randn_like] = _like(_normal_as)


@_handles(torch.randint)
def _randint(
    mode: Any,
    *args: Any,
    dtype: torch.dtype | None = None,
    device: _Device = None,
    out: Tensor | None = None,
    requires_grad: bool = False,
    **named: Any,
) -> Tensor:
    numbers = list(args)
    size = named["size"] if "size" in named else numbers.pop()
    low = named["low"] if "low" in named else (numbers.pop(0) if len(numbers) > 1 else 0)
    high = named["high"] if "high" in named else numbers.pop(0)
    if "high" in named and numbers:
        low = numbers.pop(0)
    place = mode.place(draws.size_of((size,)), out.device if out is not None else device)
    return _made(draws.integers(place, low, high), dtype or torch.int64, out, requires_grad)


@_handles(torch.randint_like)
def _randint_like(
    mode: Any,
    input: Tensor,
    *args: int,
    dtype: torch.dtype | None = None,
    device: _Device = None,
    requires_grad: bool = False,
    low: int | None = None,
    high: int | None = None,
    **_: Any,
) -> Tensor:
    bounds = [n for n in (low, *args, high) if n is not None]
    first, end = bounds if len(bounds) == 2 else (0, bounds[0])
    place = mode.place(input.shape, device if device is not None else input.device)
    return _made(draws.integers(place, first, end), dtype or input.dtype, None, requires_grad)


@_handles(torch.randperm)
def _randperm(
    mode: Any,
    n: int,
    *,
    dtype: torch.dtype | None = None,
    device: _Device = None,
    out: Tensor | None = None,
    requires_grad: bool = False,
    **_: Any,
) -> Tensor:
    place = mode.place_whole((n,), out.device if out is not None else device)
    return _made(draws.permutation(place), dtype or torch.int64, out, requires_grad)


@_handles(torch.normal)
def _normal(
    mode: Any,
    mean: Any,
    std: Any = 1.0,
    size: Any = None,
    *,
    dtype: torch.dtype | None = None,
    device: _Device = None,
    out: Tensor | None = None,
    requires_grad: bool = False,
    **_: Any,
) -> Tensor:
    tensors = [t for t in (mean, std) if isinstance(t, Tensor)]
    shape = size if size is not None else torch.broadcast_shapes(*(t.shape for t in tensors))
    where = tensors[0].device if tensors else (out.device if out is not None else device)
    kind = dtype or (tensors[0].dtype if tensors else torch.get_default_dtype())
    numbers = draws.normal(mode.place(draws.size_of((shape,)), where)).to(kind)
    mean, std = (t.detach() if isinstance(t, Tensor) else t for t in (mean, std))
    return _made(numbers * std + mean, kind, out, requires_grad)


@_handles(torch.bernoulli, Tensor.bernoulli)
def _bernoulli(mode: Any, input: Tensor, p: Any = None, *, out: Tensor | None = None) -> Tensor:
    chance = input if p is None else p
    below = draws.uniform(mode.place(input.shape, input.device)) < _plain(chance)
    return _made(below, input.dtype, out, False)


@_handles(torch.poisson)
def _poisson(mode: Any, input: Tensor) -> Tensor:
    return draws.poisson(mode.place(input.shape, input.device), input).to(input.dtype)


@_handles(torch.binomial)
def _binomial(mode: Any, count: Tensor, prob: Tensor) -> Tensor:
    shape = torch.broadcast_shapes(count.shape, prob.shape)
    return draws.binomial(mode.place(shape, count.device), count, prob).to(count.dtype)


@_handles(standard_gamma)
def _standard_gamma(mode: Any, alpha: Tensor) -> Tensor:
    return draws.gamma(mode.place(alpha.shape, alpha.device), alpha)


@_handles(sample_dirichlet)
def _sample_dirichlet(mode: Any, concentration: Tensor) -> Tensor:
    parts = draws.gamma(mode.place(concentration.shape, concentration.device), concentration)
    return parts / parts.sum(-1, keepdim=True)


@_handles(torch.multinomial, Tensor.multinomial)
def _multinomial(
    mode: Any,
    input: Tensor,
    num_samples: int,
    replacement: bool = False,
    *,
    out: Tensor | None = None,
) -> Tensor:
    place = mode.place(input.shape, input.device)
    # As many numbers for a row's samples as there are samples, beside those of its columns.
    samples = draws.Place(
        key=place.key,
        shape=(*place.shape[:-1], num_samples),
        offsets=place.offsets,
        batch_dim=place.batch_dim,
        device=place.device,
    )
    picked = draws.chosen(place, input, num_samples, replacement, samples)
    return _made(picked, torch.int64, out, False)


# ---- in place ------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _filled(tensor: Tensor, numbers: Tensor) -> Tensor:
    return tensor.copy_(numbers.to(tensor.dtype) if not numbers.is_complex() else numbers)


def _in_place(number: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def filled(mode: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return _filled(tensor, number(mode.place(tensor.shape, tensor.device), *args, **kwargs))

    return filled


@_handles(Tensor.uniform_)
def _uniform_(mode: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    low, high = (
        args[i] if len(args) > i else kwargs.get(name, default)
        for i, (name, default) in enumerate((("from", 0.0), ("to", 1.0)))
    )
    place = mode.place(tensor.shape, tensor.device)
    return _filled(tensor, _uniform_as(place, tensor.dtype) * (high - low) + low)


@_handles(Tensor.normal_)
def _normal_(mode: Any, tensor: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    place = mode.place(tensor.shape, tensor.device)
    return _filled(tensor, _normal_as(place, tensor.dtype) * std + mean)


def _log_normal(place: draws.Place, mean: float = 1.0, std: float = 2.0) -> Tensor:
    return (draws.normal(place) * std + mean).exp()


def _exponential(place: draws.Place, lambd: float = 1.0) -> Tensor:
    return draws.exponential(place) / lambd


def _cauchy(place: draws.Place, median: float = 0.0, sigma: float = 1.0) -> Tensor:
    return draws.cauchy(place) * sigma + median


def _geometric(place: draws.Place, p: Any) -> Tensor:
    return draws.geometric(place, p)


def _bernoulli_(place: draws.Place, p: Any = 0.5) -> Tensor:
    return draws.uniform(place) < _plain(p)


CALLS[Tensor.log_normal_] = _in_place(_log_normal)
CALLS[Tensor.exponential_] = _in_place(_exponential)
CALLS[Tensor.cauchy_] = _in_place(_cauchy)
CALLS[Tensor.geometric_] = _in_place(_geometric)
CALLS[Tensor.bernoulli_] = _in_place(_bernoulli_)


@_handles(Tensor.random_)
def _random_(mode: Any, tensor: Tensor, *args: int, **named: Any) -> Tensor:
    bounds = [n for n in (named.get("from"), *args, named.get("to")) if n is not None]
    if len(bounds) == 2:
        low, high = bounds
    else:
        low, high = 0, bounds[0] if bounds else _random_end(tensor.dtype)
    return _filled(tensor, draws.integers(mode.place(tensor.shape, tensor.device), low, high))


def _random_end(dtype: torch.dtype) -> int:
    """The default: all integers that the dtype holds, from 0."""
    if dtype.is_floating_point:
        return int(2 ** (1 - math.log2(torch.finfo(dtype).eps))) + 1
    return 2 if dtype == torch.bool else min(torch.iinfo(dtype).max, 2**62)
