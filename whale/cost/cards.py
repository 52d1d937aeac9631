"""cards: lanes whose devices are parts of the same card, and what they leave each other.

Place in the flow: under `price`, for replicas that meet inside Layers, and under `sim.simulate`,
for stages that wait for each other. A lane is one replica of a device group. Parts of a card (CUDA
MPS, MIG) have multiprocessors of their own but share its memory: a lane is faster while its
neighbours rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from whale.ir.prices import StagePrice

Near = Mapping[int, float]
"""Other lanes on a lane's cards, each with its part of all the ranks a rank has beside it there, in
the mean of the lane's ranks.

Where the lane itself has several ranks on a card the parts do not sum to 1: the rest work whenever
it does."""


def neighbours(cards: Sequence[str], lanes: Sequence[tuple[int, ...]]) -> list[Near]:
    """Of each lane, given by its ranks, the lanes beside it; `cards` are those of all ranks."""
    on_card: dict[str, Counter[int]] = {}
    for i, ranks in enumerate(lanes):
        for rank in ranks:
            if cards[rank]:
                on_card.setdefault(cards[rank], Counter())[i] += 1
    found: list[Near] = []
    for i, ranks in enumerate(lanes):
        near: dict[int, float] = {}
        for rank in ranks:
            beside = on_card.get(cards[rank], Counter())
            for j, count in beside.items():
                if j != i:
                    share = count / (beside.total() - 1) / len(ranks)
                    near[j] = near.get(j, 0.0) + share
        found.append(dict(sorted(near.items())))
    return found


def seconds_alone(prices: Sequence[StagePrice]) -> float:
    """Seconds of a lane's stages while its neighbours rest, over those while all of them work."""
    total = sum(p.forward_s + p.backward_s for p in prices)
    alone = sum(p.alone * (p.forward_s + p.backward_s) for p in prices)
    return alone / total if total else 1.0


ROUNDS = 3
"""One is faster while the others wait, who wait less if it is: this many settle that."""


def paces(alone: Sequence[float], rests: Sequence[float], near: Sequence[Near]) -> list[float]:
    """Seconds of each lane over those while all its neighbours work.

    Args:
        alone: The same while they rest.
        rests: The share of the step in which each lane rests.
        near: Each lane's neighbours.
    """
    return [
        1.0 - (1.0 - ratio) * sum(part * rests[i] for i, part in others.items())
        for ratio, others in zip(alone, near, strict=True)
    ]
