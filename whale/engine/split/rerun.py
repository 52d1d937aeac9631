"""Rerun: whether a module's code does the same with a few units as with all.

Place in the flow: asked by `engine.split.unit_options` before a way to cut is offered. The sharded
forwards are put on a copy with the weights of one or two units, on fake tensors, and every
operation is compared with the trace: the same function, the same numbers, and the shape that
follows from where the units are. Code that remembers a size does not pass, unless it keeps it in an
attribute that counts heads or their width: those are changed with the weights. Nothing would notice
in a real run.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from whale.engine.split.heads import SIZES, Inside
from whale.engine.split.rules import install
from whale.engine.split.unit_ops import name_of
from whale.engine.split.units import UnitFollower, alike_shape, local_shape
from whale.engine.state.copies import copied
from whale.engine.trace.program import Op, tensors_in, visit
from whale.ir.model_graph import SplitOption
from whale.nn.forwards import replace_forward
from whale.nn.shard import Shard

_COUNTS = (
    "num_heads", "n_head", "n_heads", "num_attention_heads", "nhead", "heads", "num_kv_heads",
    "num_key_value_heads", "n_kv_heads", "split_size", "all_head_size", "inner_dim",
)  # fmt: skip
"""Attributes that count heads or their joint width, by the names models give them."""
_NOT_COUNTS = ("head_dim", "head_size", "attn_head_size", "layer_idx", "attention_head_size")

_SIZES = SIZES | {
    "zeros",
    "ones",
    "empty",
    "new_zeros",
    "new_ones",
    "new_empty",
    "split_with_sizes",
}

Log = list[tuple[str, tuple[tuple[int, ...], ...], Counter[Any]]]


def counts_of(module: nn.Module) -> list[tuple[str, int]]:
    """Attributes of a module, and of its config, that count heads by their name."""
    found = [
        (name, module.__dict__[name]) for name in _COUNTS if type(module.__dict__.get(name)) is int
    ]
    config = module.__dict__.get("config")
    for name in _COUNTS[:9] if config is not None else ():
        value = getattr(config, name, None)
        if type(value) is int:
            found.append((f"config.{name}", value))
    return found


def reruns(
    option: SplitOption, inside: Inside, follower: UnitFollower, path: str | None = None
) -> SplitOption | None:
    """The option with the attributes to change, if the code then runs alike; else None."""
    path = option.path if path is None else path
    for counts in _attributes(inside, path, follower):
        marked = replace(option, marks=(*option.marks, *(("count", c) for c in counts)))
        # Where one unit is a dim of one element, what is wrong might still broadcast.
        held = (2, 1) if option.units > 2 else (1,)
        if all(_alike(marked, inside, follower, path, units) for units in held):
            return marked
    return None


def _attributes(inside: Inside, path: str, follower: UnitFollower) -> Iterator[list[str]]:
    """Sets of attributes that may have to change, the most likely first."""
    prefix = f"{path}." if path else ""
    named: list[str] = []
    configured: list[str] = []
    others: list[str] = []
    sizes = {follower.shape(v)[c.dim] for v, c in follower.cuts.items()}
    sizes |= {sum(s) for s in follower.parts.values()}
    for name, module in inside.modules.items():
        if name != path and not name.startswith(prefix):
            continue
        for attribute, value in counts_of(module):
            if value % follower.units == 0:
                to = configured if attribute.startswith("config.") else named
                to.append(f"{name}:{attribute}")
        for attribute, value in module.__dict__.items():
            if type(value) is not int or attribute in (*_COUNTS, *_NOT_COUNTS):
                continue
            if value in sizes and value > 1 and value % follower.units == 0:
                others.append(f"{name}:{attribute}")
    yield named
    if configured:
        yield [*named, *configured]
    for attribute in others[:8]:
        yield [*named, attribute]
    if len(others) > 1:
        yield [*named, *others]
        yield [*named, *configured, *others]


class _Watch(TorchFunctionMode):
    """Writes down what the user's code calls; not what modules of the trace's leaves do."""

    def __init__(self) -> None:
        super().__init__()
        self.log: Log = []
        self.paused = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        # The capture around this must not see it: it would count the dropouts.
        with torch._C.DisableTorchFunction():
            out = func(*args, **(kwargs or {}))
            name = getattr(func, "__name__", "")
            made = tensors_in(out)
            if name == "__get__" and made:
                name = "getattr"
            if name == "__setitem__":
                name, made = "set_item", [args[0]]
            if made and not self.paused:
                shapes = tuple(tuple(t.shape) for t in made)
                self.log.append((name, shapes, _numbers(name, (args, kwargs))))
            return out


def _numbers(name: str, args: Any) -> Counter[Any]:
    """The numbers that a function computes with."""
    found: list[Any] = []
    kinds = float if name in _SIZES else (int, float)
    visit(args, found.append, kinds)
    return Counter(found)


def _alike(
    option: SplitOption, inside: Inside, follower: UnitFollower, path: str, units: int
) -> bool:
    (call,) = inside.calls[path]
    module = inside.modules[path]
    shard = Shard(
        group="",
        index=0,
        cuts=(0, units, option.units),
        params=dict(option.params),
        marks=option.marks,
    )
    memo: dict[int, Any] = {id(t): t for t in (*module.parameters(), *module.buffers())}
    for name, sharding in option.params:
        whole = inside.state[name]
        shape = list(whole.shape)
        shape[sharding.dim] = sum(high - low for low, high in sharding.spans(0, units))
        memo[id(whole)] = nn.Parameter(whole.new_empty(shape), requires_grad=False)
    local = copied(module, memo)
    prefix = f"{path}." if path else ""
    modules = {f"{prefix}{name}" if name else path: m for name, m in local.named_modules()}
    ops = inside.program.ops[call.first : call.last]
    watch = _Watch()
    try:
        install(option.rule, option.path, option.modules, shard, modules)
        for leaf in {op.layer for op in ops if op.layer is not None}:
            _hide(leaf, modules[leaf], watch)
        with torch.no_grad(), _quiet(), watch:
            out = local(*call.args, **call.kwargs)
    except Exception:  # noqa: BLE001 - whatever a user's forward raises when sizes do not fit
        return False
    if len(watch.log) != len(ops) or not all(
        _same(op, entry, follower, units) for op, entry in zip(ops, watch.log, strict=True)
    ):
        return False
    made = tensors_in(out)
    if len(made) != len(call.values):
        return False
    gathered = {place for place, _, _ in follower.returned}
    return all(
        tuple(t.shape)
        == (whole if value is None or i in gathered else local_shape(follower, value, units))
        for i, (t, value, whole) in enumerate(zip(made, call.values, call.made, strict=True))
    )


def _hide(path: str, module: nn.Module, watch: _Watch) -> None:
    """A leaf of the trace: one entry, whatever it does."""
    forward = module.forward

    def hidden(*args: Any, **kwargs: Any) -> Any:
        watch.paused += 1
        try:
            out = forward(*args, **kwargs)
        finally:
            watch.paused -= 1
        if not watch.paused:
            shapes = tuple(tuple(t.shape) for t in tensors_in(out))
            watch.log.append((path, shapes, Counter()))
        return out

    replace_forward(module, hidden)


def _same(op: Op, entry: tuple[str, Any, Counter[Any]], follower: UnitFollower, units: int) -> bool:
    name, shapes, numbers = entry
    if op.layer is not None:
        if name != op.layer:
            return False
    elif name != name_of(op) or numbers != _numbers(name, (op.args, op.kwargs)):
        return False
    if len(shapes) != len(op.outputs):
        return False
    return all(
        shape in (local_shape(follower, value, units), alike_shape(follower, value, units))
        for shape, value in zip(shapes, op.outputs, strict=True)
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's log of operations that fail on fake tensors: here that is an answer."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = disabled
