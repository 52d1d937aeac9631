"""CostModel: seconds of a Layer's forward and backward on a device, and of the update after them.

Place in the flow: made once per planning from a ModelGraph, a Cluster and (if there is one) a
Profile; the planner balances with it, the simulator times the Schedule with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from whale.cost.comm import Fabric
from whale.cost.crossing import Crossing, cut_bytes
from whale.cost.rates import LAUNCH_S, default_rate
from whale.errors import PlanError
from whale.ir.cluster import Cluster, Device
from whale.ir.device_types import DEVICE_TYPES, device_type
from whale.ir.model_graph import (
    DROPOUT_BYTES,
    ITEM_BYTES,
    Layer,
    ModelGraph,
    Parameter,
    Work,
    item_bytes,
)
from whale.ir.profile import LayerTime, Profile, Rate

# Backward over forward: both operands of a product get a gradient; flash attention computes its
# scores again (5 products for 2); elementwise backward reads what forward wrote and the gradient;
# dropout makes its mask again.
_BACKWARD = {
    "matmul": 2.0,
    "conv": 2.0,
    "attention": 2.5,
    "rnn": 2.0,
    "memory": 2.0,
    "dropout": 1.0,
}
_PRODUCTS = frozenset(("matmul", "conv", "attention", "rnn"))
# On a CPU the mask is not made in a kernel of its own but by 28 passes over int64 coordinates.
_CPU_DROPOUT = 28.0 * 16.0 / DROPOUT_BYTES
# Of a split block, norms, dropout and residuals stay whole (Korthikanti et al. 2022, section 4.1).
# Per sublayer, in units of what the block gives: a norm reads and writes it, an addition reads two
# and writes one; its backward needs the inputs of the norm and of the first product, and a mask.
_SUBLAYERS = ("attention", "multihead", "pair")
_WHOLE_MOVED, _WHOLE_KEPT = 5.0, 2.5
# Of anything else that is split in part, 10 of 34 units: the same paper's sum for one block.
_WHOLE_PART = 10.0 / 34.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What the cost of a step depends on beside model and cluster."""

    optimizer: str = "AdamW"
    state_tensors: float = 2.0
    """Bytes of optimizer state per byte of parameter."""
    scratch_tensors: float = 1.0
    """Bytes the update makes and frees per byte of parameter."""
    widens_itself: bool = False
    """Whether it updates half precision without wide copies made for it."""
    tf32: bool = False
    """Whether float32 products run on tensor cores."""
    autocast: str = ""
    """The dtype that products run in, where it is not that of their parameters."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """Devices that are alike share their prices."""

    type: str
    speed: float
    pace_flops: float | None
    profile: int | None
    """A rank whose profile stands for all of them."""


class CostModel:
    """Prices Layers on the devices of a cluster."""

    def __init__(
        self,
        graph: ModelGraph,
        cluster: Cluster,
        training: Training | None = None,
        profile: Profile | None = None,
    ) -> None:
        if profile is not None and len(profile.devices) != cluster.num_devices:
            raise PlanError(
                f"the profile has {len(profile.devices)} devices, the cluster "
                f"{cluster.num_devices}",
                hint="calibrate on the devices you plan for, one rank each",
            )
        if profile is not None:
            _check_types(profile, cluster)
        self.graph, self.cluster = graph, cluster
        self.training = training or Training()
        self.calls = graph.calls
        self.profile = profile
        parameters = {p.name: p for p in graph.parameters}
        self.trainable = {p.name: p.trainable for p in graph.parameters}
        self.parameter_bytes = [
            sum(parameters[n].nbytes for n in layer.params) for layer in graph.layers
        ]
        self.trained_bytes = [
            sum(parameters[n].nbytes for n in layer.params if parameters[n].trainable)
            for layer in graph.layers
        ]
        self.gradient_bytes = [
            max((parameters[n].nbytes for n in layer.params if parameters[n].trainable), default=0)
            for layer in graph.layers
        ]
        """Of every Layer's largest gradient, which is made beside the one it is added to."""
        self._dtypes = [_dtype(parameters, layer) for layer in graph.layers]
        self._cache: dict[tuple[int, _Kind, float, float], tuple[float, float]] = {}
        self._kinds = [self._kind(device) for device in cluster.devices]

    @cached_property
    def cut_bytes(self) -> list[Crossing]:
        """What travels where the model is cut before each of its Layers."""
        return cut_bytes(self.graph)

    @cached_property
    def fabric(self) -> Fabric:
        """What the collectives cost."""
        return Fabric.of(self.cluster, self.profile.links if self.profile else None)

    def _kind(self, device: Device) -> _Kind:
        measured = None
        if self.profile is not None:
            mine = self.profile.device(device.rank)
            # Measurements of equal devices differ by noise; the first stands for those like it.
            measured = next(
                r for r in range(device.rank + 1) if self.profile.device(r).is_like(mine)
            )
        return _Kind(device.type, device.speed, device.pace_flops, measured)

    def alike(self, rank: int) -> object:
        """Equal for ranks whose prices and memory are equal."""
        return self._kinds[rank], self.capacity(rank)

    def capacity(self, rank: int) -> int:
        """Bytes a rank may use: what was measured, unless the cluster's description gives less."""
        device = self.cluster.devices[rank]
        if self.profile is None:
            return device.memory_bytes
        measured = self.profile.device(rank).memory_bytes
        given = device.memory_bytes != device_type(device.type).memory_bytes
        return min(measured, device.memory_bytes) if given else measured

    def forward_s(self, layer: int, rank: int, rows: float, part: float = 1.0) -> float:
        """Seconds of one forward; `part` is the share of a split Layer's width."""
        return self._seconds(layer, rank, rows, part)[0]

    def backward_s(self, layer: int, rank: int, rows: float, part: float = 1.0) -> float:
        """Seconds of one backward."""
        return self._seconds(layer, rank, rows, part)[1]

    def again_s(self, layer: int, rank: int, rows: float, part: float = 1.0, *, keep: str) -> float:
        """Seconds of what of a forward runs again in the backward (`ir.plan.StageLayer`)."""
        if not keep or rows <= 0:
            return 0.0
        kind, found = self._kinds[rank], self.graph.layers[layer]
        forward = self.forward_s(layer, rank, rows, part)
        if kind.pace_flops is not None:
            return forward if keep == "inputs" else 0.0
        works = [w for w in found.work if keep == "inputs" or w.kind not in _PRODUCTS]
        parts = [
            self._estimate(found, each, layer, kind, rows, part, False)
            for each in (works, found.work, found.glue)
        ]
        # What runs between Layers does not run again.
        return forward * parts[0] / ((parts[1] + parts[2]) or 1.0)

    def step_s(self, layer: int, rank: int, rows: float, part: float = 1.0) -> float:
        """Seconds of both."""
        return sum(self._seconds(layer, rank, rows, part))

    def _seconds(self, index: int, rank: int, rows: float, part: float) -> tuple[float, float]:
        if rows <= 0:
            return 0.0, 0.0
        kind = self._kinds[rank]
        key = (index, kind, rows, part)
        found = self._cache.get(key)
        if found is None:
            found = self._cache[key] = self._priced(index, kind, rows, part)
        return found

    def _priced(self, index: int, kind: _Kind, rows: float, part: float) -> tuple[float, float]:
        layer = self.graph.layers[index]
        if kind.pace_flops is not None:
            flops = layer.flops + layer.flops_per_row * rows
            scale = part if layer.splits else 1.0
            forward = flops * scale / kind.pace_flops
            return forward, 2.0 * forward
        seconds = []
        times = self._measured(layer, kind)
        for backward in (False, True):
            own = self._estimate(layer, layer.work, index, kind, rows, part, backward)
            if times is not None:
                # Measured whole; a part of it takes what the estimate says a part takes.
                whole = self._estimate(layer, layer.work, index, kind, rows, 1.0, backward)
                curve = times.backward if backward else times.forward
                own = curve.at(rows) * (own / whole if whole else 1.0)
            glue = self._estimate(layer, layer.glue, index, kind, rows, part, backward)
            seconds.append((own + glue) / kind.speed)
        return seconds[0], seconds[1]

    def _measured(self, layer: Layer, kind: _Kind) -> LayerTime | None:
        if kind.profile is None or self.profile is None:
            return None
        return self.profile.device(kind.profile).layers.get(layer.signature)

    def _estimate(
        self,
        layer: Layer,
        works: Sequence[Work],
        index: int,
        kind: _Kind,
        rows: float,
        part: float,
        backward: bool,
    ) -> float:
        seconds, calls = 0.0, 0.0
        for work in works:
            times = _BACKWARD[work.kind] if backward else 1.0
            scale = self._scale(layer, work, index, rows, part)
            flops = work.flops.at(rows) * times * scale
            moved = work.moved.at(rows) * times * scale
            if work.kind == "dropout" and kind.type == "CPU":
                moved *= _CPU_DROPOUT
            rate = self._rate(kind, work, self._dtypes[index])
            seconds += rate.seconds(work.calls * times, flops, moved)
            calls += work.calls * times
        return max(seconds, calls * self._launch(kind))

    def _scale(self, layer: Layer, work: Work, index: int, rows: float, part: float) -> float:
        """What a part of a split Layer's width does of one kind of its work."""
        if not layer.splits or part == 1.0:
            return 1.0
        if work.kind not in ("memory", "dropout"):
            return part
        per_made = _WHOLE_MOVED
        if work.kind == "dropout":
            per_made = DROPOUT_BYTES / item_bytes(self._dtypes[index])
        whole = _whole_share(layer, per_made, work.moved.at(rows), rows)
        return whole + (1.0 - whole) * part

    def _rate(self, kind: _Kind, work: Work, dtype: str) -> Rate:
        name = self._computed(dtype) if work.kind in _PRODUCTS else dtype
        like = "memory" if work.kind == "dropout" else work.kind
        if kind.profile is not None and self.profile is not None:
            rates = self.profile.device(kind.profile).rates.get(like, {})
            if name in rates:
                return rates[name]
        return default_rate(kind.type, like, name)

    def _computed(self, dtype: str) -> str:
        """What products of a Layer in `dtype` run in."""
        if dtype != "float32":
            return dtype
        return self.training.autocast or ("tf32" if self.training.tf32 else dtype)

    def _launch(self, kind: _Kind) -> float:
        if kind.profile is not None and self.profile is not None:
            return self.profile.device(kind.profile).launch_s
        return 0.0 if kind.type == "CPU" else LAUNCH_S

    def alone(self, index: int, rank: int) -> float:
        """A Layer's seconds while neighbours on the card rest, over those with all at work."""
        times = self._measured(self.graph.layers[index], self._kinds[rank])
        return times.alone if times is not None else 1.0

    def apply_s(self, rank: int, parameter_bytes: float) -> float:
        """Seconds of the update of so many bytes of parameters on a rank."""
        kind = self._kinds[rank]
        moved = parameter_bytes * _ADAMW_TENSORS * _passes(self.training) / _passes(Training())
        speed: float | None = None
        if kind.profile is not None and self.profile is not None:
            speed = self.profile.device(kind.profile).apply_bytes_per_s
        if speed is None:
            # Foreach kernels make passes of their own: about half of the memory's speed.
            speed = 0.5 * device_type(kind.type).memory_bytes_per_s
        return moved / speed / (1.0 if kind.pace_flops is not None else kind.speed)

    def reserved(self, rank: int) -> int:
        """Bytes of a device that no tensor can have."""
        if self.profile is not None:
            return self.profile.device(rank).reserved_bytes
        return 0 if self.cluster.devices[rank].type == "CPU" else CONTEXT_BYTES

    def host_rate(self, rank: int) -> float:
        """Bytes per second between a rank and its node's memory, each way."""
        return device_type(self.cluster.devices[rank].type).host_bytes_per_s

    def peak_flops(self, rank: int) -> float:
        """What a device's data sheet promises for the dtype most Layers compute in."""
        dtype = max(set(self._dtypes), key=self._dtypes.count) if self._dtypes else "float32"
        name = self._computed(dtype)
        known = device_type(self.cluster.devices[rank].type).flops_per_s
        return known.get(name, known["float32"]) * self.cluster.devices[rank].speed

    def kept_bytes(self, index: int, rank: int, rows: float, part: float = 1.0) -> float:
        """Bytes a Layer's forward leaves for the backward, where a rank has a part of its width.

        Measured where it was: which kernel runs, and so what it keeps, is the device's choice.
        """
        layer = self.graph.layers[index]
        measured = self._measured(layer, self._kinds[rank])
        if measured is not None and measured.kept is not None:
            kept = measured.kept.at(rows)
        else:
            kept = layer.kept.at(rows)
        if not layer.splits or part == 1.0:
            return kept
        return kept * _kept_part(layer, part, layer.kept.at(rows), rows)


