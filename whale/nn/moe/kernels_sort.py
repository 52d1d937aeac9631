"""A stable sort of the slots by expert in three kernels on CUDA.

Place in the flow: what `permute.sort_by_expert` is on CUDA. A counting sort: experts are counted
per block of slots, one running sum over (expert, block) says where each block's slots of each
expert begin, and each block sorts its own slots in registers to place them.
"""

# No postponed annotations here: Triton reads those of its kernels.
import torch

try:
    import triton  # type: ignore[import-not-found]
    import triton.language as tl  # type: ignore[import-not-found]
except ImportError:
    triton = None

MAX_EXPERTS = 4000
_BLOCK = 1024


def takes(ids: torch.Tensor, num_experts: int) -> bool:
    """Whether `sort` can do it. Subclasses (fake tensors) have no memory to read.

    Under `torch.compile` the plain formulas are better: they can be fused with what is around.
    """
    return (
        triton is not None
        and not torch.compiler.is_compiling()
        and type(ids) is torch.Tensor
        and ids.is_cuda
        and 0 < ids.numel() < 1 << 30
        and num_experts <= MAX_EXPERTS
    )


def sort(
    ids: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`order`, its inverse, counts and offsets, as `permute.Routing` describes them."""
    ids = ids.contiguous()
    slots = ids.numel()
    blocks = triton.cdiv(slots, _BLOCK)
    # Two more keys: slots without an expert, and places beyond the last slot.
    bins = triton.next_power_of_2(num_experts + 2)
    counted = torch.empty(bins * blocks, dtype=torch.int32, device=ids.device)
    order = torch.empty(slots, dtype=torch.int64, device=ids.device)
    inverse = torch.empty_like(order)
    counts = torch.empty(num_experts, dtype=torch.int32, device=ids.device)
    offsets = torch.empty_like(counts)
    sizes = {"bins": bins, "block": _BLOCK, "num_warps": 4}
    with torch.cuda.device(ids.device):
        _count[(blocks,)](ids, counted, slots, blocks, num_experts, **sizes)
        upto = torch.cumsum(counted, 0, dtype=torch.int32)
        _place[(blocks,)](
            ids, counted, upto, order, inverse, counts, offsets, slots, blocks, num_experts, **sizes
        )
    return order, inverse, counts, offsets


if triton is not None:

    @triton.jit
    def _keys(ids, slot, slots, experts):  # type: ignore[no-untyped-def]
        expert = tl.load(ids + slot, mask=slot < slots, other=0).to(tl.int32)
        expert = tl.where(expert < 0, experts, expert)
        return tl.where(slot < slots, expert, experts + 1)

    @triton.jit(do_not_specialize=["slots", "blocks", "experts"])
    def _count(  # type: ignore[no-untyped-def]
        ids, counted, slots, blocks, experts, bins: tl.constexpr, block: tl.constexpr
    ):
        slot = tl.program_id(0) * block + tl.arange(0, block)
        found = tl.histogram(_keys(ids, slot, slots, experts), bins)
        tl.store(counted + tl.arange(0, bins) * blocks + tl.program_id(0), found)

    @triton.jit(do_not_specialize=["slots", "blocks", "experts"])
    def _place(  # type: ignore[no-untyped-def]
        ids, counted, upto, order, inverse, counts, offsets, slots, blocks, experts,
        bins: tl.constexpr, block: tl.constexpr,
    ):  # fmt: skip
        place = tl.arange(0, block)
        here = tl.program_id(0)
        keys = _keys(ids, here * block + place, slots, experts)
        found = tl.histogram(keys, bins)
        begins = tl.cumsum(found, axis=0) - found
        ordered = tl.sort(keys * block + place)
        key = ordered // block
        slot = here * block + ordered % block
        at = key * blocks + here
        inside = slot < slots
        before = tl.load(upto + at, mask=inside, other=0)
        before -= tl.load(counted + at, mask=inside, other=0)
        row = before + place - tl.gather(begins, key, axis=0)
        tl.store(order + row, slot.to(tl.int64), mask=inside)
        tl.store(inverse + slot, row.to(tl.int64), mask=inside)
        if here == 0:
            expert = tl.arange(0, bins)
            end = tl.load(upto + expert * blocks + blocks - 1, mask=expert < experts, other=0)
            begin = tl.load(
                upto + expert * blocks - 1, mask=(expert < experts) & (expert > 0), other=0
            )
            tl.store(offsets + expert, end, mask=expert < experts)
            tl.store(counts + expert, end - begin, mask=expert < experts)
