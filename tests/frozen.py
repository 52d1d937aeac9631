"""frozen: what the server of `tests.ranks` has loaded is put out of the collector's reach.

Place in the flow: the last module that the server loads. Ranks are forked from it. A small model is
trained first, so that what torch and Whale load and remember at first use is there in every rank.
What is frozen then, ranks neither search nor copy. Both together save a small test most of its
time.
"""

from __future__ import annotations

import gc
import os
import warnings
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import whale as wh
from whale.runtime.compat import drop_cached_fakes


class _Net(nn.Module):
    """A little of what most tests have."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.norm, self.drop = nn.LayerNorm(4), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.experts = wh.nn.MoE(4, 8, num_experts=2, top_k=1, balance="bias")
        self.head = nn.Linear(4, 5)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.norm(self.embed(ids))
        q = h.unflatten(-1, (2, 2)).transpose(1, 2)
        h = h + F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)
        h = h + self.drop(self.down(F.gelu(self.up(h))))
        return self.head(h + self.experts(h))


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def warm_up() -> None:
    """Trains a step by itself, in one thread: a process with others must not be forked."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ids = torch.arange(12).remainder(5).view(4, 3)
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = wh.parallelize(
            _Net().double(),
            optimizer=partial(torch.optim.AdamW, lr=1e-3),
            loss=_loss,
            batch=(ids, ids),
            config={"pipeline.num_micro_batch": 2},
            cluster="1x1xCPU",
        )
        step((ids, ids))
        step.evaluate((ids, ids))
        step.close(forget=True)
    torch.set_num_threads(threads)


assert "RANK" not in os.environ
warm_up()
drop_cached_fakes()  # remembers the caches that it finds, for objects cannot be found once frozen
gc.collect()
gc.freeze()
