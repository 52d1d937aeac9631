"""Random planning problems small enough to try every answer, for tests and `benchmarks/`.

Devices come in one to three types; memory is loose, tight, or too small. Bytes are whole numbers,
so that what fits never hangs on rounding.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from math import ceil

import numpy as np

from whale.cost.memory import LayerBytes, most_kept, stage_bytes
from whale.ir.memory import DeviceBytes
from whale.planner.balance import Member
from whale.planner.chain import GroupKind, Stage
from whale.planner.span_memory import SpanMemory

REGIMES = {"loose": (2.0, 5.0), "tight": (1.0, 1.35), "short": (0.6, 1.0)}
# Peak TFLOP/s and memory of device types that people mix.
TYPES = ((156, 40), (125, 32), (125, 16), (65, 16), (31, 24), (21, 16), (11, 12))


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceCase:
    """Rows over devices, with the peak speeds that the simpler methods go by."""

    members: tuple[Member, ...]
    speeds: tuple[int, ...]
    total: int
    regime: str

    def fits(self, units: tuple[int, ...]) -> bool:
        return all(
            member.bytes(x) <= member.capacity_bytes
            for member, x in zip(self.members, units, strict=True)
        )

    def seconds(self, units: tuple[int, ...]) -> float:
        return max(
            (m.seconds(x) for m, x in zip(self.members, units, strict=True) if x), default=0.0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainCase:
    """Layers over groups, with the FLOPs and peak speeds that the simpler methods go by."""

    kinds: tuple[GroupKind, ...]
    speeds: tuple[int, ...]
    flops: tuple[float, ...]
    num_micro_batch: int
    regime: str

    def fits(self, stages: tuple[Stage, ...]) -> bool:
        for index, stage in enumerate(stages):
            kind, layers = self.kinds[stage.kind], slice(stage.start, stage.end)
            held = min(self.num_micro_batch, len(stages) - index)
            if needed_bytes(kind.memory, layers, held) > kind.capacity_bytes:
                return False
        return True

    def seconds(self, stages: tuple[Stage, ...]) -> float:
        times = [stage_seconds(self.kinds[stage.kind], stage) for stage in stages]
        return sum(times) + (self.num_micro_batch - 1) * max(times)


def needed_bytes(memory: SpanMemory, layers: slice, held: int) -> float:
    """What `cost.memory` and `ir.memory` say of a stage of these layers."""
    calls = map(LayerBytes, memory.kept[layers], memory.passing[layers])
    stage = stage_bytes(reversed(list(calls)), memory.received[layers.start])
    device = DeviceBytes(
        parameters=sum(memory.static[layers]),
        gradients=0.0,
        optimizer=0.0,
        scratch=sum(memory.scratch[layers]),
        workspace=stage.workspace,
        driver=memory.driver,
        gaps=memory.gaps,
    )
    return device.peak(most_kept({0: stage.kept}, [{0: held}]))


def stage_seconds(kind: GroupKind, stage: Stage) -> float:
    edge = kind.edge_seconds[stage.start] if kind.edge_seconds else 0.0
    return sum(kind.seconds[stage.start : stage.end]) + edge


def _time(rng: random.Random, speed: float) -> Callable[[int], float]:
    """Seconds of x rows: launch floor, saturation or tiles over the time at peak speed."""
    work = rng.uniform(20, 60) / speed
    floor = rng.choice([0.0, rng.uniform(0.0, 3.0) * work])
    half = rng.choice([0.0, rng.uniform(0.2, 2.0)])
    tile = rng.choice([1, 1, 2, 3])
    return lambda x: max(floor, (ceil(x / tile) * tile + half) * work)


def balance_case(rng: random.Random, regime: str) -> BalanceCase:
    types = rng.sample(TYPES, rng.randint(1, 3))
    times = [_time(rng, speed) for speed, _ in types]
    picked = [rng.randrange(len(types)) for _ in range(rng.randint(2, 5))]
    total = rng.randint(1, 14)
    per_row = rng.randint(2, 9)
    # Half of the cases have the memory the paper assumes, in proportion to the load.
    fixed = rng.choice([0, rng.randint(1, 3 * per_row)])
    sizes = [types[i][1] for i in picked]
    # What the rows and each device's fixed part need, over the devices in proportion to their size.
    scale = rng.uniform(*REGIMES[regime]) * (total * per_row + fixed * len(picked)) / sum(sizes)
    members = tuple(
        Member(
            name=f"rank {rank} (type {i})",
            seconds=times[i],
            bytes=lambda x: fixed + x * per_row,
            capacity_bytes=float(ceil(scale * types[i][1])),
        )
        for rank, i in enumerate(picked)
    )
    return BalanceCase(
        members=members, speeds=tuple(types[i][0] for i in picked), total=total, regime=regime
    )


def best_balance(case: BalanceCase, minimum: int = 0) -> float | None:
    """The least time over all ways to divide the rows; None when none fits."""
    shares = _compositions(case.total, len(case.members), minimum)
    if not len(shares):
        return None
    columns = []
    for member, units in zip(case.members, shares.T, strict=True):
        table = [
            np.inf if member.bytes(x) > member.capacity_bytes else member.seconds(x) if x else 0.0
            for x in range(case.total + 1)
        ]
        columns.append(np.array(table)[units])
    best = float(np.max(columns, axis=0).min())
    return None if best == np.inf else best


@cache
def _compositions(total: int, parts: int, minimum: int) -> np.ndarray:
    bars = combinations(range(total - minimum * parts + parts - 1), parts - 1)
    room = total - minimum * parts
    rows = [
        [b - a - 1 + minimum for a, b in zip((-1, *bar), (*bar, room + parts - 1), strict=True)]
        for bar in bars
    ]
    return np.array(rows if room >= 0 else [], dtype=int).reshape(-1, parts)


def chain_case(rng: random.Random, regime: str) -> ChainCase:
    num_layers = rng.randint(2, 6)
    types = rng.sample(TYPES, rng.randint(1, 3))
    num_groups = rng.randint(max(2, len(types)), 5)
    counts = [1] * len(types)
    for _ in range(num_groups - len(types)):
        counts[rng.randrange(len(types))] += 1
    m = rng.choice([1, 2, 3, 4, 8, 32])
    flops = tuple(rng.uniform(50, 150) * rng.choice([1, 1, 1, 3]) for _ in range(num_layers))
    if rng.random() < 0.4:
        flops = flops[:1] * num_layers
    resident = tuple(float(rng.randint(5, 30)) for _ in range(num_layers))
    activation = tuple(float(rng.randint(0, 8)) for _ in range(num_layers))
    slack = float(rng.choice([0, 2]))
    # Rare on purpose: with all of them at once little is left to choose.
    passing, scratch, received = (
        tuple(float(rng.randint(0, most)) * (rng.random() < 0.5) for _ in range(num_layers))
        for most in (10, 20, 4)
    )
    gaps = rng.choice([0.0, 0.0625])
    held = min(m, (num_groups + 1) // 2)
    need = sum(resident) + held * sum(activation) + slack * num_groups
    sizes = sum(count * size for count, (_, size) in zip(counts, types, strict=True))
    # One layer more or less makes a whole stage's difference here, hence the room to spare.
    scale = 1.3 * rng.uniform(*REGIMES[regime]) * need / sizes
    edges = rng.random() < 0.5
    kinds = tuple(
        GroupKind(
            name=f"type {number}",
            count=count,
            capacity_bytes=float(ceil(scale * size)),
            seconds=tuple(work / speed / rng.uniform(0.5, 1.0) for work in flops),
            memory=SpanMemory(
                static=resident,
                kept=activation,
                passing=passing,
                scratch=scratch,
                received=received,
                driver=slack,
                gaps=gaps,
            ),
            edge_seconds=tuple(rng.uniform(0, 0.5) for _ in flops) if edges else (),
        )
        for number, (count, (speed, size)) in enumerate(zip(counts, types, strict=True))
    )
    speeds = tuple(speed for speed, _ in types)
    return ChainCase(kinds=kinds, speeds=speeds, flops=flops, num_micro_batch=m, regime=regime)


def all_chains(case: ChainCase) -> Iterator[tuple[Stage, ...]]:
    """Every cut with every order of groups, as stages."""
    num_layers = len(case.flops)

    def extend(start: int, left: tuple[int, ...]) -> Iterator[tuple[Stage, ...]]:
        if start == num_layers:
            yield ()
            return
        for kind, count in enumerate(left):
            if not count:
                continue
            fewer = (*left[:kind], count - 1, *left[kind + 1 :])
            for end in range(start + 1, num_layers + 1):
                stage = Stage(kind=kind, start=start, end=end)
                yield from ((stage, *rest) for rest in extend(end, fewer))

    return extend(0, tuple(kind.count for kind in case.kinds))


def best_chain(
    case: ChainCase, accept: Callable[[tuple[Stage, ...]], bool] = lambda stages: True
) -> float | None:
    """The shortest step over all chains that fit and are accepted; None when there is none."""
    steps = (
        case.seconds(stages) for stages in all_chains(case) if accept(stages) and case.fits(stages)
    )
    return min(steps, default=None)
