"""SymmetricSums: SUMs between GPUs of one node through memory they all can read.

Place in the flow: under a Communicator when `communication.symmetric_memory` is on. A collective of
a few kilobytes costs NCCL its launch and its protocol; here each member writes its part where the
others see it and adds theirs itself, in one kernel. Batch norm over replicas, with two collectives
per norm, lives on it. Only NVLink (or one card shared by several ranks) makes it possible, and
float32 and bfloat16 alone are summed so, by at most 8 ranks: everything else stays with NCCL.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

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


class SymmetricSums:
    """The shared buffer of one group, and sums through it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        try:
            self.buffer = symmetric_buffer(_CAPACITY, group)
        except RuntimeError as error:
            raise WhaleError(
                "communication.symmetric_memory: the GPUs of this node cannot map each other's "
                f"memory ({str(error).splitlines()[0]})",
                hint="switch it off; ranks that share one card need "
                "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1",
            ) from error
        self.group = group.group_name

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether a sum of this tensor can go through the buffer."""
        return tensor.is_cuda and tensor.dtype in _DTYPES and tensor.numel() > 0

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """A new tensor: the SUM over the group."""
        out = tensor.contiguous().clone()
        self.sum_(out)
        return out

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


class StreamWork:
    """Work on a stream of its own, waited for as `dist.Work` is."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> bool:
        """What the current stream does next comes after it."""
        torch.cuda.current_stream().wait_event(self._event)
        return True
