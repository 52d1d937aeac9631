"""Stacked experts of other libraries: found by what they hold and how they are called.

Place in the flow: `engine.capture` gives them a forward that runs on fake tensors, `engine.match`
asks for their split options. The sharded forward is `nn.moe.stacked`, the balancing loss that their
model may add `nn.router_losses`. transformers writes its experts so since version 5: Mixtral,
Qwen-MoE, DeepSeek and many more.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from whale.engine.program import tensors_in
from whale.ir.model_graph import SplitOption
from whale.ir.sharding import DimSharding
from whale.nn.forwards import has_own_call, replace_forward
from whale.nn.moe.experts import moe_ffn
from whale.nn.moe.layer import MoE
from whale.nn.moe.stacked import matrices

_ARGUMENTS = ("hidden_states", "top_k_index", "top_k_weights")


def is_stacked(module: nn.Module) -> bool:
    """Whether this is a module of stacked experts without a router.

    Its parameters are its own and have an expert per row, two are stacks of matrices that fit, and
    it is called with tokens, the experts of each and their weights.
    """
    own = list(module.parameters(recurse=False))
    stacks = [p for p in own if p.dim() == 3]
    count = getattr(module, "num_experts", None)
    if isinstance(module, MoE) or len(stacks) != 2 or type(count) is not int or count < 2:
        return False
    if len(own) != len(list(module.parameters())) or any(p.shape[0] != count for p in own):
        return False
    # What it holds for each expert beside its weights would not be cut.
    if has_own_call(module) or any(b.shape[:1] == (count,) for b in module.buffers()):
        return False
    names = tuple(inspect.signature(type(module).forward).parameters)[1:]
    if names != _ARGUMENTS:
        return False
    w_in, w_out = matrices(module)
    return w_in.shape[1] == w_out.shape[2] and w_in.shape[2] in (
        w_out.shape[1],
        2 * w_out.shape[1],
    )


def give_shapes(model: nn.Module) -> None:
    """Puts forwards in place that need no values: experts' own code asks where tokens go."""
    for module in model.modules():
        if is_stacked(module):
            replace_forward(module, _Shapes(module))


class _Shapes:
    """As many rows through as large matrices as the experts' own forward."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The replaced forward."""
        w_in, w_out = matrices(self.module)
        gated = w_in.shape[2] != w_out.shape[1]
        return moe_ffn(
            hidden_states, top_k_index, top_k_weights, w_in, w_out, activation="silu", gated=gated
        )


def stacked_options(
    modules: Mapping[str, nn.Module],
    names: Mapping[int, str],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Iterable[SplitOption]:
    """Stacked experts, by expert."""
    grad = any(t.requires_grad for t in tensors_in((args, kwargs))[:1])
    for index, (path, module) in enumerate(modules.items()):
        if is_stacked(module):
            count = int(module.num_experts)  # type: ignore[arg-type]
            cut = DimSharding(dim=0, sections=(count,), units=count)
            yield SplitOption(
                rule="stacked experts",
                path=path,
                modules=(path,),
                units=count,
                unit="experts",
                params=tuple((names[id(p)], cut) for p in module.parameters()),
                # What comes before it in its Layer has parameters, so its input has a gradient.
                entered=int(grad or index > 0),
            )
