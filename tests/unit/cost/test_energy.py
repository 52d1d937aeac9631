"""Energy: against measured runs, within stated tolerances, and what must always hold."""

import dataclasses

import pytest

from whale.cost.energy import PUE, compute_watts, step_joules
from whale.ir.cluster import Cluster
from whale.ir.device_types import DEVICE_TYPES

V100, H100 = DEVICE_TYPES["V100-32GB"], DEVICE_TYPES["H100"]
MWH = 3.6e9


def joules(device, compute, communicate, idle, utilisation, *, count=1, pue=PUE):
    """Equal devices."""
    columns = ([x] * count for x in (compute, communicate, idle, utilisation))
    return step_joules([device] * count, *columns, pue=pue)


def test_v100_fleet_of_gpt3():
    """330 W with the host (arXiv:2104.10350), 24.6 of 125 TFLOP/s over the whole step."""
    achieved = 24.6 / 125
    for compute, communicate, idle in ((1.0, 0.0, 0.0), (0.85, 0.1, 0.05), (0.75, 0.15, 0.1)):
        used = achieved / compute
        watts = joules(V100, compute, communicate, idle, used, pue=1.0)
        assert watts == pytest.approx(330, rel=0.1)
        per_flop = joules(V100, compute, communicate, idle, used) / (achieved * 125e12)
        assert per_flop == pytest.approx(14.8e-12, rel=0.12)


@pytest.mark.parametrize(
    ("num_devices", "days", "mwh", "shares"),
    [
        (480, 3, 12.5, (0.7, 0.25, 0.05)),
        (480, 3, 12.5, (0.85, 0.1, 0.05)),
        (512, 10, 45.0, (0.8, 0.15, 0.05)),
    ],
)
def test_giant_runs_on_v100(num_devices, days, mwh, shares):
    """M6 of 1 and 10 trillion parameters, at 330 W per accelerator and PUE 1.1."""
    seconds = [share * days * 86400 for share in shares]
    assert joules(V100, *seconds, 0.25, count=num_devices) / MWH == pytest.approx(mwh, rel=0.15)


def test_h100_of_olmo2():
    """131 MWh of GPU energy for 6 * 7.3e9 * 4.05e12 FLOPs; 85 % of 700 W while it trains."""
    assert compute_watts(H100, 0.25) == pytest.approx(0.85 * 700, rel=0.02)
    measured = 131 * MWH / (6 * 7.3e9 * 4.05e12)
    # At that power and energy, 0.22 of the peak over the whole step.
    gpu = 0.85 * compute_watts(H100, 0.26) + 0.1 * 0.5 * 700 + 0.05 * H100.idle_watts
    assert gpu / (0.22 * 989e12) == pytest.approx(measured, rel=0.1)


def test_power_lies_between_idle_and_tdp():
    for device in DEVICE_TYPES.values():
        watts = [compute_watts(device, step / 10) for step in range(11)]
        assert watts == sorted(watts)
        assert device.idle_watts < watts[0]
        assert watts[-1] == device.tdp_watts
        working, talking, waiting = (
            joules(device, *(1.0 if i == j else 0.0 for j in range(3)), 0.4) for i in range(3)
        )
        assert working > talking > waiting > 0


def test_devices_add_up():
    types = [V100, H100]
    both = step_joules(types, [1.0, 2.0], [0.5, 0.0], [0.5, 0.0], [0.3, 0.4])
    alone = joules(V100, 1.0, 0.5, 0.5, 0.3) + joules(H100, 2.0, 0.0, 0.0, 0.4)
    assert both == pytest.approx(alone)
    assert step_joules(types, [1.0, 2.0], [0.5, 0.0], [0.5, 0.0], [0.3, 0.4], pue=1.0) == (
        pytest.approx(both / PUE)
    )
    with pytest.raises(ValueError, match="shorter"):
        step_joules(types, [1.0], [0.0], [0.0], [0.3])


def test_a_power_limit_counts(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text('[[node]]\ngpus = 1\ntype = "H100"\npower_watts = 500\n')
    limited = Cluster.from_toml(path).type_of(0)
    assert limited == dataclasses.replace(H100, tdp_watts=500.0)
    assert compute_watts(limited, 1.0) == 500.0
    assert joules(limited, 1.0, 0.0, 0.0, 0.4) < joules(H100, 1.0, 0.0, 0.0, 0.4)
