"""SymmetricMemory: collectives between GPUs of one node through memory they all can read.

Place in the flow: under a Communicator when `communication.symmetric_memory` is on. A collective of
a few kilobytes costs NCCL its launch and its protocol; here each member writes its part where the
others see it and reads theirs itself. Batch norm over replicas, with two collectives per norm,
lives on it. Only NVLink (or one card shared by several ranks) makes it possible, for at most 8
ranks; float32 and bfloat16 alone are summed everywhere (all-reduce), any dtype is gathered or
summed in pieces; all-to-all stays with NCCL, since members do not know each other's sizes.

[Note: order] One buffer serves all collectives of a group. They run on one stream, in the order all
members share, and each ends with all having read what they need: the next may write.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from whale.errors import WhaleError
from whale.runtime.compat import symmetric_buffer

_CAPACITY = 32 << 20
_ONE_SHOT = 256 << 10
"""Above it every member adds a part of the sum and reads the rest: half the traffic, two waits."""
_ALIGNMENT = 128
"""Bytes: the kernels add 16 at a time, by as many members as there are (8 at most)."""
MOST_MEMBERS = 8
_DTYPES = (torch.float32, torch.bfloat16)


def within_node(ranks: Iterable[int]) -> bool:
    """Whether these ranks share a host, as the launcher numbered them."""
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return len({rank // per_node for rank in ranks}) == 1


class SymmetricMemory:
    """The shared buffer of one group, and what goes through it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        try:
            self.buffer, self._handle = symmetric_buffer(_CAPACITY, group)
        except RuntimeError as error:
            raise WhaleError(
                "communication.symmetric_memory: the GPUs of this node cannot map each other's "
                f"memory ({str(error).splitlines()[0]})",
                hint="switch it off; ranks that share one card need "
                "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1",
            ) from error
        self.group, self.index, self.size = group.group_name, group.rank(), group.size()

    def sums(self, tensor: torch.Tensor) -> bool:
        """Whether an all-reduce of this tensor can go through the buffer."""
        return tensor.is_cuda and tensor.dtype in _DTYPES and tensor.numel() > 0

    def sum_(self, tensor: torch.Tensor) -> None:
        """SUM in place, on the current stream; the buffer is free again when it returns there."""
        for part in tensor.view(-1).split(_CAPACITY // tensor.element_size()):
            unit = _ALIGNMENT // tensor.element_size()
            shared = self.buffer.view(tensor.dtype)[: -(-part.numel() // unit) * unit]
            shared[: part.numel()].copy_(part)
            if shared.nbytes <= _ONE_SHOT:
                shared = torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", self.group)
            else:
                torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", self.group)
            part.copy_(shared[: part.numel()])

    def gather(self, out: torch.Tensor, local: torch.Tensor, sizes: Sequence[int]) -> None:
        """Rows of every member, `sizes` by member, into `out`, in group order."""
        row = local[:1].numel() if len(local) else out[:1].numel()
        flat, pieces = local.reshape(-1), out.view(-1).split([size * row for size in sizes])
        room = _CAPACITY // local.element_size()
        for first in range(0, max(sizes) * row, room):
            mine = flat[first : first + room]
            self._own(mine).copy_(mine)
            self._handle.barrier()
            for peer, piece in enumerate(pieces):
                if len(part := piece[first : first + room]):
                    part.copy_(mine if peer == self.index else self._of(peer, part))
            self._handle.barrier()

    def sum_pieces(self, out: torch.Tensor, local: torch.Tensor, sizes: Sequence[int]) -> None:
        """The SUM over the group of this member's rows of `local`, `sizes` by member."""
        row = local[:1].numel()
        pieces = local.reshape(-1).split([size * row for size in sizes])
        flat = out.view(-1)
        # In the buffer each member's part has a slot of its own.
        room = _CAPACITY // local.element_size() // self.size
        for first in range(0, max(sizes) * row, room):
            for peer, piece in enumerate(pieces):
                part = piece[first : first + room]
                self._own(part, peer * room).copy_(part)
            self._handle.barrier()
            mine = flat[first : first + room]
            # Added in group order by everyone, so that what is gathered of it is the same anywhere.
            total = torch.zeros_like(mine, dtype=torch.promote_types(mine.dtype, torch.float32))
            for peer in range(self.size if len(mine) else 0):
                total += self._of(peer, mine, self.index * room)
            mine.copy_(total)
            self._handle.barrier()

    def _own(self, like: torch.Tensor, offset: int = 0) -> torch.Tensor:
        return self.buffer.view(like.dtype)[offset : offset + like.numel()]

    def _of(self, peer: int, like: torch.Tensor, offset: int = 0) -> torch.Tensor:
        return self._handle.get_buffer(peer, (like.numel(),), like.dtype, offset)


class StreamWork:
    """Work on a stream of its own, waited for as `dist.Work` is."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> bool:
        """What the current stream does next comes after it."""
        torch.cuda.current_stream().wait_event(self._event)
        return True
