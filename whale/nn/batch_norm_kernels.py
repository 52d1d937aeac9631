"""The passes of batch norm as Triton kernels on CUDA, where torch's leave a GPU without work.

Place in the flow: `batch_norm_cuda` comes here for tensors that `takes` accepts, and only then is
Triton loaded. torch's kernels under SyncBatchNorm give a block a channel, so that 64 channels keep
less than half of a large GPU busy; here a channel's values are split over as many blocks as fill
it, and a second small kernel joins what they found. No atomics: the same input gives the same bits.

A tensor [N, C, ...] is contiguous: a row is a sample's positions of one channel. Statistics and
sums are in float32, of float64 in float64; means and squares are taken together (Welford), so that
a large mean costs no digits.
"""

# No postponed annotations here: Triton reads those of its kernels.
from functools import lru_cache
from typing import Any, NamedTuple

import torch

try:
    import triton  # type: ignore[import-not-found]
    import triton.language as tl  # type: ignore[import-not-found]
except ImportError:
    triton = None

LEAST_ELEMENTS = 1 << 25
"""Below it a step is not waiting for the GPU, and torch's kernels are launched in less time."""
MOST_CHANNELS = 256
"""With more of them a block for each fills a GPU."""
_LEAST_CAPABILITY = (8, 0)
"""Triton compiles for older GPUs in part (V100) or not at all (P100)."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_TILE = 2048
_MOST_COLS = 1024
_BLOCKS = 1024
"""That read a tensor at once: several for each multiprocessor of a large GPU."""
_CHANNELS_AT_ONCE = 64


def takes(x: torch.Tensor) -> bool:
    """Whether it is worth it and can be done. Subclasses (fake tensors) have no memory to read.

    Under `torch.compile` torch's own kernels stay: it knows how to order those.
    """
    return (
        triton is not None
        and not torch.compiler.is_compiling()
        and type(x) in (torch.Tensor, torch.nn.Parameter)
        and x.is_cuda
        and x.dtype in _DTYPES
        and torch.cuda.get_device_capability(x.device) >= _LEAST_CAPABILITY
        and x.dim() > 2
        and x.is_contiguous()
        and x.shape[1] <= MOST_CHANNELS
        and x.numel() >= LEAST_ELEMENTS
        # Rows are counted in int32, elements are not.
        and max(x.shape[0] * x.shape[1], x.numel() // (x.shape[0] * x.shape[1])) < 1 << 31
    )


class _Matrix(NamedTuple):
    """A tensor as the kernels see it, and how they divide it."""

    samples: int
    channels: int
    positions: int
    reduction: tuple[int, int]
    """The grid of a kernel that sums by channel: channels, parts of each."""
    reduction_tile: dict[str, Any]
    each: tuple[int]
    """The grid of a kernel that goes over all rows."""
    each_tile: dict[str, Any]
    joined: tuple[int]
    """The grid of a kernel that goes over channels."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self[:3]


