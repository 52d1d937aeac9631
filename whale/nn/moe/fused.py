"""The experts and the whole layer as one autograd node each, on CUDA in bfloat16.

Place in the flow: `experts` comes here for bfloat16 on CUDA; only then is Triton loaded. The
products are grouped ones (torch's or ours), everything between them is one Triton kernel.

What is kept for backward: the sorted rows and the first product's output h, [R, d] and [R, 2 f].
The activation and the experts' output are computed again or not needed (see `kernels_experts`).
Backward writes over h unless the graph is kept for another backward; it cannot be differentiated
again (`backend="loop"` can). `torch.compile` runs around these nodes, not through them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from whale.nn.moe import kernels_experts, kernels_permute, products
from whale.runtime.collectives import first_order_of


class _How(NamedTuple):
    activation: str
    gated: bool
    few_rows: bool


def takes(x: torch.Tensor) -> bool:
    """Whether the kernels take tensors like `x`."""
    return kernels_permute.takes(x) and x.dtype == torch.bfloat16


@torch.compiler.disable
def expert_ffn(
    x: torch.Tensor,
    offsets: torch.Tensor,
    w_in: torch.Tensor,
    w_out: torch.Tensor,
    activation: str,
    gated: bool,
    backend: str,
) -> torch.Tensor:
    """As `experts.expert_ffn`, without biases."""
    how = _How(activation, gated, products.few_rows(len(x), len(w_in), backend))
    return _Experts.apply(x, offsets, w_in, w_out, how)  # type: ignore[no-any-return]


@torch.compiler.disable
def moe_ffn(
    x: torch.Tensor,
    gates: torch.Tensor,
    order: torch.Tensor,
    inverse: torch.Tensor,
    offsets: torch.Tensor,
    w_in: torch.Tensor,
    w_out: torch.Tensor,
    activation: str,
    gated: bool,
    backend: str,
) -> torch.Tensor:
    """As `experts.moe_ffn`, without biases."""
    how = _How(activation, gated, products.few_rows(len(order), len(w_in), backend))
    return _Layer.apply(x, gates, order, inverse, offsets, w_in, w_out, how)  # type: ignore[no-any-return]


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        offsets: torch.Tensor,
        w_in: torch.Tensor,
        w_out: torch.Tensor,
        how: _How,
    ) -> torch.Tensor:
        ctx.how = how
        x = x.contiguous()
        h, y = _forward(x, offsets, w_in, w_out, how)
        ctx.save_for_backward(x, h, offsets, w_in, w_out)
        return kernels_permute.zero_tail(y, offsets)

    @staticmethod
    @first_order_of("experts in one kernel")
    def backward(ctx: Any, *grads: Any) -> Any:
        x, h, offsets, w_in, w_out = ctx.saved_tensors
        needs = (ctx.needs_input_grad[0], *ctx.needs_input_grad[2:4])
        in_place = _last_use(ctx)
        held = [grads[0].contiguous(), x, h]
        del x, h
        of_x, of_in, of_out, _ = _backward(
            held, None, offsets, offsets, w_in, w_out, ctx.how, in_place, needs
        )
        if of_x is not None:
            kernels_permute.zero_tail(of_x, offsets)
        return of_x, None, of_in, of_out, None


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        gates: torch.Tensor,
        order: torch.Tensor,
        inverse: torch.Tensor,
        offsets: torch.Tensor,
        w_in: torch.Tensor,
        w_out: torch.Tensor,
        how: _How,
    ) -> torch.Tensor:
        ctx.how, ctx.k = how, gates.shape[1]
        gates = gates.contiguous()
        rows = kernels_permute.gather(x, order, ctx.k)
        h, y = _forward(rows, offsets, w_in, w_out, how)
        ctx.save_for_backward(rows, h, gates, order, inverse, offsets, w_in, w_out)
        return kernels_permute.sum_slots(y, inverse, ctx.k, gates, offsets)

    @staticmethod
    @first_order_of("experts in one kernel")
    def backward(ctx: Any, *grads: Any) -> Any:
        x, h, gates, order, inverse, offsets, w_in, w_out = ctx.saved_tensors
        needs = (ctx.needs_input_grad[0], *ctx.needs_input_grad[5:7])
        in_place = _last_use(ctx)
        held = [kernels_permute.gather(grads[0], order, ctx.k), x, h]
        del x, h
        of_rows, of_in, of_out, of_gates = _backward(
            held, gates, order, offsets, w_in, w_out, ctx.how, in_place, needs
        )
        of_x = None
        if of_rows is not None:
            of_x = kernels_permute.sum_slots(of_rows, inverse, ctx.k, None, offsets)
        return of_x, of_gates, None, None, None, of_in, of_out, None


def _forward(
    x: torch.Tensor, offsets: torch.Tensor, w_in: torch.Tensor, w_out: torch.Tensor, how: _How
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first product's output, and the experts' output (anything in the rows of no expert)."""
    h = products.rows(x, w_in, offsets, how.few_rows)
    a = kernels_experts.activate(h, how.activation, how.gated)
    return h, products.rows(a, w_out, offsets, how.few_rows)


def _backward(
    held: list[torch.Tensor],
    gates: torch.Tensor | None,
    order: torch.Tensor,
    offsets: torch.Tensor,
    w_in: torch.Tensor,
    w_out: torch.Tensor,
    how: _How,
    in_place: bool,
    needs: tuple[bool, bool, bool],
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of the sorted rows, w_in, w_out and gates.

    `held` are the gradient of the experts' output without gates, the rows and h, in a list that is
    emptied, so that each is freed after its last use.
    """
    h, x, grad = held.pop(), held.pop(), held.pop()
    of_a = products.rows(grad, w_out.transpose(1, 2), offsets, how.few_rows)
    of_h, a, of_gates = kernels_experts.activate_backward(
        of_a, h, how.activation, how.gated, gates, order, offsets, in_place
    )
    del of_a, h
    of_x = of_in = of_out = None
    if needs[2]:
        of_out = products.weights(a, grad, offsets, w_out)
    del a, grad
    if needs[1]:
        of_in = products.weights(x, of_h, offsets, w_in)
    del x
    if needs[0]:
        of_x = products.rows(of_h, w_in.transpose(1, 2), offsets, how.few_rows)
    return of_x, of_in, of_out, of_gates


def _last_use(ctx: Any) -> bool:
    """Drops the node's hold on its saved tensors; whether they are this backward's alone."""
    keeps = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    if keeps is None or keeps():
        return False
    ctx.maybe_clear_saved_tensors()
    return True
