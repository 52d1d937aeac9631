"""Measure: how fast this job's devices and links really are, as a Profile.

Place in the flow: behind `whale calibrate`, before planning. Every rank measures its own device
while the others do the same, because that is how they will train; then all hold the same Profile,
which `cost` prices plans from. Each Layer of a model is run alone, as it would be in a step.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from whale.engine.capture import capture
from whale.engine.measure_device import (
    available_memory,
    default_dtypes,
    measure_apply,
    measure_launch,
    measure_rates,
)
from whale.engine.measure_layers import heaviest, measure_layers
from whale.engine.measure_links import Together, measure_contention, measure_links
from whale.ir.device_types import type_in
from whale.ir.profile import DeviceProfile, LayerTime, Profile
from whale.runtime.batch import Loss

ROWS = (1, 4, 16, 64)


def calibrate(
    model: nn.Module | None = None,
    batch: Any = None,
    loss: Loss | None = None,
    rows: Sequence[int] = ROWS,
    *,
    device: torch.device | None = None,
    dtypes: Sequence[str] | None = None,
    repeats: int = 5,
    budget_s: float = 60.0,
    symmetric_memory: bool = False,
) -> Profile:
    """The Profile of this job's devices and links, the same on every rank; all call it alike.

    Args:
        model: Whose Layers are timed, on the meta device or not; None: devices and links alone.
        batch: One global batch for it; its shapes are what matters.
        loss: As for `parallelize`; needed where the batch holds a target.
        rows: Numbers of rows to time each Layer at.
        device: This rank's own; default: the current GPU, or the CPU.
        dtypes: What products and copies are timed in; default: by kind of device.
        repeats: Rounds of each measurement, of which the median counts.
        budget_s: Seconds for the Layers of the model, at most (larger row counts are given up).
        symmetric_memory: Sums go through it, as `communication.symmetric_memory` will have it.
    """
    if device is None:
        cuda = torch.cuda.is_available()
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    captured = capture(model, batch, loss) if model is not None else None
    with Together() as together:
        if together.num_ranks > 1:
            # Opens the communicator, whose buffers are no memory for tensors.
            dist.all_reduce(torch.zeros(1, device=device))
        together.wait()
        memory, reserved = available_memory(device)
        together.wait()
        launch_s = measure_launch(device)
        together.wait()
        dtypes = default_dtypes(device) if dtypes is None else dtypes
        rates = measure_rates(device, dtypes, synchronize=together.wait)
        apply_bytes_per_s = measure_apply(device, synchronize=together.wait)
        layers: dict[str, LayerTime] = {}
        if model is not None and captured is not None:
            layers = measure_layers(
                model,
                captured,
                device,
                rows,
                repeats=repeats,
                budget_s=budget_s,
                synchronize=together.wait,
                turn=together.turns(card_of(device)),
            )
        links = measure_links(together.num_ranks, device, symmetric=symmetric_memory)
        with heaviest(model, captured, layers, device) as load:
            lost, contention = measure_contention(
                together.num_ranks, device, load, symmetric=symmetric_memory
            )
        mine = DeviceProfile(
            type=_type_of(device),
            memory_bytes=memory,
            reserved_bytes=reserved,
            launch_s=launch_s,
            apply_bytes_per_s=apply_bytes_per_s,
            rates=rates,
            layers=layers,
            lost=lost,
            card=card_of(device),
        )
        found = together.gather((mine, _card_bytes(device)))
    about = f"torch {torch.__version__}, {len(found)} rank{'s' if len(found) > 1 else ''}"
    if model is not None:
        about += f", Layers of {type(model).__name__}"
    return Profile(
        devices=_shared(found),
        links=links,
        contention=contention if together.num_ranks > 1 else None,
        about=about,
    )


def _type_of(device: torch.device) -> str:
    if device.type == "cpu":
        return "CPU"
    name = torch.cuda.get_device_name(device)
    return type_in(name) or name


def card_of(device: torch.device) -> str:
    """Which card a rank is on, among all hosts; CPU ranks are on none."""
    if device.type == "cpu":
        return ""
    return f"{socket.gethostname()} {torch.cuda.get_device_properties(device).uuid}"


def _card_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return 0
    return int(torch.cuda.get_device_properties(device).total_memory)


def _shared(found: Sequence[tuple[DeviceProfile, int]]) -> tuple[DeviceProfile, ...]:
    """Devices whose ranks share a card without a limit get their part of it: each saw all of it.

    A card that one rank has to itself needs no name.
    """
    seen: dict[str, list[int]] = {}
    for device, _ in found:
        seen.setdefault(device.card, []).append(device.memory_bytes)
    devices = []
    for device, total in found:
        mates = seen[device.card]
        if not device.card or len(mates) == 1:
            devices.append(replace(device, card=""))
        elif sum(mates) > total:
            part = device.memory_bytes * max(mates) // sum(mates)
            devices.append(replace(device, memory_bytes=part))
        else:
            devices.append(device)
    return tuple(devices)
