"""The formulas of batch norm on CUDA: our kernels, or torch's own, those under SyncBatchNorm.

Place in the flow: what `batch_norm` runs for a tensor on CUDA; the CPU's versions of the same
functions are there. One pass over x for the statistics and one to normalise, two over x and its
gradient in backward; statistics are in float32 for half precision. Nothing here waits for the
device. torch's kernels stand in without Triton and under `torch.compile`.
"""

from __future__ import annotations

from types import ModuleType

import torch

# A member without rows has this count: the kernel that combines divides by the count so far, so the
# first one must not be 0. As an integer it is 0.
_NO_ROWS = 1e-30


def _kernels(x: torch.Tensor) -> ModuleType | None:
    """Our own kernels, where they take `x`."""
    from whale.nn import batch_norm_kernels  # noqa: PLC0415 - it loads Triton

    return batch_norm_kernels if batch_norm_kernels.takes(x) else None


def _channels_last(x: torch.Tensor) -> torch.memory_format | None:
    for dims, layout in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if x.dim() == dims and x.is_contiguous(memory_format=layout):
            return layout
    return None


def dense(x: torch.Tensor) -> torch.Tensor:
    """`x` in a layout the kernels take: channels last, or contiguous."""
    return x if _channels_last(x) is not None else x.contiguous()


def like(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`grad` in the layout of `x`, which `dense` gave: the kernels read both with one index."""
    return grad.contiguous(memory_format=_channels_last(x) or torch.contiguous_format)


def statistics(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Mean and 1 / sqrt(var + eps) by channel, then the count."""
    channels = x.shape[1]
    if not x.numel():
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        mean, invstd = x.new_zeros(channels, dtype=dtype), x.new_ones(channels, dtype=dtype)
        return torch.cat([mean, invstd, mean.new_full((1,), _NO_ROWS)])
    if (kernels := _kernels(x)) is not None:
        return kernels.statistics(x, eps)  # type: ignore[no-any-return]
    mean, invstd = torch.batch_norm_stats(x, eps)
    return torch.cat([mean, invstd, mean.new_full((1,), x.numel() // channels)])


def combined(
    means: torch.Tensor,
    invstds: torch.Tensor,
    counts: torch.Tensor,
    eps: float,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    factor: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The group's mean and 1 / sqrt(var + eps); moves the running statistics too, where given."""
    # The first argument only tells the dtype, in which the kernel reads the counts.
    return torch.batch_norm_gather_stats_with_counts(
        means, means, invstds, running_mean, running_var, factor, eps, counts
    )


def normalized(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    invstd: torch.Tensor,
) -> torch.Tensor:
    """(x - mean) * invstd * weight + bias."""
    if not x.numel():
        return torch.empty_like(x)
    if (kernels := _kernels(x)) is not None:
        return kernels.normalized(x, weight, bias, mean, invstd)
    # The kernel takes an eps and does not use it.
    return torch.batch_norm_elemt(x, weight, bias, mean, invstd, 0.0)


def reduced(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    needs: tuple[bool, bool, bool],
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """This member's sums of dy and dy * (x - mean), and the gradients of weight and bias."""
    if not x.numel():
        of_weight = torch.zeros_like(weight) if weight is not None and needs[1] else None
        of_bias = torch.zeros_like(weight) if weight is not None and needs[2] else None
        return mean.new_zeros(2 * len(mean)), of_weight, of_bias
    if (kernels := _kernels(x)) is not None:
        sums, of_weight, of_bias = kernels.reduced(grad, x, weight, mean, invstd)
        return sums, of_weight if needs[1] else None, of_bias if needs[2] else None
    by_grad, by_both, grad_weight, grad_bias = torch.batch_norm_backward_reduce(
        grad, x, mean, invstd, weight, True, needs[1], needs[2]
    )
    return torch.cat([by_grad, by_both]), grad_weight, grad_bias


def input_gradient(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    sums: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    """The gradient of x, from the sums of all members."""
    if not x.numel():
        return torch.empty_like(x)
    if (kernels := _kernels(x)) is not None:
        return kernels.input_gradient(grad, x, weight, mean, invstd, sums, counts)
    by_grad, by_both = sums.chunk(2)
    if weight is not None and weight.dtype != mean.dtype:
        weight = weight.to(mean.dtype)
    # The kernel reads the counts as an array of int32.
    members = counts.to(torch.int32).contiguous()
    return torch.batch_norm_backward_elemt(grad, x, mean, invstd, weight, by_grad, by_both, members)
