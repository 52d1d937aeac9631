"""cards: lanes whose devices are parts of the same card, and what they leave each other.

Place in the flow: under `simulate`. Parts of a card (CUDA MPS, MIG) have multiprocessors of their
own but share its memory: a lane is faster while its neighbours rest.
"""

from __future__ import annotations

from collections.abc import Sequence

from whale.ir.prices import DevicePrice, StagePrice


def neighbours(
    devices: Sequence[DevicePrice], lanes: Sequence[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """Of each lane, given by its ranks, the other lanes on its cards."""
    on_card: dict[str, set[int]] = {}
    for i, ranks in enumerate(lanes):
        for rank in ranks:
            if devices[rank].card:
                on_card.setdefault(devices[rank].card, set()).add(i)
    found = []
    for i, ranks in enumerate(lanes):
        mine = {devices[rank].card for rank in ranks} - {""}
        found.append(tuple(sorted(set().union(*(on_card[card] for card in mine)) - {i})))
    return found


def seconds_alone(prices: Sequence[StagePrice]) -> float:
    """Seconds of a lane's stages while its neighbours rest, over those while all of them work."""
    total = sum(p.forward_s + p.backward_s for p in prices)
    alone = sum(p.alone * (p.forward_s + p.backward_s) for p in prices)
    return alone / total if total else 1.0


def paces(
    alone: Sequence[float], rests: Sequence[float], others: Sequence[tuple[int, ...]]
) -> list[float]:
    """Seconds of each lane over those while all its neighbours work.

    Args:
        alone: The same while they rest.
        rests: The share of the step in which each lane rests.
        others: Each lane's neighbours.
    """
    return [
        1.0 - (1.0 - ratio) * sum(rests[i] for i in near) / len(near) if near else 1.0
        for ratio, near in zip(alone, others, strict=True)
    ]
