"""The copies of `permute` as Triton kernels on CUDA: gather, gate-weighted sum, its gradients.

Place in the flow: `permute` and `fused` come here for tensors on CUDA that `takes` accepts; only
then is Triton loaded. Each kernel reads its inputs once and writes its output once: they run at the
speed of the memory. Sums are in float32, in the order of the slots, without atomics.
"""

# No postponed annotations here: Triton reads those of its kernels.
from typing import Any

import torch

try:
    import triton  # type: ignore[import-not-found]
    import triton.language as tl  # type: ignore[import-not-found]
except ImportError:
    triton = None

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_TILE = 4096
_MAX_COLS = 2048


def takes(x: torch.Tensor) -> bool:
    """Whether the kernels can do it. Subclasses (fake tensors) have no memory to read.

    Under `torch.compile` the plain formulas are better: they can be fused with what is around.
    """
    return (
        triton is not None
        and not torch.compiler.is_compiling()
        and type(x) in (torch.Tensor, torch.nn.Parameter)
        and x.is_cuda
        and x.dtype in _DTYPES
        and x.dim() == 2
    )


def _tile(cols: int) -> dict[str, Any]:
    """Elements of a tile: 16-byte accesses, several in flight per thread."""
    block_cols = min(triton.next_power_of_2(max(cols, 16)), _MAX_COLS)
    return {"block_rows": max(1, _TILE // block_cols), "block_cols": block_cols, "num_warps": 4}


def gather(x: torch.Tensor, order: torch.Tensor, k: int) -> torch.Tensor:
    """Row r is `x[order[r] // k]`."""
    x = x.contiguous()
    rows, cols = len(order), x.shape[1]
    out = x.new_empty(rows, cols)
    if out.numel():
        tile = _tile(cols)
        grid = (triton.cdiv(rows, tile["block_rows"]), triton.cdiv(cols, tile["block_cols"]))
        with torch.cuda.device(x.device):
            _gather[grid](x, order, out, rows, cols, k=k, **tile)
    return out


def sum_slots(
    y: torch.Tensor,
    inverse: torch.Tensor,
    k: int,
    gates: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Row t is the sum of `y[inverse[t * k + j]]` over j, weighted by `gates` [T, k] if given.

    With `offsets`, rows of `y` from `offsets[-1]` on count as zeros, whatever they hold.
    """
    y = y.contiguous()
    tokens, cols = len(inverse) // k, y.shape[1]
    out = y.new_empty(tokens, cols)
    if out.numel():
        tile = _tile(cols)
        grid = (triton.cdiv(tokens, tile["block_rows"]), triton.cdiv(cols, tile["block_cols"]))
        weights = y if gates is None else gates.contiguous()
        ends = inverse if offsets is None else offsets
        with torch.cuda.device(y.device):
            _sum_slots[grid](
                y, inverse, weights, ends, out, tokens, cols, len(ends) - 1,
                k=k, gated=gates is not None, limited=offsets is not None, **tile,
            )  # fmt: skip
    return out


def combine_backward(
    grad: torch.Tensor, y: torch.Tensor, gates: torch.Tensor, order: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of y and gates of `sum_slots(y, inverse, k, gates)`, in one pass."""
    grad, y, gates = grad.contiguous(), y.contiguous(), gates.contiguous()
    rows, cols = y.shape
    of_y, of_gates = torch.empty_like(y), torch.empty_like(gates)
    if not y.numel():
        return of_y, of_gates.zero_()
    tile = _tile(cols)
    with torch.cuda.device(y.device):
        _combine_backward[(triton.cdiv(rows, tile["block_rows"]),)](
            grad, y, gates, order, of_y, of_gates, rows, cols, k=gates.shape[1], **tile
        )
    return of_y, of_gates


def zero_tail(y: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Writes zeros to the rows of `y` from `offsets[-1]` on; the others are not touched."""
    rows, cols = y.shape
    if y.numel():
        tile = _tile(cols)
        grid = (triton.cdiv(rows, tile["block_rows"]),)
        with torch.cuda.device(y.device):
            _zero_tail[grid](y, offsets, rows, cols, len(offsets) - 1, **tile)
    return y


if triton is not None:

    @triton.jit(do_not_specialize=["rows"])
    def _gather(  # type: ignore[no-untyped-def]
        x, order, out, rows, cols, k: tl.constexpr,
        block_rows: tl.constexpr, block_cols: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
        col = tl.program_id(1) * block_cols + tl.arange(0, block_cols)[None, :]
        token = tl.load(order + row, mask=row < rows, other=0) // k
        inside = (row < rows)[:, None] & (col < cols)
        value = tl.load(x + token.to(tl.int64)[:, None] * cols + col, mask=inside)
        tl.store(out + row.to(tl.int64)[:, None] * cols + col, value, mask=inside)

    @triton.jit(do_not_specialize=["tokens"])
    def _sum_slots(  # type: ignore[no-untyped-def]
        y, inverse, gates, ends, out, tokens, cols, last,
        k: tl.constexpr, gated: tl.constexpr, limited: tl.constexpr,
        block_rows: tl.constexpr, block_cols: tl.constexpr,
    ):  # fmt: skip
        token = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
        col = tl.program_id(1) * block_cols + tl.arange(0, block_cols)[None, :]
        inside = (token < tokens)[:, None] & (col < cols)
        total = tl.zeros((block_rows, block_cols), dtype=tl.float32)
        for j in tl.static_range(k):
            slot = token.to(tl.int64) * k + j
            row = tl.load(inverse + slot, mask=token < tokens, other=0)
            here = inside
            if limited:
                here = inside & (row < tl.load(ends + last))[:, None]
            value = tl.load(y + row.to(tl.int64)[:, None] * cols + col, mask=here, other=0.0)
            if gated:
                gate = tl.load(gates + slot, mask=token < tokens, other=0.0).to(tl.float32)
                total += value.to(tl.float32) * gate[:, None]
            else:
                total += value.to(tl.float32)
        at = out + token.to(tl.int64)[:, None] * cols + col
        tl.store(at, total.to(out.dtype.element_ty), mask=inside)

    @triton.jit(do_not_specialize=["rows"])
    def _combine_backward(  # type: ignore[no-untyped-def]
        grad, y, gates, order, of_y, of_gates, rows, cols, k: tl.constexpr,
        block_rows: tl.constexpr, block_cols: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
        slot = tl.load(order + row, mask=row < rows, other=0).to(tl.int64)
        gate = tl.load(gates + slot, mask=row < rows, other=0.0).to(tl.float32)
        dot = tl.zeros((block_rows,), dtype=tl.float32)
        for start in range(0, cols, block_cols):
            col = start + tl.arange(0, block_cols)[None, :]
            inside = (row < rows)[:, None] & (col < cols)
            of_out = tl.load(grad + (slot // k)[:, None] * cols + col, mask=inside, other=0.0)
            at = row.to(tl.int64)[:, None] * cols + col
            value = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
            of_out = of_out.to(tl.float32)
            dot += tl.sum(of_out * value, axis=1)
            tl.store(of_y + at, (of_out * gate[:, None]).to(of_y.dtype.element_ty), mask=inside)
        tl.store(of_gates + slot, dot.to(of_gates.dtype.element_ty), mask=row < rows)

    @triton.jit(do_not_specialize=["rows"])
    def _zero_tail(  # type: ignore[no-untyped-def]
        y, ends, rows, cols, last, block_rows: tl.constexpr, block_cols: tl.constexpr
    ):
        row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
        routed = tl.load(ends + last)
        if tl.program_id(0) * block_rows + block_rows > routed:
            for start in range(0, cols, block_cols):
                col = start + tl.arange(0, block_cols)[None, :]
                tail = ((row >= routed) & (row < rows))[:, None] & (col < cols)
                at = y + row.to(tl.int64)[:, None] * cols + col
                tl.store(at, tl.zeros((block_rows, block_cols), y.dtype.element_ty), mask=tail)
