"""Replicas that meet inside Layers (batch norm) on a card that they share."""

from __future__ import annotations

from math import sqrt
from pathlib import Path

import pytest
import torch

import whale as wh
from whale.engine.capture.captured import capture
from whale.ir.profile import Curve, DeviceProfile, LayerTime, Profile
from whale.models.registry import preset
from whale.sim.report import Report

RESNET = preset("resnet-tiny")
BATCH = RESNET.batch(16, None)


def report(tmp_path: Path, speeds: tuple[float, float], card: str) -> Report:
    """Of an equal split over two devices that take so many seconds for a row of any Layer."""
    graph = capture(RESNET.build(), BATCH, RESNET.loss).graph
    devices = []
    for per_row in speeds:
        curve = Curve.of({1: per_row, 16: 16 * per_row})
        time = LayerTime(forward=curve, backward=curve, alone=0.5)
        layers = {layer.signature: time for layer in graph.layers}
        devices.append(
            DeviceProfile(type="V100-16GB", memory_bytes=1 << 34, layers=layers, card=card)
        )
    path = tmp_path / "profile.json"
    Profile(devices=tuple(devices)).write(path)
    plan = wh.plan(
        RESNET.build(),
        cluster="1x2xV100-16GB",
        batch=BATCH,
        loss=RESNET.loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        config={"cluster.profile": str(path), "cluster.balance": "equal"},
    )
    return wh.simulate(plan)


def step_s(tmp_path: Path, speeds: tuple[float, float], card: str) -> float:
    return report(tmp_path, speeds, card).step_seconds


def test_one_is_faster_while_the_other_waits_for_it(tmp_path):
    apart = step_s(tmp_path, (1.0, 2.0), "")
    # The slow one takes p of its time: the fast one rests 1 - 1 / 2p of it, p = 1 - (that) / 2.
    p = (0.5 + sqrt(0.25 + 1.0)) / 2.0
    assert step_s(tmp_path, (1.0, 2.0), "a") == pytest.approx(p * apart, rel=0.02)


def test_equals_never_wait(tmp_path):
    apart = step_s(tmp_path, (1.0, 1.0), "")
    assert step_s(tmp_path, (1.0, 1.0), "a") == pytest.approx(apart, rel=1e-4)


@pytest.mark.parametrize("card", ["", "a"])
@pytest.mark.parametrize("speeds", [(1.0, 2.0), (1e-6, 1e-6), (1e-6, 3e-6)])
def test_nobody_is_busy_for_longer_than_the_step(tmp_path, speeds, card):
    found = report(tmp_path, speeds, card)
    for device in found.devices:
        assert device.communicate_s >= 0.0
        assert device.compute_s + device.communicate_s <= found.step_seconds * (1.0 + 1e-9)
    assert sum(found.where_time_goes.values()) == pytest.approx(found.step_seconds)


def test_one_without_rows_waits_for_the_others():
    plan = wh.plan(
        RESNET.build(),
        cluster="1x3xV100-16GB",
        batch=RESNET.batch(2, None),
        loss=RESNET.loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        config={"cluster.balance": "equal"},
    )
    found = wh.simulate(plan)
    assert sorted(d.rows for d in found.devices) == [0, 1, 1]
    for device in found.devices:
        assert bool(device.compute_s) == bool(device.rows)
        assert device.compute_s + device.communicate_s <= found.step_seconds
    assert sum(found.where_time_goes.values()) == pytest.approx(found.step_seconds)
