"""Reasons: why a module of a split Layer stays whole, in a few words for the plan.

Place in the flow: asked by `engine.split.match` when all options of a Layer are known. The planner
adds its own where an option was there and not taken (`planner.reasons`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from whale.ir.model_graph import SplitOption
from whale.ir.plan import AROUND
from whale.nn.sharded import is_linear


def whole_reasons(
    modules: Mapping[str, nn.Module], options: Iterable[SplitOption], traced: bool
) -> dict[str, str]:
    """By path, why a module with parameters is in no option."""
    found = list(options)
    covered = {path for option in found for path in option.modules}
    around = [option.path for option in found if option.rule in AROUND]
    reasons: dict[str, str] = {}
    for path, module in modules.items():
        if path in covered or not module._parameters:
            continue
        if not any(parameter is not None for parameter in module._parameters.values()):
            continue
        if any(path == a or path.startswith(f"{a}." if a else "") for a in around):
            reasons[path] = "inside attention that is split by heads"
        else:
            reasons[path] = _of_kind(module, traced)
    return reasons


def _of_kind(module: nn.Module, traced: bool) -> str:
    kind = type(module).__name__
    if "norm" in kind.lower():
        return "norms are computed whole"
    if isinstance(module, nn.Linear) and not is_linear(module):
        if hasattr(module, "parametrizations"):
            return "its weight is made anew by a parametrization"
        return f"{kind} has a forward of its own"
    if isinstance(module, nn.Embedding):
        return "an embedding with max_norm or scale_grad_by_freq, or of a kind of its own"
    if int(getattr(module, "groups", 1)) > 1:
        return "a grouped convolution"
    if not traced:
        return f"no rule for {kind}, and the code around it reads values"
    return f"no rule for {kind}"
