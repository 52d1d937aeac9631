"""Held: what every rank of a plan holds of the parameters, and what moving it costs.

Place in the flow: under `cost.price`. Where copies share parameters out, they gather them for each
use or after each update, and sum gradients into what each of them keeps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from whale.cost.compute import CostModel
from whale.cost.memory import HeldBytes, held_bytes
from whale.ir.homes import Stretch, all_syncs
from whale.ir.keeping import Share, shares_of
from whale.ir.model_graph import item_bytes
from whale.ir.plan import Home, Plan, StageLayer

_HOST_TENSORS = 7.0
"""What AdamW reads and writes of a parameter: see `cost.compute`."""
_HOST_BYTES_PER_S = 129e9
"""Of a node's processors in an update: fused AdamW on 16 cores beside an H200 did 4.6 G parameters
a second, 28 bytes each (measured)."""


class HeldParameters:
    """Bytes and seconds, rank by rank; ranks of one role share them.

    Args:
        plan: Who keeps what.
        costs: Devices and links.
        roles: By rank, what it has in common with ranks that do the same.
        stages: By rank, its stages.
    """

    def __init__(
        self,
        plan: Plan,
        costs: CostModel,
        roles: Sequence[object],
        stages: Sequence[tuple[int, ...]],
    ) -> None:
        self.plan, self.costs, self._roles, self._stages = plan, costs, roles, stages
        self.plain = not any(plan.apart(home) or home.tier != "device" for home in plan.homes)
        """Whether ranks keep what they compute with, and all of it."""
        self._by_name: dict[object, dict[str, HeldBytes]] = {}
        self._sums: dict[object, HeldBytes] = {}
        self._shared: dict[object, dict[str, list[Share]]] = {}

    def role(self, rank: int) -> object:
        """Equal for ranks that hold as much of everything."""
        weights = self.plan.state_weights
        return self._roles[rank], weights[rank] if weights else 1

    @cached_property
    def syncs(self) -> list[tuple[Home, list[Stretch]]]:
        """Who sums what with whom."""
        return all_syncs(self.plan)

    # ---- bytes ----------------------------------------------------------------------------------

    def of(self, rank: int) -> HeldBytes:
        """What a rank holds of all parameters."""
        role = self.role(rank)
        if role not in self._sums:
            if self.plain:
                self._sums[role] = self._whole_and_cut(rank)
            else:
                self._sums[role] = sum(self._named(rank).values(), HeldBytes())
        return self._sums[role]

    def shared(self, rank: int) -> HeldBytes:
        """What a rank keeps of what is shared out."""
        found = HeldBytes()
        for home in self.plan.homes:
            if home.zero and home.tier == "device" and (own := self._named(rank).get(home.name)):
                kept = own.updated or own.parameters
                away = kept if home.zero > 2 else 0.0
                found += HeldBytes(parameters=away, updated=own.updated)
        return found

    def of_layer(self, layer: StageLayer, rank: int) -> HeldBytes | None:
        """What a rank holds of a Layer's parameters; None where nothing is shared out."""
        if self.plain:
            return None
        held = self._named(rank)
        return sum((held[name] for name in layer.params if name in held), HeldBytes())

    def _whole_and_cut(self, rank: int) -> HeldBytes:
        """Where nothing is shared out: of thousands of parameters few are cut."""
        found = HeldBytes()
        for (stages, dtype), (frozen, trained) in self._whole.items():
            if not stages.isdisjoint(self._stages[rank]):
                for numel, trains in ((frozen, False), (trained, True)):
                    found += held_bytes(numel, dtype, trained=trains)
        for home in self.plan.homes:
            piece = self.plan.piece(home, rank) if home.splits else None
            if piece is not None:
                numel = math.prod(piece.shape(home.shape))
                found += held_bytes(numel, home.dtype, trained=self.costs.trainable[home.name])
        return found

    @cached_property
    def _whole(self) -> dict[tuple[frozenset[int], str], tuple[int, int]]:
        """Elements that no split cuts by the stages that use them, and dtype: frozen, trained."""
        found: dict[tuple[frozenset[int], str], tuple[int, int]] = {}
        for home in self.plan.homes:
            if not home.splits:
                key = frozenset(home.stages), home.dtype
                frozen, trained = found.get(key, (0, 0))
                if self.costs.trainable[home.name]:
                    trained += math.prod(home.shape)
                else:
                    frozen += math.prod(home.shape)
                found[key] = frozen, trained
        return found

    def _named(self, rank: int) -> dict[str, HeldBytes]:
        """By parameter, where some are shared out."""
        role = self.role(rank)
        if role not in self._by_name:
            found = {}
            for home in self.plan.homes:
                piece = self.plan.piece(home, rank)
                if piece is None:
                    continue
                numel = math.prod(piece.shape(home.shape))
                shares = self._shares(rank).get(home.name, ())
                kept = sum(how.numel(member) for how, member in shares)
                found[home.name] = held_bytes(
                    numel,
                    home.dtype,
                    trained=self.costs.trainable[home.name],
                    zero=home.zero,
                    part=kept / numel if numel else 1.0,
                    tier=home.tier,
                    fetched=home.fetched,
                    precision=self.plan.precision,
                )
            self._by_name[role] = found
        return self._by_name[role]

    def _shares(self, rank: int) -> dict[str, list[Share]]:
        role = self.role(rank)
        if role not in self._shared:
            self._shared[role] = shares_of(self.plan, rank, self.syncs)
        return self._shared[role]

    # ---- seconds --------------------------------------------------------------------------------

    def apply_s(self, rank: int) -> float:
        """The update, where it runs, and what it needs and changes moved there and back."""
        held, costs = self.of(rank), self.costs
        moved = 2.0 * held.brought * costs.training.state_tensors + held.host_moved
        if not self.plan.early:
            moved += 2.0 * held.written_back  # brought once more for it
        found = costs.apply_s(rank, held.updated + held.brought) + self.publish_s(rank)
        found += moved / self.costs.host_rate(rank)
        node = costs.cluster.devices[rank].node
        beside = sum(device.node == node for device in costs.cluster.devices)
        return found + held.host_updated * _HOST_TENSORS * beside / _HOST_BYTES_PER_S

    def publish_s(self, rank: int) -> float:
        """After an update: what others keep, and this rank computes with, comes here."""
        return sum(
            self._seconds("all_gather", rank, home)
            for home in self.plan.homes
            if home.zero in (1, 2) and self._stages_meet(rank, home)
        )

    def moves(
        self, layer: StageLayer, ranks: Sequence[int], forward: float, backward: float
    ) -> Moves:
        """Of a Layer whose computes take so long, what is moved for it on the slowest rank."""
        return Moves(
            forward=forward,
            backward=backward,
            gather=max(self.gather_s(layer, rank) for rank in ranks),
            scatter=max(self.scatter_s(layer, rank) for rank in ranks),
            back=max(self.back_s(layer, rank) for rank in ranks),
        )

    def gather_s(self, layer: StageLayer, rank: int) -> float:
        """Before a Layer runs: those of its parameters that are brought for each use."""
        homes = self._of(layer)
        found = sum(self._seconds("all_gather", rank, home) for home in homes if home.zero > 2)
        hosted = (home for home in homes if not home.resident and home.hosted)
        nbytes = sum(self._named(rank)[home.name].away for home in hosted)
        return found + nbytes / self.costs.host_rate(rank)

    def scatter_s(self, layer: StageLayer, rank: int) -> float:
        """After its backward: gradients that are summed with every micro-batch."""
        return sum(
            self._seconds("reduce_scatter", rank, home)
            for home in self._of(layer)
            if home.zero > 1 and self.costs.trainable[home.name]
        )

    def back_s(self, layer: StageLayer, rank: int) -> float:
        """Inside its backward: what is updated there goes back to the host."""
        if not self.plan.early or self.plain:
            return 0.0
        held = self._named(rank)
        nbytes = sum(held[name].written_back for name in layer.params if name in held)
        return nbytes / self.costs.host_rate(rank)

    def _seconds(self, kind: str, rank: int, home: Home) -> float:
        """Of all that is moved of one parameter, with its part of a collective's fixed time."""
        found = 0.0
        for how, _ in self._shares(rank).get(home.name, ()):
            ranks = how.slice.sync.ranks
            nbytes = how.slice.numel * item_bytes(home.dtype)
            # Many parameters travel together, so each has little of the latency.
            together = self.plan.bucket_bytes
            found += self.costs.fabric.collective(kind, ranks, together) * nbytes / together
        return found

    def _of(self, layer: StageLayer) -> list[Home]:
        return [self._homes[name] for name in layer.params if name in self._homes]

    @cached_property
    def _homes(self) -> dict[str, Home]:
        return {home.name: home for home in self.plan.homes if home.zero or home.fetched}

    def _stages_meet(self, rank: int, home: Home) -> bool:
        return any(stage in home.stages for stage in self._stages[rank])


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """Seconds of one Layer: of its computes, and of what is moved for it."""

    forward: float
    backward: float
    gather: float
    scatter: float
    back: float


