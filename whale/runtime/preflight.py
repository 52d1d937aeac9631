"""Checks among the ranks before they work together: the same torch and the same Whale everywhere.

Place in the flow: called by `wh.init` once the ranks share a store, before any collective. Versions
that differ between nodes otherwise show as a hang or as numbers that drift apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import torch
from torch.distributed import DistStoreError, Store

from whale import __version__
from whale.errors import RankError

_KEY = "whale/preflight/versions"


def versions() -> str:
    """What this rank runs, as one line."""
    return f"torch {torch.__version__}, whale {__version__}"


def check_versions(
    store: Store,
    rank: int,
    world: int,
    *,
    mine: str | None = None,
    timeout_seconds: float = 60.0,
) -> None:
    """Raise RankError, on every rank, unless all `world` ranks run the same versions.

    Args:
        store: Where all ranks meet; must not hold a check of an earlier job.
        rank: This rank.
        world: How many ranks there are.
        mine: What this rank runs; by default its torch and Whale versions.
        timeout_seconds: How long to wait for the other ranks.
    """
    store.set(f"{_KEY}/{rank}", mine or versions())
    keys = [f"{_KEY}/{other}" for other in range(world)]
    try:
        store.wait(keys, timedelta(seconds=timeout_seconds))
    except (DistStoreError, RuntimeError) as error:
        silent = [other for other, key in enumerate(keys) if not store.check([key])]
        raise RankError(
            f"{_ranks(silent)} of {world} said nothing within {timeout_seconds:g} s",
            hint="look at the output of that rank; one node may not have started",
        ) from error
    ranks_of: dict[str, list[int]] = {}
    for other, text in enumerate(store.multi_get(keys)):
        ranks_of.setdefault(text.decode(), []).append(other)
    if len(ranks_of) > 1:
        each = "; ".join(f"{_ranks(ranks)}: {text}" for text, ranks in ranks_of.items())
        raise RankError(
            f"ranks run different versions: {each}; allowed: one for all",
            hint="install the same torch and whale-train on every node",
        )


def _ranks(ranks: Iterable[int]) -> str:
    """`rank 3` or `ranks 0-2, 5`: runs of consecutive ranks are folded."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
    return f"rank {text}" if len(runs) == 1 and runs[0][0] == runs[0][1] else f"ranks {text}"
