"""StepClock: how long steps and their computes take on this rank, and how much memory they hold.

Place in the flow: the executor tells it where computes begin and end, Step where steps do;
`Step.report` reads it. On CUDA it records events, so nothing waits for it. It also paces a CPU rank
that plays a slower device (`pace_flops` in the cluster's description): the rank sleeps to the
deadline that its work is declared to take.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch

from whale.ir.plan import Plan
from whale.ir.prices import StagePrice

KEPT_STEPS = 256
WARM_UP_STEPS = 2


class StepClock:
    """Times of the last steps."""

    def __init__(self, plan: Plan, rank: int, device: torch.device) -> None:
        self.device = device
        self.num_steps = 0
        self.timed_computes = False
        """Whether each compute is timed too: a pair of events per action."""
        self._steps: deque[tuple[Any, Any, list[tuple[Any, Any]]]] = deque(maxlen=KEPT_STEPS)
        self._begun: Any = None
        self._computes: list[tuple[Any, Any]] = []
        self._deadlines = _deadlines(plan, rank)

    # ---- recording ------------------------------------------------------------------------------

    def _now(self) -> Any:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return time.perf_counter()

    def begin_step(self) -> None:
        """The step begins."""
        self._begun, self._computes = self._now(), []

    def end_step(self) -> None:
        """The update is done."""
        self.num_steps += 1
        if self.num_steps > WARM_UP_STEPS:
            self._steps.append((self._begun, self._now(), self._computes))
        elif self.device.type == "cuda":
            # What was built and warmed up before is not what a step needs.
            torch.cuda.reset_peak_memory_stats(self.device)

    def begin_compute(self) -> Any:
        """The inputs of a compute are here."""
        return self._now() if self.timed_computes or self._deadlines else None

    def end_compute(self, begun: Any, kind: str, stage: int, rows: int) -> None:
        """A compute is done, or (CUDA) launched."""
        if self._deadlines and rows:
            price = self._deadlines.get(stage)
            if price is not None:
                left = begun + _declared(price, kind) - time.perf_counter()
                if left > 0:
                    time.sleep(left)
        if self.timed_computes:
            self._computes.append((begun, self._now()))

    # ---- reading --------------------------------------------------------------------------------

    def step_seconds(self) -> list[float]:
        """Seconds of the steps kept; waits for the device."""
        self._wait()
        return [self._between(begun, ended) for begun, ended, _ in self._steps]

    def compute_seconds(self) -> list[float]:
        """Seconds of the computes of every step kept, if they are timed."""
        self._wait()
        return [sum(self._between(a, b) for a, b in pairs) for _, _, pairs in self._steps if pairs]

    def peak_bytes(self) -> int | None:
        """The most that tensors have taken since the warm-up; None on the CPU."""
        if self.device.type != "cuda":
            return None
        return int(torch.cuda.max_memory_allocated(self.device))

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _between(self, begun: Any, ended: Any) -> float:
        if self.device.type == "cuda":
            return float(begun.elapsed_time(ended)) * 1e-3
        return float(ended - begun)


def _deadlines(plan: Plan, rank: int) -> dict[int, StagePrice]:
    """The prices of a paced rank's stages; nothing for a rank at its own speed."""
    if plan.prices is None or not plan.prices.devices[rank].paced:
        return {}
    found = {}
    for price in plan.prices.stages:
        device = plan.stages[price.stage].virtual_device
        if rank in device.replicas[price.replica].ranks:
            found[price.stage] = price
    return found


def _declared(price: StagePrice, kind: str) -> float:
    if kind == "F":
        return price.forward_s
    if kind == "W":
        return price.weight_s
    return price.backward_s - (price.weight_s if kind == "I" else 0.0)
