"""Stacked experts of other libraries: found by what they hold and how they are called.

Place in the flow: `engine.capture` gives them a forward that runs on fake tensors,
`engine.split.match` asks for their split options. The sharded forward is `nn.moe.stacked`, the
balancing loss that their model may add `nn.router_losses`. transformers writes its experts so since
version 5: Mixtral, Qwen-MoE, DeepSeek and many more.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from whale.engine.trace.program import tensors_in
from whale.ir.model_graph import SplitOption
from whale.ir.sharding import DimSharding
from whale.nn.forwards import has_own_call, replace_forward
from whale.nn.moe.experts import moe_ffn
from whale.nn.moe.layer import MoE
from whale.nn.moe.stacked import matrices, plain_activation

_CHOICES = frozenset(("top_k_index", "router_indices", "top_k_indices", "expert_indices"))
_WEIGHTS = frozenset(("top_k_weights", "routing_weights", "expert_weights"))


def is_stacked(module: nn.Module) -> bool:
    """Whether this is a module of stacked experts without a router.

    Each of its parameters has as many rows for every expert, the first and the last are stacks of
    matrices that fit, and it is called with tokens, the experts of each and their weights.
    """
    count = getattr(module, "num_experts", None)
    if isinstance(module, MoE) or type(count) is not int or count < 2:
        return False
    held = list(module.parameters())
    if not held or any(p.dim() == 0 or p.shape[0] % count for p in held):
        return False
    # What it holds for each expert beside its weights would not be cut.
    if has_own_call(module) or any(b.shape[:1] == (count,) for b in module.buffers()):
        return False
    names = tuple(inspect.signature(type(module).forward).parameters)[1:]
    if len(names) != 3 or names[1] not in _CHOICES or names[2] not in _WEIGHTS:
        return False
    return matrices(module) is not None


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
        found = matrices(self.module, hidden_states.shape[-1])
        assert found is not None
        w_in, w_out = found
        gated = w_in.shape[2] != w_out.shape[1]
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        made = moe_ffn(
            rows, top_k_index, top_k_weights, w_in, w_out, activation="silu", gated=gated
        )
        return made.view(hidden_states.shape)


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
            cuts = tuple(
                (names[id(p)], DimSharding(dim=0, sections=(p.shape[0],), units=count))
                for p in module.parameters()
            )
            yield SplitOption(
                rule="stacked experts",
                path=path,
                modules=tuple(f"{path}.{n}" if n else path for n, _ in module.named_modules()),
                units=count,
                unit="experts",
                params=cuts,
                # What comes before it in its Layer has parameters, so its input has a gradient.
                entered=int(grad or index > 0),
                instead=tuple(_by_columns(path, module, names, int(grad or index > 0))),
            )


def _by_columns(
    path: str, module: nn.Module, names: Mapping[int, str], entered: int
) -> Iterable[SplitOption]:
    """Every expert by its hidden columns, for more members than experts; plain gated ones only."""
    found = matrices(module)
    own = list(module.parameters())
    if found is None or plain_activation(module) is None or len(own) != 2:
        return
    hidden = found[1].shape[1]
    transposed = found[0].stride() != own[0].stride()
    into, out_of = (1, 2) if transposed else (2, 1)
    yield SplitOption(
        rule="stacked columns",
        path=path,
        modules=tuple(f"{path}.{n}" if n else path for n, _ in module.named_modules()),
        units=hidden,
        unit="columns",
        params=(
            (names[id(own[0])], DimSharding(dim=into, sections=(hidden,) * 2, units=hidden)),
            (names[id(own[1])], DimSharding(dim=out_of, sections=(hidden,), units=hidden)),
        ),
        entered=entered,
    )
