"""What travels between ranks, and how ranks measure together.

Place in the flow: the part of `engine.calibrate` that needs other ranks. Figures are kept as
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

from whale.engine.calibrate.stopwatch import Stopwatch, Work
from whale.ir.profile import Links
from whale.runtime.groups import Communicator

_SIZES = {
    "cuda": (1 << 12, 1 << 24, 1 << 26, 1 << 28),
    "cpu": (1 << 14, 1 << 22),
}
_LARGE = {"cuda": 1 << 26, "cpu": 1 << 22}
_LONGEST_S = 0.3
"""Of one collective: where it takes this long, larger ones are not tried."""
_SUMS = (4, 256)
"""At least and at most, in a row, while the computes they are to slow are running."""
_QUICK_S = 0.05
_MOST_LOST = 0.9
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

    def turns(self, place: str) -> tuple[int, int]:
        """Which of the ranks on the card `place` this is, and the most there are on one."""
        places = self.gather(place)
        most = max((places.count(p) for p in places if p), default=1)
        return (places[: self.rank].count(place) if place else 0), most

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

    Latency is the smallest size's; speed the mean of the larger ones' (as large as a bucket of
    gradients, or several of them), between which protocols and caches make it differ. Bytes are
    those on a rank's bus: 2 (n - 1) / n of an all-reduce's, (n - 1) / n of those an all-gather
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
        times = _by_size(numels, partial(collective, comm, device), watch)
        links[name, num_ranks, nodes] = _line([(rounds * part * 4.0 * n, t) for n, t in times])
    pairs = {1: 1} if per_node > 1 else {}
    if nodes > 1:
        pairs[2] = per_node
    for span, peer in pairs.items():
        times = _by_size(numels, partial(_ping_pong, peer, device), watch)
        # There and back.
        links["send", 2, span] = _line([(4.0 * n, t / 2) for n, t in times])
    return links


def measure_contention(
    num_ranks: int, device: torch.device, load: Work | None = None, *, symmetric: bool = False
) -> tuple[float, float]:
    """What computing and summing gradients take from each other when they run side by side.

    `load` is this rank's compute, which must not wait for the device; default: products and passes
    over memory. What the two take depends on it: a kernel that fills the multiprocessors slows the
    sum, one that leaves room is slowed by it.

    Returns:
        The share of its speed that this rank's compute loses beside a sum, and the share that a sum
        loses while all ranks compute (the same number on every rank).
    """
    if num_ranks < 2:
        return 0.0, 0.0
    watch = Stopwatch(device)
    comm = Communicator(
        "links", tuple(range(num_ranks)), dist.get_rank(), dist.group.WORLD, symmetric=symmetric
    )
    gradients = torch.zeros(_LARGE[device.type] // 4, device=device)
    compute = load or _load(device)

    def side_by_side(num_sums: int, calls: int, rounds: int) -> tuple[float, float]:
        """Seconds of the computes, and of the sums after them."""
        found = []
        for number in range(rounds + 1):
            dist.all_reduce(torch.zeros(1, device=device))
            watch.synchronize()
            start = watch.mark()
            works = [comm.all_reduce_(gradients, async_op=True) for _ in range(num_sums)]
            for _ in range(calls):
                compute()
            middle = watch.mark()
            for work in works:
                if work is not None:
                    work.wait()
            end = watch.mark()
            if number:
                found.append((watch.between(start, middle), watch.between(middle, end)))
        return statistics.median(a for a, _ in found), statistics.median(b for _, b in found)

    once = _per_call(compute, None, watch, 3, 3)
    one_sum, longest = (_largest(t, device) for t in (sum(side_by_side(1, 0, 1)), once))
    # On a slow network a sum is long enough by itself, and must not be waited for too often.
    least, rounds = (_SUMS[0], 5) if one_sum < _QUICK_S else (1, 2)
    # So many sums that they outlast the compute of every rank, whatever that loses.
    num_sums = min(max(least, math.ceil(2.0 * longest / one_sum)), _SUMS[1])
    sums = _largest(sum(side_by_side(num_sums, 0, rounds)), device)
    calls = max(1, int(0.6 * sums / once))
    alone = calls * _per_call(compute, None, watch, calls, 5)
    under_load, after = side_by_side(num_sums, calls, rounds)
    lost = 1.0 - alone / under_load
    # What was summed while all computed, over the time that took.
    contention = torch.tensor([1.0 - (sums - after) / under_load], dtype=torch.float64)
    contention = contention.to(device)
    dist.all_reduce(contention)
    return _share(lost), _share(contention.item() / num_ranks)


def _largest(seconds: float, device: torch.device) -> float:
    """Of all ranks."""
    found = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found.item())


def _share(value: float) -> float:
    return min(max(value, 0.0), _MOST_LOST)


def _by_size(
    numels: Sequence[int], make: Callable[[int], Work], watch: Stopwatch
) -> list[tuple[int, float]]:
    """Seconds by size, up to one that takes long; every rank has the same, so all stop alike."""
    found: list[tuple[int, float]] = []
    for numel in numels:
        found.append((numel, _slowest(make(numel), numel, watch)))
        if len(found) > 1 and found[-1][1] > _LONGEST_S:
            break
    return found


def _line(times: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Latency and bytes per second, of (bytes, seconds)."""
    (small, quick), *others = times
    slopes = [max(slow - quick, 1e-9) / (large - small) for large, slow in others]
    return quick, 1.0 / statistics.fmean(slopes)


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
    return _products(device, 2048, 8)


