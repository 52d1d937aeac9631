"""Adafactor's passes over a large parameter on CUDA, each one Triton kernel.

Place in the flow: `adafactor` comes here for parameters of two or three dims on CUDA. A tensor is
seen as [blocks, rows, cols]. No two programs write to one place and sums have a fixed order, so
the same numbers come out every time. Rounding by chance is that of `runtime.masters`: the same
bits.
"""

# No postponed annotations here: Triton reads those of its kernels.
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from whale.runtime.masters import Rounding

try:
    import triton  # type: ignore[import-not-found]
    import triton.language as tl  # type: ignore[import-not-found]
except ImportError:
    triton = None

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BLOCK_ROWS, _BLOCK_COLS = 16, 256


def takes(param: torch.Tensor, grad: torch.Tensor, rounding: Rounding | None) -> bool:
    """Whether the kernels can do it."""
    whole = rounding is None or (rounding.offsets is not None and param.dtype == torch.bfloat16)
    return (
        triton is not None
        and param.dim() in (2, 3)
        and param.dtype in _DTYPES
        and grad.dtype in _DTYPES
        and param.is_contiguous()
        and grad.is_contiguous()
        and max(param.shape) < 1 << 31
        and whole
    )


def _blocks(tensor: torch.Tensor) -> tuple[int, int, int]:
    *outer, rows, cols = tensor.shape
    return (outer[0] if outer else 1), rows, cols


@dataclass(frozen=True, slots=True)
class Scales:
    """The second moment's estimate as a product: one number for each row, one for each column."""

    rows: torch.Tensor
    cols: torch.Tensor
    least: float

    @classmethod
    def of(cls, state: Mapping[str, torch.Tensor], least: float) -> "Scales":
        """Of the optimizer's state."""
        rows, cols = state["row_var"], state["col_var"]
        mean = rows.mean(-2, keepdim=True).clamp_(min=least)
        return cls(rows=(rows / mean).contiguous(), cols=cols.contiguous(), least=least * least)


