"""Batch norm over all replicas' samples, as one device would see the micro-batch.

Place in the flow: installed by `engine.lower` on batch norms of stages with several replicas, for
any shares (0 rows too). One collective each way: forward gathers every member's mean, variance and
count, backward sums two numbers per channel. What the formulas need of a device is here for the
CPU, which torch's SyncBatchNorm refuses, and in `batch_norm_cuda` for CUDA.

The collectives are custom ops, and the one in forward is outside the autograd.Function, so that
torch.compile keeps the gradient (see `runtime.collectives`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from whale.errors import WhaleError
from whale.nn import batch_norm_cuda
from whale.nn.column_shard import plain
from whale.nn.forwards import replace_base, replace_forward, runs
from whale.runtime.collectives import all_sum, first_order_of, gather, refuse_transforms
from whale.runtime.groups import communicator


class SyncedBatchNorm:
    """The forward of a batch norm whose statistics are those of all members of `group`."""

    def __init__(self, module: Any, group: str) -> None:
        self.module, self.group = module, group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The replaced forward."""
        module = self.module
        x = plain(x)  # sharded columns would not reach the gradients of the statistics
        module._check_input_dim(x)
        if not module.training and module.running_mean is not None:
            return _BatchNorm.forward(module, x)
        if x.is_cuda:
            x = batch_norm_cuda.dense(x)
        refuse_transforms()
        with torch.no_grad():
            mean, invstd, counts = self._statistics(x)
        return _Normalize.apply(  # type: ignore[no-any-return]
            x, module.weight, module.bias, mean, invstd, counts, self.group
        )

    def _statistics(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The group's mean and 1 / sqrt(var + eps) by channel, and every member's count."""
        module, channels = self.module, x.shape[1]
        count = x.numel() // max(1, channels)
        local = batch_norm_cuda.statistics(x, module.eps) if x.is_cuda else _statistics(x)
        members = communicator(self.group).size
        stats = gather(local.unsqueeze(0), 0, [1] * members, self.group)
        means, spreads, counts = stats[:, :channels], stats[:, channels:-1], stats[:, -1]
        if not x.is_cuda:
            mean, var = _combined(means, spreads, counts)
            self._track(mean, var, counts.sum())
            return mean, torch.rsqrt(var + module.eps), counts
        running_mean, running_var = module.running_mean, module.running_var
        # The kernel tracks in the dtype of its input, and divides by the count less one.
        if self._tracks() and count > 1 and running_mean.dtype == stats.dtype:
            mean, invstd = batch_norm_cuda.combined(
                means,
                spreads,
                counts,
                module.eps,
                running_mean,
                running_var,
                self._next_factor(),
            )
        else:
            mean, invstd = batch_norm_cuda.combined(means, spreads, counts, module.eps)
            self._track(mean, invstd.pow(-2) - module.eps, counts.sum())
        return mean, invstd, counts

    def _tracks(self) -> bool:
        module = self.module
        tracks = module.track_running_stats and module.running_mean is not None
        return bool(module.training and tracks)

    def _next_factor(self) -> float:
        """Counts the batch; the weight of its statistics in the running ones."""
        module = self.module
        module.num_batches_tracked.add_(1)
        if module.momentum is None:
            return 1.0 / float(module.num_batches_tracked)
        return float(module.momentum)

    def _track(self, mean: torch.Tensor, var: torch.Tensor, count: torch.Tensor) -> None:
        if not self._tracks():
            return
        module, factor = self.module, self._next_factor()
        unbiased = var * (count / (count - 1).clamp(min=1))
        module.running_mean.lerp_(mean.to(module.running_mean.dtype), factor)
        module.running_var.lerp_(unbiased.to(module.running_var.dtype), factor)


def install_synced(module: nn.Module, path: str, group: str) -> None:
    """Joins a batch norm with those of the group's other members.

    In a subclass with a forward of its own, the call of its base's is what is joined.
    """
    synced = SyncedBatchNorm(module, group)
    if runs(module, _BatchNorm, nn.SyncBatchNorm):
        replace_forward(module, synced)
        return
    base = nn.SyncBatchNorm if isinstance(module, nn.SyncBatchNorm) else _BatchNorm
    count = replace_base(module, base, synced)
    own = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        before = count.calls
        out = own(*args, **kwargs)
        if module.training and count.calls == before:
            raise WhaleError(
                f"{path} ({type(module).__name__}) is a batch norm whose forward does not call its "
                "base's: its statistics would be those of each replica's own rows",
                hint="call super().forward(x) in it, or derive it from nn.Module",
            )
        return out

    replace_forward(module, forward)


class OwnBatchNorm:
    """A batch norm that normalises its replica's rows by their own statistics.

    Its forward is torch's; what replicas must agree on is the running statistics.
    """

    def __init__(self, module: Any, group: str, share: float) -> None:
        self.module, self.group, self.share = module, group, share

    def settle(self) -> None:
        """The running statistics become their mean over replicas, weighed by rows; all call it."""
        module = self.module
        if module.running_mean is None:
            return
        mean, var = module.running_mean, module.running_var
        parts = torch.cat([mean, var, mean.new_ones(1)]).double() * self.share
        total = communicator(self.group).all_reduce(parts)
        means, variances = (total[:-1] / total[-1]).chunk(2)
        mean.copy_(means)
        var.copy_(variances)


class _Normalize(torch.autograd.Function):
    """(x - mean) * invstd * weight + bias.

    Backward goes through the statistics too, which are functions of every member's x; the gradients
    of weight and bias stay this member's own part.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        invstd: torch.Tensor,
        counts: torch.Tensor,
        group: str,
    ) -> torch.Tensor:
        ctx.group = group
        ctx.save_for_backward(x, weight, mean, invstd, counts)
        normalized = batch_norm_cuda.normalized if x.is_cuda else _normalized
        return normalized(x, weight, bias, mean, invstd)

    @staticmethod
    @first_order_of("a batch norm over replicas")
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, mean, invstd, counts = ctx.saved_tensors
        needs = ctx.needs_input_grad[:3]
        on_cuda = x.is_cuda
        if on_cuda:
            grad = batch_norm_cuda.like(grad, x)
        reduced = batch_norm_cuda.reduced if on_cuda else _reduced
        sums, grad_weight, grad_bias = reduced(grad, x, weight, mean, invstd, needs)
        grad_x = None
        if needs[0]:
            sums = all_sum(sums, ctx.group)
            input_gradient = batch_norm_cuda.input_gradient if on_cuda else _input_gradient
            grad_x = input_gradient(grad, x, weight, mean, invstd, sums, counts)
        return grad_x, grad_weight, grad_bias, None, None, None, None


