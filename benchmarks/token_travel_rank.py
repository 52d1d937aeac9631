"""One rank of the token travel benchmark; rank 0 writes what was measured.

Place in the flow: started by `token_travel`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import whale as wh
from benchmarks.slowest import seconds
from benchmarks.token_travel import PER_NODE, WAYS
from whale.ir.levels import all_level_groups, level_groups
from whale.nn.moe.courier import Courier
from whale.runtime import groups
from whale.runtime.groups import Communicator

WIDTH, REPEATS = 256, 15
DTYPES = {"": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def couriers(rank: int, count: int) -> dict[str, Courier]:
    """One for each way."""
    everyone = tuple(range(count))
    names = {}
    for ranks in (everyone, *all_level_groups(everyone, PER_NODE)):
        made = dist.new_group(list(ranks))
        if rank in ranks:
            names[ranks] = f"travel{ranks}"
            groups._open[names[ranks]] = Communicator(names[ranks], ranks, rank, made)
    inside, between = level_groups(everyone, PER_NODE, rank)
    found = {}
    for way in WAYS:
        kind, _, dtype = way.partition(" ")
        levels = (names[inside], names[between]) if kind == "two-level" else None
        found[way] = Courier(
            names[everyone],
            dtype=DTYPES[dtype],
            levels=levels,
            per_node=PER_NODE if levels else 0,
        )
    return found


def once(courier: Courier, rows: torch.Tensor, counts: torch.Tensor) -> None:
    """There, and the gradients back."""
    out = courier.send(rows, counts)
    out.backward(torch.ones_like(out))
    rows.grad = None


def between_nodes(way: str, counts: torch.Tensor, rank: int) -> tuple[float, int]:
    """(MB, messages) that leave this rank's node in one journey."""
    node = rank // PER_NODE
    kind, _, dtype = way.partition(" ")
    nbytes = (2 * (WIDTH + (dtype == "fp16"))) if dtype else 4 * WIDTH
    others = [t for t in range(len(counts)) if t // PER_NODE != node]
    if kind == "flat":
        return float(counts[rank, others].sum()) * nbytes / 1e6, len(others)
    mine = [s for s in range(len(counts)) if s // PER_NODE == node]
    same = [t for t in others if t % PER_NODE == rank % PER_NODE]
    return float(counts[mine][:, same].sum()) * nbytes / 1e6, len(same)


def main() -> None:
    """All ways, in turns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    wh.init(device=options.device)
    rank, count = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", 0) if options.device == "cuda" else torch.device("cpu")
    ways = couriers(rank, count)
    found = []
    for tokens in (64, 2048):
        generator = torch.Generator().manual_seed(tokens)
        targets = torch.randint(0, count, (count, tokens), generator=generator)
        counts = torch.stack([torch.bincount(row, minlength=count) for row in targets])
        rows = torch.randn(tokens, WIDTH, device=device, requires_grad=True)
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for repeat in range(REPEATS + 2):
            for way in WAYS[repeat % len(WAYS) :] + WAYS[: repeat % len(WAYS)]:
                taken = seconds(partial(once, ways[way], rows, counts), device)
                if repeat > 1:
                    times[way].append(taken)
        for way in WAYS:
            ratios = [a / b for a, b in zip(times[way], times["flat"], strict=True)]
            nbytes, messages = between_nodes(way, counts, rank)
            found.append(
                {
                    "tokens": tokens,
                    "way": way,
                    "megabytes": nbytes,
                    "messages": messages,
                    "ratio": statistics.median(ratios),
                }
            )
    if rank == 0:
        options.out.write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()


if __name__ == "__main__":
    main()
