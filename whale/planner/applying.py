"""Applying: in which groups a plan's parameters are updated, one after another.

Place in the flow: a pass of `make_plan` after homes are known. What the update of a group makes
(steps of the optimizer, wide copies) is gone before the next, and, inside the backward, its
gradients too. Groups follow the backward: those whose gradients come first have the first numbers.
"""

from __future__ import annotations

import math
from dataclasses import replace

from whale.config import Config
from whale.errors import PlanError
from whale.ir.homes import all_syncs, crosses
from whale.ir.plan import Plan


def in_groups(plan: Plan, config: Config) -> Plan:
    """The plan with `optimizer.num_apply_group` groups of about as many elements each.

    What several device groups sum together is complete last, and in the last group.
    """
    count, settings = config.optimizer.num_apply_group, config.optimizer
    if settings.apply_in_backward:
        check_early(plan, settings.max_grad_norm)
    if count == 1 and not settings.apply_in_backward:
        return plan
    late = {
        home.name
        for home, stretches in all_syncs(plan)
        if any(crosses(plan, sync) for _, _, syncs in stretches for sync in syncs)
    }
    ordered = [h for h in reversed(plan.homes) if h.name not in late]
    total, seen = sum(math.prod(h.shape) for h in ordered) or 1, 0
    group = dict.fromkeys(late, count - 1)
    for home in ordered:
        size = math.prod(home.shape)
        # By its middle: a large one is in the group where most of it is.
        group[home.name] = min(count - 1, (2 * seen + size) * count // (2 * total))
        seen += size
    homes = tuple(replace(home, apply_group=group[home.name]) for home in plan.homes)
    return replace(plan, homes=homes, early=settings.apply_in_backward)


def check_early(plan: Plan, max_norm: float | None) -> None:
    """Refuses updates inside the backward where a step is decided by all of its gradients."""
    why = None
    if max_norm is not None:
        why = f"optimizer.max_grad_norm = {max_norm}: the norm of all gradients"
    elif plan.precision.loss_scale:
        why = "amp.dtype = float16: whether any gradient overflowed"
    if why is not None:
        raise PlanError(
            f"optimizer.apply_in_backward with {why} is known when the backward is over, and the "
            "first group is updated before that",
            hint="leave optimizer.apply_in_backward out (optimizer.num_apply_group alone still "
            "saves what updates make), or do without clipping and float16",
        )
