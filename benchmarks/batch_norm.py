"""Batch norm over replicas on a GPU, at the shapes of ResNet-50: kernels side by side.

`python -m benchmarks.batch_norm --out benchmarks/results/batch-norm.md` on a machine with a GPU.
Forward and backward of one norm as Whale runs it (a group of one: no communication), the same with
torch's kernels under SyncBatchNorm, and `nn.BatchNorm2d`, which joins no statistics. Sides take
turns; a time is the median of their rounds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from whale.models.registry import preset
from whale.nn import batch_norm_kernels
from whale.nn.batch_norm import SyncedBatchNorm
from whale.runtime import groups

ROUNDS, CALLS = 5, 5
Norm = Callable[[torch.Tensor], torch.Tensor]


def shapes() -> Counter[tuple[int, int, int]]:
    """Channels, height and width of every norm of ResNet-50, and how many there are."""
    with torch.device("meta"):
        model = preset("resnet-50").build()
        x, _ = preset("resnet-50").batch(2, None)
    found: Counter[tuple[int, int, int]] = Counter()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.register_forward_pre_hook(
                lambda _, given: found.update([tuple(given[0].shape[1:])])
            )
    model(x.to("meta"))
    return found


def race(sides: Mapping[str, Norm], x: torch.Tensor) -> dict[str, float]:
    """Milliseconds of a forward and backward of each side."""
    grad = torch.randn_like(x)
    x = x.requires_grad_()
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(ROUNDS + 1):
        for name, side in sides.items():
            # Backward is the side's too: the choice of kernels is made there again.
            takes = batch_norm_kernels.takes if name != "torch" else lambda _: False
            with mock.patch.object(batch_norm_kernels, "takes", takes):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                for _ in range(CALLS):
                    torch.autograd.grad(side(x), x, grad)
                end.record()
                torch.cuda.synchronize()
            if number:
                times[name].append(begin.elapsed_time(end) / CALLS)
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> int:
    """Measures, prints and keeps the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    groups._open["alone"] = groups.Communicator("alone", (0,), 0, None)
    lines = [
        "# Batch norm over replicas: kernels",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, {torch.cuda.get_device_name()}, torch "
        f"{torch.__version__.split('+')[0]}, float32, {options.rows} rows, forward + backward of "
        "one norm in ms, side by side. *Joined* sides compute statistics that replicas join, here "
        "a group of one: Whale's kernels, and torch's, those under SyncBatchNorm.",
        "",
        "| shape | norms | Whale, joined | torch, joined | nn.BatchNorm2d | torch / Whale "
        "| nn / Whale |",
        "|---|---|---|---|---|---|---|",
    ]
    totals = Counter[str]()
    for (channels, height, width), count in sorted(shapes().items()):
        norm = nn.BatchNorm2d(channels).cuda()
        joined = SyncedBatchNorm(norm, "alone")
        x = torch.randn(options.rows, channels, height, width, device="cuda")
        found = race({"whale": joined, "torch": joined, "nn": norm}, x)
        for side, ms in found.items():
            totals[side] += count * ms
        lines.append(_line(f"{channels} x {height} x {width}", count, found))
        print(lines[-1], flush=True)
    lines.append(_line("all of ResNet-50", sum(shapes().values()), totals))
    print(lines[-1], flush=True)
    if options.out is not None:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


def _line(shape: str, count: int, ms: Mapping[str, float]) -> str:
    return (
        f"| {shape} | {count} | {ms['whale']:.3f} | {ms['torch']:.3f} | {ms['nn']:.3f} "
        f"| {ms['torch'] / ms['whale']:.2f} | {ms['nn'] / ms['whale']:.2f} |"
    )


if __name__ == "__main__":
    sys.exit(main())
