"""A closed Step gives its memory back, whoever still refers to its parts."""

from __future__ import annotations

import gc
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import whale as wh


def held_bytes() -> int:
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, nn.Parameter) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def test_a_closed_step_holds_nothing():
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    batch = torch.randn(8, 64), torch.randint(10, (8,))
    adamw = partial(torch.optim.AdamW, lr=1e-3)
    before = held_bytes()
    for _ in range(2):
        step = wh.parallelize(model, optimizer=adamw, loss=F.cross_entropy, batch=batch)
        step(batch)
        weights = sum(p.numel() * 4 for p in model.parameters())
        assert held_bytes() - before > 3 * weights, "the step trains on memory of its own"
        step.close()
        assert held_bytes() - before < weights
    assert all(p.numel() for p in model.parameters()), "the user's model keeps its weights"
