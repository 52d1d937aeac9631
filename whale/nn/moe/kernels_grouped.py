"""Grouped matrix products in Triton for Hopper GPUs: what a few rows per expert need.

Place in the flow: `products` chooses between these and torch's. Persistent programs walk over the
tiles; the copy engine (TMA) fills a software pipeline that runs across tiles, so the next tile's
loads hide behind this one's stores. Nothing waits for the device: a small kernel lists the row
tiles of each expert.
"""

# No postponed annotations here: Triton reads those of its kernels.
import torch

try:
    import triton  # type: ignore[import-not-found]
    import triton.language as tl  # type: ignore[import-not-found]
    from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore[import-not-found]
except ImportError:
    triton = None


def _programs(x: torch.Tensor) -> int:
    return torch.cuda.get_device_properties(x.device).multi_processor_count


def rows(
    a: torch.Tensor,
    w: torch.Tensor,
    offsets: torch.Tensor,
    block_m: int = 128,
    block_n: int = 256,
    block_k: int = 64,
    group: int = 8,
    num_warps: int = 8,
) -> torch.Tensor:
    """[R, n]: `a[r] @ w[e]` for the rows r of expert e; `w` [E, k, n] may be a transposed view.

    k must be a multiple of `block_k`; the rows of no expert are not written.
    """
    num_rows, depth = a.shape
    experts, _, cols = w.shape
    transposed = w.stride(2) != 1
    c = a.new_empty(num_rows, cols)
    expert_of, row_of, used = row_tiles(offsets, num_rows, block_m)
    if transposed:
        flat, b_block = w.transpose(1, 2).reshape(experts * cols, depth), [block_n, block_k]
    else:
        flat, b_block = w.reshape(experts * depth, cols), [block_k, block_n]
    programs = _programs(a)
    with torch.cuda.device(a.device):
        _rows[(programs,)](
            TensorDescriptor.from_tensor(a, [block_m, block_k]),
            TensorDescriptor.from_tensor(flat, b_block),
            c, offsets, expert_of, row_of, used, cols, depth, transposed=transposed,
            block_m=block_m, block_n=block_n, block_k=block_k, group=group, programs=programs,
            num_stages=4 if depth <= 4096 else 3, num_warps=num_warps,
        )  # fmt: skip
    return c


def row_tiles(
    offsets: torch.Tensor, num_rows: int, block_m: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The expert and the first row of each tile of `block_m` rows (-1: no tile), and how many."""
    experts, chunk = len(offsets), 64
    padded = triton.cdiv(triton.cdiv(num_rows, block_m) + experts, chunk) * chunk
    expert_of = offsets.new_empty(padded)
    row_of = torch.empty_like(expert_of)
    used = offsets.new_empty(1)
    with torch.cuda.device(offsets.device):
        _row_tiles[(padded // chunk,)](
            offsets, expert_of, row_of, used, experts, block_m=block_m, chunk=chunk,
            block_experts=triton.next_power_of_2(experts), num_warps=4,
        )  # fmt: skip
    return expert_of, row_of, used


if triton is not None:

    @triton.jit
    def _row_tiles(  # type: ignore[no-untyped-def]
        ends, expert_of, row_of, used, experts, block_m: tl.constexpr, chunk: tl.constexpr,
        block_experts: tl.constexpr,
    ):  # fmt: skip
        expert = tl.arange(0, block_experts)
        end = tl.load(ends + expert, mask=expert < experts, other=0)
        begin = tl.load(ends + expert - 1, mask=(expert < experts) & (expert > 0), other=0)
        tiles = tl.where(expert < experts, (end - begin + block_m - 1) // block_m, 0)
        upto = tl.cumsum(tiles, axis=0)
        tile = tl.program_id(0) * chunk + tl.arange(0, chunk)
        inside = (tile[:, None] < upto[None, :]) & (tile[:, None] >= (upto - tiles)[None, :])
        found = tl.sum(inside.to(tl.int32), axis=1) > 0
        which = tl.sum(tl.where(inside, expert[None, :], 0), axis=1)
        row = begin[None, :] + (tile[:, None] - (upto - tiles)[None, :]) * block_m
        first = tl.sum(tl.where(inside, row, 0), axis=1)
        tl.store(expert_of + tile, tl.where(found, which, -1))
        tl.store(row_of + tile, first)
        if tl.program_id(0) == 0:
            tl.store(used, tl.sum(tiles, axis=0))

    @triton.jit
    def _rows(  # type: ignore[no-untyped-def]
        a_desc, b_desc, c, ends, expert_of, row_of, used, cols, depth,
        transposed: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr,
        block_k: tl.constexpr, group: tl.constexpr, programs: tl.constexpr,
    ):  # fmt: skip
        n_tiles = tl.cdiv(cols, block_n)
        row_tiles = tl.load(used)
        for tile in tl.range(tl.program_id(0), row_tiles * n_tiles, programs, flatten=True):
            # `group` row tiles side by side share columns of weights in L2; the last may be fewer.
            per_group = group * n_tiles
            first = (tile // per_group) * group
            size = tl.minimum(row_tiles - first, group)
            within = tile % per_group
            m = first + within % size
            n = within // size
            expert = tl.load(expert_of + m)
            row = tl.load(row_of + m)
            end = tl.load(ends + expert)
            acc = tl.zeros((block_m, block_n), dtype=tl.float32)
            for k in range(0, depth, block_k):
                a = a_desc.load([row, k])
                if transposed:
                    b = b_desc.load([expert * cols + n * block_n, k]).T
                else:
                    b = b_desc.load([expert * depth + k, n * block_n])
                acc = tl.dot(a, b, acc)
            # By halves, which take half the shared memory on their way out.
            r = row + tl.arange(0, block_m)[:, None]
            half: tl.constexpr = block_n // 2
            parts = tl.permute(tl.reshape(acc, (block_m, 2, half)), (0, 2, 1))
            left, right = tl.split(parts)
            col = n * block_n + tl.arange(0, half)[None, :]
            at = c + r.to(tl.int64) * cols + col
            inside = (r < end) & (col < cols)
            tl.store(at, left.to(c.dtype.element_ty), mask=inside)
            inside = (r < end) & (col + half < cols)
            tl.store(at + half, right.to(c.dtype.element_ty), mask=inside)
