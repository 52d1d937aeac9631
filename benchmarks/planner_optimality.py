"""How far from the optimum: the planner's balance and chain, the paper's Algorithm 1, proportion.

`python -m benchmarks.planner_optimality --out benchmarks/results/planner-optimality.md` tries every
answer of thousands of small problems and writes the table, then times the large ones.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from benchmarks.algorithm1 import Shares, algorithm1, cut_by_loads, proportional
from tests.unit.planner.instances import (
    REGIMES,
    BalanceCase,
    ChainCase,
    balance_case,
    best_balance,
    best_chain,
    chain_case,
)
from whale.errors import PlanError
from whale.planner.balance import Member, balance, balance_shards
from whale.planner.chain import GroupKind, Stage, partition
from whale.planner.span_memory import SpanMemory

COMMAND = "python -m benchmarks.planner_optimality --out benchmarks/results/planner-optimality.md"
Case = BalanceCase | ChainCase


@dataclass(slots=True)
class Tally:
    """What one method did on the cases that can be solved."""

    instances: int = 0
    feasible: int = 0
    not_fitting: int = 0
    given_up: int = 0
    endless: int = 0
    ratios: list[float] = field(default_factory=list)

    def row(self, regime: str, method: str) -> str:
        ratios = sorted(self.ratios)
        quality = "| | | |"
        if ratios:
            late = ratios[min(len(ratios) - 1, round(0.95 * len(ratios)))]
            quality = f"| {statistics.fmean(ratios):.3f} | {late:.3f} | {ratios[-1]:.3f} |"
        share = f"{self.not_fitting} ({self.not_fitting / max(self.feasible, 1):.1%})"
        return (
            f"| {regime} | {method} | {self.instances} | {self.feasible} | {share} "
            f"| {self.given_up} | {self.endless} {quality}"
        )


Answer = tuple[int, ...] | tuple[Stage, ...] | None


def whale_balance(case: BalanceCase) -> tuple[Answer, bool]:
    try:
        return balance(case.members, case.total).units, True
    except PlanError:
        return None, True


def paper_balance(case: BalanceCase, *, repaired: bool) -> tuple[Answer, bool]:
    """TGmem is the memory of the whole batch, all of it in proportion to the load."""
    shares = algorithm1(
        case.speeds,
        [member.capacity_bytes for member in case.members],
        [member.bytes(case.total) / case.total for member in case.members],
        proportional(case.total, case.speeds),
        whole=True,
        repaired=repaired,
    )
    return tuple(int(load) for load in shares.loads), shares.ended


def proportional_balance(case: BalanceCase) -> tuple[Answer, bool]:
    return proportional(case.total, case.speeds), True


def whale_chain(case: ChainCase, tolerance: float) -> tuple[Answer, bool]:
    try:
        return partition(case.kinds, case.num_micro_batch, tolerance=tolerance).stages, True
    except PlanError:
        return None, True


def paper_chain(case: ChainCase, *, repaired: bool) -> tuple[Answer, bool]:
    """Devices by memory, largest first; loads by Algorithm 1; cut where FLOPs come nearest.

    TGmem of a stage counts the micro-batches that it holds, which the paper's text asks for.
    """
    kinds = [number for number, kind in enumerate(case.kinds) for _ in range(kind.count)]
    kinds.sort(key=lambda number: -case.kinds[number].capacity_bytes)
    groups = [case.kinds[number] for number in kinds]
    shares: Shares = algorithm1(
        [case.speeds[number] for number in kinds],
        [group.capacity_bytes - group.memory.driver for group in groups],
        [
            sum(group.memory.static)
            + min(case.num_micro_batch, len(groups) - index) * sum(group.memory.kept)
            for index, group in enumerate(groups)
        ],
        [case.speeds[number] / sum(case.speeds[n] for n in kinds) for number in kinds],
        whole=False,
        repaired=repaired,
    )
    return cut_by_loads(case.flops, shares.loads, kinds), shares.ended


def proportional_chain(case: ChainCase) -> tuple[Answer, bool]:
    kinds = [number for number, kind in enumerate(case.kinds) for _ in range(kind.count)]
    return cut_by_loads(case.flops, [case.speeds[number] for number in kinds], kinds), True


def compare(
    make: Callable[[random.Random, str], Case],
    best_of: Callable[[Case], float | None],
    methods: dict[str, Callable[[Case], tuple[Answer, bool]]],
    per_regime: int,
) -> list[str]:
    """The rows of one table. A plan counts only if it fits; a ratio only if a plan counts."""
    tallies: dict[tuple[str, str], Tally] = {}
    for regime in REGIMES:
        rng = random.Random(regime)
        for _ in range(per_regime):
            case = make(rng, regime)
            best = best_of(case)
            for name, method in methods.items():
                answer, ended = method(case)
                for key in ((regime, name), ("all", name)):
                    tally = tallies.setdefault(key, Tally())
                    tally.instances += 1
                    tally.endless += not ended
                    if best is None:
                        # Whatever is answered here cannot fit; only a proof of "no" is right.
                        assert answer is None or not case.fits(answer), case
                        continue
                    tally.feasible += 1
                    if answer is None:
                        tally.given_up += 1
                    elif not case.fits(answer):
                        tally.not_fitting += 1
                    else:
                        tally.ratios.append(case.seconds(answer) / best)
    return [
        tallies[regime, name].row(regime, name) for regime in (*REGIMES, "all") for name in methods
    ]


def scale_kinds(rng: random.Random, num_kinds: int, count: int, room: float) -> list[GroupKind]:
    """96 layers of a 175B-like model in 2 GB to 4 GB pieces; each kind slower and smaller."""
    layers = range(96)
    flops = [rng.uniform(0.9, 1.1) * (1.5 if layer % 12 == 11 else 1.0) for layer in layers]
    resident = tuple(rng.uniform(2.4e9, 3.6e9) for _ in layers)
    activation = tuple(rng.uniform(1.6e8, 2.4e8) for _ in layers)
    speeds, sizes = (1.0, 0.55, 0.4, 0.25), (80e9, 40e9, 32e9, 16e9)
    return [
        GroupKind(
            name=f"kind {number}",
            count=count,
            capacity_bytes=room * sizes[number],
            seconds=tuple(work / speeds[number] * rng.uniform(0.97, 1.03) for work in flops),
            memory=SpanMemory(static=resident, kept=activation, driver=1e9),
            edge_seconds=tuple(rng.uniform(0.01, 0.05) for _ in layers),
        )
        for number in range(num_kinds)
    ]


def timed(call: Callable[[], object], repeats: int) -> tuple[object, float, float, float]:
    """The last result; the median and the longest seconds, and the median processor seconds."""
    seconds, processor, result = [], [], None
    for _ in range(repeats):
        start, used = time.perf_counter(), time.process_time()
        result = call()
        seconds.append(time.perf_counter() - start)
        processor.append(time.process_time() - used)
    return result, statistics.median(seconds), max(seconds), statistics.median(processor)


def chain_timings(repeats: int) -> list[str]:
    rows = []
    for num_kinds, count in ((2, 32), (4, 16)):
        for num_micro_batch in (8, 32, 128, 512):
            for room, memory in ((1.0, "loose"), (0.4, "tight")):
                for tolerance in (0.01, 0.0):
                    kinds = scale_kinds(random.Random(1), num_kinds, count, room)
                    call = partial(partition, kinds, num_micro_batch, tolerance=tolerance)
                    chain, middle, longest, used_s = timed(call, repeats)
                    counts = [sum(s.kind == k for s in chain.stages) for k in range(num_kinds)]
                    used = " + ".join(map(str, counts))
                    rows.append(
                        f"| {num_kinds} x {count} | {num_micro_batch} | {memory} | {tolerance:g} "
                        f"| {middle:.2f} | {longest:.2f} | {used_s:.2f} | {used} "
                        f"| {chain.seconds:.2f} | {chain.seconds / chain.bound_seconds - 1:.2%} |"
                    )
                    print(rows[-1], flush=True)
    return rows


def balance_timings(repeats: int) -> list[str]:
    rng = random.Random(0)

    def member(rank: int) -> Member:
        floor, row, rows = rng.uniform(1e-3, 3e-3), rng.uniform(1e-4, 5e-4), rng.randint(9, 30)
        return Member(
            name=f"rank {rank}",
            seconds=lambda x: max(floor, x * row),
            bytes=lambda x: 1e9 + x * 1e8,
            capacity_bytes=1e9 + rows * 1e8,
        )

    members = [member(rank) for rank in range(512)]
    caps = [rng.randint(10**9, 4 * 10**9) for _ in members]
    speeds = [rng.uniform(1e9, 1e11) for _ in members]
    calls = {
        "`balance`, 4,096 rows over 512 devices": partial(balance, members, 4096),
        "`balance_shards`, 1 TB over 512 devices": partial(balance_shards, 10**12, caps, speeds),
    }
    rows = []
    for name, call in calls.items():
        _, middle, longest, used = timed(call, 5 * repeats)
        rows.append(f"| {name} | {1e3 * middle:.0f} | {1e3 * longest:.0f} | {1e3 * used:.0f} |")
    return rows


def main() -> int:
    """Runs everything and writes the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--instances", type=int, default=1000, help="per memory regime")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    balance_rows = compare(
        balance_case,
        best_balance,
        {
            "Whale `balance`": whale_balance,
            "Algorithm 1 as printed": partial(paper_balance, repaired=False),
            "Algorithm 1 repaired": partial(paper_balance, repaired=True),
            "FLOPs-proportional": proportional_balance,
        },
        options.instances,
    )
    chain_rows = compare(
        chain_case,
        best_chain,
        {
            "Whale `partition`, tolerance 0": partial(whale_chain, tolerance=0.0),
            "Whale `partition`, tolerance 0.01": partial(whale_chain, tolerance=0.01),
            "by memory, Algorithm 1 as printed": partial(paper_chain, repaired=False),
            "by memory, Algorithm 1 repaired": partial(paper_chain, repaired=True),
            "FLOPs-proportional": proportional_chain,
        },
        options.instances,
    )
    load = os.getloadavg()[0]
    timings = balance_timings(options.repeats), chain_timings(options.repeats)
    write(options.out, balance_rows, chain_rows, *timings, load)
    return 0


