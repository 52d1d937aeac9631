"""Energy: joules of a step, from how long each device computes, communicates and waits.

Place in the flow: after the simulator, which gives the seconds; the planner ranks by it when energy
is the objective. A device draws

    computing       idle + (TDP - idle) * (K0 + K1 * utilisation), at most TDP
    communicating   COMMUNICATE * TDP
    waiting         idle

and its host HOST * TDP all the time; the building adds PUE. Communication that hides behind compute
is compute here. The constants are set to meet these runs (tests/unit/cost/test_energy.py):

    GPT-3, V100     330 W per accelerator with its host, 24.6 of 125 TFLOP/s (arXiv:2104.10350),
                    so 14.8 pJ/FLOP at the wall (1,287 MWh for 3.14e23 FLOPs)
    OLMo 2 7B, H100 131 MWh of GPU energy for 6 * 7.3e9 * 4.05e12 FLOPs, 2.7 pJ/FLOP
    OLMo, H100      85 % of the maximum power while training, 15 % while not (arXiv:2503.05804)
"""

from __future__ import annotations

from collections.abc import Sequence

from whale.ir.device_types import DeviceType

# Power over the idle level, as a share of what there is up to TDP. 85 % of 700 W from 105 W idle is
# 0.82; 2.7 pJ/FLOP at that power is a utilisation of 0.22. Large products (0.7 and more) draw TDP.
K0, K1 = 0.72, 0.4

COMMUNICATE = 0.5
"""Power over TDP while only communicating: a convention, the middle of 0.4 to 0.6."""

HOST = 0.3
"""The host's share (CPUs, memory, network, fans) over the TDP of one device: about what is left of
GPT-3's 330 W. A DGX-1's power supply (3,500 W for 8 x 300 W) allows 0.46."""

PUE = 1.1
"""What the building draws over what the machines draw: GPT-3's data centre, arXiv:2104.10350."""


def compute_watts(device: DeviceType, utilisation: float) -> float:
    """Power of a device while it computes.

    Args:
        device: Its type; a lower power limit stands in `tdp_watts` (`Cluster.type_of`).
        utilisation: Achieved over peak FLOPs while computing, 0 to 1.
    """
    share = min(1.0, K0 + K1 * utilisation)
    return device.idle_watts + (device.tdp_watts - device.idle_watts) * share


def step_joules(
    device_types: Sequence[DeviceType],
    compute_s: Sequence[float],
    communicate_s: Sequence[float],
    idle_s: Sequence[float],
    utilisation: Sequence[float],
    *,
    pue: float = PUE,
) -> float:
    """Energy of a step at the wall, hosts and building included.

    Args:
        device_types: One per device, as `Cluster.type_of` gives them.
        compute_s: How long each device computes.
        communicate_s: How long each communicates and does nothing else.
        idle_s: How long each waits. The three add up to the step.
        utilisation: Achieved over peak FLOPs of each while it computes.
        pue: 1.0 leaves the building out.
    """
    joules = 0.0
    for device, compute, communicate, idle, used in zip(
        device_types, compute_s, communicate_s, idle_s, utilisation, strict=True
    ):
        joules += compute * compute_watts(device, used)
        joules += communicate * max(device.idle_watts, COMMUNICATE * device.tdp_watts)
        joules += idle * device.idle_watts
        joules += (compute + communicate + idle) * HOST * device.tdp_watts
    return pue * joules
