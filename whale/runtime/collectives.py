"""Collectives that autograd understands, each named with its conjugate. SUM only.

Uneven is the normal case.

Place in the flow: what the split rules and the bridges inside a stage are made of.

| name | forward | backward | used |
|---|---|---|---|
| `enter` | identity | all-reduce | a whole input of a sharded product |
| `leave` | all-reduce | identity | partial products of a row split |
| `all_sum` | all-reduce | all-reduce | statistics over replicas (batch norm) |
| `gather` | all-gather | own slice | shards to a whole that every member then uses alike |
| `enter_rows` | all-gather | reduce-scatter | `enter` after data parallel: the fused bridge |
| `leave_rows` | reduce-scatter | all-gather | `leave` before a data parallel TaskGraph |
| `scatter` | own slice | all-gather | whole rows to each replica's own, an input's own columns |
| `exchange` | all-to-all | all-to-all | all rows x own columns <-> own rows x all columns |
| `send_rows` | all-to-all | all-to-all | rows to the members that work on them, and back |

Those with a collective in forward are custom ops: a plain autograd.Function silently loses its
gradient under torch.compile on torch 2.11.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.library import custom_op

from whale.errors import WhaleError
from whale.runtime.compat import in_transform
from whale.runtime.groups import communicator

Backward = Callable[..., Any]


def first_order(backward: Backward) -> Backward:
    """A backward that refuses to be differentiated: what other members did is not in its graph."""

    @functools.wraps(backward)
    def run(ctx: Any, *grads: torch.Tensor) -> Any:
        if torch.is_grad_enabled() and any(grad.requires_grad for grad in grads):
            raise _second_order("that several ranks compute together")
        return backward(ctx, *grads)

    return run


def first_order_of(what: str) -> Callable[[Backward], Backward]:
    """The same for a backward that has its whole formula in one step, which no graph records."""

    def decorate(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def run(ctx: Any, *grads: torch.Tensor) -> Any:
            if torch.is_grad_enabled():
                raise _second_order(f"of {what}")
            return backward(ctx, *grads)

        return run

    return decorate


def _second_order(what: str) -> WhaleError:
    return WhaleError(
        f"the model differentiates a gradient (create_graph=True) {what}",
        hint="let one device compute it, where each gradient has its whole graph: `wh.replicate` "
        "a split module, give the stage of a batch norm one replica",
    )


def refuse_transforms() -> None:
    """Before a forward that needs other ranks: a transform would pass by what they compute."""
    if in_transform():
        raise WhaleError(
            "a module that several ranks compute together is called inside torch.func (vmap, jvp, "
            "grad, ...) or forward-mode autograd, which know nothing of the other ranks",
            hint="let one device compute it: `wh.replicate` this module",
        )


@custom_op("whale::leave", mutates_args=())
def leave(x: torch.Tensor, group: str) -> torch.Tensor:
    """SUM of partial products."""
    return communicator(group).all_reduce(x)


@leave.register_fake
def _(x: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _no_context(ctx: Any, inputs: Any, output: Any) -> None:
    return None


leave.register_autograd(first_order(lambda ctx, grad: (grad, None)), setup_context=_no_context)


@custom_op("whale::all_sum", mutates_args=())
def all_sum(x: torch.Tensor, group: str) -> torch.Tensor:
    """SUM of contributions that each rank's own loss depends on."""
    return communicator(group).all_reduce(x)


@all_sum.register_fake
def _(x: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _group_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.group = inputs[1]


all_sum.register_autograd(
    first_order(lambda ctx, grad: (communicator(ctx.group).all_reduce(grad), None)),
    setup_context=_group_context,
)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: str, meanwhile: Meanwhile | None) -> torch.Tensor:
        ctx.group, ctx.meanwhile = group, meanwhile
        return x.view_as(x)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Any) -> Any:
        total, work = communicator(ctx.group).start_all_reduce(grads[0])
        if ctx.meanwhile is not None:
            ctx.meanwhile()
        if work is not None:
            work.wait()
        return total, None, None


Meanwhile = Callable[[], None]


