"""Code that runs without a row: sizes that torch cannot infer from an empty tensor.

Place in the flow: around a forward whose replica has no rows, and must run because others wait for
it in a collective. `x.view(*shape[:2], -1, head_dim)` is how most models part their heads; torch
cannot tell what -1 stands for where the batch has no rows, though any other batch says it. So the
sizes are inferred as if the dims of no elements had one.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from whale.runtime.recompute import RerunMode

_RESHAPES = frozenset({torch.Tensor.view, torch.Tensor.reshape, torch.reshape})


def sizes_of_none(shape: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[int, ...] | None:
    """`wanted` with its -1 inferred for an empty tensor; None if nothing says what it is."""
    if wanted.count(-1) != 1 or 0 not in wanted or shape.count(0) != wanted.count(0):
        return None
    have = math.prod(size for size in shape if size)
    known = math.prod(size for size in wanted if size > 0)
    if have % known:
        return None
    return tuple(have // known if size == -1 else size for size in wanted)


class EmptyRows(RerunMode):
    """Gives reshapes of empty tensors the sizes that torch finds ambiguous."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _RESHAPES and not kwargs and args[0].numel() == 0:
            wanted = args[1:]
            if len(wanted) == 1 and isinstance(wanted[0], (tuple, list)):
                wanted = tuple(wanted[0])
            if all(type(size) is int for size in wanted):
                sizes = sizes_of_none(tuple(args[0].shape), wanted)
                if sizes is not None:
                    return func(args[0], sizes)
        return func(*args, **(kwargs or {}))
