"""The grouped products under the experts, and which implementation does each of them.

Place in the flow: under `experts` and `fused`. `rows` is a product of each expert's rows with its
matrix (forward and the rows' gradient), `weights` the product over each expert's rows (the weights'
gradient). On CUDA torch's grouped products are the fastest where experts have many rows, ours
(`kernels_grouped`) where they have few.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

# Rows per expert, on average, up to which our products are the faster ones (H200).
FEW_ROWS = 256


def few_rows(rows: int, experts: int, backend: str) -> bool:
    """Whether our products are taken: by the `backend`, or for "auto" by the rows per expert."""
    return backend == "triton" or (backend == "auto" and rows <= FEW_ROWS * experts)


def rows(a: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor, ours: bool) -> torch.Tensor:
    """[R, n]: `a[r] @ w[e]` for the rows r of expert e; the rows of no expert are not written."""
    if ours and len(a) and a.shape[1] % 64 == 0:
        from whale.nn.moe import kernels_grouped  # noqa: PLC0415 - it loads Triton

        return kernels_grouped.rows(a, w, offsets)
    return grouped_mm(a, w, offsets)


def weights(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, like: torch.Tensor
) -> torch.Tensor:
    """[E, m, n]: `a[rows of e].T @ b[rows of e]`, in the memory layout of `like`."""
    if like.stride(2) == 1:
        return grouped_mm(a.t(), b, offsets)
    return grouped_mm(b.t(), a, offsets).transpose(1, 2)


def grouped_mm(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """PyTorch's grouped product under either name: [R, m] x [E, m, n] or [m, R] x [R, n]."""
    weights = b.dim() == 3
    if (a.shape[0] if weights else a.shape[1]) == 0:  # torch refuses the strides of no rows
        return a.new_zeros((0, b.shape[2]) if weights else (len(offsets), len(a), b.shape[1]))
    found = getattr(F, "grouped_mm", None)
    return found(a, b, offs=offsets) if found else torch._grouped_mm(a, b, offs=offsets)
