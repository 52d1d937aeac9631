"""How a mixture of experts can be split: by expert, or every expert by its hidden columns.

Place in the flow: asked by `engine.split.match`. By expert, tokens travel; by columns, every member
works on every expert, so that the load is even whatever the router does, and there may be more
members than experts. The planner takes the first that the number of members allows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from whale.engine.trace.program import tensors_in
from whale.ir.model_graph import SplitOption
from whale.ir.sharding import DimSharding
from whale.nn.moe.layer import MoE, own_parts


def expert_options(
    modules: dict[str, nn.Module],
    names: dict[int, str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Iterable[SplitOption]:
    """The options of every MoE among the modules of a Layer, whose own path comes first."""
    grad = any(t.requires_grad for t in tensors_in((args, kwargs)))
    for index, (path, module) in enumerate(modules.items()):
        if not isinstance(module, MoE) or own_parts(module):
            continue
        experts, hidden = module.num_experts, module.hidden
        by_expert = DimSharding(dim=0, sections=(experts,), units=experts)
        halves = (hidden,) * (2 if module.gated else 1)
        cuts = {
            "experts": (experts, "experts", by_expert, by_expert),
            "expert columns": (
                hidden,
                "columns",
                DimSharding(dim=2, sections=halves, units=hidden),
                DimSharding(dim=2, sections=(hidden,), units=hidden),
            ),
        }
        for rule, (units, unit, into, out_of) in cuts.items():
            if module.split_by not in ("", unit):
                continue
            yield SplitOption(
                rule=rule,
                path=path,
                modules=(path, *(f"{path}.{n}" for n, _ in module.named_modules() if n)),
                units=units,
                unit=unit,
                params=((names[id(module.w_in)], into), (names[id(module.w_out)], out_of)),
                # What comes before it in its Layer has parameters, so its input has a gradient.
                entered=int(grad or index > 0),
                copies=module.top_k,
            )
