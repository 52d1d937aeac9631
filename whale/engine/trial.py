"""Trial: whether a module's code runs with fewer heads than it was built for.

Place in the flow: asked by `engine.match` before attention is offered by heads. The sharded
forwards are put on a copy with one head's weights, on fake tensors. Code that remembers a size
under a name of its own does not pass: its views fail, or fold tokens or parts of a head into the
heads that are missing; nor does code that computes with a number of heads. Nothing would notice in
a real run.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from whale.engine.heads import SIZES, Inside, name_of
from whale.engine.program import tensors_in, visit
from whale.engine.rules import install
from whale.ir.model_graph import SplitOption
from whale.nn.shard import Shard


class _Watch(TorchFunctionMode):
    """Notes what attention products read, and the numbers that values are computed with."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[list[tuple[int, ...]]] = []
        self.numbers: Counter[tuple[str, Any]] = Counter()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # The capture around this must not see it: it would count the dropouts.
        with torch._C.DisableTorchFunction():
            if func is F.scaled_dot_product_attention:
                self.read.append([tuple(t.shape) for t in tensors_in((args, kwargs or {}))[:3]])
            self.numbers += _numbers(getattr(func, "__name__", ""), (args, kwargs))
            return func(*args, **(kwargs or {}))


def _numbers(name: str, args: Any) -> Counter[tuple[str, Any]]:
    """The numbers among the arguments of a function that computes with them."""
    found: list[Any] = []
    if name not in SIZES:
        visit(args, found.append, (int, float))
    return Counter((name, number) for number in found)


def runs_with_fewer(option: SplitOption, inside: Inside, heads: list[tuple[int, ...]]) -> bool:
    """Whether a module with one unit runs, attends with that unit's part of `heads`, and gives all.

    `heads` are the shapes of query, key and value with all units.
    """
    (call,) = inside.calls[option.path]
    module = inside.modules[option.path]
    shard = Shard(group="", index=0, cuts=(0, 1, option.units), params=dict(option.params))
    memo: dict[int, Any] = {id(t): t for t in (*module.parameters(), *module.buffers())}
    for name, sharding in option.params:
        whole = inside.state[name]
        shape = list(whole.shape)
        shape[sharding.dim] = sum(high - low for low, high in sharding.spans(0, 1))
        memo[id(whole)] = nn.Parameter(whole.new_empty(shape), requires_grad=False)
    local = copy.deepcopy(module, memo)
    prefix = f"{option.path}." if option.path else ""
    modules = {f"{prefix}{name}" if name else option.path: m for name, m in local.named_modules()}
    watch = _Watch()
    try:
        install("attention", option.path, option.modules, shard, modules)
        with torch.no_grad(), _quiet(), watch:
            out = local(*call.args, **call.kwargs)
    except Exception:  # noqa: BLE001 - whatever a user's forward raises when sizes do not fit
        return False
    expected = [(s[0], s[1] // option.units, *s[2:]) for s in heads]
    numbers: Counter[tuple[str, Any]] = Counter()
    for op in inside.program.ops[call.first : call.last]:
        numbers += _numbers(name_of(op), (op.args, op.kwargs))
    # Leaf modules, opaque in the trace, compute with more.
    return watch.read == [expected] and _shapes(out) == call.made and numbers <= watch.numbers


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's log of operations that fail on fake tensors: here that is an answer."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = disabled


def _shapes(value: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(t.shape) for t in tensors_in(value))
