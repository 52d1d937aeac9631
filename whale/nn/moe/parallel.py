"""Expert parallelism: tokens travel to the members that hold their experts, and back.

Place in the flow: installed by `engine.lower` on every MoE of a stage with several replicas (they
share statistics) and by the `experts` rule where a `split` spreads the experts over a group.

| the group | what happens |
|---|---|
| members of one replica: all see the same rows | each runs its experts; outputs are summed |
| several replicas: each has rows of its own | all-to-all to the experts, all-to-all back |
| columns of every expert on each member | rows are gathered if need be; outputs are summed |

Numbers of experts may differ by member. A member's rows arrive sorted by source and expert; they
are brought into the order of expert, then source, which is the order one device would have.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from whale.nn.column_shard import plain
from whale.nn.moe import permute
from whale.nn.moe.courier import Courier
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
        self.courier = Courier(shard.group)
        self.num_chunks = 1

    def meet(self, meeting: Replicas, ranks: tuple[int, ...]) -> None:
        """From now on it is one of several replicas of its stage: those of `ranks`."""
        self.meeting = meeting
        members = communicator(self.shard.group).ranks
        self.places = [ranks.index(rank) for rank in members if rank in ranks]

    def __call__(self, x: Tensor, valid: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The replaced forward."""
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
            returned = self._there_and_back(tokens.index_select(0, slots.tokens), counts)
            return weighted_sum(tokens, returned, slots, routed.gates)
        (by_expert, _, _), inverse = permute.route(routed.ids, self.module.num_experts)
        rows = permute.gather_rows(tokens, by_expert, routed.ids.shape[1], inverse)
        returned = self._there_and_back(rows[:num_rows], counts)
        # Slots without room come last, and nothing comes back for them.
        padded = F.pad(returned, (0, 0, 0, len(rows) - len(returned)))
        return permute.combine(padded, by_expert, routed.gates, inverse)

    def _there_and_back(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows in expert order through their experts, wherever those are."""
        chunks = [_Chunk(part, counts, self.shard) for part in self._parts()]
        if len(chunks) == 1:
            chunk = chunks[0]
            arrived = self.courier.send(rows, chunk.flows)
            return self.courier.send(self._compute(arrived, chunk), chunk.flows.t())
        begun = [
            self.courier.start(
                rows.index_select(0, chunk.rows.to(rows.device)), chunk.flows, wait=False
            )
            for chunk in chunks
        ]
        # One part computes while the next is on its way, and goes back while the next computes.
        sizes = [chunk.high - chunk.low for chunk in chunks]
        weights = zip(self.module.w_in.split(sizes), self.module.w_out.split(sizes), strict=True)
        returning = [
            self.courier.start(self._compute(arrived(), chunk, *own), chunk.flows.t(), wait=False)
            for arrived, chunk, own in zip(begun, chunks, weights, strict=True)
        ]
        back = permute.inverse_of(torch.cat([chunk.rows for chunk in chunks]))
        returned = torch.cat([arrived() for arrived in returning])
        return returned.index_select(0, back.to(rows.device))

    def _compute(
        self,
        arrived: Tensor,
        chunk: _Chunk,
        w_in: Tensor | None = None,
        w_out: Tensor | None = None,
    ) -> Tensor:
        """Rows by source through the chunk's experts, and by source again."""
        order, back, offsets = _by_expert(chunk.received, arrived.device)
        made = self.module.ffn(arrived.index_select(0, order), offsets, w_in, w_out)
        return made.index_select(0, back)

    def _parts(self) -> list[list[tuple[int, int]]]:
        """For each chunk, every member's experts in it."""
        ranges = list(zip(self.shard.cuts, self.shard.cuts[1:], strict=False))
        count = max(1, min(self.num_chunks, *(high - low for low, high in ranges)))
        return [
            [
                (low + (high - low) * i // count, low + (high - low) * (i + 1) // count)
                for low, high in ranges
            ]
            for i in range(count)
        ]


class _Chunk:
    """Some of every member's experts, and the rows for them.

    Attributes:
        low, high: This member's experts of the chunk, counted among its own.
        flows: [members, members] rows from each to each.
        received: [members, experts] rows that come here, by source.
        rows: Which of this member's rows, in expert order, the chunk is about.
    """

    def __init__(self, part: list[tuple[int, int]], counts: Tensor, shard: Shard) -> None:
        low, high = part[shard.index]
        self.low, self.high = low - shard.low, high - shard.low
        self.flows = torch.stack([counts[:, a:b].sum(1) for a, b in part], 1)
        self.received = counts[:, low:high]
        ends = counts[shard.index].cumsum(0)
        starts = ends - counts[shard.index]
        self.rows = torch.cat(
            [torch.arange(int(starts[a]), int(ends[b - 1])) for a, b in part if b > a]
        )


def _by_expert(received: Tensor, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """From (source, expert) to (expert, source): the order, its inverse, where experts end."""
    num_members, num_experts = received.shape
    experts = torch.arange(num_experts).repeat(num_members)
    of_rows = torch.repeat_interleave(experts, received.reshape(-1))
    order = torch.sort(of_rows, stable=True).indices
    offsets = received.sum(0).cumsum(0).to(torch.int32)
    return order.to(device), permute.inverse_of(order).to(device), offsets.to(device)