def enter(x: torch.Tensor, group: str, meanwhile: Meanwhile | None = None) -> torch.Tensor:
    """A whole input of a sharded product: its gradient is the SUM of the shards' partial ones.

    `meanwhile` is run in backward while that sum travels; an `x` without a gradient never runs it.
    """
    if not x.requires_grad:
        return x
    return _Enter.apply(x, group, meanwhile)  # type: ignore[no-untyped-call,no-any-return]


def _gathered(x: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] = sum(sizes)
    return x.new_empty(shape)


def _own(grad: torch.Tensor, dim: int, sizes: list[int], group: str) -> torch.Tensor:
    index = communicator(group).index
    return grad.narrow(dim, sum(sizes[:index]), sizes[index])


def _sizes_context(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.dim, ctx.sizes, ctx.group = inputs


@custom_op("whale::gather", mutates_args=())
def gather(x: torch.Tensor, dim: int, sizes: list[int], group: str) -> torch.Tensor:
    """Shards along `dim` to the whole, which every member then uses in the same way."""
    return communicator(group).all_gather(x, dim, sizes).contiguous()


@gather.register_fake
def _(x: torch.Tensor, dim: int, sizes: list[int], group: str) -> torch.Tensor:
    return _gathered(x, dim, sizes)


gather.register_autograd(
    first_order(lambda ctx, grad: (_own(grad, ctx.dim, ctx.sizes, ctx.group), None, None, None)),
    setup_context=_sizes_context,
)


@custom_op("whale::enter_rows", mutates_args=())
def enter_rows(x: torch.Tensor, dim: int, sizes: list[int], group: str) -> torch.Tensor:
    """Each replica's rows to all rows, for a sharded product.

    Gradients are summed and cut in one.
    """
    return communicator(group).all_gather(x, dim, sizes).contiguous()


@enter_rows.register_fake
def _(x: torch.Tensor, dim: int, sizes: list[int], group: str) -> torch.Tensor:
    return _gathered(x, dim, sizes)


enter_rows.register_autograd(
    first_order(
        lambda ctx, grad: (
            communicator(ctx.group).reduce_scatter(grad, ctx.dim, ctx.sizes),
            None,
            None,
            None,
        )
    ),
    setup_context=_sizes_context,
)


@custom_op("whale::leave_rows", mutates_args=())
def leave_rows(x: torch.Tensor, dim: int, sizes: list[int], group: str) -> torch.Tensor:
    """SUM of partial products over all rows, of which each replica keeps its own."""
    return communicator(group).reduce_scatter(x, dim, sizes).contiguous()


@leave_rows.register_fake
def _(x: torch.Tensor, dim: int, sizes: list[int], group: str) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim] = sizes[communicator(group).index]
    return x.new_empty(shape)


leave_rows.register_autograd(
    first_order(
        lambda ctx, grad: (
            communicator(ctx.group).all_gather(grad, ctx.dim, ctx.sizes),
            None,
            None,
            None,
        )
    ),
    setup_context=_sizes_context,
)


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, sizes: list[int], group: str) -> torch.Tensor:
        ctx.dim, ctx.sizes, ctx.group = dim, sizes, group
        return _own(x, dim, sizes, group).clone()

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Any) -> Any:
        whole = communicator(ctx.group).all_gather(grads[0], ctx.dim, ctx.sizes)
        return whole, None, None, None


def scatter(x: torch.Tensor, dim: int, sizes: list[int], group: str) -> torch.Tensor:
    """A whole, the same on every member, to each one's own part along `dim`."""
    return _Scatter.apply(x, dim, sizes, group)  # type: ignore[no-untyped-call,no-any-return]


def _exchange(
    x: torch.Tensor,
    cut_dim: int,
    cut_sizes: list[int],
    join_dim: int,
    join_sizes: list[int],
    group: str,
) -> torch.Tensor:
    """Cuts `cut_dim` to the members, joins what they send along `join_dim`."""
    comm = communicator(group)
    parts = [part.contiguous() for part in x.split(cut_sizes, cut_dim)]
    mine = cut_sizes[comm.index]
    shapes = []
    for size in join_sizes:
        shape = list(x.shape)
        shape[cut_dim], shape[join_dim] = mine, size
        shapes.append(shape)
    counts = [torch.Size(shape).numel() for shape in shapes]
    flat = comm.all_to_all(
        torch.cat([part.reshape(-1) for part in parts]), [p.numel() for p in parts], counts
    )
    pieces = [piece.view(shape) for piece, shape in zip(flat.split(counts), shapes, strict=True)]
    return torch.cat(pieces, join_dim)


