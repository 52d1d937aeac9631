"""One rank of the benchmark of messages: calibrates, then trains two stages cut at three places.

Place in the flow: started by `messages`. Rank 0 prints one JSON line for each cut and side.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import whale as wh
from benchmarks.paced_sockets import pace_sockets
from whale.annotations import discover
from whale.engine.calibrate.profile import calibrate
from whale.planner import receives, schedules

WIDTH, BLOCKS, ROWS, MICRO_BATCHES = 512, 8, 64, 8
CUTS = (4, 5, 6)
STEPS = 10
LOSS = nn.functional.mse_loss


class Block(nn.Module):
    """Two Linears with a residual: much to compute, and as much to send wherever it is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Rows in, rows out."""
        y: Tensor = x + self.down(torch.relu(self.up(x)))
        return y


def build() -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)))


@contextmanager
def receiving(*, early: bool) -> Iterator[None]:
    """Gradients are received one compute before they are needed, as ever, or right before it."""
    usual = receives._early
    schedules._actions.cache_clear()
    if not early:
        receives._early = lambda group, late, needs: late
    try:
        yield
    finally:
        receives._early = usual
        schedules._actions.cache_clear()


def main() -> None:
    """Runs all cuts."""
    torch.set_num_threads(1)
    pace_sockets(int(sys.argv[1]))
    wh.init({"timeout_seconds": 60.0}, device="cpu")
    torch.manual_seed(1)
    batch = torch.randn(2, ROWS * MICRO_BATCHES, WIDTH).unbind()
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile.json"
        calibrate(build(), batch, LOSS, (ROWS // 2, ROWS)).write(profile)
        for cut in CUTS:
            for early in (False, True):
                with receiving(early=early):
                    facts = run(cut, batch, profile)
                if dist.get_rank() == 0:
                    blocks = (cut, BLOCKS - cut)
                    print(json.dumps({"blocks": blocks, "early": early, **facts}), flush=True)
    os._exit(0)


def run(cut: int, batch: tuple[Tensor, ...], profile: Path) -> dict[str, float]:
    """One cut: predicted and measured."""
    model = build()
    names = [str(i) for i in range(BLOCKS)]
    stages = ("|".join(names[:cut]), "|".join(names[cut:]))
    wh.annotate(model, {pattern: wh.stage() for pattern in stages})
    step = wh.parallelize(
        model,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        batch=batch,
        loss=LOSS,
        cluster=discover(),
        config={"pipeline.num_micro_batch": MICRO_BATCHES, "cluster.profile": str(profile)},
    )
    step._lowered.executor.clock.timed_computes = True
    for _ in range(STEPS):
        step(batch)
    report = step.report()
    step.close()
    assert report.measured is not None
    return {
        "predicted_s": report.step_seconds,
        "measured_s": report.measured.step_seconds,
        "predicted_compute_s": max(d.compute_s for d in report.devices),
        "measured_compute_s": max(d.compute_s or 0.0 for d in report.measured.devices),
    }


if __name__ == "__main__":
    main()
