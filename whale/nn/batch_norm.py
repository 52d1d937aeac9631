"""Batch norm over all replicas' samples, as one device would see the micro-batch.

Place in the flow: installed by `engine.lower` on batch norms of stages with several replicas.
torch's SyncBatchNorm refuses CPU; this is the same formula in differentiable sums, for any shares
(0 rows too).
"""

from __future__ import annotations

from typing import Any

import torch

from whale.runtime.collectives import all_sum


class SyncedBatchNorm:
    """The forward of a batch norm whose statistics are summed over `group`."""

    def __init__(self, module: Any, group: str) -> None:
        self.module, self.group = module, group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The replaced forward."""
        module = self.module
        module._check_input_dim(x)
        if not module.training and module.running_mean is not None:
            out: torch.Tensor = type(module).forward(module, x)
            return out
        dims = [d for d in range(x.dim()) if d != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        local = x.new_tensor([x.numel() // max(1, x.shape[1])])
        # Two sums, mean first: the one-pass form loses digits when the mean is large.
        first = all_sum(torch.cat([x.sum(dims), local]), self.group)
        count = first[-1].detach()
        mean = first[:-1] / count
        centered = x - mean.view(shape)
        var = all_sum(centered.square().sum(dims), self.group) / count
        self._track(mean.detach(), var.detach(), count)
        out = centered * torch.rsqrt(var + module.eps).view(shape)
        if module.affine:
            out = out * module.weight.view(shape) + module.bias.view(shape)
        return out

    def _track(self, mean: torch.Tensor, var: torch.Tensor, count: torch.Tensor) -> None:
        module = self.module
        if not module.training or module.running_mean is None:
            return
        with torch.no_grad():
            module.num_batches_tracked.add_(1)
            factor = module.momentum
            if factor is None:
                factor = 1.0 / float(module.num_batches_tracked)
            unbiased = var * (count / (count - 1).clamp(min=1))
            module.running_mean.lerp_(mean.to(module.running_mean.dtype), factor)
            module.running_var.lerp_(unbiased.to(module.running_var.dtype), factor)
