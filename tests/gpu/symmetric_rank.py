"""One rank of the symmetric memory check: sums and gathers of many sizes against what they must be.

Started by `test_symmetric` through `benchmarks.virtual_gpus`, or by hand with two ranks; rank 0
prints the latency of a small sum beside NCCL's.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

import whale as wh
from whale.runtime.groups import Communicator


def _value(rank: int, numel: int, turn: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, so that every order of summation gives the same."""
    base = torch.arange(numel, device="cuda", dtype=torch.int64)
    return ((base * (rank + 3) + turn) % 13).to(dtype)


def check(comm: Communicator, rank: int) -> None:
    """Every size, dtype and way of calling; back to back, so that a race would show."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        for numel in (1, 3, 129, 5000, 65_536, 200_003, 9_000_001):
            for turn in range(30 if numel < 100_000 else 3):
                expected = sum(_value(r, numel, turn, dtype) for r in range(comm.size))
                out = comm.all_reduce(_value(rank, numel, turn, dtype))
                assert torch.equal(out, expected), (dtype, numel, turn)
    pending = []
    for turn in range(20):
        flat = _value(rank, 3_000_000, turn, torch.float32)
        pending.append((turn, flat, comm.all_reduce_(flat, async_op=True)))
        comm.all_reduce(_value(rank, 77, turn, torch.float32))
    for turn, flat, work in pending:
        assert work is not None
        work.wait()
        expected = sum(_value(r, 3_000_000, turn, torch.float32) for r in range(comm.size))
        assert torch.equal(flat, expected), turn
    pieces(comm, rank)


def pieces(comm: Communicator, rank: int) -> None:
    """Gathers and sums of unequal pieces, some empty, some larger than the buffer."""
    many = [3 + r for r in range(comm.size)]
    for sizes in (many, [0, *many[1:]], [3] * comm.size):
        for width in (1, 40, 100_000, 2_900_000):
            for dtype in (torch.float32, torch.bfloat16, torch.float64):
                if width * dtype.itemsize > 16 << 20:
                    continue
                own = [_value(r, n * width, 1, dtype).view(n, width) for r, n in enumerate(sizes)]
                gathered = comm.all_gather(own[rank], 0, sizes)
                assert torch.equal(gathered, torch.cat(own)), (sizes, width, dtype)
                numel = sum(sizes) * width
                whole = [_value(r, numel, 2, dtype).view(-1, width) for r in range(comm.size)]
                expected = sum(whole).split(sizes)[rank]
                summed = comm.reduce_scatter(whole[rank], 0, sizes)
                assert torch.equal(summed, expected), (sizes, width, dtype)


def latency(comm: Communicator) -> float:
    """Microseconds of a sum of 4 KB, with compute between two of them."""
    x, w = torch.ones(1024, device="cuda"), torch.randn(1024, 1024, device="cuda")
    for timed in (False, True):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(100):
            w @ w
            comm.all_reduce(x)
        torch.cuda.synchronize()
        if timed:
            return (time.perf_counter() - start) * 1e4
    raise AssertionError


def main() -> None:
    """All checks, on every rank."""
    wh.init({"timeout_seconds": 60.0})
    rank, ranks = dist.get_rank(), tuple(range(dist.get_world_size()))
    shared = Communicator("shared", ranks, rank, dist.group.WORLD, symmetric=True)
    assert shared.shared is not None
    plain = Communicator("plain", ranks, rank, dist.group.WORLD)
    check(shared, rank)
    check(plain, rank)
    times = latency(shared), latency(plain)
    if rank == 0:
        print(f"sum of 4 KB after a product: shared {times[0]:.0f} us, NCCL {times[1]:.0f} us")
    dist.barrier()


if __name__ == "__main__":
    main()
