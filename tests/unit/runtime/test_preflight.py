"""The version check among ranks, each a thread on one store."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import HashStore

from whale.errors import RankError
from whale.runtime.preflight import check_versions, versions


def outcomes(mine):
    """What each rank's check says: None or the message."""
    store = HashStore()

    def one(rank):
        try:
            check_versions(store, rank, len(mine), mine=mine[rank], timeout_seconds=20)
        except RankError as error:
            return error.message
        return None

    with ThreadPoolExecutor(len(mine)) as pool:
        return list(pool.map(one, range(len(mine))))


def test_equal_versions_pass():
    assert versions().startswith(f"torch {torch.__version__}, whale ")
    assert outcomes([None] * 3) == [None] * 3


def test_every_rank_hears_which_ranks_differ():
    said = outcomes(["torch 2.13", "torch 2.13", "torch 2.11", "torch 2.13"])
    expected = "ranks run different versions: ranks 0-1, 3: torch 2.13; rank 2: torch 2.11"
    assert all(message.startswith(expected) for message in said)


def test_a_silent_rank_is_named():
    with pytest.raises(RankError, match=r"ranks 1-2 of 3 said nothing within 0\.2 s"):
        check_versions(HashStore(), 0, 3, timeout_seconds=0.2)
