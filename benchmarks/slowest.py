"""Seconds of work that all ranks do together: those of the slowest.

Place in the flow: under the benchmarks whose ranks take turns between several ways.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """From when all ranks are here to when the last is done; the same on every rank."""
    dist.barrier()
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    taken = torch.tensor([time.perf_counter() - start], device=device)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)