@lru_cache(maxsize=1024)
def _matrix(shape: torch.Size, dtype: torch.dtype) -> _Matrix:
    samples, channels = shape[:2]
    positions = shape.numel() // (samples * channels)
    cols = min(triton.next_power_of_2(positions), _MOST_COLS)
    across = triton.cdiv(positions, cols)
    rows = max(1, min(_TILE // cols, triton.next_power_of_2(samples)))
    parts = max(1, min(_BLOCKS // channels, triton.cdiv(samples, rows) * across))
    tall = max(1, _TILE // cols)
    wide = dtype == torch.float64
    return _Matrix(
        samples=samples,
        channels=channels,
        positions=positions,
        reduction=(channels, parts),
        reduction_tile={"block_rows": rows, "block_cols": cols, "wide": wide},
        each=(triton.cdiv(samples * channels, tall) * across,),
        each_tile={"block_rows": tall, "block_cols": cols, "wide": wide},
        joined=(triton.cdiv(channels, _CHANNELS_AT_ONCE),),
    )


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def statistics(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Mean and 1 / sqrt(var + eps) by channel, then the count."""
    matrix = _matrix(x.shape, x.dtype)
    channels, parts = matrix.reduction
    found = x.new_empty((3, parts, channels), dtype=_wide(x))
    out = x.new_empty(2 * channels + 1, dtype=_wide(x))
    with torch.cuda.device(x.device):
        _moments[matrix.reduction](x, found, *matrix.sizes, parts, **matrix.reduction_tile)
        _join_moments[matrix.joined](found, out, channels, parts, eps=eps, block=_CHANNELS_AT_ONCE)
    return out


def normalized(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    invstd: torch.Tensor,
) -> torch.Tensor:
    """(x - mean) * invstd * weight + bias."""
    matrix, out = _matrix(x.shape, x.dtype), torch.empty_like(x)
    with torch.cuda.device(x.device):
        _normalize[matrix.each](
            x, out, mean, invstd,
            mean if weight is None else weight, mean if bias is None else bias, *matrix.sizes,
            weighted=weight is not None, biased=bias is not None, **matrix.each_tile,
        )  # fmt: skip
    return out


def reduced(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    invstd: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Sums of dy and of dy * (x - mean), and the gradients of weight and bias."""
    matrix = _matrix(x.shape, x.dtype)
    channels, parts = matrix.reduction
    found = x.new_empty((2, parts, channels), dtype=_wide(x))
    sums = x.new_empty(2 * channels, dtype=_wide(x))
    of_weight = torch.empty_like(weight) if weight is not None else None
    of_bias = torch.empty_like(weight) if weight is not None else None
    with torch.cuda.device(x.device):
        _sums[matrix.reduction](grad, x, mean, found, *matrix.sizes, parts, **matrix.reduction_tile)
        _join_sums[matrix.joined](
            found, invstd, sums,
            sums if of_weight is None else of_weight, sums if of_bias is None else of_bias,
            channels, parts, weighted=weight is not None, block=_CHANNELS_AT_ONCE,
        )  # fmt: skip
    return sums, of_weight, of_bias


def input_gradient(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    sums: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    """The gradient of x, from the sums and counts of all members."""
    matrix, out = _matrix(x.shape, x.dtype), torch.empty_like(x)
    with torch.cuda.device(x.device):
        _input_gradient[matrix.each](
            grad, x, out, mean, invstd, mean if weight is None else weight, sums, counts,
            *matrix.sizes, len(counts), counts.stride(0), weighted=weight is not None,
            block_members=triton.next_power_of_2(len(counts)), **matrix.each_tile,
        )  # fmt: skip
    return out


if triton is not None:

    @triton.jit
    def _place(  # type: ignore[no-untyped-def]
        tile, samples, channels, positions, block_rows: tl.constexpr, block_cols: tl.constexpr
    ):
        """Where a tile of this program's channel lies, and which of it is inside."""
        across = tl.cdiv(positions, block_cols)
        row = (tile // across) * block_rows + tl.arange(0, block_rows)[:, None]
        col = (tile % across) * block_cols + tl.arange(0, block_cols)[None, :]
        at = (row.to(tl.int64) * channels + tl.program_id(0)) * positions + col
        return at, (row < samples) & (col < positions)

    @triton.jit
    def _moments(  # type: ignore[no-untyped-def]
        x, found, samples, channels, positions, parts,
        wide: tl.constexpr, block_rows: tl.constexpr, block_cols: tl.constexpr,
    ):  # fmt: skip
        """A part's mean, squares about it, and count."""
        kind: tl.constexpr = tl.float64 if wide else tl.float32
        mean = tl.zeros((block_rows, block_cols), kind)
        square = tl.zeros((block_rows, block_cols), kind)
        count = tl.zeros((block_rows, block_cols), kind)
        tiles = tl.cdiv(samples, block_rows) * tl.cdiv(positions, block_cols)
        for tile in range(tl.program_id(1), tiles, parts):
            at, inside = _place(tile, samples, channels, positions, block_rows, block_cols)
            value = tl.load(x + at, mask=inside, other=0.0).to(kind)
            count += inside.to(kind)
            off = tl.where(inside, value - mean, 0.0)
            mean += off / tl.maximum(count, 1.0)
            square += off * (value - mean)
        # Every place of the tile has its own: join them.
        total = tl.sum(count)
        middle = tl.sum(mean * count) / tl.maximum(total, 1.0)
        spread = tl.sum(square + count * (mean - middle) * (mean - middle))
        to = found + tl.program_id(1) * channels + tl.program_id(0)
        tl.store(to, middle)
        tl.store(to + parts * channels, spread)
        tl.store(to + 2 * parts * channels, total)

    @triton.jit
    def _join_moments(  # type: ignore[no-untyped-def]
        found, out, channels, parts, eps: tl.constexpr, block: tl.constexpr
    ):
        """All parts' moments into mean, 1 / sqrt(var + eps) and the count."""
        channel = tl.program_id(0) * block + tl.arange(0, block)
        here = channel < channels
        mean = tl.zeros((block,), found.dtype.element_ty)
        square = tl.zeros((block,), found.dtype.element_ty)
        count = tl.zeros((block,), found.dtype.element_ty)
        for part in range(parts):
            at = found + part * channels + channel
            other = tl.load(at, mask=here, other=0.0)
            spread = tl.load(at + parts * channels, mask=here, other=0.0)
            more = tl.load(at + 2 * parts * channels, mask=here, other=0.0)
            off = other - mean
            share = more / tl.maximum(count + more, 1.0)
            square += spread + off * off * count * share
            mean += off * share
            count += more
        var = square / tl.maximum(count, 1.0)
        tl.store(out + channel, mean, mask=here)
        tl.store(out + channels + channel, 1.0 / tl.sqrt(var + eps), mask=here)
        tl.store(out + 2 * channels + channel, count, mask=channel == 0)

    @triton.jit
    def _sums(  # type: ignore[no-untyped-def]
        grad, x, mean, found, samples, channels, positions, parts,
        wide: tl.constexpr, block_rows: tl.constexpr, block_cols: tl.constexpr,
    ):  # fmt: skip
        """A part's sums of dy and of dy * (x - mean)."""
        kind: tl.constexpr = tl.float64 if wide else tl.float32
        by_grad = tl.zeros((block_rows, block_cols), kind)
        by_both = tl.zeros((block_rows, block_cols), kind)
        middle = tl.load(mean + tl.program_id(0))
        tiles = tl.cdiv(samples, block_rows) * tl.cdiv(positions, block_cols)
        for tile in range(tl.program_id(1), tiles, parts):
            at, inside = _place(tile, samples, channels, positions, block_rows, block_cols)
            dy = tl.load(grad + at, mask=inside, other=0.0).to(kind)
            value = tl.load(x + at, mask=inside, other=0.0).to(kind)
            by_grad += dy
            by_both += dy * (value - middle)
        to = found + tl.program_id(1) * channels + tl.program_id(0)
        tl.store(to, tl.sum(by_grad))
        tl.store(to + parts * channels, tl.sum(by_both))

    @triton.jit
    def _join_sums(  # type: ignore[no-untyped-def]
        found, invstd, sums, of_weight, of_bias, channels, parts,
        weighted: tl.constexpr, block: tl.constexpr,
    ):  # fmt: skip
        """All parts' sums, and what they mean for weight and bias."""
        channel = tl.program_id(0) * block + tl.arange(0, block)
        here = channel < channels
        by_grad = tl.zeros((block,), found.dtype.element_ty)
        by_both = tl.zeros((block,), found.dtype.element_ty)
        for part in range(parts):
            at = found + part * channels + channel
            by_grad += tl.load(at, mask=here, other=0.0)
            by_both += tl.load(at + parts * channels, mask=here, other=0.0)
        tl.store(sums + channel, by_grad, mask=here)
        tl.store(sums + channels + channel, by_both, mask=here)
        if weighted:
            scale = tl.load(invstd + channel, mask=here, other=0.0)
            kind = of_weight.dtype.element_ty
            tl.store(of_weight + channel, (by_both * scale).to(kind), mask=here)
            tl.store(of_bias + channel, by_grad.to(kind), mask=here)

    @triton.jit
    def _tile_of(  # type: ignore[no-untyped-def]
        samples, channels, positions, block_rows: tl.constexpr, block_cols: tl.constexpr
    ):
        """Where this program's tile lies, which of it is inside, and the channel of its rows."""
        across = tl.cdiv(positions, block_cols)
        row = (tl.program_id(0) // across) * block_rows + tl.arange(0, block_rows)[:, None]
        col = (tl.program_id(0) % across) * block_cols + tl.arange(0, block_cols)[None, :]
        at = row.to(tl.int64) * positions + col
        return at, (row < samples * channels) & (col < positions), row % channels

    @triton.jit
    def _normalize(  # type: ignore[no-untyped-def]
        x, out, mean, invstd, weight, bias, samples, channels, positions,
        weighted: tl.constexpr, biased: tl.constexpr, wide: tl.constexpr,
        block_rows: tl.constexpr, block_cols: tl.constexpr,
    ):  # fmt: skip
        kind: tl.constexpr = tl.float64 if wide else tl.float32
        at, inside, channel = _tile_of(samples, channels, positions, block_rows, block_cols)
        scale = tl.load(invstd + channel)
        if weighted:
            scale *= tl.load(weight + channel).to(kind)
        value = tl.load(x + at, mask=inside, other=0.0).to(kind)
        value = (value - tl.load(mean + channel)) * scale
        if biased:
            value += tl.load(bias + channel).to(kind)
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _input_gradient(  # type: ignore[no-untyped-def]
        grad, x, out, mean, invstd, weight, sums, counts,
        samples, channels, positions, members, stride,
        weighted: tl.constexpr, wide: tl.constexpr, block_members: tl.constexpr,
        block_rows: tl.constexpr, block_cols: tl.constexpr,
    ):  # fmt: skip
        kind: tl.constexpr = tl.float64 if wide else tl.float32
        member = tl.arange(0, block_members)
        total = tl.sum(tl.load(counts + member * stride, mask=member < members, other=0.0))
        at, inside, channel = _tile_of(samples, channels, positions, block_rows, block_cols)
        scale = tl.load(invstd + channel)
        by_grad = tl.load(sums + channel) / total
        by_both = tl.load(sums + channels + channel) / total * scale * scale
        if weighted:
            scale *= tl.load(weight + channel).to(kind)
        dy = tl.load(grad + at, mask=inside, other=0.0).to(kind)
        value = tl.load(x + at, mask=inside, other=0.0).to(kind) - tl.load(mean + channel)
        value = (dy - by_grad - value * by_both) * scale
        tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)
