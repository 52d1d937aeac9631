"""Updating: what a Step updates its weights with, made for one plan.

Place in the flow: asked by Step when it is built: the user's optimizer over what this rank keeps,
refused where it cannot be exact, and given to the store with all that an update depends on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from whale.config import Config
from whale.engine.lower.lowered import Lowered
from whale.ir.plan import Plan
from whale.runtime.loss_scale import LossScale
from whale.runtime.optimizer import (
    check_apart,
    check_elementwise,
    check_grouped,
    check_no_hooks,
    make_optimizer,
)

OptimizerFactory = Callable[[Any], torch.optim.Optimizer]


def prepare_updates(
    model: nn.Module, plan: Plan, lowered: Lowered, factory: OptimizerFactory, config: Config
) -> torch.optim.Optimizer:
    """The optimizer of this rank; from here on its store can update."""
    cut = sorted(home.name for home in plan.homes if home.splits or home.zero)
    with lowered.store.masters.widened(lowered.store.kept, 0, rounds=False):
        made = _made(model, plan, lowered, factory, cut, config.optimizer.elementwise)
    at_once = plan.num_ranks == plan.num_micro_batch == len(plan.stages) == 1
    executor = lowered.executor
    executor.divides_ahead = plan.wire.divides and at_once
    if plan.precision.loss_scale:
        says = config.amp.debug_log and lowered.store.rank == 0
        executor.loss_scale = LossScale(plan.precision, ahead=executor.divides_ahead, says=says)
    num_groups = len({home.apply_group for home in plan.homes})
    lowered.store.train(
        made,
        [name for name, p in model.named_parameters() if p.requires_grad],
        ahead=executor.divides_ahead,
        in_pieces=bool(cut) or len(plan.stages) > 1 or num_groups > 1,
        max_norm=config.optimizer.max_grad_norm,
        loss_scale=executor.loss_scale,
    )
    return made


def _made(
    model: nn.Module,
    plan: Plan,
    lowered: Lowered,
    factory: OptimizerFactory,
    cut: list[str],
    elementwise: bool | None,
) -> torch.optim.Optimizer:
    named = [(n, p) for n, p in lowered.store.kept.items() if p.requires_grad]
    every = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if not every:
        # Schedulers and checkpoints still want an optimizer.
        named = [("whale.none", nn.Parameter(torch.zeros(0, device=lowered.device)))]
    made = make_optimizer(factory, named, every, lowered.device)
    check_elementwise(made, cut, elementwise)
    if cut or len(plan.stages) > 1:
        check_no_hooks(made)
    tried = False
    groups: dict[int, set[str]] = {}
    for home in plan.homes:
        groups.setdefault(home.apply_group, set()).add(home.name)
    if len(groups) > 1:
        tried = check_grouped(factory, made, every, [frozenset(names) for names in groups.values()])
    if len(plan.stages) > 1:
        of_stage = [
            frozenset(h.name for h in plan.homes if stage.index in h.stages)
            for stage in plan.stages
        ]
        tried |= check_apart(factory, made, every, of_stage)
    # What the factory made last is what its author holds: a scheduler's, say.
    return make_optimizer(factory, named, every, lowered.device) if tried else made
