"""Exchange: rows to the members that hold their experts, through them, and back.

Place in the flow: under `parallel` (`wh.nn.MoE`) and `stacked` (other libraries' experts), where
each member of a group has rows of its own. `courier` carries the rows; here is which go where, in
how many parts, and the order in which experts see them: by expert, then by source, which is the
order one device would have. Numbers of experts may differ by member.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from whale.nn.moe import permute
from whale.nn.moe.courier import Courier
from whale.nn.shard import Shard

Compute = Callable[[int, Tensor, Tensor], Tensor]
"""(chunk, rows by expert [R, d], where its experts' rows end [experts] int32) -> [R, d]."""


class Exchange:
    """Rows of the members of `shard`'s group through their experts.

    Attributes:
        courier: How rows travel.
        num_chunks: In how many parts, at most: one computes while the next is on its way.
    """

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.courier = Courier(shard.group)
        self.num_chunks = 1

    def sizes(self) -> list[int]:
        """This member's experts, by chunk."""
        return [high - low for low, high in (part[self.shard.index] for part in self._parts())]

    def there_and_back(self, rows: Tensor, counts: Tensor, compute: Compute) -> Tensor:
        """Each row through its expert, in the order the rows came in.

        Args:
            rows: This member's, by expert.
            counts: [members, experts], on the host: how many rows each has for each expert.
            compute: Runs the experts of one chunk that are here.
        """
        chunks = [_Chunk(part, counts, self.shard) for part in self._parts()]
        if len(chunks) == 1:
            arrived = self.courier.send(rows, chunks[0].flows)
            made = chunks[0].through(arrived, compute, 0)
            return self.courier.send(made, chunks[0].flows.t())
        begun = [
            self.courier.start(
                rows.index_select(0, chunk.rows.to(rows.device)), chunk.flows, wait=False
            )
            for chunk in chunks
        ]
        # One part computes while the next is on its way, and goes back while the next computes.
        returning = [
            self.courier.start(chunk.through(arrived(), compute, i), chunk.flows.t(), wait=False)
            for i, (arrived, chunk) in enumerate(zip(begun, chunks, strict=True))
        ]
        back = permute.inverse_of(torch.cat([chunk.rows for chunk in chunks]))
        returned = torch.cat([arrived() for arrived in returning])
        return returned.index_select(0, back.to(rows.device))

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
        flows: [members, members] rows from each to each.
        received: [members, experts] rows that come here, by source.
        rows: Which of this member's rows, by expert, the chunk is about.
    """

    def __init__(self, part: list[tuple[int, int]], counts: Tensor, shard: Shard) -> None:
        low, high = part[shard.index]
        self.flows = torch.stack([counts[:, a:b].sum(1) for a, b in part], 1)
        self.received = counts[:, low:high]
        ends = counts[shard.index].cumsum(0)
        starts = ends - counts[shard.index]
        self.rows = torch.cat(
            [torch.arange(int(starts[a]), int(ends[b - 1])) for a, b in part if b > a]
        )

    def through(self, arrived: Tensor, compute: Compute, number: int) -> Tensor:
        """Rows by source and expert through the experts, and by source again."""
        num_members, num_experts = self.received.shape
        experts = torch.arange(num_experts).repeat(num_members)
        of_rows = torch.repeat_interleave(experts, self.received.reshape(-1))
        order = torch.sort(of_rows, stable=True).indices
        offsets = self.received.sum(0).cumsum(0).to(torch.int32)
        device = arrived.device
        made = compute(number, arrived.index_select(0, order.to(device)), offsets.to(device))
        return made.index_select(0, permute.inverse_of(order).to(device))
