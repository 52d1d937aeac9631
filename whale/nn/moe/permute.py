"""Tokens into expert order and back: the sort, the gather of rows, the gate-weighted sum.

Place in the flow: the router gives `ids` and `gates`; `sort_by_expert` orders the T * k slots by
expert, `gather_rows` copies each slot's token there, `experts.expert_ffn` runs on the sorted rows,
and `combine` brings them back. No one-hot tensors, no atomics (gradients are the same bits in every
run), and nothing waits for the device. On CUDA the copies are Triton kernels (`kernels_permute`).

Shapes: T tokens, k experts per token, E experts, d features. Slot `t * k + j` is token t's j-th
choice; a sorted row is a slot's place in expert order.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch


class Routing(NamedTuple):
    """The slots in expert order.

    Attributes:
        order: [T * k] int64, the slot of each sorted row: by expert, then by slot. Slots with id -1
            (not routed) come last.
        counts: [E] int32, the rows of each expert.
        offsets: [E] int32, where each expert's rows end; `offsets[-1]` rows are routed in all.
    """

    order: torch.Tensor
    counts: torch.Tensor
    offsets: torch.Tensor


def sort_by_expert(ids: torch.Tensor, num_experts: int) -> Routing:
    """Sorts the slots of `ids` [T, k] (ints below `num_experts`, -1 for none) by expert, stably."""
    return route(ids, num_experts)[0]


def route(ids: torch.Tensor, num_experts: int) -> tuple[Routing, torch.Tensor]:
    """`sort_by_expert`, and the inverse of its order."""
    if ids.is_cuda:
        from whale.nn.moe import kernels_sort  # noqa: PLC0415 - it loads Triton

        if kernels_sort.takes(ids, num_experts):
            order, inverse, counts, offsets = kernels_sort.sort(ids, num_experts)
            return Routing(order, counts, offsets), inverse
    flat = ids.reshape(-1)
    # The fewer the bits of a key, the fewer the passes of a radix sort.
    small = torch.int16 if num_experts < 1 << 15 else torch.int32
    keys = torch.where(flat < 0, num_experts, flat).to(small)
    sorted_ids, order = torch.sort(keys, stable=True)
    experts = torch.arange(num_experts, device=ids.device, dtype=small)
    offsets = torch.searchsorted(sorted_ids, experts, right=True, out_int32=True)
    counts = torch.diff(offsets, prepend=offsets.new_zeros(1))
    return Routing(order, counts, offsets), inverse_of(order)


def inverse_of(order: torch.Tensor) -> torch.Tensor:
    """The sorted row of each slot."""
    rows = torch.arange(len(order), device=order.device, dtype=order.dtype)
    return torch.empty_like(order).scatter_(0, order, rows)


def gather_rows(
    x: torch.Tensor, order: torch.Tensor, k: int, inverse: torch.Tensor | None = None
) -> torch.Tensor:
    """The rows of `x` [T, d] in expert order, [T * k, d]: row r is the token of slot `order[r]`.

    A token's gradient is the sum of its k rows' gradients, in the order of its choices. Slots that
    are not routed are copied too; `expert_ffn` gives them no output and no gradient.

    Args:
        x: the tokens.
        order: of `sort_by_expert`, for T * k slots.
        k: slots per token.
        inverse: `inverse_of(order)`, to compute it once for several calls.
    """
    inverse = inverse_of(order) if inverse is None else inverse
    return _GatherRows.apply(x, order, inverse, k)  # type: ignore[no-any-return]


def combine(
    y: torch.Tensor,
    order: torch.Tensor,
    gates: torch.Tensor,
    inverse: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum over each token's slots of gate * row, [T, d] in the dtype of `y`.

    Products and sums are in the wider of both dtypes, at least float32. Rows of slots that are not
    routed must hold zeros, as those of `expert_ffn` do.

    Args:
        y: [T * k, d] sorted rows.
        order: of `sort_by_expert`.
        gates: [T, k] weights; they receive gradients, as `y` does.
        inverse: `inverse_of(order)`, to compute it once for several calls.
    """
    inverse = inverse_of(order) if inverse is None else inverse
    return _Combine.apply(y, gates, order, inverse)  # type: ignore[no-any-return]


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor, k: int
    ) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.k = k
        kernels = kernels_for(x)
        if kernels is not None:
            return kernels.gather(x, order, k)
        return x.index_select(0, order if k == 1 else order // k)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (inverse,) = ctx.saved_tensors
        return sum_slots(grads[0], inverse, ctx.k), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, gates: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(y, gates, order, inverse)
        return sum_slots(y, inverse, gates.shape[1], gates)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        y, gates, order, inverse = ctx.saved_tensors
        grad, k = grads[0], gates.shape[1]
        kernels = kernels_for(y)
        if kernels is not None and not torch.is_grad_enabled():
            return *kernels.combine_backward(grad, y, gates, order), None, None
        wide = _wide(y.dtype, gates.dtype)
        tokens = order if k == 1 else order // k
        of_rows = grad.index_select(0, tokens).to(wide)
        of_y = of_rows * gates.reshape(-1).index_select(0, order).unsqueeze(1).to(wide)
        of_gates = (of_rows * y.to(wide)).sum(1).index_select(0, inverse).view_as(gates)
        return of_y.to(y.dtype), of_gates.to(gates.dtype), None, None


def sum_slots(
    rows: torch.Tensor, inverse: torch.Tensor, k: int, gates: torch.Tensor | None = None
) -> torch.Tensor:
    """[T, d]: the sum of each token's k sorted rows, weighted by its `gates` [T, k] if given."""
    kernels = kernels_for(rows)
    if kernels is not None and not torch.is_grad_enabled():
        return kernels.sum_slots(rows, inverse, k, gates)
    if gates is None and k == 1:
        return rows.index_select(0, inverse)
    wide = _wide(rows.dtype, rows.dtype if gates is None else gates.dtype)
    slots = rows.index_select(0, inverse).view(len(inverse) // k, k, rows.shape[1])
    if gates is None:
        return slots.sum(1, dtype=wide).to(rows.dtype)
    return (slots.to(wide) * gates.unsqueeze(2).to(wide)).sum(1).to(rows.dtype)


def _wide(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    return torch.promote_types(torch.promote_types(first, second), torch.float32)


def kernels_for(x: torch.Tensor) -> ModuleType | None:
    """`kernels_permute` if it takes `x`."""
    if x.is_cuda:
        from whale.nn.moe import kernels_permute  # noqa: PLC0415 - it loads Triton

        if kernels_permute.takes(x):
            return kernels_permute
    return None
