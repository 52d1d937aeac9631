"""Expert parallelism: tokens travel to the members that hold their experts, and back.

Place in the flow: installed by `engine.lower` on every MoE of a stage with several replicas (they
share statistics) and by the `experts` rule where a `split` spreads the experts over a group.

| the group | what happens |
|---|---|
| members of one replica: all see the same rows | each runs its experts; outputs are summed |
| several replicas: each has rows of its own | all-to-all to the experts, all-to-all back |

Numbers of experts may differ by member. A member's rows arrive sorted by source and expert; they
are brought into the order of expert, then source, which is the order one device would have.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from whale.nn.column_shard import plain
from whale.nn.moe import permute
from whale.nn.moe.layer import MoE, Slots, slots_of, weighted_sum
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

    def __call__(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """The replaced forward."""
        return self.module.run(plain(x), self.meeting, self.module.here)


class ExpertForward:
    """The forward of an MoE of which this member holds the experts [shard.low, shard.high).

    Args:
        module: With its own experts' weights.
        shard: The group, and which experts are whose.
    """

    def __init__(self, module: MoE, shard: Shard) -> None:
        self.module, self.shard = module, shard
        self.meeting: Meeting = Alone()
        self.places: list[int] = []

    def meet(self, meeting: Replicas, ranks: tuple[int, ...]) -> None:
        """From now on it is one of several replicas of its stage: those of `ranks`."""
        self.meeting = meeting
        members = communicator(self.shard.group).ranks
        self.places = [ranks.index(rank) for rank in members if rank in ranks]

    def __call__(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """The replaced forward."""
        compute = self._inside if self.shard.rows is None else self._across
        return self.module.run(plain(x), self.meeting, compute)

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
        shard, group = self.shard, self.shard.group
        # [members, experts]: what each member has for each expert. The sizes of an all-to-all are
        # the host's, so this is where it waits for the device.
        counts = routed.kept.cpu()[self.places]
        bounds = zip(shard.cuts, shard.cuts[1:], strict=False)
        send = [int(counts[shard.index, low:high].sum()) for low, high in bounds]
        received = counts[:, shard.low : shard.high]
        receive = received.sum(1).tolist()
        order, back, offsets = _by_expert(received, tokens.device)

        def there_and_back(rows: Tensor) -> Tensor:
            arrived = collectives.send_rows(rows, send, receive, group)
            made = self.module.ffn(arrived.index_select(0, order), offsets)
            return collectives.send_rows(made.index_select(0, back), receive, send, group)

        if self.module.router_kind == "expert-choice":
            slots: Slots = slots_of(routed._replace(num_slots=sum(send)))
            returned = there_and_back(tokens.index_select(0, slots.tokens))
            return weighted_sum(tokens, returned, slots, routed.gates)
        (by_expert, _, _), inverse = permute.route(routed.ids, self.module.num_experts)
        rows = permute.gather_rows(tokens, by_expert, routed.ids.shape[1], inverse)
        returned = there_and_back(rows[: sum(send)])
        # Slots without room come last, and nothing comes back for them.
        padded = F.pad(returned, (0, 0, 0, len(rows) - len(returned)))
        return permute.combine(padded, by_expert, routed.gates, inverse)


def _by_expert(received: Tensor, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """From (source, expert) to (expert, source): the order, its inverse, where experts end."""
    num_members, num_experts = received.shape
    experts = torch.arange(num_experts).repeat(num_members)
    of_rows = torch.repeat_interleave(experts, received.reshape(-1))
    order = torch.sort(of_rows, stable=True).indices
    offsets = received.sum(0).cumsum(0).to(torch.int32)
    return order.to(device), permute.inverse_of(order).to(device), offsets.to(device)
