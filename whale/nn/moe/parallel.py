"""Expert parallelism: tokens travel to the members that hold their experts, and back.

Place in the flow: installed by `engine.lower` on every MoE of a stage with several replicas (they
share statistics) and by the `experts` rule where a `split` spreads the experts over a group.

| the group | what happens |
|---|---|
| members of one replica: all see the same rows | each runs its experts; outputs are summed |
| several replicas: each has rows of its own | all-to-all to the experts, all-to-all back |
| columns of every expert on each member | rows are gathered if need be; outputs are summed |
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from whale.nn.column_shard import plain
from whale.nn.moe import permute
from whale.nn.moe.exchange import Exchange
from whale.nn.moe.layer import MoE, slots_of, weighted_sum
from whale.nn.moe.router import Alone, Meeting, Routed
from whale.nn.shard import Shard
from whale.runtime import collectives
from whale.runtime.groups import communicator


class Replicas:
    """The replicas of a stage, each of which has some rows of a micro-batch."""

    def __init__(self, group: str) -> None:
        self.group = group
        self.index = communicator(group).index
        self.size = communicator(group).size

    def gather(self, local: Tensor) -> Tensor:
        """[R, ...] of equal shapes."""
        return collectives.gather(local.unsqueeze(0), 0, [1] * self.size, self.group)

    def rows(self, local: Tensor, sizes: list[int]) -> Tensor:
        """All rows, in the order of replicas."""
        return communicator(self.group).all_gather(local, 0, sizes)

    def sum(self, local: Tensor) -> Tensor:
        """Every replica's loss has the sum in it, so its gradient is a sum too."""
        return collectives.all_sum(local, self.group)


class MeetingForward:
    """The forward of an MoE that is whole on every replica: only statistics are shared."""

    def __init__(self, module: MoE, meeting: Meeting) -> None:
        self.module, self.meeting = module, meeting

    def __call__(self, x: Tensor, valid: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The replaced forward."""
        collectives.refuse_transforms()
        return self.module.run(plain(x), valid, self.meeting, self.module.here)


class ExpertForward:
    """The forward of an MoE of which this member holds the experts [shard.low, shard.high).

    Args:
        module: With its own experts' weights.
        shard: The group, and which experts are whose.
        by_columns: Whether it holds columns of every expert instead.
    """

    def __init__(self, module: MoE, shard: Shard, *, by_columns: bool = False) -> None:
        self.module, self.shard, self.by_columns = module, shard, by_columns
        self.meeting: Meeting = Alone()
        self.places: list[int] = []
        self.exchange = Exchange(shard)

    def meet(self, meeting: Replicas, ranks: tuple[int, ...]) -> None:
        """From now on it is one of several replicas of its stage: those of `ranks`."""
        self.meeting = meeting
        members = communicator(self.shard.group).ranks
        self.places = [ranks.index(rank) for rank in members if rank in ranks]

    def __call__(self, x: Tensor, valid: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The replaced forward."""
        collectives.refuse_transforms()
        if self.by_columns:
            compute = self._columns
        else:
            compute = self._inside if self.shard.rows is None else self._across
        return self.module.run(plain(x), valid, self.meeting, compute)

    def _columns(self, tokens: Tensor, routed: Routed) -> Tensor:
        """All members work on all experts, each on its columns of them, and on all rows."""
        shard = self.shard
        mine = routed._replace(
            ids=shard.gather_rows(routed.ids), gates=shard.enter(routed.gates), num_slots=None
        )
        return shard.leave(self.module.here(shard.enter(tokens), mine))

    def _inside(self, tokens: Tensor, routed: Routed) -> Tensor:
        """All members see the same rows."""
        shard = self.shard
        own = (routed.ids >= shard.low) & (routed.ids < shard.high)
        mine = routed._replace(
            ids=torch.where(own, routed.ids - shard.low, -1),
            kept=routed.kept[:, shard.low : shard.high],
            gates=shard.enter(routed.gates),
            num_slots=None,
        )
        return shard.leave(self.module.here(shard.enter(tokens), mine))

    def _across(self, tokens: Tensor, routed: Routed) -> Tensor:
        """Every member has rows of its own."""
        # [members, experts]: what each member has for each expert. The sizes of an all-to-all are
        # the host's, so this is where it waits for the device.
        counts = routed.kept.cpu()[self.places]
        num_rows = int(counts[self.shard.index].sum())
        if self.module.router_kind == "expert-choice":
            slots = slots_of(routed._replace(num_slots=num_rows))
            returned = self._exchanged(tokens.index_select(0, slots.tokens), counts)
            return weighted_sum(tokens, returned, slots, routed.gates)
        (by_expert, _, _), inverse = permute.route(routed.ids, self.module.num_experts)
        rows = permute.gather_rows(tokens, by_expert, routed.ids.shape[1], inverse)
        returned = self._exchanged(rows[:num_rows], counts)
        # Slots without room come last, and nothing comes back for them.
        padded = F.pad(returned, (0, 0, 0, len(rows) - len(returned)))
        return permute.combine(padded, by_expert, routed.gates, inverse)

    def _exchanged(self, rows: Tensor, counts: Tensor) -> Tensor:
        module, sizes = self.module, self.exchange.sizes()
        # Cut once, so that the gradients of the parts are put together once.
        weights = list(zip(module.w_in.split(sizes), module.w_out.split(sizes), strict=True))

        def compute(chunk: int, arrived: Tensor, offsets: Tensor) -> Tensor:
            return module.ffn(arrived, offsets, *weights[chunk])

        return self.exchange.there_and_back(rows, counts, compute)
