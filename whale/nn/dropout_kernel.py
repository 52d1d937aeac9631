"""Keyed dropout in one pass on CUDA: a Triton kernel with the masks of `dropout.keep_mask`.

Place in the flow: `dropout.drop` comes here for a tensor on CUDA, and only then is Triton loaded;
without Triton its own formula stands in. The hash is the same 32-bit arithmetic, so the masks are
the same bits. Backward makes the mask again: nothing is saved.

The tensor is seen as rows of its innermost dim, in memory order. A row's coordinates are hashed
once per row, only the innermost one per element.
"""

# No postponed annotations here: Triton reads those of its kernels.
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

try:
    import triton  # type: ignore[import-not-found]
    import triton.language as tl  # type: ignore[import-not-found]
except ImportError:
    triton = None

MAX_DIMS = 6
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MAX_BLOCK_COLS = 1024
_BLOCK_SIZE = 2048
_COLUMN = 15


@dataclass(frozen=True, slots=True)
class Layout:
    """A dense tensor as the kernel reads it: `rows` x `cols`, and what each dim adds to the hash.

    Attributes:
        sizes: of the dims that make up the rows, outermost in memory first.
        offsets: where their coordinates start in the whole tensor, modulo 2**32.
        col_offset: the same of the innermost dim.
        order: the rounds of the hash, four bits each from the lowest: a place in `sizes`, or 15 for
            the innermost dim.
    """

    rows: int
    cols: int
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    col_offset: int
    order: int


@lru_cache(maxsize=4096)
def layout_of(
    shape: tuple[int, ...], strides: tuple[int, ...], offsets: tuple[int, ...], batch_dim: int
) -> Layout | None:
    """The Layout of a tensor without gaps, its dims in any order; None for another one."""
    # The strides of dims of size 1 say nothing.
    wide = sorted((d for d in range(len(shape)) if shape[d] > 1), key=lambda d: -strides[d])
    expected = 1
    for dim in reversed(wide):
        if strides[dim] != expected:
            return None
        expected *= shape[dim]
    inner = wide[-1] if wide else len(shape) - 1
    outer = [d for d in range(len(shape)) if shape[d] <= 1 and d != inner] + wide[:-1]
    rounds = [batch_dim, *(d for d in range(len(shape)) if d != batch_dim)]
    order = 0
    for number, dim in enumerate(rounds):
        order |= (_COLUMN if dim == inner else outer.index(dim)) << (4 * number)
    return Layout(
        rows=expected // max(1, shape[inner]),
        cols=shape[inner],
        sizes=tuple(shape[d] for d in outer),
        offsets=tuple(_signed(offsets[d]) for d in outer),
        col_offset=_signed(offsets[inner]),
        order=order,
    )


