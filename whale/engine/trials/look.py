"""Look: all that is tried of the user's code before it runs under a plan.

Place in the flow: after capture. `wh.parallelize` looks at the batch it is given,
`engine.watch.kinds` at the first batch of every other kind. Each trial has a file of its own; here
is their order, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from whale.engine.capture.captured import Captured
from whale.engine.state.changes import (
    Changes,
    find_changes,
    refuse_across_stages,
    refuse_by_rows,
    refuse_cut,
)
from whale.engine.trials.again import check_again
from whale.engine.trials.backwards import check_backwards
from whale.engine.trials.borders import check_borders
from whale.engine.trials.choices import check_choices
from whale.engine.trials.left_behind import check_left_behind
from whale.engine.trials.parts import check_parts
from whale.engine.trials.relay import check_relay
from whale.ir.plan import Plan
from whale.runtime import batch as batches
from whale.runtime.outputs import Merge
from whale.runtime.weighing import Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """What a forward changes, and how the loss is weighed in parts (None: not tried)."""

    changes: Changes
    trial: Trial | None


def look(
    model: nn.Module,
    batch: Any,
    loss: batches.Loss | None,
    plan: Plan,
    captured: Captured,
    *,
    outputs: Mapping[str, Merge],
    check: bool,
    training: bool = True,
    briefly: bool = False,
) -> Looked:
    """Raises where the code that runs on this batch cannot be exact under the plan.

    Args:
        model: The user's own, which stays as it is.
        batch: Real rows; of a further batch those that this rank has.
        loss: As the user gave it.
        plan: What runs, or is to run.
        captured: The same code on fakes.
        outputs: Named outputs, as they are merged.
        check: Config `check_parts`.
        training: Whether it is code of training; else of evaluation.
        briefly: Whether the code is known, and only these rows are new.
    """
    changes = Changes(names=captured.changes or frozenset(), by_rows=(), tried=False)
    if training:
        if not briefly:
            check_left_behind(model, loss, batch)
        changes = find_changes(
            model, batch, loss, captured.changes, plan, moves=bool(captured.moved)
        )
        refuse_by_rows(plan, changes)
    refuse_across_stages(plan, model, captured)
    trial = None
    if check:
        trial = check_parts(
            model,
            batch,
            loss,
            plan,
            captured.random.dims,
            outputs,
            changes.names,
            training=training,
            briefly=briefly,
        )
        check_borders(model, batch, plan, captured, training=training)
        changes = replace(changes, names=changes.names | trial.written)
    refuse_cut(plan, changes)
    check_relay(model, batch, loss, plan, captured, training=training)
    check_choices(model, batch, loss, plan, training=training)
    if training:
        check_again(model, batch, loss, plan, captured, changes.names)
        check_backwards(model, batch, loss, plan)
    return Looked(changes=changes, trial=trial)
