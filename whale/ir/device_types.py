"""Device types: what each kind of device computes, holds, sends and draws, with its source.

Place in the flow: `cluster` takes from here what a description leaves out; the cost model reads the
peaks. All figures are decimal, dense (no sparsity) and per direction. FLOPs are those of matrix
products, on tensor cores where a part has them for the dtype, with sums kept in float32. A dtype
that is absent is not native to the part.

Figures about a whole node (network, host memory) belong to the machine the part is usually sold in.
Where a figure is a convention, the line says so; what the parts reach is for `whale calibrate`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from whale.errors import ClusterError

# One hop of a ring inside a node.
_NVLINK_VOLTA_S = 4.4e-6  # benchmarks/fit_nccl.py on vTrain's V100 tables (NCCL tuning.cc: 3.4e-6)
_NVLINK_AMPERE_S = 2.1e-6  # the same on its A100 tables
_PCIE_S = 5.7e-6  # NCCL tuning.cc, hwLatencies: PCI, ring, Simple
_GLOO_S = 200e-6  # convention; 2 and 4 Gloo ranks on 2 busy cores took 145e-6 and 180e-6 a hop

# PCI Express x16, one direction: half of what NVIDIA's data sheets state for both.
_PCIE3, _PCIE4, _PCIE5 = 16e9, 32e9, 64e9
_PCIE_REACHED = 0.85
"""Of the nominal rate, between a device and pinned host memory: 55 of 64 GB/s on an H200."""

_IDLE = 0.15
"""Idle power over TDP, a process holding the device: H100 nodes in training fell to 15 % of their
maximum while no kernel ran (arXiv:2503.05804, abstract). Used where no figure of the part is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """How a node talks to others: one direction, all its adapters together."""

    bytes_per_s: float
    latency_s: float
    num_adapters: int = 1
    """A device sends through one of them: alone it reaches `bytes_per_s / num_adapters`."""


# A hop of 20e-6 s over Ethernet: convention, NCCL's 14e-6 (below) and the kernel's network stack.
_ETHERNET_50 = Network(bytes_per_s=6.25e9, latency_s=20e-6)  # Whale, ATC'22: 50 Gb/s Ethernet
_ETHERNET_25 = Network(bytes_per_s=3.125e9, latency_s=20e-6)  # convention: 25 Gb/s in a cloud
# A hop: NCCL tuning.cc, hwLatencies: NET, ring, Simple.
_HDR = Network(bytes_per_s=200e9, latency_s=14e-6, num_adapters=8)  # DGX A100: 8 x 200 Gb/s
_NDR = Network(bytes_per_s=400e9, latency_s=14e-6, num_adapters=8)  # DGX H100, H200, B200: 8 x 400
_LOOPBACK = Network(bytes_per_s=1e9, latency_s=_GLOO_S)  # convention; the same test: 0.9 to 1.6e9
# The torus goes on past the host: 8 of the 16 links of its 2 x 2 chips leave it (332e9 / 4 each).
_TPU_TORUS = Network(bytes_per_s=664e9, latency_s=_NVLINK_AMPERE_S, num_adapters=4)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceType:
    """One kind of device, and the node it usually stands in."""

    name: str
    memory_bytes: int
    flops_per_s: Mapping[str, float] = field(hash=False)
    """Peak by dtype: float64, float32, tf32, float16, bfloat16; absent: not native."""
    memory_bytes_per_s: float
    intra_bytes_per_s: float
    """Out of one device, to others in its node: half of NVLink's figure, else PCI Express."""
    intra_latency_s: float
    """One hop inside a node."""
    inter_bytes_per_s: float
    """Out of one node, to others."""
    inter_latency_s: float
    """One hop between nodes."""
    num_adapters: int
    """Network adapters of a node; one device alone reaches its share of `inter_bytes_per_s`."""
    tdp_watts: float
    idle_watts: float
    host_memory_bytes: int
    """Of a node."""
    host_bytes_per_s: float
    """Between one device and its node's memory, each way."""
    source: str


def _row(
    name: str,
    *,
    memory: float,
    tflops: Mapping[str, float],
    hbm: float,
    intra: float,
    network: Network,
    watts: float,
    host: float,
    source: str,
    bus: float = _PCIE4,
    hop: float = _NVLINK_AMPERE_S,
    idle: float | None = None,
) -> DeviceType:
    """A row in the units of data sheets: `memory` and `host` in GB, `hbm` and `intra` in bytes/s.

    `half` among the dtypes stands for float16 and bfloat16 alike.
    """
    peaks = {dtype: peak * 1e12 for dtype, peak in tflops.items() if dtype != "half"}
    if "half" in tflops:
        peaks |= {"float16": tflops["half"] * 1e12, "bfloat16": tflops["half"] * 1e12}
    return DeviceType(
        name=name,
        memory_bytes=round(memory * 1e9),
        flops_per_s=MappingProxyType(peaks),
        memory_bytes_per_s=hbm,
        intra_bytes_per_s=intra,
        intra_latency_s=hop,
        inter_bytes_per_s=network.bytes_per_s,
        inter_latency_s=network.latency_s,
        num_adapters=network.num_adapters,
        tdp_watts=watts,
        idle_watts=_IDLE * watts if idle is None else idle,
        host_memory_bytes=round(host * 1e9),
        host_bytes_per_s=_PCIE_REACHED * bus,
        source=source,
    )