class Moved:
    """Parameters and gradients that move while a stage computes, as far as nothing hides them.

    What the next Layer needs comes while this one computes; so do gradients leave. What goes back
    to the host passes what comes from there: links have two ways.
    """

    def __init__(self, some: bool) -> None:
        self.any = some
        self._layers: list[Moves] = []
        self._parked = [0.0, 0.0]

    def layer(self, moves: Moves, park: float) -> None:
        """The next Layer's computes, and what is moved for it; `park`: each way."""
        self._layers.append(moves)
        self._parked[0] += max(0.0, park - moves.forward)
        self._parked[1] += max(0.0, park - moves.backward)

    def forward_s(self) -> float:
        """What gathers add to a forward."""
        found = self._parked[0] + (self._layers[0].gather if self._layers else 0.0)
        for now, after in pairwise(self._layers):
            found += max(0.0, after.gather - now.forward)
        return found

    def backward_s(self, early: float) -> float:
        """What gathers, and sums in this part of the micro-batches, add to a backward."""
        found = self._parked[1] + (self._layers[-1].gather if self._layers else 0.0)
        back = self._layers[::-1]
        for now, after in pairwise(back):
            comes = after.gather + early * now.scatter
            found += max(0.0, max(comes, now.back) - now.backward)
        return found + (early * back[-1].scatter + back[-1].back if back else 0.0)
