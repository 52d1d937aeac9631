"""The activation of the experts and its gradient as Triton kernels on CUDA, one pass each.

Place in the flow: `fused` runs them between the grouped products. The backward pass computes the
activation again from the first product's output, so it is never kept, and takes the gates along:
with y = a @ w_out and out = sum of gate * y, the gradient of a gate is `grad . y`, which is
`(grad @ w_out.T) . a`. So the products of backward run on unscaled gradients, the gate enters here,
and y is not kept either.
"""

# No postponed annotations here: Triton reads those of its kernels.
import torch

try:
    import triton  # type: ignore[import-not-found]
    import triton.language as tl  # type: ignore[import-not-found]
except ImportError:
    triton = None

# 2816 and 768 columns are whole numbers of blocks.
_BLOCK_ROWS, _BLOCK_COLS, _WARPS = 4, 256, 4


def activate(h: torch.Tensor, activation: str, gated: bool) -> torch.Tensor:
    """`act(h)`, or `act(left) * right` of its halves, computed in float32."""
    rows, width = h.shape
    cols = width // 2 if gated else width
    a = h.new_empty(rows, cols)
    if a.numel():
        grid = (triton.cdiv(rows, _BLOCK_ROWS), triton.cdiv(cols, _BLOCK_COLS))
        with torch.cuda.device(h.device):
            _activate[grid](
                h, a, rows, cols, activation=activation, gated=gated,
                block_rows=_BLOCK_ROWS, block_cols=_BLOCK_COLS, num_warps=_WARPS,
            )  # fmt: skip
    return a


