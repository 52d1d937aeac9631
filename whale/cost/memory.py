"""Memory: the bytes of Layers, of stages and of devices, for all who ask.

Place in the flow: the planner's shares and chains ask before there is a plan, `cost.price` asks for
the plan; checked against measured peaks in benchmarks/results/heterogeneous-gpu.md. What a device
holds at its peak is `ir.memory`'s to say.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from whale.cost.compute import CostModel
from whale.ir.memory import DeviceBytes
from whale.ir.model_graph import item_bytes
from whale.ir.precision import PLAIN, Precision

_BESIDE = 2.0
"""Of a Layer's parameters that are brought for its use, those of the next are there too; a gradient
on its way to who keeps it is there once more, packed."""

ALLOCATOR_SLACK = 0.05
"""What PyTorch's caching allocator loses to gaps and rounding: 2 to 8 % in training runs."""


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """One call of a Layer for one micro-batch, on one rank."""

    kept: float
    """What its forward leaves for the backward, on the device."""
    passing: float
    """What its backward holds beside that: the gradient that arrives and the one that leaves, as
    large as the largest tensor made, and a weight's gradient beside the one it is added to."""
    parked: float = 0.0
    """What of it waits on the host."""


@dataclass(frozen=True, slots=True)
class StageBytes:
    """One stage on one rank."""

    kept: float
    """What one micro-batch in flight keeps."""
    workspace: float
    """The most that a backward holds beside what the forwards kept."""
    parked: float = 0.0
    """What one micro-batch in flight has on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBytes:
    """Of a rank's parameters, by where it has what of them and when."""

    parameters: float = 0.0
    """All the time: computed with, or kept."""
    gradients: float = 0.0
    """Once the backward has made all of them."""
    updated: float = 0.0
    """Of what its optimizer has the state of, on the device."""
    brought: float = 0.0
    """Of what has its state on the host, and is updated on the device."""
    wide: float = 0.0
    """Made for an update, of all groups together."""
    away: float = 0.0
    """Of the parameters that are brought for each use, whole."""
    scattered: float = 0.0
    """Of the gradients that go to who keeps them with every micro-batch, whole."""
    host: float = 0.0
    """On the host: parameters and gradients."""
    host_updated: float = 0.0
    """Of what is updated on the host."""
    written_back: float = 0.0
    """Updated on the device and copied to the host."""
    host_moved: float = 0.0
    """To the host and back for an update there: gradients, and weights that are computed with."""

    def __add__(self, other: HeldBytes) -> HeldBytes:
        return HeldBytes(
            parameters=self.parameters + other.parameters,
            gradients=self.gradients + other.gradients,
            updated=self.updated + other.updated,
            brought=self.brought + other.brought,
            wide=self.wide + other.wide,
            away=self.away + other.away,
            scattered=self.scattered + other.scattered,
            host=self.host + other.host,
            host_updated=self.host_updated + other.host_updated,
            written_back=self.written_back + other.written_back,
            host_moved=self.host_moved + other.host_moved,
        )


def held_bytes(
    numel: float,
    dtype: str,
    *,
    trained: bool,
    zero: int = 0,
    part: float = 1.0,
    tier: str = "device",
    fetched: bool = False,
    precision: Precision = PLAIN,
) -> HeldBytes:
    """Of so many elements of parameters, as `ir.plan.Home` says what is done with them.

    `part` is what a rank keeps where copies share them out. What it updates lies in the memory that
    it computes with, where that is there all the time and of the same dtype.
    """
    here = numel * item_bytes(dtype)
    mine = numel * (part if zero else 1.0)
    wide = precision.kept(dtype)
    away, hosted, streamed = zero > 2 or fetched, tier == "host", tier == "weights"
    halves = bool(precision.parameters) and dtype == precision.parameters
    below = 2.0 * mine if halves and precision.master == "split" else 0.0
    kept = mine * item_bytes(wide) + below
    beside = kept if away or hosted or wide != dtype else below
    computed = 0.0 if away else here
    if not trained:
        return HeldBytes(
            parameters=computed + (0.0 if hosted or streamed else beside),
            away=here if away else 0.0,
            host=kept if hosted or streamed else 0.0,
        )
    sums = item_bytes(precision.summed(dtype))
    made = numel * sums if zero < 2 else 0.0
    shared = mine * sums if zero else 0.0
    # Without a master of its own, half precision is updated in a float32 that is made for it.
    lifted = halves and precision.master in ("split", "stochastic")
    basis = mine * (4.0 if lifted else item_bytes(wide))
    copied = halves and precision.master == "float32" and sums < 4
    lifts = (4.0 * mine if lifted else 0.0) + (4.0 * mine if copied or lifted and sums < 4 else 0.0)
    return HeldBytes(
        parameters=computed + (0.0 if hosted or streamed else beside),
        gradients=made + (0.0 if hosted else shared),
        updated=basis if tier in ("device", "weights") else 0.0,
        brought=basis if tier == "state" else 0.0,
        wide=0.0 if hosted else lifts,
        away=here if away else 0.0,
        scattered=numel * sums if zero > 1 else 0.0,
        host=kept + mine * item_bytes(wide) if hosted else kept if streamed else 0.0,
        host_updated=basis if hosted else 0.0,
        written_back=kept if streamed else 0.0,
        host_moved=mine * (sums + (0.0 if away else item_bytes(dtype))) if hosted else 0.0,
    )


