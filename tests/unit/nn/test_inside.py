"""Counts that are local inside a forward only, and collectives that no transform may pass by."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from whale.errors import WhaleError
from whale.nn.inside import Count, Inside
from whale.nn.shard import Shard


def test_counts_are_local_inside_and_whole_again_after_an_error() -> None:
    module, config = nn.Identity(), SimpleNamespace(n_head=4)
    module.num_heads = 4
    counts = [Count(module, "num_heads", 2, "num_heads"), Count(config, "n_head", 2, "n_head")]
    outer = Inside("block", counts)
    inner = Inside("block.inner", [Count(module, "num_heads", 2, "num_heads")])
    with pytest.raises(KeyError), outer:
        assert (module.num_heads, config.n_head) == (2, 2)
        with inner, outer:
            assert (module.num_heads, config.n_head) == (2, 2)
        assert (module.num_heads, config.n_head) == (2, 2)
        raise KeyError
    assert (module.num_heads, config.n_head) == (4, 4)


def test_a_count_that_the_forward_sets_stays_and_is_refused_next_time() -> None:
    module = nn.Identity()
    module.num_heads = 4
    inside = Inside("block", [Count(module, "num_heads", 2, "block.num_heads")])
    with inside:
        module.num_heads = 8
    assert module.num_heads == 8
    with pytest.raises(WhaleError, match=r"block.num_heads is 8, and was 4"), inside:
        pass


def test_a_part_is_refused_outside() -> None:
    inside = Inside("block")
    with inside:
        inside.check(nn.Linear(1, 1))
    with pytest.raises(WhaleError, match="a Linear of block"):
        inside.check(nn.Linear(1, 1))


def test_shards_refuse_transforms() -> None:
    shard = Shard(group="none", index=0, cuts=(0, 1, 2), params={})
    x = torch.ones(2, 3)
    for call in (shard.enter, shard.leave, shard.gather_rows, lambda x: shard.join(x, 0, 2)):
        with pytest.raises(WhaleError, match="torch.func"):
            torch.func.vmap(call)(x)
        with pytest.raises(WhaleError, match="torch.func"):
            torch.func.jvp(call, (x,), (x,))
        with pytest.raises(WhaleError, match="torch.func"), forward_ad.dual_level():
            call(x)
