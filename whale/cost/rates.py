"""Rates of a device that nobody measured: its data sheet times what kernels reach of it.

Place in the flow: the fallback of `cost.compute` where a Profile says nothing.
"""

from __future__ import annotations

from functools import lru_cache

from whale.ir.device_types import device_type
from whale.ir.profile import Rate

# Share of the peak that kernels of a kind reach at full size. matmul: planning notes, section 4
# (0.65 to 0.93 at 10 to 100 GFLOP a call). conv: one V100 trains ResNet-50 with
# 1x1 convolutions. attention: FlashAttention-2 reports 0.35 to 0.6 forward on A100 for head dim 64.
# rnn: a step's product is small, cuDNN reaches about a quarter (NVIDIA's GNMT figures on V100).
_EFFICIENCY = {"matmul": 0.75, "conv": 0.65, "attention": 0.4, "rnn": 0.25, "memory": 0.75}
_MEMORY_EFFICIENCY = 0.8  # STREAM-like kernels on HBM parts reach 0.8 to 0.9
_OVERHEAD_S = 4e-6  # a kernel's start and tail; NVIDIA's launch latency is 2 to 5 microseconds
LAUNCH_S = 8e-6  # PyTorch eager: host time per operation, 5 to 10 microseconds
_CPU_OVERHEAD_S = 2e-6
# A type that does not know a dtype computes it in float32.
_FALLBACK = ("float32", "float16", "bfloat16", "float64")


@lru_cache(maxsize=1024)
def default_rate(type_name: str, kind: str, dtype: str) -> Rate:
    """What a device of that type should reach."""
    known = device_type(type_name)
    peak = known.flops_per_s.get(dtype)
    if peak is None:
        peak = next(known.flops_per_s[d] for d in _FALLBACK if d in known.flops_per_s)
    return Rate(
        flops_per_s=peak * _EFFICIENCY[kind],
        bytes_per_s=known.memory_bytes_per_s * _MEMORY_EFFICIENCY,
        overhead_s=_CPU_OVERHEAD_S if type_name == "CPU" else _OVERHEAD_S,
    )