def layer_bytes(
    costs: CostModel,
    index: int,
    rank: int,
    share: tuple[float, float],
    *,
    held: float = 1.0,
    rules: Collection[str] = (),
    params: HeldBytes | None = None,
    parked: bool = False,
    recompute: str = "",
) -> LayerBytes:
    """One call of the Layer at `index`, of which `rank` computes `share`: rows and width.

    `held` is the part of its weights that the rank has, `rules` are those of its splits, `params`
    what it holds of them, where copies share them out. What is `parked` is on the device while the
    Layer runs, and while it is brought back for a backward; what a Layer that runs again lets go
    (`recompute`, as of `ir.plan.StageLayer`) is there for its own backward alone.
    """
    rows, width = share
    # Only columns leave the output cut; rows make all of it, to be summed.
    scale = width if set(rules) == {"column"} else 1.0
    layer, calls = costs.graph.layers[index], costs.calls[index]
    made = kept = max(0.0, costs.kept_bytes(index, rank, rows, width) / calls)
    if recompute:
        kept = layer.entered.at(rows) / calls
    if recompute == "products":
        kept = min(made, kept + layer.products.at(rows) * width / calls)
    return LayerBytes(
        kept=0.0 if parked else kept,
        parked=kept if parked else 0.0,
        passing=(2.0 * kept if parked else 0.0)
        + (made if recompute else 0.0)
        + 2.0 * layer.largest.at(rows) * scale
        + costs.gradient_bytes[index] * held
        + (0.0 if params is None else _BESIDE * (params.away + params.scattered)),
    )


def stage_bytes(layers: Iterable[LayerBytes], received: float = 0.0) -> StageBytes:
    """Of the calls of a stage, from the last to the first: the order of the backward.

    When a Layer's backward runs, what the Layers after it kept is free again. `received` is what a
    micro-batch holds of other stages' values.
    """
    most = kept = parked = 0.0
    for layer in layers:
        most = max(most, layer.passing - kept)
        kept += layer.kept
        parked += layer.parked
    return StageBytes(kept=kept + received, workspace=most, parked=parked)


def most_kept(kept: Mapping[int, float], held: Iterable[Mapping[int, int]]) -> float:
    """Activations at the worst moment: `kept` by stage, and the micro-batches held by stage."""
    return max((sum(n * kept[stage] for stage, n in now.items()) for now in held), default=0.0)


_GROUPS_HERE = 2.0
"""Apply groups whose gradients or state are there at once: one that is updated, one on its way."""


def device_bytes(
    costs: CostModel,
    rank: int,
    held: HeldBytes,
    *,
    workspace: float,
    num_groups: int = 1,
    early: bool = False,
    parked: float = 0.0,
) -> DeviceBytes:
    """Of a rank with such parameters, updated in so many groups, maybe inside the backward.

    `parked` are its activations on the host.
    """
    training, few = costs.training, min(1.0, _GROUPS_HERE / num_groups)
    state = training.state_tensors
    scratch = (held.updated + held.brought) * training.scratch_tensors
    scratch += 0.0 if training.widens_itself else held.wide
    return DeviceBytes(
        parameters=held.parameters,
        gradients=held.gradients * (few if early else 1.0),
        optimizer=held.updated * state,
        scratch=scratch / num_groups + held.brought * state * few,
        workspace=workspace,
        driver=float(costs.reserved(rank)),
        gaps=0.0 if costs.cluster.devices[rank].type == "CPU" else ALLOCATOR_SLACK,
        host=parked
        + held.host
        + held.host_updated * (state + training.scratch_tensors / num_groups)
        + held.brought * state,
    )
