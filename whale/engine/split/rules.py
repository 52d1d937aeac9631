"""The registry of split rules: how a sharded module computes, and how users add rules of their own.

Place in the flow: `engine.split.match` finds what the rules cover, the planner chooses cuts,
`install` puts the sharded forwards on this rank's copy. A module no rule covers is computed whole
on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from whale.engine.split.unit_marks import install_inside, install_marks, install_units
from whale.errors import WhaleError
from whale.ir.sharding import DimSharding
from whale.nn.attention import MultiheadForward
from whale.nn.column_shard import plain
from whale.nn.forwards import replace_forward
from whale.nn.moe.batched import BatchedForward
from whale.nn.moe.layer import MoE
from whale.nn.moe.parallel import ExpertForward
from whale.nn.moe.stacked import StackedForward
from whale.nn.shard import Shard
from whale.nn.sharded import (
    ColumnConv,
    LoneColumn,
    LoneRow,
    VocabEmbedding,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule for one module type: `match(module)` gives {parameter: DimSharding} or None.

    `forward(module, shard)`
    gives the sharded forward.
    """

    match: Callable[[nn.Module], dict[str, DimSharding] | None]
    forward: Callable[[nn.Module, Shard], Callable[..., Any]]
    unit: str


_user_rules: dict[type[nn.Module], Rule] = {}


def register_rule(
    module_type: type[nn.Module],
    *,
    match: Callable[[nn.Module], dict[str, DimSharding] | None],
    forward: Callable[[nn.Module, Shard], Callable[..., Any]],
    unit: str = "columns",
) -> None:
    """Teaches `split` a module type of your own.

    `match(module)` returns how each of its parameters is cut, by the parameter's name in the module
    (all with the same number of units), or None to leave this instance whole. `forward(module,
    shard)` returns the callable that replaces `forward` on a rank whose parameters are cut;
    `shard.enter`, `shard.leave` and `shard.join` are its collectives.
    """
    if not (isinstance(module_type, type) and issubclass(module_type, nn.Module)):
        raise WhaleError(
            f"register_rule: {module_type!r} is not a module type",
            hint="pass the class, for example register_rule(MyLinear, match=..., forward=...)",
        )
    _user_rules[module_type] = Rule(match=match, forward=forward, unit=unit)


def user_rule(module: nn.Module) -> Rule | None:
    """The rule registered for exactly this module's type."""
    return _user_rules.get(type(module))


def install(
    rule: str, path: str, paths: tuple[str, ...], shard: Shard, modules: dict[str, nn.Module]
) -> None:
    """Replaces the forwards of a split's modules on this rank's copy.

    Their parameters are already cut.
    """
    _INSTALL[rule](path, [modules[p] for p in paths], shard, modules)


def _install_pair(
    path: str, parts: list[nn.Module], shard: Shard, modules: dict[str, nn.Module]
) -> None:
    install_units(_by_path(parts, modules), shard)


def _install_attention(
    path: str, parts: list[nn.Module], shard: Shard, modules: dict[str, nn.Module]
) -> None:
    install_inside(path, shard, modules)
    install_units(_by_path(parts, modules), shard)
    install_marks(path, shard, modules)


def _by_path(parts: list[nn.Module], modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """The parts, in their order, by path."""
    paths = {id(module): path for path, module in modules.items()}
    return {paths[id(part)]: part for part in parts}


def _install_multihead(
    path: str, parts: list[nn.Module], shard: Shard, modules: dict[str, nn.Module]
) -> None:
    module = parts[0]
    assert isinstance(module, nn.MultiheadAttention)
    replace_forward(module, MultiheadForward(module, shard, lambda x, p: x))


def _install_column(
    path: str, parts: list[nn.Module], shard: Shard, modules: dict[str, nn.Module]
) -> None:
    module = parts[0]
    replace_forward(module, LoneColumn(module, shard, shard.cuts[-1]))


def _install_row(
    path: str, parts: list[nn.Module], shard: Shard, modules: dict[str, nn.Module]
) -> None:
    replace_forward(parts[0], LoneRow(parts[0], shard))


def _install_embedding(
    path: str, parts: list[nn.Module], shard: Shard, modules: dict[str, nn.Module]
) -> None:
    assert isinstance(parts[0], nn.Embedding)
    replace_forward(parts[0], VocabEmbedding(parts[0], shard))


def _install_conv(
    path: str, parts: list[nn.Module], shard: Shard, modules: dict[str, nn.Module]
) -> None:
    replace_forward(parts[0], ColumnConv(parts[0], shard, shard.cuts[-1]))


def _install_experts(
    path: str, parts: list[nn.Module], shard: Shard, modules: dict[str, nn.Module]
) -> None:
    module = parts[0]
    assert isinstance(module, MoE)
    module.run_by(ExpertForward(module, shard))


def _install_expert_columns(
    path: str, parts: list[nn.Module], shard: Shard, modules: dict[str, nn.Module]
) -> None:
    module = parts[0]
    assert isinstance(module, MoE)
    module.run_by(ExpertForward(module, shard, by_columns=True))


def _install_stacked(
    path: str, parts: list[nn.Module], shard: Shard, modules: dict[str, nn.Module]
) -> None:
    replace_forward(parts[0], StackedForward(parts[0], shard))


def _install_stacked_columns(
    path: str, parts: list[nn.Module], shard: Shard, modules: dict[str, nn.Module]
) -> None:
    replace_forward(parts[0], StackedForward(parts[0], shard, by_columns=True))


def _install_batched(
    path: str, parts: list[nn.Module], shard: Shard, modules: dict[str, nn.Module]
) -> None:
    replace_forward(parts[0], BatchedForward(parts[0], shard))


def _install_user(
    path: str, parts: list[nn.Module], shard: Shard, modules: dict[str, nn.Module]
) -> None:
    rule = _user_rules.get(type(parts[0]))
    if rule is None:
        raise WhaleError(
            f"the plan splits {path} by a rule for {type(parts[0]).__name__}, which is not "
            "registered",
            hint="call wh.register_rule before parallelize, on every rank",
        )
    forward = rule.forward(parts[0], shard)
    # A rule knows nothing of columns left sharded by the Linear before it.
    replace_forward(parts[0], lambda *args, **kwargs: forward(*plain(args), **plain(kwargs)))


_INSTALL: dict[str, Callable[[str, list[nn.Module], Shard, dict[str, nn.Module]], None]] = {
    "pair": _install_pair,
    "attention": _install_attention,
    "multihead": _install_multihead,
    "column": _install_column,
    "row": _install_row,
    "embedding": _install_embedding,
    "conv": _install_conv,
    "experts": _install_experts,
    "expert columns": _install_expert_columns,
    "stacked experts": _install_stacked,
    "stacked columns": _install_stacked_columns,
    "batched experts": _install_batched,
    "user": _install_user,
}