def _load(device: torch.device) -> Work:
    """Compute of both kinds, in about equal parts: products, and passes over memory."""
    products = _products(device, *((2048, 8) if device.type == "cuda" else (256, 8)))
    x = torch.zeros(1 << (24 if device.type == "cuda" else 19), device=device)

    def work() -> None:
        products()
        for _ in range(8):
            x.add_(1.0)

    return work


def _products(device: torch.device, side: int, times: int) -> Work:
    x = torch.randn(side, side, device=device)

    def work() -> None:
        for _ in range(times):
            torch.matmul(x, x)

    return work


def _all_reduce(comm: Communicator, device: torch.device, numel: int) -> Work:
    # Zeros: sums that grow from call to call would end as infinities.
    return partial(_call, comm.all_reduce_, torch.zeros(numel, device=device))


def _all_gather(comm: Communicator, device: torch.device, numel: int) -> Work:
    x = torch.randn(numel // comm.size, device=device)
    if comm.shared is not None:
        return lambda: _call(partial(comm.all_gather, dim=0, sizes=[x.numel()] * comm.size), x)
    return partial(_call, _gather_single, x.new_empty(numel), x)


def _reduce_scatter(comm: Communicator, device: torch.device, numel: int) -> Work:
    x = torch.randn(numel, device=device)
    if comm.shared is not None:
        sizes = [numel // comm.size] * comm.size
        return lambda: _call(partial(comm.reduce_scatter, dim=0, sizes=sizes), x)
    return partial(_call, _reduce_single, x.new_empty(numel // comm.size), x)


def _all_to_all(comm: Communicator, device: torch.device, numel: int) -> Work:
    x = torch.randn(numel, device=device)
    return partial(_call, dist.all_to_all_single, torch.empty_like(x), x)


def _call(collective: Callable[..., object], *args: torch.Tensor) -> None:
    collective(*args)


def _ping_pong(peer: int, device: torch.device, numel: int) -> Work:
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


_COLLECTIVES: dict[str, tuple[Callable[[Communicator, torch.device, int], Work], float]] = {
    "all_reduce": (_all_reduce, 2.0),
    "all_gather": (_all_gather, 1.0),
    "reduce_scatter": (_reduce_scatter, 1.0),
    "all_to_all": (_all_to_all, 1.0),
}
