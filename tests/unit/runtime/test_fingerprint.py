"""Fingerprints see every bit; signatures see what a program depends on."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import numpy
import pytest
import torch
from torch import nn

from whale.engine.state.wrappers import refuse_wrapped
from whale.errors import WhaleError
from whale.runtime import batch as batches
from whale.runtime.batch import LocalBatch
from whale.runtime.fingerprint import fingerprint, fingerprint_tensor
from whale.runtime.signature import content, signature_of

DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8,
    torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_changed_element_changes_it(dtype: torch.dtype) -> None:
    tensor = (torch.randn(7, 5) * 3).to(dtype)
    before = tensor.clone()
    print_ = fingerprint(tensor)
    assert torch.equal(tensor, before), "the tensor itself is left alone"
    for place in range(35):
        other = tensor.clone()
        other.view(-1)[place] = ~other.view(-1)[place] if dtype is torch.bool else 77
        assert fingerprint(other) != print_
    assert fingerprint(tensor.t()) != print_
    assert fingerprint(tensor.t().contiguous().t()) == print_, "strides do not matter"


def test_every_bit_and_every_place() -> None:
    tensor = torch.randn(1000)
    first = int(fingerprint_tensor(tensor))
    for bit in range(32):
        other = tensor.clone()
        other.view(torch.int32)[777] ^= 1 << bit if bit < 31 else -(2**31)
        assert int(fingerprint_tensor(other)) != first
    assert int(fingerprint_tensor(tensor.flip(0))) != first
    assert int(fingerprint_tensor(torch.zeros(3))) != int(fingerprint_tensor(-torch.zeros(3)))


def taken(batch: object) -> LocalBatch:
    rows = batches.num_rows(batch)
    flags = tuple(batches.has_rows(t, rows) for t in batches.leaves(batch))
    return LocalBatch(data=batch, total_rows=rows, rows=((0, rows),), batched=flags)


def lines(batch: object) -> dict[str, str]:
    cpu = torch.device("cpu")
    return signature_of(taken(batch), device=cpu, training=True, autocast=None).lines()


Pair = namedtuple("Pair", "x y")


@dataclass
class Hidden:
    boxes: list[torch.Tensor]


def test_signature_is_of_kinds_not_of_rows_or_values() -> None:
    x = torch.randn(4, 3)
    base = lines({"x": x, "flag": True, "name": "a"})
    assert base == lines({"x": torch.randn(6, 3), "flag": True, "name": "a"})
    assert base != lines({"x": x.double(), "flag": True, "name": "a"})
    assert base != lines({"x": torch.randn(4, 5), "flag": True, "name": "a"})
    assert base != lines({"x": x, "flag": False, "name": "a"})
    assert lines(Pair(x, x))["tensors"] == "[0]: float32[rows, 3]; [1]: float32[rows, 3]"
    assert isinstance(batches.rebuild(Pair(x, x), [x, x]), Pair)


@pytest.mark.parametrize(
    "bad", [numpy.zeros(4), Hidden([torch.zeros(4, 2)])], ids=["array", "object"]
)
def test_hidden_rows_are_refused(bad: object) -> None:
    with pytest.raises(WhaleError, match="whose rows Whale does not see"):
        lines((torch.randn(4, 3), bad))


def test_content_is_of_values() -> None:
    x = torch.arange(6).view(2, 3)
    assert content((x, "a")) == content((x.clone(), "a"))
    assert content((x, "a")) != content((x + 1, "a"))
    assert content((x, "a")) != content((x, "b"))
    assert content((x, "a")) != content((x.int(), "a"))
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_wrapped_models_are_refused() -> None:
    with pytest.raises(WhaleError, match=r"averaged twice"):
        refuse_wrapped(nn.Sequential(nn.DataParallel(nn.Linear(2, 2))))
    refuse_wrapped(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)))