def write(
    path: Path,
    balance_rows: Sequence[str],
    chain_rows: Sequence[str],
    balance_times: Sequence[str],
    chain_times: Sequence[str],
    load: float,
) -> None:
    head = [
        "| memory | method | instances | feasible | plan does not fit, though one does "
        "| infeasible found where feasible | does not end | mean ratio | p95 | worst |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    cores = len(os.sched_getaffinity(0))
    lines = [
        "# Planner optimality",
        "",
        f"    {COMMAND}",
        "",
        f"{datetime.now(UTC).date()}, {cores} CPU cores, load average {load:.1f} before "
        f"the timings{' (other jobs ran beside them)' if load > 1.5 else ''}.",
        "",
        "Random problems, each solved by trying every answer. A ratio is a plan's seconds over the "
        "optimum's, of plans that fit. Memory: loose 2 to 5 times what the work needs if devices "
        "filled up evenly, tight 1 to 1.35, short 0.6 to 1 (the chain, which is cut at whole "
        "layers, 1.3 times that). On problems without an answer Whale's methods refuse; that is "
        "checked, and the others' plans for them do not fit.",
        "",
        "## Rows over devices: `whale.planner.balance`",
        "",
        "2 to 5 devices of 1 to 3 types, 1 to 14 rows; times with launch floors, saturation and "
        "tiles; half of the problems have memory in proportion to the load, as the paper assumes, "
        "half a fixed part besides. With so few rows, one too many on a slow device costs much: "
        "hence the worst ratios.",
        "",
        *head,
        *balance_rows,
        "",
        "## Layers over stages: `whale.planner.chain`",
        "",
        "2 to 5 groups of 1 to 3 types, 2 to 6 layers, 1 to 32 micro-batches, 1F1B. The optimum is "
        "over every cut, every order of groups and every choice of groups left out. The paper's "
        "way: groups by memory, largest first; loads by Algorithm 1, with the memory of the "
        "micro-batches that each stage holds; cut where the FLOPs come nearest to the loads.",
        "",
        *head,
        *chain_rows,
        "",
        "Algorithm 1 as printed always ends: each turn takes a device off one of its two lists. "
        "It can end with a device that still overflows.",
        "",
        "## At scale",
        "",
        "| call | median ms | longest ms | CPU ms |",
        "|---|---|---|---|",
        *balance_times,
        "",
        "`partition` of 96 layers over 64 groups; the gap is to the lower bound that the search "
        "proved itself. Tolerance 0 runs until the optimum is proven.",
        "",
        "| kinds x groups | micro-batches | memory | tolerance | median s | longest s | CPU s "
        "| groups used per kind | step s | gap to bound |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *chain_times,
    ]
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
