"""The experts' feed-forward layers over rows in expert order, and the whole layer of one device.

Place in the flow: `permute` brings the tokens into expert order; `expert_ffn` is all an
expert-parallel layer needs here; `moe_ffn` is sort, gather, experts and combine in one for a device
that holds every expert. The router, the balancing and the all-to-all are elsewhere.

Shapes: R sorted rows, E experts, d features, f hidden features (w_in has 2 f columns if gated).

[Note: weight layout] `w_in` is [E, d, f] (gated: [E, d, 2 f], the activated half first), `w_out`
is [E, f, d]: forward is `x @ w`. Either may be a transposed view of a contiguous tensor; gradients
come in the layout of the weights, and nothing is copied to be transposed. The fastest on an H200 is
d outermost in both: `w_in` contiguous, and `w_out = stored.transpose(1, 2)` of a contiguous
[E, d, f]. A grouped product of depth d (forward of w_in, the rows' gradient of w_out) wants its
weights row-major (1,024 rows per expert: 591 TFLOP/s against 448), one of depth f or 2 f does not
mind. The stored w_out is then the `down_proj` of Mixtral and Qwen-MoE, w_in their `gate_up_proj`
with its last two dims swapped.

[Note: backends]
- `loop`: one product per expert that has rows, by plain autograd. Any device and dtype (float64
  too); the others are tested against it. It reads the counts on the host.
- `grouped_mm`: `torch.nn.functional.grouped_mm`, float32 and bfloat16 on CPU, bfloat16 on CUDA
  (where nothing waits for the device); strides must be multiples of 16 bytes. On CUDA what lies
  between the products is one Triton kernel each (`fused`), unless there are biases.
- `triton`: the same with our own products of rows (`kernels_grouped`), bfloat16 on CUDA.
Without a choice: on CUDA in bfloat16 the faster of the last two by the rows per expert, on CPU
`grouped_mm` in float32 and bfloat16, and `loop` for anything these do not take.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from whale.nn.moe import permute, products

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
}
BACKENDS = ("loop", "grouped_mm", "triton")


def expert_ffn(
    x: torch.Tensor,
    offsets: torch.Tensor,
    w_in: torch.Tensor,
    w_out: torch.Tensor,
    *,
    b_in: torch.Tensor | None = None,
    b_out: torch.Tensor | None = None,
    activation: str = "gelu",
    gated: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """Each expert's feed-forward layer on its rows: `act(x @ w_in + b_in) @ w_out + b_out`.

    Gated: `(act(left) * right) @ w_out + b_out` with `left, right` the halves of
    `x @ w_in + b_in`. Rows from `offsets[-1]` on belong to no expert: zeros come out for them, and
    they get no gradient.

    Args:
        x: [R, d] rows in expert order.
        offsets: [E] int32, where each expert's rows end.
        w_in: [E, d, f], gated [E, d, 2 f].
        w_out: [E, f, d].
        b_in: [E, f], gated [E, 2 f].
        b_out: [E, d].
        activation: "gelu", "relu" or "silu".
        gated: whether the activation is multiplied by a linear half.
        backend: one of `BACKENDS`; by default the fastest one that takes the tensors.
    """
    _check(x, w_in, w_out, activation, gated)
    backend = _chosen(backend, x, w_in, w_out)
    if backend == "shapes":
        return _shapes_only(x, w_in, w_out, b_in, b_out, activation, gated)
    if backend == "loop":
        return _loop(x, offsets, w_in, w_out, b_in, b_out, activation, gated)
    if x.is_cuda and b_in is None and b_out is None:
        from whale.nn.moe import fused  # noqa: PLC0415 - it loads Triton

        if fused.takes(x):
            return fused.expert_ffn(x, offsets, w_in, w_out, activation, gated, backend)
    return _grouped(x, offsets, w_in, w_out, b_in, b_out, activation, gated)


def moe_ffn(
    x: torch.Tensor,
    ids: torch.Tensor,
    gates: torch.Tensor,
    w_in: torch.Tensor,
    w_out: torch.Tensor,
    *,
    b_in: torch.Tensor | None = None,
    b_out: torch.Tensor | None = None,
    activation: str = "gelu",
    gated: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """The mixture of experts' output for tokens `x` [T, d] where one device has every expert.

    `ids` [T, k] are the experts of each token (-1: none), `gates` [T, k] their weights. The rest is
    as in `expert_ffn`. On CUDA in bfloat16 it is one autograd node that keeps the first product's
    output and the sorted input, nothing else, and computes the rest again.
    """
    _check(x, w_in, w_out, activation, gated)
    k, num_experts = ids.shape[1], w_in.shape[0]
    backend = _chosen(backend, x, w_in, w_out)
    (order, _, offsets), inverse = permute.route(ids, num_experts)
    if x.is_cuda and backend not in ("loop", "shapes") and b_in is None and b_out is None:
        from whale.nn.moe import fused  # noqa: PLC0415 - it loads Triton

        if fused.takes(x):
            routed = (order, inverse, offsets)
            return fused.moe_ffn(x, gates, *routed, w_in, w_out, activation, gated, backend)
    rows = permute.gather_rows(x, order, k, inverse)
    y = expert_ffn(
        rows, offsets, w_in, w_out, b_in=b_in, b_out=b_out, activation=activation, gated=gated,
        backend=backend if backend != "shapes" else None,
    )  # fmt: skip
    return permute.combine(y, order, gates, inverse)


def activate(h: torch.Tensor, activation: str, gated: bool) -> torch.Tensor:
    """`act(h)`, or `act(left) * right` of its halves."""
    act = ACTIVATIONS[activation]
    if not gated:
        return act(h)
    left, right = h.chunk(2, dim=-1)
    return act(left) * right


def _check(
    x: torch.Tensor, w_in: torch.Tensor, w_out: torch.Tensor, activation: str, gated: bool
) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    experts, d, columns = w_in.shape
    hidden = columns // 2 if gated else columns
    if w_out.shape != (experts, hidden, d) or x.shape[-1] != d or (gated and columns % 2):
        raise ValueError(
            f"x {tuple(x.shape)}, w_in {tuple(w_in.shape)} and w_out {tuple(w_out.shape)} do not "
            f"fit: [rows, d], [experts, d, {'2 f' if gated else 'f'}] and [experts, f, d] are due"
        )


def _chosen(backend: str | None, x: torch.Tensor, w_in: torch.Tensor, w_out: torch.Tensor) -> str:
    if backend is not None:
        if backend not in BACKENDS:
            raise ValueError(f"backend {backend!r} is not one of {', '.join(BACKENDS)}")
        if backend == "triton" and not (x.is_cuda and x.dtype == torch.bfloat16):
            raise ValueError(
                f"backend 'triton' takes bfloat16 on CUDA, not {x.dtype} on {x.device}"
            )
        return backend
    if x.is_meta or type(x) not in (torch.Tensor, torch.nn.Parameter):
        return "shapes"
    same = x.dtype == w_in.dtype == w_out.dtype
    dtypes = (torch.bfloat16,) if x.is_cuda else (torch.bfloat16, torch.float32)
    if not (same and x.dtype in dtypes and x.device.type in ("cpu", "cuda")):
        return "loop"
    if any(size * x.element_size() % 16 for size in (*w_in.shape[1:], w_out.shape[1])):
        return "loop"
    if not (_dense(w_in) and _dense(w_out)):
        return "loop"
    return "auto" if x.is_cuda else "grouped_mm"


def _dense(w: torch.Tensor) -> bool:
    return w.is_contiguous() or w.transpose(1, 2).is_contiguous()


def _loop(
    x: torch.Tensor,
    offsets: torch.Tensor,
    w_in: torch.Tensor,
    w_out: torch.Tensor,
    b_in: torch.Tensor | None,
    b_out: torch.Tensor | None,
    activation: str,
    gated: bool,
) -> torch.Tensor:
    ends = offsets.tolist()
    counts = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    rest = x.shape[0] - (ends[-1] if ends else 0)
    # unbind and split: the gradients are stacked once, not added expert by expert.
    first, second = w_in.unbind(), w_out.unbind()
    parts = x.split([*counts, rest])
    busy = [e for e, count in enumerate(counts) if count] or [0]
    outs = []
    for e in busy:
        h = parts[e] @ first[e]
        h = h if b_in is None else h + b_in[e]
        y = activate(h, activation, gated) @ second[e]
        outs.append(y if b_out is None else y + b_out[e])
    if rest:
        outs.append(outs[0].new_zeros(rest, w_out.shape[2]))
    return torch.cat(outs)


def _shapes_only(
    x: torch.Tensor,
    w_in: torch.Tensor,
    w_out: torch.Tensor,
    b_in: torch.Tensor | None,
    b_out: torch.Tensor | None,
    activation: str,
    gated: bool,
) -> torch.Tensor:
    """For tensors without values (fake, meta): the shapes and the operations, with one expert."""
    h = x @ w_in[0]
    h = h if b_in is None else h + b_in[0]
    y = activate(h, activation, gated) @ w_out[0]
    return y if b_out is None else y + b_out[0]


def _grouped(
    x: torch.Tensor,
    offsets: torch.Tensor,
    w_in: torch.Tensor,
    w_out: torch.Tensor,
    b_in: torch.Tensor | None,
    b_out: torch.Tensor | None,
    activation: str,
    gated: bool,
) -> torch.Tensor:
    h = _GroupedProduct.apply(x, offsets, w_in, b_in)
    return _GroupedProduct.apply(activate(h, activation, gated), offsets, w_out, b_out)  # type: ignore[no-any-return]


class _GroupedProduct(torch.autograd.Function):
    """`x @ w + b` by expert; zeros, in values and gradients, for the rows of no expert."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        offsets: torch.Tensor,
        w: torch.Tensor,
        b: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, offsets, w)
        ctx.has_bias = b is not None
        x = x.contiguous()
        y = products.grouped_mm(x, w, offsets)
        if b is not None:
            rows = torch.arange(len(x), device=x.device, dtype=offsets.dtype)
            expert = torch.searchsorted(offsets, rows, right=True).clamp_(max=len(w) - 1)
            y = y + b.index_select(0, expert)
        return _routed_only(y, offsets)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, offsets, w = ctx.saved_tensors
        # An expanded gradient (that of a plain sum) has strides the product does not take.
        grad = grads[0].contiguous()
        of_x = of_w = of_b = None
        if ctx.needs_input_grad[0]:
            of_x = _routed_only(products.grouped_mm(grad, w.transpose(1, 2), offsets), offsets)
        if ctx.needs_input_grad[2]:
            of_w = products.grouped_mm(x.contiguous().t(), grad, offsets)
        if ctx.has_bias and ctx.needs_input_grad[3]:
            # A sum by expert without atomics: a product with ones, as many as the strides want.
            ones = grad.new_ones(len(grad), 16 // grad.element_size())
            of_b = products.grouped_mm(ones.t(), grad, offsets)[:, 0]
        return of_x, None, of_w, of_b


def _routed_only(y: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """`y` with zeros from row `offsets[-1]` on, where a grouped product writes nothing."""
    if not y.is_cuda:
        y[int(offsets[-1]) :] = 0
        return y
    rows = torch.arange(len(y), device=y.device)
    return torch.where((rows < offsets[-1]).unsqueeze(1), y, 0)
