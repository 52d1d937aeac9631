"""Keyed dropout: the helper under modules and functions, and how its kernel reads a tensor."""

from __future__ import annotations

import math
import random

import pytest
import torch

from whale.nn import dropout_kernel
from whale.nn.dropout import drop, keep_mask, position_mask
from whale.runtime.context import StepContext
from whale.runtime.hashing import MASK as _MASK
from whale.runtime.hashing import _mix, key_of


def _strided(shape: list[int], order: list[int]) -> torch.Tensor:
    """A tensor without gaps whose dims are in memory in this order, the outermost first."""
    made = torch.arange(math.prod(shape), dtype=torch.float64).view([shape[d] for d in order])
    return made.permute([order.index(d) for d in range(len(shape))])


def _kernel_mask(
    x: torch.Tensor, p: float, key: int, offsets: list[int], batch_dim: int
) -> torch.Tensor:
    """What the kernel computes, by its Layout, with torch's formulas."""
    layout = dropout_kernel.layout_of(x.shape, x.stride(), tuple(offsets), batch_dim)
    assert layout is not None
    assert layout.rows * layout.cols == x.numel()
    rest = torch.arange(layout.rows).unsqueeze(1)
    places: dict[int, torch.Tensor] = {}
    for number in range(len(layout.sizes) - 1, 0, -1):
        places[number] = rest % layout.sizes[number] + layout.offsets[number]
        rest = rest // layout.sizes[number]
    if layout.sizes:
        places[0] = rest + layout.offsets[0]
    places[15] = torch.arange(layout.cols).unsqueeze(0) + layout.col_offset
    counter = torch.tensor(key)
    for number in range(len(layout.sizes) + 1):
        counter = _mix(counter ^ (places[(layout.order >> (4 * number)) & 15] & _MASK))
    flat = (counter >= int(p * (1 << 32))).expand(layout.rows, layout.cols).reshape(-1)
    return flat.as_strided(x.shape, x.stride())


@pytest.mark.parametrize("seed", range(40))
def test_the_kernels_layout_gives_the_same_mask(seed: int) -> None:
    rng = random.Random(seed)
    shape = [rng.choice([1, 2, 3, 5, 8]) for _ in range(1 + seed % 6)]
    x = _strided(shape, rng.sample(range(len(shape)), len(shape)))
    batch_dim = rng.randrange(len(shape))
    first_row, key = rng.choice([0, 6, 2**31 + 5, 10**11]), rng.getrandbits(32)
    sharded = None
    if len(shape) > 1:
        dim = rng.choice([d for d in range(len(shape)) if d != batch_dim])
        sharded = (dim, rng.randrange(50), 100)
    offsets = [0] * len(shape)
    offsets[batch_dim] = first_row
    if sharded is not None:
        offsets[sharded[0]] = sharded[1]
    want = keep_mask(
        shape,
        0.4,
        key=key,
        first_row=first_row,
        rows=shape[batch_dim],
        batch_dim=batch_dim,
        device=x.device,
        sharded=sharded,
    )
    assert torch.equal(_kernel_mask(x, 0.4, key, offsets, batch_dim), want)


def test_a_tensor_with_gaps_has_no_layout() -> None:
    gaps = [torch.zeros(4, 6)[:, ::2], torch.zeros(4, 6)[:, :3], torch.zeros(1, 6).expand(4, 6)]
    for x in gaps:
        assert dropout_kernel.layout_of(x.shape, x.stride(), (0, 0), 0) is None


def test_the_kernel_is_for_cuda_only() -> None:
    assert not dropout_kernel.takes(torch.zeros(3))


@pytest.mark.parametrize("batch_dim", [0, 1, None])
def test_drop_is_the_mask_and_its_scale(batch_dim: int | None) -> None:
    context = StepContext(first_row=4, rows=6, micro_batch=2)
    x = torch.randn(6, 6, 5, dtype=torch.float64, requires_grad=True)
    key = key_of(1, 2, "name", 3)
    mask = position_mask(x, 0.25, key, context, batch_dim, (2, 10, 40))
    out = drop(x, 0.25, key, context, batch_dim, (2, 10, 40))
    assert torch.equal(out, x * mask * (1.0 / 0.75))
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(grad, mask.double() * (1.0 / 0.75))
    assert 0.5 < float(mask.float().mean()) < 0.95


def test_nothing_stays_at_one() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    out = drop(x, 1.0, 5, StepContext(rows=3), 0, None)
    assert not out.any()
    assert out.requires_grad
