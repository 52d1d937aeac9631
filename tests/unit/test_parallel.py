"""parallelize refuses, before anything runs, what can be foreseen to fail."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import whale as wh
from whale.errors import ClusterError, PlanError
from whale.ir.cluster import Cluster


def test_a_cluster_too_small_for_the_model_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 60_000), nn.Linear(60_000, 60_000))
        batch = (torch.empty(2, 8), torch.empty(2, dtype=torch.long))
    with pytest.raises(PlanError, match=r"rank 0 \(T4\) would need .* GB, it has 1\d\.\d GB"):
        wh.parallelize(
            model,
            optimizer=partial(torch.optim.AdamW, lr=1e-3),
            loss=F.cross_entropy,
            batch=batch,
            cluster=Cluster.parse("1x1xT4"),
            config={"check_parts": False},
        )


def test_plan_takes_what_cluster_returns_and_refuses_what_is_none() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    batch = torch.randn(4, 4), torch.randn(4, 4)
    make = partial(wh.plan, model, loss=nn.functional.mse_loss)
    assert make(cluster=wh.cluster("1x2xT4"), batch=batch).device_types == ("T4", "T4")
    with pytest.raises(ClusterError, match="a cluster of type int"):
        make(cluster=4, batch=batch)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="the batch has no rows"):
        make(cluster="1x2xT4", batch=tuple(t[:0] for t in batch))
