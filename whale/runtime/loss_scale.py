"""LossScale: the factor on the loss that keeps float16 gradients from underflow.

Place in the flow: the executor begins every backward with it, the store divides it out again. A
dynamic one is halved where a gradient overflowed on any rank, whose step is then left out on all,
and doubled where none did for a while.

[Note: the unit] Gradients here are those of sums, which are larger than those of means by the count
of samples or tokens. So that a scale means what it means for a mean, the backward is begun with the
scale over about the last step's count: a power of two, which rounds nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from whale.ir.precision import Precision

GROWS_AFTER = 2000
"""Steps without an overflow after which it doubles, as in torch."""
_LARGEST = 2.0**64
_LEAST = 2.0**-24

_LOG = logging.getLogger("whale")


class LossScale:
    """The scale of one Step; all ranks have the same.

    Args:
        precision: The plan's.
        ahead: Whether gradients come divided by their count.
        says: Whether changes are logged.
    """

    def __init__(self, precision: Precision, *, ahead: bool, says: bool = False) -> None:
        self.value, self.dynamic = precision.loss_scale, precision.dynamic
        self.ahead, self.says = ahead, says
        self.good_steps = 0
        """Since it last changed."""
        self._unit = 1.0

    @property
    def seed(self) -> float:
        """What a backward begins with."""
        return self.value * self._unit

    def begin(self, num_rows: int) -> None:
        """Before a step; before the first nobody knows more than its rows."""
        if self._unit == 1.0 and not self.ahead:
            self._unit = 2.0 ** -round(math.log2(max(1, num_rows)))

    def after(self, overflowed: bool, factor: float) -> None:
        """A step is over, whose gradients of sums are divided by 1 / `factor`."""
        before = self.value
        if 0.0 < factor < math.inf and not self.ahead:
            self._unit = 2.0 ** round(math.log2(factor))
        if overflowed:
            self.good_steps = 0
            if self.dynamic:
                self.value = max(self.value / 2.0, _LEAST)
        else:
            self.good_steps += 1
            if self.dynamic and self.good_steps >= GROWS_AFTER:
                self.value, self.good_steps = min(self.value * 2.0, _LARGEST), 0
        if self.says and (overflowed or self.value != before):
            why = "a gradient overflowed" if overflowed else f"{GROWS_AFTER} steps went well"
            _LOG.info("loss scale %g -> %g: %s", before, self.value, why)

    def state(self) -> dict[str, Any]:
        """As a checkpoint keeps it."""
        return {"value": self.value, "good_steps": self.good_steps}

    def load(self, state: Mapping[str, Any]) -> None:
        """From a checkpoint; one that is not dynamic keeps its own value."""
        if self.dynamic:
            self.value, self.good_steps = float(state["value"]), int(state["good_steps"])


def overflow(gradients: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """1 if a gradient holds an infinity or no number, else 0; nothing waits for it."""
    found = [g for g in gradients if g.numel()]
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in found:
        by_device.setdefault(gradient.device, []).append(gradient)
    bad = torch.zeros((), dtype=torch.float64, device=device)
    for tensors in by_device.values():
        largest = torch.stack([t.double() for t in torch._foreach_norm(tensors, float("inf"))])
        bad += (~torch.isfinite(largest)).any().to(device)
    return bad.clamp(max=1.0)