def _check_types(profile: Profile, cluster: Cluster) -> None:
    for device in cluster.devices:
        measured = profile.device(device.rank).type
        if measured in DEVICE_TYPES and measured != device.type:
            raise PlanError(
                f"rank {device.rank} is a {device.type} in the cluster and a {measured} in the "
                "profile",
                hint="calibrate on the devices you plan for",
            )


CONTEXT_BYTES = 700_000_000
"""A CUDA context with cuBLAS and NCCL buffers, as seen on V100 to H200 (0.5 to 0.9 GB)."""


_ADAMW_TENSORS = 7.0
"""What `apply_bytes_per_s` counts per parameter: weight, gradient and two states read, weight and
states written."""


def _passes(training: Training) -> float:
    """How often the update reads or writes a tensor as large as the parameters, in torch's kernels.

    Three times to zero the gradients and to divide them; then AdamW 21 times (8 kernels), SGD with
    momentum 8 (3 kernels), without it 3; others as AdamW does by their states.
    """
    if training.optimizer == "SGD":
        return 3.0 + (8.0 if training.state_tensors else 3.0)
    return 6.0 + 9.0 * training.state_tensors


def _whole_share(layer: Layer, per_made: float, total: float, rows: float) -> float:
    """The share of a split Layer's `total` that every rank has whole."""
    sublayers = sum(option.rule in _SUBLAYERS for option in layer.splits)
    if not sublayers or not total:
        return _WHOLE_PART
    return min(1.0, sublayers * per_made * layer.made.at(rows) / total)


def _kept_part(layer: Layer, part: float, kept: float, rows: float) -> float:
    rules = {option.rule for option in layer.splits}
    if rules <= {"column", "row"}:
        return part
    if rules == {"embedding"}:
        return 1.0
    whole = _whole_share(layer, _WHOLE_KEPT, kept, rows)
    return whole + (1.0 - whole) * part


def _dtype(parameters: Mapping[str, Parameter], layer: Layer) -> str:
    """The dtype a Layer computes in: that of most of its parameters."""
    sizes: dict[str, int] = {}
    for name in layer.params:
        parameter = parameters[name]
        if parameter.dtype in ITEM_BYTES:
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel
    return max(sizes, key=lambda d: sizes[d]) if sizes else "float32"
