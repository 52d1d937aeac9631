"""What was calibrated and measured on GPUs is still predicted: the simulator does not drift.

Calibrations and measurements were kept by `benchmarks.heterogeneous`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import whale as wh
from benchmarks.heterogeneous import RUNS
from benchmarks.heterogeneous_rank import SIZES, annotated, build, plan
from whale.models.registry import preset

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def measured() -> list:
    found = []
    for line in (RESULTS / "heterogeneous-gpu.jsonl").read_text().splitlines():
        row = json.loads(line)
        profile = RESULTS / "profiles" / row["run"] / f"{row['experiment']}.json"
        for name, side in row.get("sides", {}).items() if profile.exists() else ():
            case = (row["run"], row["experiment"], name)
            found.append(pytest.param(profile, *case, side, id="-".join(case)))
    return found


@pytest.fixture(autouse=True)
def tf32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.every(3)
@pytest.mark.parametrize(("profile", "run", "experiment", "name", "side"), measured())
def test_time_and_memory_are_predicted(profile, run, experiment, name, side):
    size = SIZES["gpu"][experiment]
    with torch.device("meta"):
        batch = preset(size.preset).batch(size.rows * size.num_micro_batch, size.seq)
    model = annotated(size) if name == "split" else build(size)
    count = len(RUNS[run].shares)
    cluster = f"{count}x1xH200" if RUNS[run].hosts else f"1x{count}xH200"
    balance = {"cluster__balance": "equal"} if name == "equal" else {}
    report = wh.simulate(plan(size, model, batch, cluster, profile, **balance))
    assert report.step_seconds == pytest.approx(side["measured_s"], rel=0.1)
    for device, peak in zip(report.devices, side["measured_peaks"], strict=True):
        assert device.memory.total == pytest.approx(peak, rel=0.08)


def test_there_are_some():
    assert len(measured()) == 14