_P100 = _row(
    "P100-16GB",
    bus=_PCIE3,
    memory=16,
    tflops={"float64": 5.3, "float32": 10.6, "float16": 21.2},
    hbm=732e9,
    intra=80e9,
    hop=_NVLINK_VOLTA_S,
    network=_ETHERNET_50,
    watts=300.0,
    idle=50.0,
    host=736,
    source="NVIDIA P100 data sheet (SXM2); node: Whale, ATC'22, evaluation: 736 GB, 50 Gb/s; "
    "idle: convention",
)
_V100 = _row(
    "V100-16GB",
    bus=_PCIE3,
    memory=16,
    tflops={"float64": 7.8, "float32": 15.7, "float16": 125.0},
    hbm=900e9,
    intra=150e9,
    hop=_NVLINK_VOLTA_S,
    network=_ETHERNET_50,
    watts=300.0,
    idle=55.0,
    host=736,
    source="NVIDIA V100 data sheet (SXM2); node: Whale, ATC'22, evaluation: 736 GB, 50 Gb/s; "
    "idle: convention, 50 to 90 W for parts of 300 to 400 W",
)
_T4 = _row(
    "T4",
    bus=_PCIE3,
    memory=16,
    tflops={"float64": 0.253, "float32": 8.1, "float16": 65.0},
    hbm=320e9,
    intra=_PCIE3,
    hop=_PCIE_S,
    network=_ETHERNET_25,
    watts=70.0,
    host=384,
    source="NVIDIA T4 data sheet; float64 1/32 of float32, Turing whitepaper; host: AWS "
    "g4dn.metal, 8 x T4",
)
_A10 = _row(
    "A10",
    memory=24,
    tflops={"float64": 0.488, "float32": 31.2, "tf32": 62.5, "half": 125.0},
    hbm=600e9,
    intra=_PCIE4,
    hop=_PCIE_S,
    network=_ETHERNET_25,
    watts=150.0,
    host=512,
    source="NVIDIA A10 data sheet; float64 1/64 of float32, GA102 whitepaper; host: convention",
)
_A100 = _row(
    "A100-40GB",
    memory=40,
    tflops={"float64": 19.5, "float32": 19.5, "tf32": 156.0, "half": 312.0},
    hbm=1555e9,
    intra=300e9,
    network=_HDR,
    watts=400.0,
    idle=70.0,
    host=1000,
    source="NVIDIA A100 data sheet (SXM4); node: DGX A100, 320 GB version; idle: as the V100's",
)
_H100 = _row(
    "H100",
    bus=_PCIE5,
    memory=80,
    tflops={"float64": 67.0, "float32": 67.0, "tf32": 494.0, "half": 989.0},
    hbm=3350e9,
    intra=450e9,
    network=_NDR,
    watts=700.0,
    host=2000,
    source="NVIDIA H100 data sheet (SXM5), sparse figures halved; node: DGX H100",
)
_B200 = _row(
    "B200",
    bus=_PCIE5,
    memory=180,
    tflops={"float64": 37.0, "float32": 75.0, "tf32": 1100.0, "half": 2250.0},
    hbm=8000e9,
    intra=900e9,
    network=_NDR,
    watts=1000.0,
    host=2000,
    source="NVIDIA DGX B200 and HGX B200 data sheets over 8 GPUs (1,440 GB, 64 TB/s), sparse "
    "figures halved",
)
_L40S = _row(
    "L40S",
    memory=48,
    tflops={"float64": 1.43, "float32": 91.6, "tf32": 183.0, "half": 362.0},
    hbm=864e9,
    intra=_PCIE4,
    hop=_PCIE_S,
    network=_ETHERNET_25,
    watts=350.0,
    host=512,
    source="NVIDIA L40S data sheet; float64 1/64 of float32, Ada whitepaper; host: convention",
)
_4090 = _row(
    "4090",
    memory=24,
    tflops={"float64": 1.29, "float32": 82.6, "tf32": 82.6, "half": 165.2},
    hbm=1008e9,
    intra=_PCIE4,
    hop=_PCIE_S,
    network=_ETHERNET_25,
    watts=450.0,
    host=256,
    source="NVIDIA Ada whitepaper (RTX 4090: no NVLink, no peer-to-peer); host: convention",
)
_3090 = _row(
    "3090",
    memory=24,
    tflops={"float64": 0.556, "float32": 35.6, "tf32": 35.6, "half": 71.0},
    hbm=936e9,
    # The NVLink bridge (56e9 one direction) is an extra and joins pairs only.
    intra=_PCIE4,
    hop=_PCIE_S,
    network=_ETHERNET_25,
    watts=350.0,
    host=256,
    source="NVIDIA Ampere GA102 whitepaper (RTX 3090); host: convention",
)
_MI300X = _row(
    "MI300X",
    bus=_PCIE5,
    memory=192,
    tflops={"float64": 163.4, "float32": 163.4, "tf32": 653.7, "half": 1307.4},
    hbm=5300e9,
    intra=448e9,
    network=_ETHERNET_25,
    watts=750.0,
    host=2000,
    source="AMD Instinct MI300X data sheet (matrix peaks; Infinity Fabric 896 GB/s both ways); "
    "network and host: convention",
)
_TPU_V3 = _row(
    "TPU-v3",
    bus=_PCIE3,
    memory=32,
    tflops={"bfloat16": 123.0},
    hbm=900e9,
    intra=332e9,
    network=_TPU_TORUS,
    watts=262.0,
    idle=123.0,
    host=340,
    source="cloud.google.com/tpu/docs/v3, a chip of 2 cores: 123 TF, 32 GB, 900 GB/s, 123 W at "
    "least and 262 W at most, all-reduce 340 TB/s over 1,024 chips; host: v3-8, 4 chips, 340 GB",
)
_CPU = _row(
    "CPU",
    memory=8,
    tflops={"float64": 0.048, "float32": 0.096},
    hbm=10e9,
    intra=1e9,
    hop=_GLOO_S,
    network=_LOOPBACK,
    watts=10.0,
    host=64,
    source="a convention, no part: one rank on one core of a test machine (AVX2 at 3 GHz: 2 "
    "units x 8 lanes x 2), Gloo over loopback",
)

