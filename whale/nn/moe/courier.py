"""Courier: how rows travel between the members that have them and the members that need them.

Place in the flow: under `parallel.ExpertForward`. Who sends how many rows to whom is a matrix that
every member knows, so each way of travelling is a few all-to-alls of known sizes:

- flat: everyone to everyone;
- two-level: inside each node first, rows bound for the i-th GPU of any node to the i-th of this
  one, then between the i-th GPUs of all nodes: fewer and larger messages over the slow network.

Either way rows arrive by source, and gradients go back the same way. Rows may travel in half
precision: bfloat16, or float16 with a power of two per row, kept in one more column.

[Note: error] A row that travels is off by at most 2^-8 (bfloat16) or 2^-11 (float16) of its largest
element, once per journey, or twice where it travels on two levels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from whale.runtime import collectives
from whale.runtime.groups import communicator


class Courier:
    """Carries rows between the members of `group`.

    Args:
        group: The group's name.
        dtype: What rows travel in; None: as they are.
        levels: Names of this member's groups inside its node and between nodes, for two levels.
        per_node: Members of the group in each node, in order; 0: one level.
    """

    def __init__(
        self,
        group: str,
        *,
        dtype: torch.dtype | None = None,
        levels: tuple[str, str] | None = None,
        per_node: int = 0,
    ) -> None:
        self.group, self.dtype = group, dtype
        self.levels, self.per_node = levels, per_node

    def send(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows by target, to rows by source; `counts[i, j]` rows go from member i to member j."""
        return self.start(rows, counts)()

    def start(self, rows: Tensor, counts: Tensor, *, wait: bool = True) -> Callable[[], Tensor]:
        """The same in two halves: without `wait`, what is called next overlaps the journey."""
        me = communicator(self.group).index
        if self.levels is None:
            return self._leg(rows, counts[me], counts[:, me], self.group, wait=wait)
        inside, between = self.levels
        size = self.per_node
        node, place = divmod(me, size)
        # [source node, source place, target node, target place]
        grid = counts.view(len(counts) // size, size, len(counts) // size, size)
        mine = grid[node, place]
        rows = rows.index_select(0, _regroup(mine).to(rows.device))
        # Inside: what any of this node has for the members of my place, by source, then node.
        here = grid[node, :, :, place]
        rows = self._leg(rows, mine.sum(0), here.sum(1), inside)()
        rows = rows.index_select(0, _regroup(here).to(rows.device))
        return self._leg(rows, here.sum(0), grid[:, :, node, place].sum(1), between, wait=wait)

    def _leg(
        self, rows: Tensor, send: Tensor, receive: Tensor, group: str, *, wait: bool = True
    ) -> Callable[[], Tensor]:
        out, back = send.tolist(), receive.tolist()
        if not wait:
            return _Journey(rows, out, back, group, self.dtype).arrived
        if self.dtype is None:
            arrived = collectives.send_rows(rows, out, back, group)
        else:
            arrived = collectives.send_half_rows(rows, out, back, group, self.dtype)
        return lambda: arrived


def _regroup(counts: Tensor) -> Tensor:
    """Rows by (first, second) index of `counts`, brought into the order (second, first)."""
    first, second = counts.shape
    keys = torch.arange(second).repeat(first).repeat_interleave(counts.reshape(-1))
    return torch.sort(keys, stable=True).indices


class _Journey:
    """An all-to-all that is waited for later, in forward and in backward.

    Between its two halves a tensor stands for the rows that are on their way: autograd sees the
    halves as two nodes, and what lies between them overlaps the journey.
    """

    def __init__(
        self,
        rows: Tensor,
        send: list[int],
        receive: list[int],
        group: str,
        dtype: torch.dtype | None,
    ) -> None:
        self.send, self.receive, self.group, self.dtype = send, receive, group, dtype
        self.like = rows.dtype
        self._travelling: tuple[Any, Tensor, Tensor] | None = None
        self.started = _Start.apply(rows, self)

    def go(self, rows: Tensor, send: list[int], receive: list[int]) -> None:
        """Begins."""
        packed = rows if self.dtype is None else collectives.packed(rows, self.dtype)
        out, work = communicator(self.group).start_all_to_all(packed, send, receive)
        self._travelling = work, packed, out

    def wait(self) -> Tensor:
        """Ends: the rows that arrived."""
        assert self._travelling is not None
        work, _, out = self._travelling
        self._travelling = None
        if isinstance(work, dist.Work):
            work.wait()
        return out if self.dtype is None else collectives.unpacked(out, self.like)

    def arrived(self) -> Tensor:
        """The rows, once they are here."""
        return _Finish.apply(self.started, self)  # type: ignore[no-any-return]


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, journey: _Journey) -> Tensor:
        ctx.journey = journey
        journey.go(rows, journey.send, journey.receive)
        return rows.new_empty(1)

    @staticmethod
    @collectives.first_order
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.journey.wait(), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, started: Tensor, journey: _Journey) -> Tensor:
        ctx.journey = journey
        return journey.wait()

    @staticmethod
    @collectives.first_order
    def backward(ctx: Any, *grads: Any) -> Any:
        journey = ctx.journey
        journey.go(grads[0].contiguous(), journey.receive, journey.send)
        return grads[0].new_zeros(1), None
