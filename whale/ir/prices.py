"""Prices: what the cost model says of a plan, kept in it, so that a plan alone can be simulated.

Place in the flow: made by `cost.price`, read by `sim.simulate`. Per stage and replica, per gradient
bucket and per device: never per micro-batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from whale.errors import PlanError
from whale.ir.memory import DeviceBytes

CONTENTION = 0.5
"""Of sums where nothing was measured: both want the same memory and multiprocessors. Seen on
BERT-Large over two virtual GPUs of an H200, where 0.3 s of sums took 0.5 s beside the backward;
Echo (2024) fits the same effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePrice:
    """One replica of one stage, for one micro-batch; seconds include the collectives inside."""

    stage: int
    replica: int
    forward_s: float
    backward_s: float
    weight_s: float
    """Of `backward_s`, what a schedule may put off."""
    collective_s: float
    """Of both, what communication inside takes."""
    kept_bytes: int
    """Activations per micro-batch in flight, on each of its ranks."""
    alone: float = 1.0
    """Seconds while neighbours on the same card rest, over those with all of them at work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagePrice:
    """One edge between stages, for one micro-batch: activations, and gradients that come back."""

    producer: int
    consumer: int
    seconds: float
    nbytes: int
    back_s: float
    """Of the gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducePrice:
    """One gradient bucket, summed over `ranks` once it is complete."""

    ranks: tuple[int, ...]
    stage: int
    after: float
    """The fraction of the stage's last backward that completes it."""
    seconds: float
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePrice:
    """One rank: memory that does not come and go, and the update."""

    rank: int
    node: int
    rows: int
    apply_s: float
    memory: DeviceBytes
    """All of it but activations."""
    capacity_bytes: int
    peak_flops: float
    """What the device could do in the dtype of the model, per second."""
    power_watts: float
    paced: bool = False
    """A CPU rank that sleeps to the time its work is declared to take."""
    binds: str = ""
    card: str = ""
    """The card this device is a part of, where it shares one."""
    lost: float = 0.0
    """The share of its speed that computing loses beside a sum of gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Everything the simulator needs beside the Schedule."""

    stages: tuple[StagePrice, ...]
    messages: tuple[MessagePrice, ...]
    reduces: tuple[ReducePrice, ...]
    devices: tuple[DevicePrice, ...]
    step_flops: float
    """Forward and backward of the global batch, useful work only."""
    lower_bound_s: float
    """No plan on these devices can be faster."""
    host_capacity_bytes: tuple[int, ...] = ()
    """By node, its own memory."""
    contention: float = CONTENTION
    """The share of its speed that a sum of gradients loses while all its ranks compute."""
    cluster: str = ""
    sources: tuple[str, ...] = ()
    """Where the figures come from."""

    def host_bytes(self) -> dict[int, float]:
        """By node, what its ranks have in its memory."""
        found: dict[int, float] = {}
        for device in self.devices:
            found[device.node] = found.get(device.node, 0.0) + device.memory.host
        return found

    def check(self) -> None:
        """Refuses numbers that nothing costs: after reading, for what is read may be anything."""
        memory = (device.memory for device in self.devices)
        parts = (*self.stages, *self.messages, *self.reduces, *self.devices, *memory)
        for item in (self, *parts):
            _check_numbers(item)


def _check_numbers(item: Any) -> None:
    for field in fields(item):
        value = getattr(item, field.name)
        if field.type not in ("int", "float") or (
            isinstance(value, int | float) and 0 <= value < math.inf
        ):
            continue
        raise PlanError(
            f"the plan's {type(item).__name__} has {field.name} = {value!r}; allowed: numbers from "
            "0 on",
            hint="make it again with `whale plan MODEL --cluster SPEC --json F`",
        )