_ROWS = (
    _P100,
    _V100,
    replace(_V100, name="V100-32GB", memory_bytes=32_000_000_000),
    _T4,
    _A10,
    _A100,
    replace(
        _A100,
        name="A100-80GB",
        memory_bytes=80_000_000_000,
        memory_bytes_per_s=2039e9,
        host_memory_bytes=2_000_000_000_000,
        source="NVIDIA A100 data sheet (SXM4); node: DGX A100, 640 GB version; idle: as the V100's",
    ),
    _H100,
    replace(
        _H100,
        name="H200",
        memory_bytes=141_000_000_000,
        memory_bytes_per_s=4800e9,
        source="NVIDIA H200 data sheet (SXM5), sparse figures halved; node: DGX H200",
    ),
    _B200,
    _L40S,
    _4090,
    _3090,
    _MI300X,
    _TPU_V3,
    _CPU,
)

DEVICE_TYPES: Mapping[str, DeviceType] = MappingProxyType({row.name: row for row in _ROWS})

UNKNOWN = _row(
    "unknown",
    bus=_PCIE3,
    memory=8,
    tflops={"float64": 0.3, "float32": 10.0, "float16": 20.0},
    hbm=300e9,
    intra=_PCIE3,
    hop=_PCIE_S,
    network=_ETHERNET_25,
    watts=250.0,
    host=64,
    source="a convention for a discovered device that is in no row: an older PCI Express card",
)


def device_type(name: str) -> DeviceType:
    """The row of this name; UNKNOWN for a name that a driver gave and the table has not."""
    return DEVICE_TYPES.get(name, UNKNOWN)


def type_named(name: object, *, where: str) -> str:
    """The type of exactly this name, whatever its case; an error suggests the nearest."""
    types = {known.lower(): known for known in DEVICE_TYPES}
    if isinstance(name, str) and name.lower() in types:
        return types[name.lower()]
    text = str(name).lower()
    near = [known for known in types if text and known.startswith(text)]
    near = near or difflib.get_close_matches(text, types, n=2, cutoff=0.4)
    raise ClusterError(
        f"{where}: unknown device type {name!r}; allowed: {', '.join(DEVICE_TYPES)}",
        hint=(
            f"did you mean {' or '.join(types[match] for match in near)}?"
            if near
            else "other devices take the nearest type, with what differs given in a TOML file"
        ),
    )


def type_in(name: str) -> str | None:
    """The type that a driver's name such as "Tesla V100-SXM2-32GB" spells, if any."""
    words = {word.upper() for word in re.split(r"[\s\-_]+", name)}
    return next((known for known in DEVICE_TYPES if {*known.upper().split("-")} <= words), None)