def mean_squares(grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a gradient, by rows and by columns."""
    blocks, rows, cols = _blocks(grad)
    by_row = torch.empty(blocks * rows, dtype=torch.float32, device=grad.device)
    by_col = torch.empty(blocks * cols, dtype=torch.float32, device=grad.device)
    with torch.cuda.device(grad.device):
        _row_squares[(blocks * triton.cdiv(rows, _BLOCK_ROWS),)](
            grad, by_row, rows, cols, block_rows=_BLOCK_ROWS, block_cols=_BLOCK_COLS
        )
        _col_squares[(blocks * triton.cdiv(cols, _BLOCK_COLS),)](
            grad, by_col, rows, cols, block_rows=_BLOCK_ROWS, block_cols=_BLOCK_COLS
        )
    return by_row, by_col


def square_sums(
    param: torch.Tensor, grad: torch.Tensor, scales: Scales
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of squares: of the update before it is scaled, and of the parameter."""
    blocks, rows, cols = _blocks(param)
    programs = blocks * triton.cdiv(rows, _BLOCK_ROWS)
    sums = torch.empty((2, programs), dtype=torch.float32, device=param.device)
    with torch.cuda.device(param.device):
        _sums[(programs,)](
            param, grad, scales.rows, scales.cols, sums, rows, cols, programs, scales.least,
            block_rows=_BLOCK_ROWS, block_cols=_BLOCK_COLS,
        )  # fmt: skip
    found = sums.double().sum(1)
    return found[0], found[1]


def update(
    param: torch.Tensor,
    grad: torch.Tensor,
    scales: Scales,
    change: torch.Tensor,
    rounding: Rounding | None,
) -> None:
    """Changes the parameter in place; `change` is as of `adafactor`."""
    blocks, rows, cols = _blocks(param)
    grid = (blocks * triton.cdiv(rows, _BLOCK_ROWS) * triton.cdiv(cols, _BLOCK_COLS),)
    key, offsets = 0, tuple[int, ...]((0, 0, 0))
    if rounding is not None:
        assert rounding.offsets is not None
        key, offsets = rounding.key, (0, 0, 0, *rounding.offsets)[-3:]
    with torch.cuda.device(param.device):
        _update[grid](
            param, grad, scales.rows, scales.cols, change, rows, cols, scales.least,
            _signed(key), *map(_signed, offsets),
            by_chance=rounding is not None, deep=param.dim() == 3,
            block_rows=_BLOCK_ROWS, block_cols=_BLOCK_COLS,
        )  # fmt: skip


def _signed(value: int) -> int:
    """The int32 with the low 32 bits of `value`: a kernel's arguments keep one type."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value


if triton is not None:

    @triton.jit
    def _row_squares(  # type: ignore[no-untyped-def]
        grad, out, rows, cols, block_rows: tl.constexpr, block_cols: tl.constexpr
    ):
        tiles = tl.cdiv(rows, block_rows)
        block = tl.program_id(0) // tiles
        row = (tl.program_id(0) % tiles) * block_rows + tl.arange(0, block_rows)
        start = (block.to(tl.int64) * rows + row)[:, None] * cols
        total = tl.zeros((block_rows, block_cols), dtype=tl.float32)
        for first in range(0, cols, block_cols):
            col = first + tl.arange(0, block_cols)[None, :]
            inside = (row < rows)[:, None] & (col < cols)
            value = tl.load(grad + start + col, mask=inside, other=0.0).to(tl.float32)
            total += value * value
        mean = tl.sum(total, axis=1) / cols
        tl.store(out + block.to(tl.int64) * rows + row, mean, mask=row < rows)

    @triton.jit
    def _col_squares(  # type: ignore[no-untyped-def]
        grad, out, rows, cols, block_rows: tl.constexpr, block_cols: tl.constexpr
    ):
        tiles = tl.cdiv(cols, block_cols)
        block = tl.program_id(0) // tiles
        col = (tl.program_id(0) % tiles) * block_cols + tl.arange(0, block_cols)
        total = tl.zeros((block_rows, block_cols), dtype=tl.float32)
        for first in range(0, rows, block_rows):
            row = first + tl.arange(0, block_rows)
            inside = (row < rows)[:, None] & (col < cols)[None, :]
            at = (block.to(tl.int64) * rows + row)[:, None] * cols + col[None, :]
            value = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
            total += value * value
        mean = tl.sum(total, axis=0) / rows
        tl.store(out + block.to(tl.int64) * cols + col, mean, mask=col < cols)

    @triton.jit
    def _direction(value, of_row, of_col, least):  # type: ignore[no-untyped-def]
        """A gradient over the root of its second moment."""
        return value * (1.0 / tl.sqrt(tl.maximum(of_row * of_col, least)))

    @triton.jit
    def _sums(  # type: ignore[no-untyped-def]
        param, grad, by_row, by_col, out, rows, cols, programs, least,
        block_rows: tl.constexpr, block_cols: tl.constexpr,
    ):  # fmt: skip
        tiles = tl.cdiv(rows, block_rows)
        block = tl.program_id(0) // tiles
        row = (tl.program_id(0) % tiles) * block_rows + tl.arange(0, block_rows)
        at_row = block.to(tl.int64) * rows + row
        of_row = tl.load(by_row + at_row, mask=row < rows, other=0.0)[:, None]
        updates = tl.zeros((block_rows, block_cols), dtype=tl.float32)
        params = tl.zeros((block_rows, block_cols), dtype=tl.float32)
        for first in range(0, cols, block_cols):
            col = first + tl.arange(0, block_cols)
            inside = (row < rows)[:, None] & (col < cols)[None, :]
            at = at_row[:, None] * cols + col[None, :]
            at_col = block.to(tl.int64) * cols + col
            of_col = tl.load(by_col + at_col, mask=col < cols, other=0.0)[None, :]
            value = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
            made = _direction(value, of_row, of_col, least)
            updates += made * made
            old = tl.load(param + at, mask=inside, other=0.0).to(tl.float32)
            params += old * old
        tl.store(out + tl.program_id(0), tl.sum(tl.sum(updates, axis=1), axis=0))
        tl.store(out + programs + tl.program_id(0), tl.sum(tl.sum(params, axis=1), axis=0))

    @triton.jit
    def _mix(x):  # type: ignore[no-untyped-def]
        """`hashing._mix` where the arithmetic is modulo 2**32 by itself."""
        x = (x ^ (x >> 16)) * 0x7FEB352D
        x = (x ^ (x >> 15)) * 0x846CA68B
        return x ^ (x >> 16)

    @triton.jit
    def _finite(bits):  # type: ignore[no-untyped-def]
        return (bits & 0x7F800000) != 0x7F800000

    # Keys change with every step: a kernel of its own for some of them is not worth it.
    @triton.jit(do_not_specialize=["key", "first_block", "first_row", "first_col"])
    def _update(  # type: ignore[no-untyped-def]
        param, grad, by_row, by_col, change, rows, cols, least,
        key, first_block, first_row, first_col,
        by_chance: tl.constexpr, deep: tl.constexpr,
        block_rows: tl.constexpr, block_cols: tl.constexpr,
    ):  # fmt: skip
        across = tl.cdiv(cols, block_cols)
        down = tl.cdiv(rows, block_rows)
        tile = tl.program_id(0)
        block = tile // (across * down)
        row = (tile // across) % down * block_rows + tl.arange(0, block_rows)
        col = tile % across * block_cols + tl.arange(0, block_cols)
        at_row = block.to(tl.int64) * rows + row
        at_col = block.to(tl.int64) * cols + col
        inside = (row < rows)[:, None] & (col < cols)[None, :]
        at = at_row[:, None] * cols + col[None, :]
        of_row = tl.load(by_row + at_row, mask=row < rows, other=0.0)[:, None]
        of_col = tl.load(by_col + at_col, mask=col < cols, other=0.0)[None, :]
        value = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        old = tl.load(param + at, mask=inside, other=0.0).to(tl.float32)
        factor = tl.load(change)
        shrink = tl.load(change + 1)
        new = old * shrink - _direction(value, of_row, of_col, least) * factor
        rounded = new.to(param.dtype.element_ty)
        if by_chance:
            counter = key.to(tl.uint32)
            if deep:
                counter = _mix(counter ^ (block.to(tl.uint32) + first_block.to(tl.uint32)))
            rows_hash = _mix(counter ^ (row.to(tl.uint32) + first_row.to(tl.uint32)))
            place = (col.to(tl.uint32) + first_col.to(tl.uint32))[None, :]
            noise = _mix(rows_hash[:, None] ^ place) & 0xFFFF
            bits = new.to(tl.uint32, bitcast=True)
            lifted = (bits + noise) & 0xFFFF0000
            near = rounded.to(tl.float32).to(tl.uint32, bitcast=True)
            plain = _finite(bits) & _finite(lifted) & _finite(near)
            rounded = (
                tl.where(plain, lifted, near)
                .to(tl.float32, bitcast=True)
                .to(param.dtype.element_ty)
            )
        tl.store(param + at, rounded, mask=inside)
