"""LossParts: how the stage that has the loss gives its part of it.

Place in the flow: made by `engine.lower`, used by `engine.lower.stages`. It holds what the trial of
`engine.trials.parts` found, and how replicas meet for what no part knows alone: counts of different
means, router losses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from whale.errors import PlanError
from whale.ir.homes import sum_groups
from whale.ir.plan import Plan
from whale.nn.moe.parallel import Replicas
from whale.nn.router_losses import Compute, Gathered, computed_by, plainly
from whale.runtime.context import StepContext
from whale.runtime.groups import Groups, communicator
from whale.runtime.weighing import MeanTracker, Trial, Weighed, Weighing


@dataclass(frozen=True, slots=True, kw_only=True)
class LossParts:
    """The parts of a stage's loss, and this rank's among them.

    Attributes:
        context: Says which rows are being computed.
        weighing: What a trial found; None: there was none.
        whole: Whether this is the only part.
        group: The replicas, if there are several and each of their micro-batches is one of a step.
        leads: Whether this rank speaks for its replica in `group`.
        router: How router losses are computed; None: the model has none.
    """

    context: StepContext
    weighing: Weighing | None
    whole: bool
    group: str | None = None
    leads: bool = True
    router: Compute | None = None

    @property
    def joins(self) -> bool:
        """Whether replicas tell each other their counts in it."""
        return self.weighing is not None and self.weighing.joins and self.group is not None

    @property
    def in_turn(self) -> bool:
        """Whether parts are computed one after another, so that none knows the others' counts."""
        return not self.whole and self.group is None

    @contextmanager
    def around(self, model: nn.Module) -> Iterator[None]:
        """Inside, the model runs."""
        with nullcontext() if self.router is None else computed_by(model, self.router):
            yield

    def tracker(self, rows: int) -> MeanTracker | None:
        """Watches the code of the loss, where that is needed."""
        return None if self.whole else MeanTracker(rows)

    def weigh(self, tracker: MeanTracker | None, loss: Tensor) -> Weighed:
        """What the rows just computed add."""
        if tracker is None:
            one = torch.ones((), dtype=torch.float64, device=loss.device)
            return Weighed(total=loss, count=one, floor=torch.zeros_like(one))
        share = self.context.rows / max(1, self.context.batch_rows)
        meet = self._meet if self.group is not None else None
        return tracker.weigh(loss, share, self.weighing, meet)

    def _meet(self, numbers: Tensor) -> Tensor:
        assert self.group is not None
        return communicator(self.group).all_reduce(numbers if self.leads else numbers * 0.0)


def loss_parts(
    plan: Plan,
    rank: int,
    groups: Groups,
    context: StepContext,
    trial: Trial | None,
    *,
    router_losses: bool,
    divides: bool,
) -> dict[int, LossParts]:
    """By stage of this rank, how the loss is given there if it has it.

    `divides`: gradients are divided by the count, so that a part that is the whole needs none.
    """
    found = {}
    weighing = None if trial is None else trial.weighing
    for index in plan.stages_of(rank):
        device = plan.stages[index].virtual_device
        whole = divides and len(device.replicas) == 1 and plan.num_micro_batch == 1
        if len(device.replicas) == 1:
            found[index] = LossParts(
                context=context,
                weighing=weighing,
                whole=whole,
                router=plainly if router_losses else None,
            )
            continue
        mine = next(g for g in sum_groups([r.ranks for r in device.replicas]) if rank in g.ranks)
        group = groups.find(mine.ranks)
        if group is None and trial is not None and trial.meets:
            raise PlanError(
                f"replicas would meet for the loss of stage {index}, but the plan has no group of "
                f"ranks {mine.ranks}",
                hint="replicate a module of this stage",
            )
        router: Compute | None = None
        if router_losses and group is not None:
            if mine.leads != mine.ranks:
                raise PlanError(
                    f"the model computes a router loss of all tokens in stage {index}, whose "
                    "replicas have different widths",
                    hint="give its replicas the same number of devices",
                )
            router = Gathered(Replicas(group), tried=trial is None or trial.router_losses)
        found[index] = LossParts(
            context=context,
            weighing=weighing,
            whole=False,
            group=group if plan.num_micro_batch == 1 else None,
            leads=rank in mine.leads,
            router=router,
        )
    return found
