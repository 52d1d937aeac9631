"""Chances: what a random number without a batch may be, while a model runs on fake tensors.

Place in the flow: beside `engine.trace`. Code that branches on a draw (`torch.rand([]) < p`, to
skip a layer) is decided here in two ways. Where every number the draw can give decides alike
(p = 0), the outcome is a constant. Where it does not, the outcome of the middle number stands in
for capture's run of code that is not cut; the real run draws.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from whale.engine.trace.program import tensors_in, tree_map
from whale.runtime.compat import real_tensors

_ELEMENTS = 16
_UNIFORM = (torch.rand, torch.rand_like, torch.Tensor.uniform_)
_COMPARED: dict[str, Callable[[Any, Any], Any]] = {
    "lt": operator.lt, "__lt__": operator.lt, "le": operator.le, "__le__": operator.le,
    "gt": operator.gt, "__gt__": operator.gt, "ge": operator.ge, "__ge__": operator.ge,
}  # fmt: skip
_LARGEST = 1.0 - 2.0**-53


class Chances:
    """Follows small draws without a batch through what is computed from them."""

    def __init__(self, constants: dict[int, torch.Tensor]) -> None:
        self.constants = constants
        """Real values of fake tensors; decided comparisons are added."""
        self._typical: dict[int, torch.Tensor] = {}
        self._uniform: set[int] = set()
        self._keep: list[Any] = []

    def follow(
        self,
        func: Any,
        name: str,
        args: tuple[Any, ...],
        kwargs: Any,
        out: Any,
        drawn: tuple[str, int] | None,
    ) -> None:
        """A function ran on fakes and gave `out`."""
        if drawn is None and not self._typical:
            return
        made = tensors_in(out)
        if not made or sum(t.numel() for t in made) > _ELEMENTS:
            return
        if drawn is not None:
            for tensor in made:
                self._draw(func, tensor, args, kwargs)
            return
        known = self.typical_args((args, kwargs))
        if known is None or not self._any_typical((args, kwargs)):
            return
        if name in _COMPARED and self._decided(_COMPARED[name], args, made[0]):
            return
        with real_tensors(), torch.no_grad():
            real = tensors_in(func(*known[0], **known[1]))
        for fake, value in zip(made, real, strict=True):
            self._hold(fake)
            self._typical[id(fake)] = value

    def _draw(self, func: Any, tensor: torch.Tensor, args: Any, kwargs: Any) -> None:
        self._hold(tensor)
        uniform = func in _UNIFORM and not (func is torch.Tensor.uniform_ and (args[1:] or kwargs))
        with real_tensors():
            middle = 0.5 if uniform and tensor.dtype.is_floating_point else 0
            self._typical[id(tensor)] = torch.full(tensor.shape, middle, dtype=tensor.dtype)
        if uniform:
            self._uniform.add(id(tensor))

    def _decided(self, compare: Any, args: tuple[Any, ...], out: torch.Tensor) -> bool:
        """Whether the least and the largest number a draw can give compare alike."""
        draw, other = args[0], args[1]
        if isinstance(other, torch.Tensor):
            if id(other) not in self.constants:
                return False
            other = self.constants[id(other)]
        if not isinstance(draw, torch.Tensor) or id(draw) not in self._uniform:
            return False
        with real_tensors():
            ends = [
                torch.as_tensor(compare(torch.full(draw.shape, end, dtype=torch.float64), other))
                for end in (0.0, _LARGEST)
            ]
            if not torch.equal(*ends):
                return False
        self._hold(out)
        self.constants[id(out)] = ends[0]
        return True

    def _hold(self, tensor: torch.Tensor) -> None:
        self._keep.append(tensor)

    def _any_typical(self, value: Any) -> bool:
        return any(id(t) in self._typical for t in tensors_in(value))

    def typical_args(self, value: Any) -> Any | None:
        """`value` with constants and the middle of draws for fakes; None where one is neither."""
        known = self._any_typical(value)

        def leaf(item: Any) -> Any:
            nonlocal known
            if not isinstance(item, torch.Tensor):
                return item
            found = self.constants.get(id(item), self._typical.get(id(item)))
            known = known and found is not None
            return found

        mapped = tree_map(value, leaf) if known else None
        return mapped if known else None