# ---- the formulas on the CPU ---------------------------------------------------------------------


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Half precision in float32: what statistics are taken in."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _by_channel(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return values.view([1, -1] + [1] * (x.dim() - 2))


def _sums(x: torch.Tensor) -> torch.Tensor:
    return x.sum([d for d in range(x.dim()) if d != 1])


def _statistics(x: torch.Tensor) -> torch.Tensor:
    """Mean and variance by channel, then the count; zeros for no rows."""
    x = _wide(x)
    channels = x.shape[1]
    if not x.numel():
        return x.new_zeros(2 * channels + 1)
    # Two passes inside, mean first: the one-pass form loses digits when the mean is large.
    mean, var = torch.batch_norm_update_stats(x, None, None, 0.0)
    return torch.cat([mean, var, mean.new_full((1,), x.numel() // channels)])


def _combined(
    means: torch.Tensor, variances: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and variance of all members' samples (Chan et al., for any number of parts)."""
    shares = (counts / counts.sum()).unsqueeze(1)
    mean = (shares * means).sum(0)
    return mean, (shares * (variances + (means - mean).square())).sum(0)


def _normalized(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    invstd: torch.Tensor,
) -> torch.Tensor:
    scale = invstd if weight is None else invstd * weight
    out = (_wide(x) - _by_channel(mean, x)) * _by_channel(scale, x)
    if bias is not None:
        out += _by_channel(bias, x)
    return out.to(x.dtype)


def _reduced(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    needs: tuple[bool, bool, bool],
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """This member's sums of dy and dy * (x - mean), and the gradients of weight and bias."""
    grad = _wide(grad)
    by_grad = _sums(grad)
    by_both = _sums(grad * (_wide(x) - _by_channel(mean, x)))
    grad_weight = (by_both * invstd).to(weight.dtype) if weight is not None and needs[1] else None
    grad_bias = by_grad.to(weight.dtype) if weight is not None and needs[2] else None
    return torch.cat([by_grad, by_both]), grad_weight, grad_bias


def _input_gradient(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    sums: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    by_grad, by_both = (sums / counts.sum()).chunk(2)
    scale = invstd if weight is None else invstd * weight
    centered = _wide(x) - _by_channel(mean, x)
    out = _wide(grad) - _by_channel(by_grad, x)
    out -= centered * _by_channel(by_both * invstd.square(), x)
    return (out * _by_channel(scale, x)).to(x.dtype)