@custom_op("whale::exchange", mutates_args=())
def exchange(
    x: torch.Tensor,
    cut_dim: int,
    cut_sizes: list[int],
    join_dim: int,
    join_sizes: list[int],
    group: str,
) -> torch.Tensor:
    """All rows x own columns to own rows x all columns, or back."""
    return _exchange(x, cut_dim, cut_sizes, join_dim, join_sizes, group)


@exchange.register_fake
def _(
    x: torch.Tensor,
    cut_dim: int,
    cut_sizes: list[int],
    join_dim: int,
    join_sizes: list[int],
    group: str,
) -> torch.Tensor:
    shape = list(x.shape)
    shape[cut_dim], shape[join_dim] = cut_sizes[communicator(group).index], sum(join_sizes)
    return x.new_empty(shape)


def _exchange_context(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.cut_dim, ctx.cut_sizes, ctx.join_dim, ctx.join_sizes, ctx.group = inputs


@first_order
def _exchange_backward(ctx: Any, grad: torch.Tensor) -> Any:
    back = _exchange(grad, ctx.join_dim, ctx.join_sizes, ctx.cut_dim, ctx.cut_sizes, ctx.group)
    return back, None, None, None, None, None


exchange.register_autograd(_exchange_backward, setup_context=_exchange_context)


@custom_op("whale::send_rows", mutates_args=())
def send_rows(x: torch.Tensor, send: list[int], receive: list[int], group: str) -> torch.Tensor:
    """`send[i]` rows to member i, `receive[i]` rows from it, in the order of members."""
    return communicator(group).all_to_all(x, send, receive)


@send_rows.register_fake
def _(x: torch.Tensor, send: list[int], receive: list[int], group: str) -> torch.Tensor:
    return x.new_empty((sum(receive), *x.shape[1:]))


def _send_context(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.send, ctx.receive, ctx.group = inputs


send_rows.register_autograd(
    first_order(
        lambda ctx, grad: (
            communicator(ctx.group).all_to_all(grad, ctx.receive, ctx.send),
            None,
            None,
            None,
        )
    ),
    setup_context=_send_context,
)


def packed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows in half precision; float16 rows with their power of two in one more column."""
    if dtype == torch.bfloat16:
        return x.to(dtype)
    largest = x.abs().amax(1, keepdim=True) if x.shape[1] else x.new_ones(len(x), 1)
    # The exponent of a row's largest element; of a row of zeros, or of none finite, anything.
    exponent = torch.frexp(largest.double()).exponent.to(x.dtype).clamp(-1000, 1000)
    scaled = x * torch.exp2(-exponent.double()).to(x.dtype)
    return torch.cat([scaled.to(dtype), exponent.to(dtype)], 1)


def unpacked(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of `packed`, but for rounding."""
    if x.dtype == torch.bfloat16:
        return x.to(dtype)
    return x[:, :-1].to(dtype) * torch.exp2(x[:, -1:].double()).to(dtype)


@custom_op("whale::send_half_rows", mutates_args=())
def send_half_rows(
    x: torch.Tensor, send: list[int], receive: list[int], group: str, dtype: torch.dtype
) -> torch.Tensor:
    """`send_rows`, with rows and gradients in half precision on the way."""
    moved = communicator(group).all_to_all(packed(x, dtype), send, receive)
    return unpacked(moved, x.dtype)


@send_half_rows.register_fake
def _(
    x: torch.Tensor, send: list[int], receive: list[int], group: str, dtype: torch.dtype
) -> torch.Tensor:
    return x.new_empty((sum(receive), *x.shape[1:]))


def _half_context(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.send, ctx.receive, ctx.group, ctx.dtype = inputs


@first_order
def _half_backward(ctx: Any, grad: torch.Tensor) -> Any:
    moved = communicator(ctx.group).all_to_all(packed(grad, ctx.dtype), ctx.receive, ctx.send)
    return unpacked(moved, grad.dtype), None, None, None, None


send_half_rows.register_autograd(_half_backward, setup_context=_half_context)
