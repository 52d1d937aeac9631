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

from whale.engine.calibrate.devices import (
    available_memory,
    default_dtypes,
    measure_apply,
    measure_launch,
    measure_rates,
)
from whale.engine.calibrate.layers import REPEATS, heaviest, measure_layers
from whale.engine.calibrate.links import Together, measure_contention, measure_links
from whale.engine.calibrate.stopwatch import Work
from whale.engine.capture.captured import capture
from whale.ir.device_types import type_in
from whale.ir.profile import DeviceProfile, Profile
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
    repeats: int = REPEATS,
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
    device = device or _own_device()
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
        mine = DeviceProfile(
            type=_type_of(device),
            memory_bytes=memory,
            reserved_bytes=reserved,
            launch_s=launch_s,
            rates=measure_rates(device, dtypes, synchronize=together.wait),
            apply_bytes_per_s=measure_apply(device, synchronize=together.wait),
            card=card_of(device),
        )
        links = measure_links(together.num_ranks, device, symmetric=symmetric_memory)
        found = together.gather((mine, _card_bytes(device)))
    about = f"torch {torch.__version__}, {len(found)} rank{'s' if len(found) > 1 else ''}"
    profile = Profile(devices=_shared(found), links=links, about=about)
    if model is None:
        return _side_by_side(profile, device, symmetric_memory=symmetric_memory)
    return with_layers(
        profile,
        model,
        batch,
        loss,
        rows,
        device=device,
        repeats=repeats,
        budget_s=budget_s,
        symmetric_memory=symmetric_memory,
    )


def with_layers(
    profile: Profile,
    model: nn.Module,
    batch: Any,
    loss: Loss | None,
    rows: Sequence[int] = ROWS,
    *,
    device: torch.device | None = None,
    repeats: int = REPEATS,
    budget_s: float = 60.0,
    symmetric_memory: bool = False,
) -> Profile:
    """A profile of devices and links with a model's Layers in it; arguments as for `calibrate`."""
    device = device or _own_device()
    captured = capture(model, batch, loss)
    with Together() as together:
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
        everyone = together.gather(layers)
    devices = [replace(d, layers=f) for d, f in zip(profile.devices, everyone, strict=True)]
    about = f"{profile.about}, Layers of {type(model).__name__}"
    profile = replace(profile, devices=tuple(devices), about=about)
    with heaviest(model, captured, layers, device) as load:
        return _side_by_side(profile, device, load, symmetric_memory=symmetric_memory)


def _side_by_side(
    profile: Profile, device: torch.device, load: Work | None = None, *, symmetric_memory: bool
) -> Profile:
    """With what computing `load` and summing gradients take from each other."""
    # CPU ranks that outnumber cores wait for turns, which changes from one moment to the next: the
    # same machine gave 0.2 to 0.9, and predictions of `make train` from -45 to +91 %.
    if len(profile.devices) == 1 or device.type == "cpu":
        return profile
    with Together() as together:
        lost, contention = measure_contention(
            together.num_ranks, device, load, symmetric=symmetric_memory
        )
        everyone = together.gather(lost)
    devices = [replace(d, lost=part) for d, part in zip(profile.devices, everyone, strict=True)]
    return replace(profile, devices=tuple(devices), contention=contention)


def _own_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


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
