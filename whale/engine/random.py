"""Randomness: keyed dropout put on this rank's copy, by what capture saw.

Place in the flow: a step of `engine.lower`. Modules are keyed by their path, functional calls by
Layer and number.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from whale.engine.capture import Captured
from whale.errors import WhaleError
from whale.nn.attention import MultiheadForward, supported
from whale.nn.dropout import KeyedDropout, key_of, position_mask
from whale.nn.forwards import replace_forward, runs
from whale.nn.randomness import CallNames, KeyedRandom
from whale.nn.shard import Shard
from whale.runtime.context import StepContext


def install_randomness(
    local: nn.Module,
    captured: Captured,
    context: StepContext,
    names: CallNames,
    shards: dict[str, Shard],
    *,
    whole: bool,
) -> KeyedRandom | None:
    """Keys every dropout; gives the mode for functional ones, if the model calls any."""
    for path, module in local.named_modules():
        if type(module) is nn.Dropout and runs(module, nn.Dropout):
            keyed = KeyedDropout(module, path, context, captured.dropouts.get(path, 0))
            keyed.shard = shards.get(path)
            if keyed.shard is not None and ("head dropout", path) in keyed.shard.marks:
                keyed.dim = 1
            replace_forward(module, keyed)
        elif isinstance(module, nn.MultiheadAttention):
            _key_multihead(module, path, context, shards.get(path))
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
    modules = dict(local.named_modules(remove_duplicate=False))
    calls = _layer_calls(captured)
    if whole:
        _count_calls(modules, calls, context)
    if not captured.random:
        return None
    for layer in captured.graph.layers:
        made = sum(1 for path, _ in captured.random if path == layer.path)
        names.watch(layer.path, modules[layer.path], made // max(1, calls.get(layer.path, 1)))
    return KeyedRandom(names, captured.random)


def _layer_calls(captured: Captured) -> dict[str, int]:
    """How often each Layer is called in one forward."""
    found: dict[str, int] = {}
    for op in captured.program.ops if captured.program is not None else ():
        if op.layer is not None:
            found[op.layer] = found.get(op.layer, 0) + 1
    return found


def _count_calls(
    modules: dict[str, nn.Module], calls: dict[str, int], context: StepContext
) -> None:
    """In a whole model, Layers called more than once number their own calls."""
    for path, times in calls.items():
        if times < 2:
            continue
        seen: dict[str, Any] = {"position": None, "calls": 0}

        def enter(*_: Any, seen: dict[str, Any] = seen) -> None:
            position = (context.step, context.micro_batch)
            seen["calls"] = seen["calls"] + 1 if seen["position"] == position else 0
            seen["position"] = position
            context.enter_layer(seen["calls"])

        def leave(*_: Any) -> None:
            context.enter_layer(0)

        modules[path].register_forward_pre_hook(enter, prepend=True)
        modules[path].register_forward_hook(leave, always_call=True)


def _key_multihead(
    module: nn.MultiheadAttention, path: str, context: StepContext, shard: Shard | None
) -> None:
    forward: Any = module.__dict__.get("forward")
    while forward is not None and not isinstance(forward, MultiheadForward):
        forward = getattr(forward, "forward", None)
    if forward is None:
        if not module.dropout:
            return
        if not supported(module):
            raise WhaleError(
                f"{path} (MultiheadAttention with kdim/vdim, bias_k, add_zero_attn or a forward of "
                f"its own) has dropout {module.dropout}",
                hint="set its dropout to 0, or use scaled_dot_product_attention",
            )
        forward = MultiheadForward(module, None, lambda x, p: x)
        replace_forward(module, forward)
    # The key has the number of the Layer's call already, which counts over all stages.
    names = CallNames(context, by_entry=True)
    names.layer = f"{path}.dropout"

    def drop(x: torch.Tensor, p: float) -> torch.Tensor:
        key = key_of(context.seed, context.step, *names.next())
        key = key_of(key, context.layer_call, "call", 0)
        sharded = (1, shard.low, shard.cuts[-1]) if shard is not None else None
        return x * position_mask(x, p, key, context, 0, sharded) * (1.0 / (1.0 - p))

    forward.drop = drop


def with_heads(module: nn.Module, shard: Shard, names: CallNames) -> None:
    """Tells functional dropout which heads the attention now running holds."""

    def enter(*_: Any) -> None:
        names.heads = (shard.low, shard.num_units, shard.cuts[-1])
        names.drops_heads = ("head dropout", "()") in shard.marks

    def leave(*_: Any) -> None:
        names.heads = None

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)