def _signed(value: int) -> int:
    """The int32 with the low 32 bits of `value`: a kernel's arguments keep one type."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


def takes(x: torch.Tensor) -> bool:
    """Whether `drop` can do it. Subclasses (fake tensors) have no memory to read."""
    return (
        triton is not None
        and type(x) in (torch.Tensor, torch.nn.Parameter)
        and x.is_cuda
        and x.dtype in _DTYPES
        and 1 <= x.dim() <= MAX_DIMS
        and x.numel() > 0
        # Rows and columns are counted in int32, elements are not.
        and max(x.shape) < 1 << 31
        and x.numel() // min((s for s in x.shape if s > 1), default=1) < 1 << 31
    )


def drop(
    x: torch.Tensor, p: float, key: int, offsets: Sequence[int], batch_dim: int
) -> torch.Tensor:
    """`x * keep / (1 - p)`; element i of dim d is at `offsets[d] + i` of the whole tensor."""
    return _Drop.apply(x, p, key, tuple(offsets), batch_dim)  # type: ignore[no-any-return]


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, p: float, key: int, offsets: tuple[int, ...], batch_dim: int
    ) -> torch.Tensor:
        ctx.place = (p, key, offsets, batch_dim)
        return _run(x, p, key, offsets, batch_dim)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # The gradient is dropped alike, whatever its own strides.
        return _Drop.apply(grads[0], *ctx.place), None, None, None, None


def _run(
    x: torch.Tensor, p: float, key: int, offsets: tuple[int, ...], batch_dim: int
) -> torch.Tensor:
    layout = layout_of(x.shape, x.stride(), offsets, batch_dim)
    if layout is None:
        x = x.contiguous()
        layout = layout_of(x.shape, x.stride(), offsets, batch_dim)
        assert layout is not None
    y = torch.empty_like(x)
    block_cols = min(triton.next_power_of_2(layout.cols), _MAX_BLOCK_COLS)
    block_rows = min(triton.next_power_of_2(layout.rows), _BLOCK_SIZE // block_cols)
    tiles = triton.cdiv(layout.rows, block_rows) * triton.cdiv(layout.cols, block_cols)
    spare = MAX_DIMS - 1 - len(layout.sizes)
    sizes = (*layout.sizes, *[1] * spare)
    starts = (*layout.offsets, *[0] * spare)
    with torch.cuda.device(x.device):
        _kernel[(tiles,)](
            x,
            y,
            layout.rows,
            layout.cols,
            _signed(key),
            layout.col_offset,
            *sizes[1:],
            *starts,
            num_outer=len(layout.sizes),
            order=layout.order,
            threshold=int(p * (1 << 32)),
            scale=1.0 / (1.0 - p),
            wide=x.dtype == torch.float64,
            block_rows=block_rows,
            block_cols=block_cols,
        )
    return y


if triton is not None:

    @triton.jit
    def _mix(x):  # type: ignore[no-untyped-def]
        """`dropout._mix` where the arithmetic is modulo 2**32 by itself."""
        x = (x ^ (x >> 16)) * 0x7FEB352D
        x = (x ^ (x >> 15)) * 0x846CA68B
        return x ^ (x >> 16)

    @triton.jit
    def _chosen(which: tl.constexpr, c0, c1, c2, c3, c4, column):  # type: ignore[no-untyped-def]
        """The coordinate of a round; `which` is known when the kernel is compiled."""
        place = column
        if which == 0:
            place = c0
        if which == 1:
            place = c1
        if which == 2:
            place = c2
        if which == 3:
            place = c3
        if which == 4:
            place = c4
        return place

    # Values that change from call to call: a kernel of its own for some of them is not worth it.
    @triton.jit(
        do_not_specialize=[
            "rows", "key", "col_offset", "s1", "s2", "s3", "s4", "o0", "o1", "o2", "o3", "o4",
        ]
    )  # fmt: skip
    def _kernel(  # type: ignore[no-untyped-def]
        x, y, rows, cols, key, col_offset, s1, s2, s3, s4, o0, o1, o2, o3, o4,
        num_outer: tl.constexpr, order: tl.constexpr, threshold: tl.constexpr,
        scale: tl.constexpr, wide: tl.constexpr,
        block_rows: tl.constexpr, block_cols: tl.constexpr,
    ):  # fmt: skip
        tiles_across = tl.cdiv(cols, block_cols)
        tile = tl.program_id(0)
        row_tile = tile // tiles_across
        col_tile = tile - row_tile * tiles_across
        row = row_tile * block_rows + tl.arange(0, block_rows)[:, None]
        col = col_tile * block_cols + tl.arange(0, block_cols)[None, :]

        # The row's coordinates, the innermost first.
        rest = row.to(tl.uint32)
        c0 = rest
        c1 = rest
        c2 = rest
        c3 = rest
        c4 = rest
        if num_outer > 4:
            c4, rest = rest % s4.to(tl.uint32), rest // s4.to(tl.uint32)
        if num_outer > 3:
            c3, rest = rest % s3.to(tl.uint32), rest // s3.to(tl.uint32)
        if num_outer > 2:
            c2, rest = rest % s2.to(tl.uint32), rest // s2.to(tl.uint32)
        if num_outer > 1:
            c1, rest = rest % s1.to(tl.uint32), rest // s1.to(tl.uint32)
        if num_outer > 0:
            c0 = rest

        c0 += o0.to(tl.uint32)
        c1 += o1.to(tl.uint32)
        c2 += o2.to(tl.uint32)
        c3 += o3.to(tl.uint32)
        c4 += o4.to(tl.uint32)
        column = col.to(tl.uint32) + col_offset.to(tl.uint32)
        counter = key.to(tl.uint32)
        for number in tl.static_range(num_outer + 1):
            place = _chosen((order >> (4 * number)) & 15, c0, c1, c2, c3, c4, column)
            counter = _mix(counter ^ place)

        at = row.to(tl.int64) * cols + col
        inside = (row < rows) & (col < cols)
        value = tl.load(x + at, mask=inside)
        keep = counter >= threshold
        if wide:
            value = value * (keep.to(tl.float64) * scale)
        else:
            value = value.to(tl.float32) * (keep.to(tl.float32) * scale)
        tl.store(y + at, value.to(y.dtype.element_ty), mask=inside)