def activate_backward(
    of_a: torch.Tensor,
    h: torch.Tensor,
    activation: str,
    gated: bool,
    gates: torch.Tensor | None,
    order: torch.Tensor,
    offsets: torch.Tensor,
    in_place: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The gradient of h, the activation (times its gate), and the gradient of the gates.

    Args:
        of_a: [R, f], `grad @ w_out.T` without gates; overwritten by the activation.
        h: [R, f or 2 f], the first product's output.
        activation: its name.
        gated: whether `h` has two halves.
        gates: [T, k] or None, which is a gate of 1 everywhere.
        order: the slot of each row.
        offsets: in the rows from `offsets[-1]` on, all results are zero.
        in_place: whether the gradient of h may be written over h.
    """
    rows, cols = of_a.shape
    of_h = h if in_place else torch.empty_like(h)
    col_tiles = triton.cdiv(cols, _BLOCK_COLS)
    weighted = gates is not None
    dots = torch.empty((col_tiles, rows) if weighted else 0, dtype=torch.float32, device=h.device)
    if of_a.numel():
        with torch.cuda.device(h.device):
            _activate_backward[(triton.cdiv(rows, _BLOCK_ROWS), col_tiles)](
                of_a, h, of_h, gates if weighted else dots, dots, order, offsets,
                rows, cols, len(offsets) - 1, activation=activation, gated=gated,
                weighted=weighted, block_rows=_BLOCK_ROWS, block_cols=_BLOCK_COLS,
                num_warps=_WARPS,
            )  # fmt: skip
    if gates is None:
        return of_h, of_a, None
    of_gates = torch.empty_like(gates)
    if gates.numel():
        with torch.cuda.device(h.device):
            _gate_gradients[(triton.cdiv(rows, 256),)](
                dots, order, of_gates, rows, col_tiles=col_tiles, block=256, num_warps=4
            )
    return of_h, of_a, of_gates


if triton is not None:

    @triton.jit
    def act(x, activation: tl.constexpr):  # type: ignore[no-untyped-def]
        """The activation of float32 values."""
        if activation == "relu":
            y = tl.maximum(x, 0.0)
        elif activation == "silu":
            y = x * tl.sigmoid(x)
        else:
            y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
        return y

    @triton.jit
    def act_and_slope(x, activation: tl.constexpr):  # type: ignore[no-untyped-def]
        """The activation and its derivative."""
        if activation == "relu":
            y = tl.maximum(x, 0.0)
            slope = (x > 0.0).to(tl.float32)
        elif activation == "silu":
            sigmoid = tl.sigmoid(x)
            y = x * sigmoid
            slope = sigmoid * (1.0 + x - y)
        else:
            normal = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
            y = x * normal
            slope = normal + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
        return y, slope

    @triton.jit(do_not_specialize=["rows"])
    def _activate(  # type: ignore[no-untyped-def]
        h, a, rows, cols, activation: tl.constexpr, gated: tl.constexpr,
        block_rows: tl.constexpr, block_cols: tl.constexpr,
    ):  # fmt: skip
        row = (tl.program_id(0) * block_rows + tl.arange(0, block_rows)).to(tl.int64)[:, None]
        col = tl.program_id(1) * block_cols + tl.arange(0, block_cols)[None, :]
        inside = (row < rows) & (col < cols)
        width = 2 * cols if gated else cols
        left = tl.load(h + row * width + col, mask=inside, other=0.0).to(tl.float32)
        value = act(left, activation)
        if gated:
            right = tl.load(h + row * width + cols + col, mask=inside, other=0.0)
            value = value * right.to(tl.float32)
        tl.store(a + row * cols + col, value.to(a.dtype.element_ty), mask=inside)

    @triton.jit(do_not_specialize=["rows"])
    def _activate_backward(  # type: ignore[no-untyped-def]
        of_a, h, of_h, gates, dots, order, ends, rows, cols, last,
        activation: tl.constexpr, gated: tl.constexpr, weighted: tl.constexpr,
        block_rows: tl.constexpr, block_cols: tl.constexpr,
    ):  # fmt: skip
        first = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
        row = first.to(tl.int64)[:, None]
        col = tl.program_id(1) * block_cols + tl.arange(0, block_cols)[None, :]
        inside = (row < rows) & (col < cols)
        # Rows of no expert hold anything: they are left zero.
        routed = inside & (row < tl.load(ends + last))
        width = 2 * cols if gated else cols
        grad = tl.load(of_a + row * cols + col, mask=routed, other=0.0).to(tl.float32)
        left = tl.load(h + row * width + col, mask=routed, other=0.0).to(tl.float32)
        right = tl.full((block_rows, block_cols), 1.0, dtype=tl.float32)
        if gated:
            right = tl.load(h + row * width + cols + col, mask=routed, other=0.0).to(tl.float32)
        value, slope = act_and_slope(left, activation)
        kept = value * right
        if weighted:
            tl.store(
                dots + tl.program_id(1) * rows.to(tl.int64) + first,
                tl.sum(grad * kept, axis=1), mask=first < rows,
            )  # fmt: skip
            slot = tl.load(order + first, mask=first < rows, other=0)
            gate = tl.load(gates + slot, mask=first < rows, other=0.0).to(tl.float32)
            kept = kept * gate[:, None]
            grad = grad * gate[:, None]
        of_left = grad * slope * right
        tl.store(of_h + row * width + col, of_left.to(of_h.dtype.element_ty), mask=inside)
        if gated:
            of_right = (grad * value).to(of_h.dtype.element_ty)
            tl.store(of_h + row * width + cols + col, of_right, mask=inside)
        tl.store(of_a + row * cols + col, kept.to(of_a.dtype.element_ty), mask=inside)

    @triton.jit(do_not_specialize=["rows"])
    def _gate_gradients(  # type: ignore[no-untyped-def]
        dots, order, of_gates, rows, col_tiles: tl.constexpr, block: tl.constexpr
    ):
        row = tl.program_id(0) * block + tl.arange(0, block)
        total = tl.zeros((block,), dtype=tl.float32)
        for tile in range(col_tiles):
            total += tl.load(dots + tile * rows.to(tl.int64) + row, mask=row < rows, other=0.0)
        slot = tl.load(order + row, mask=row < rows, other=0)
        tl.store(of_gates + slot, total.to(of_gates.dtype.element_ty), mask=row < rows)
