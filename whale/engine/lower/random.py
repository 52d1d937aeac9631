"""Randomness on this rank's copy: dropout modules keyed, and a mode for all other draws.

Place in the flow: a step of `engine.lower`, by what capture saw the model draw.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from whale.engine.capture.captured import Captured
from whale.engine.trace.draw_recorder import Randomness
from whale.engine.trace.program import Op
from whale.errors import WhaleError
from whale.ir.plan import Plan
from whale.nn.attention import MultiheadForward, supported
from whale.nn.forwards import replace_forward
from whale.nn.keyed_modules import KeyedDropout, is_dropout, key_multihead
from whale.nn.moe.stacked import StackedForward
from whale.nn.randomness import CallNames, Draws, KeyedRandom, follow_all
from whale.nn.shard import Shard
from whale.runtime import generators, recompute
from whale.runtime.hashing import key_of

_CLOSED = "in stacked experts that are split, where the order of rows depends on the routing"


class Surroundings:
    """What a stage's forward runs in: names of draws, keyed functions, untouched generators."""

    def __init__(
        self, names: CallNames, draws: Draws, mode: KeyedRandom | None, foreign: bool, ranks: int
    ) -> None:
        self.names, self.draws, self.mode = names, draws, mode
        self.foreign, self.ranks = foreign, ranks

    @contextmanager
    def around(self) -> Iterator[None]:
        """Around one forward of this rank."""
        names, context = self.names, self.names.context
        names.begin()
        with ExitStack() as stack:
            if self.foreign:
                key = key_of(context.seed, context.step, "Python", context.micro_batch)
                stack.enter_context(generators.seeded(key))
            ranks = 1 if self.foreign else self.ranks
            stack.enter_context(generators.untouched(context.step, ranks))
            stack.enter_context(recompute.scope(names))
            if self.mode is not None:
                stack.enter_context(self.mode)
            yield

    @contextmanager
    def at(self, *, step: int, first_row: int, rows: int, micro_rows: int) -> Iterator[None]:
        """Around one forward beside the step, on these rows."""
        context = self.names.context
        before = dataclasses.replace(context)
        context.step, context.first_row, context.rows = step, first_row, rows
        context.micro_batch, context.micro_rows = 0, micro_rows
        try:
            with self.around():
                yield
        finally:
            for field in dataclasses.fields(before):
                setattr(context, field.name, getattr(before, field.name))

    def before(self, op: Op) -> None:
        """Before an operation of a cut model: where in the whole forward it is."""
        place_draws(self.names, op)


def place_draws(names: CallNames, op: Op) -> None:
    """Draws of an operation of a cut model are named as in the whole forward."""
    if op.layer is not None:
        names.stack.clear()
        names.counts.update(op.drawn)
    elif op.random is not None:
        path, number = op.random
        names.stack[:] = [path]
        names.counts[path] = number


def install_randomness(
    local: nn.Module,
    plan: Plan,
    captured: Captured,
    names: CallNames,
    shards: dict[str, Shard],
) -> Surroundings:
    """Keys every dropout module; the surroundings key the rest."""
    seen = captured.random
    cut = len(plan.stages) > 1
    _check_foreign(seen, plan)
    draws = Draws(names, seen.dims)
    keyed: set[str] = set()
    for path, module in local.named_modules():
        if is_dropout(module):
            dropout = KeyedDropout(module, path, draws)
            dropout.shard = shards.get(path)
            if dropout.shard is not None and ("head dropout", path) in dropout.shard.marks:
                dropout.dim = 1
            replace_forward(module, dropout)
            keyed.add(path)
        elif isinstance(module, nn.MultiheadAttention):
            if _key_multihead(module, path, draws, shards.get(path)):
                keyed.add(path)
        elif isinstance(module, nn.RNNBase) and module.dropout and module.num_layers > 1:
            raise WhaleError(
                f"{path} ({type(module).__name__}) has dropout={module.dropout} between its "
                f"{module.num_layers} layers, "
                "drawn inside torch's kernel, where it depends on the layout",
                hint="use one-layer modules with nn.Dropout between them, or dropout=0",
            )
        elif isinstance(module, nn.TransformerEncoderLayer):
            # Its inference shortcut reads the weights as if they were whole.
            module.activation_relu_or_gelu = 0
        if isinstance(module.__dict__.get("forward"), StackedForward):
            names.close(_CLOSED, module)
    others = seen.drawing - keyed
    mode = None
    if others or not seen.known:
        mode = KeyedRandom(draws, cut=cut)
        follow_all(
            names,
            ((p, m) for p, m in local.named_modules() if p in others or not seen.known),
        )
    draws.guarded = True
    if cut and plan.num_micro_batch > 1:
        names.settled = dict(local.named_buffers())
    return Surroundings(names, draws, mode, bool(seen.foreign), plan.num_ranks)


def _check_foreign(seen: Randomness, plan: Plan) -> None:
    replicas = max((len(s.virtual_device.replicas) for s in plan.stages), default=1)
    if seen.foreign and seen.foreign_rows and replicas > 1:
        raise WhaleError(
            f"the model draws from {seen.foreign}, more numbers for more rows: {replicas} replicas "
            "would draw the same for different rows",
            hint="draw with torch's functions, which are keyed by seed, step and row",
        )


def _key_multihead(
    module: nn.MultiheadAttention, path: str, draws: Draws, shard: Shard | None
) -> bool:
    """Keys its dropout, if its forward is torch's or already ours."""
    forward: Any = module.__dict__.get("forward")
    while forward is not None and not isinstance(forward, MultiheadForward):
        forward = getattr(forward, "forward", None)
    if forward is None:
        own = type(module).forward is nn.MultiheadAttention.forward
        if not own or not module.dropout or not supported(module):
            return False
        forward = MultiheadForward(module, None, lambda x, p: x)
        replace_forward(module, forward)
    key_multihead(forward, path, draws, shard)
    return True


def with_heads(module: nn.Module, shard: Shard, names: CallNames) -> None:
    """Tells functional dropout which heads the attention now running holds."""

    def enter(*_: Any) -> None:
        names.heads = (shard.low, shard.num_units, shard.cuts[-1])
        names.drops_heads = ("head dropout", "()") in shard.marks

    def leave(*_: Any) -> None:
        names.heads, names.drops_heads = None, False

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)
