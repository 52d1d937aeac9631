"""What travels between ranks, and how ranks measure together.

Place in the flow: the part of `engine.measure` that needs other ranks. Figures are kept as
`cost.comm` reads them: a latency and the bus's bytes per second, by collective and shape of group.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from whale.engine.stopwatch import Stopwatch, Work
from whale.ir.profile import Links
from whale.runtime.groups import Communicator

_SIZES = {
    "cuda": (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 26),
    "cpu": (1 << 14, 1 << 18, 1 << 20, 1 << 22),
}
_LONGEST_WAIT = timedelta(minutes=10)

# Torch 2.13 renamed them; the old names warn there.
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Together:
    """All ranks of the job, measuring at the same time; alone, without a job."""

    def __init__(self) -> None:
        joined = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.num_ranks = dist.get_world_size() if joined else 1
        self.rank = dist.get_rank() if joined else 0
        # Of its own and on the host: waiting in it takes nothing from the device.
        self._group = dist.new_group(backend="gloo", timeout=_LONGEST_WAIT) if joined else None

    def __enter__(self) -> Together:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._group is not None:
            dist.destroy_process_group(self._group)

    def wait(self, work: Work | None = None) -> None:
        """Until all ranks are here; goes on with `work` meanwhile, so the others stay under load.

        Ranks of one machine share memory and power: one that rests makes its neighbours look
        faster than they are in training.
        """
        if self._group is None:
            return
        # Not `barrier`, which may choose the job's GPU even for a group on the host.
        arrived = dist.all_reduce(torch.zeros(1), group=self._group, async_op=True)
        assert arrived is not None
        while not arrived.is_completed():
            if work is None:
                time.sleep(1e-3)
            else:
                work()
        arrived.wait()

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, by rank."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value, group=self._group)
        return values


def measure_links(
    num_ranks: int,
    device: torch.device,
    sizes: Sequence[int] | None = None,
    *,
    symmetric: bool = False,
) -> Links:
    """Collectives of the whole job and messages between two ranks; every rank calls it alike.

    Latency and speed are a line from the smallest of a few sizes to the largest. Bytes
    are those on a rank's bus: 2 (n - 1) / n of an all-reduce's, (n - 1) / n of those an all-gather
    gives, a reduce-scatter takes and a rank sends in an all-to-all, all of a message's.
    `symmetric` measures what `communication.symmetric_memory` will do.
    """
    if num_ranks < 2:
        return {}
    per_node = min(int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks)), num_ranks)
    nodes = math.ceil(num_ranks / per_node)
    part = (num_ranks - 1) / num_ranks
    # A size is a multiple of the ranks, so that it can be cut.
    numels = [
        max(1, round(size / 4 / num_ranks)) * num_ranks for size in sizes or _SIZES[device.type]
    ]
    watch = Stopwatch(device)
    comm = Communicator(
        "links", tuple(range(num_ranks)), dist.get_rank(), dist.group.WORLD, symmetric=symmetric
    )
    links: dict[tuple[str, int, int], tuple[float, float]] = {}
    for name, (collective, rounds) in _COLLECTIVES.items():
        times = [
            (rounds * part * 4.0 * n, _slowest(collective(n, comm, device), n, watch))
            for n in numels
        ]
        links[name, num_ranks, nodes] = _line(times)
    pairs = {1: 1} if per_node > 1 else {}
    if nodes > 1:
        pairs[2] = per_node
    for span, peer in pairs.items():
        # There and back.
        times = [(4.0 * n, _slowest(_ping_pong(n, peer, device), n, watch) / 2) for n in numels]
        links["send", 2, span] = _line(times)
    return links


def _line(times: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Latency from the smallest, speed from the largest: between them protocols change."""
    (small, quick), *_, (large, slow) = times
    return quick, (large - small) / max(slow - quick, 1e-9)


def _slowest(work: Work, numel: int, watch: Stopwatch) -> float:
    """Seconds per call, the same number on all ranks."""
    # Counts depend on the size alone: all ranks must make the same calls.
    small = numel <= 1 << 18
    calls, rounds = (10, 5) if small else (2, 5)
    # Small collectives in a row flow into each other; in training compute lies between them, and
    # each has its latency to itself (0.1 ms became 0.8 ms over loopback).
    between = _between(watch.device) if small and watch.device.type == "cuda" else None
    seconds = [_per_call(work, between, watch, calls, rounds)]
    if between is not None:
        seconds.append(_per_call(between, None, watch, calls, rounds))
    # Of the rank that takes longest, both times: a fast one waits for the compute of a slow one,
    # which is no latency.
    worst = torch.tensor(seconds, dtype=torch.float64, device=watch.device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    both, alone = [*worst.tolist(), 0.0][:2]
    return float(max(both - alone, 1e-6))


def _per_call(work: Work, between: Work | None, watch: Stopwatch, calls: int, rounds: int) -> float:
    def once() -> None:
        work()
        if between is not None:
            between()

    once()
    once()
    found = []
    for _ in range(rounds):
        watch.synchronize()
        start = watch.mark()
        for _ in range(calls):
            once()
        end = watch.mark()
        found.append(watch.between(start, end) / calls)
    return statistics.median(found)


def _between(device: torch.device) -> Work:
    """Some compute, as a Layer would do.

    Long enough (about a millisecond) for NCCL's threads to go to sleep, as they do in training:
    waking them is a part of the latency.
    """
    x = torch.randn(2048, 2048, device=device)

    def products() -> None:
        for _ in range(8):
            torch.matmul(x, x)

    return products


def _all_reduce(numel: int, comm: Communicator, device: torch.device) -> Work:
    # Zeros: sums that grow from call to call would end as infinities.
    return partial(_call, comm.all_reduce_, torch.zeros(numel, device=device))


def _all_gather(numel: int, comm: Communicator, device: torch.device) -> Work:
    x = torch.randn(numel // comm.size, device=device)
    if comm.shared is not None:
        return lambda: _call(partial(comm.all_gather, dim=0, sizes=[x.numel()] * comm.size), x)
    return partial(_call, _gather_single, x.new_empty(numel), x)


def _reduce_scatter(numel: int, comm: Communicator, device: torch.device) -> Work:
    x = torch.randn(numel, device=device)
    if comm.shared is not None:
        sizes = [numel // comm.size] * comm.size
        return lambda: _call(partial(comm.reduce_scatter, dim=0, sizes=sizes), x)
    return partial(_call, _reduce_single, x.new_empty(numel // comm.size), x)


def _all_to_all(numel: int, comm: Communicator, device: torch.device) -> Work:
    x = torch.randn(numel, device=device)
    return partial(_call, dist.all_to_all_single, torch.empty_like(x), x)


def _call(collective: Callable[..., object], *args: torch.Tensor) -> None:
    collective(*args)


def _ping_pong(numel: int, peer: int, device: torch.device) -> Work:
    """A message from rank 0 to `peer` and back; the other ranks do nothing."""
    rank, x = dist.get_rank(), torch.randn(numel, device=device)

    def work() -> None:
        if rank == 0:
            dist.send(x, peer)
            dist.recv(x, peer)
        elif rank == peer:
            dist.recv(x, 0)
            dist.send(x, 0)

    return work


_COLLECTIVES: dict[str, tuple[Callable[[int, Communicator, torch.device], Work], float]] = {
    "all_reduce": (_all_reduce, 2.0),
    "all_gather": (_all_gather, 1.0),
    "reduce_scatter": (_reduce_scatter, 1.0),
    "all_to_all": (_all_to_all, 1.0),
}
