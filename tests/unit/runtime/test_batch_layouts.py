"""Batches whose tensors have no rows that can be cut are refused before anything runs on them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import whale as wh

X = torch.eye(4)


def nested(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([X[:1], X[:2], X[:3], X], layout=layout)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (X.to_sparse, "sparse_coo"),
        (X.to_sparse_csr, "sparse_csr"),
        (lambda: nested(torch.strided), "nested"),
        (lambda: nested(torch.jagged), "nested"),
    ],
)
def test_sparse_and_nested_batches_are_refused(make, said: str):
    model = wh.annotate(nn.Linear(4, 4), {"": wh.replicate()})
    with pytest.raises(wh.WhaleError, match=said) as caught:
        wh.plan(model, cluster="1x2xCPU", batch=(make(), X), loss=F.mse_loss)
    assert caught.value.hint
    with pytest.raises(wh.WhaleError, match=said):
        wh.parallelize(model, optimizer=torch.optim.SGD, batch=(make(), X), loss=F.mse_loss)
