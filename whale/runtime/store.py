"""ParameterStore: the parameters of one rank, from where they are kept to their update.

Place in the flow: made by `engine.lower`, which lays the parameters out; Step gives it the
optimizer and asks it for sums and updates. What a rank computes with and what it keeps, updates and
saves may differ (`ir.keeping`): the store moves between the two. Nobody else touches a parameter's
data or gradient, or calls the optimizer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from whale.errors import WhaleError
from whale.ir.homes import Slice, Sync, rank_slices
from whale.ir.keeping import shared
from whale.ir.plan import Plan
from whale.ir.sharding import Piece
from whale.ir.updates import RankStep, Update
from whale.runtime.grads import GradientBuckets
from whale.runtime.groups import Groups, Later
from whale.runtime.half import HalfSums
from whale.runtime.masters import Masters
from whale.runtime.moving import Mover
from whale.runtime.shards import Shards
from whale.runtime.units import Unit
from whale.runtime.updater import Add, Before, Updater


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A rank's parameters: what it computes with, and what it keeps.

    One parameter stands in both where they are the same.
    """

    params: dict[str, nn.Parameter]
    pieces: dict[str, Piece]
    kept: dict[str, nn.Parameter]
    kept_pieces: dict[str, Piece]
    lower: dict[str, torch.Tensor]
    """The lower halves of what is kept in two."""


_OUTLIVING = 2
"""Layers whose streamed weights stay from their backward to their update."""


class ParameterStore:
    """What a rank holds of the model, its gradients and its optimizer.

    Args:
        plan: Who keeps what.
        rank: This one.
        held: Its parameters.
        groups: The communicators.
        planned: What it does in a step.
        half: Sums in half precision, if asked for.
        device: Where it computes.
        seed: Of what is rounded by chance.
    """

    updater: Updater

    def __init__(
        self,
        plan: Plan,
        rank: int,
        held: Held,
        groups: Groups,
        planned: RankStep,
        half: HalfSums | None,
        device: torch.device,
        seed: int,
    ) -> None:
        self.plan, self.rank, self.device = plan, rank, device
        self.params, self.pieces = held.params, held.pieces
        self.kept, self.kept_pieces = held.kept, held.kept_pieces
        self.masters = Masters(
            plan.precision.master if plan.precision.parameters else "none",
            held.kept,
            held.kept_pieces,
            held.lower,
            {home.name: home.shape for home in plan.homes},
            seed,
        )
        self._apart = {n: None for n, p in held.kept.items() if p is not held.params[n]}
        self._groups = groups
        self._mover = Mover(device)
        self._tiers = {home.name: home.tier for home in plan.homes}
        self.absent = plan.away & self.params.keys()
        """Parameters that are here only while their Layer runs."""
        self.streamed = frozenset(n for n in held.kept if self._tiers[n] == "weights")
        """Of these, those that the device updates and the host keeps."""
        self._leaving: list[Callable[[], None]] = []
        self._outlived: deque[Unit] = deque()
        """Whose weights are here after their backward, for their update."""
        self.units = self._make_units()
        self._unit_of = {name: unit for unit in self.units.values() for name in unit.params}
        shards = {
            number: self._shards(bucket.slices)
            for number, bucket in enumerate(planned.buckets)
            if bucket.zero
        }
        self._published = [s for s in shards.values() if self.absent.isdisjoint(s.names)]
        mine = set(plan.stages_of(rank))
        rounds: dict[int, int] = {}
        for action in planned.actions:
            if action.kind == "G":
                assert isinstance(action, Update)
                rounds[action.number] = rounds.get(action.number, 0) + 1
        self.grads = GradientBuckets(
            planned.buckets,
            self.params,
            self.pieces,
            groups,
            rank,
            {home.name: set(home.stages) & mine for home in plan.homes},
            half,
            shards,
            self.kept,
            rounds,
            watches_all=plan.early,
        )

    # ---- between what is kept and what is computed with -----------------------------------------

    def _shards(self, slices: Iterable[Slice]) -> Shards:
        """Slices of one Sync that its ranks share out."""
        found = [shared(self.plan, piece, self.pieces[piece.home.name]) for piece in slices]
        comm = self._groups.of(found[0].slice.sync.ranks)
        return Shards(comm, found, self.pieces, self.kept_pieces)

    def _make_units(self) -> dict[str, Unit]:
        """By Layer, the parameters that are here only while it runs."""
        found: dict[str, Unit] = {}
        for stage in self.plan.stages_of(self.rank):
            last: Unit | None = None
            for layer in self.plan.stages[stage].layers:
                names = [name for name in layer.params if name in self.absent]
                if not names or layer.path in found:
                    continue
                unit = found[layer.path] = self._unit(layer.path, names)
                unit.before = last
                if last is not None:
                    last.after = unit
                last = unit
        return found

    def _unit(self, path: str, names: Sequence[str]) -> Unit:
        slices: dict[Sync, list[Slice]] = {}
        for piece in rank_slices(self.plan, self.rank):
            if piece.home.name in names and piece.home.zero:
                slices.setdefault(piece.sync, []).append(piece)
        shards = [self._shards(own) for own in slices.values()]
        shared = {name for each in shards for name in each.names}
        alone = [name for name in names if name not in shared]
        params = {name: self.params[name] for name in names}
        # As they are computed with: a rehearsal widens them.
        like = {name: param.new_empty(0) for name, param in params.items()}
        shapes = {n: self.pieces[n].shape(self.plan.home(n).shape) for n in names}

        @torch.no_grad()
        def fetch() -> Callable[[], dict[str, torch.Tensor]]:
            begun = []
            coming = {n: self._mover.fetch(self.kept[n], like[n].dtype, often=True) for n in alone}
            for each in shards:
                mine = each.mine(self.kept, like[each.names[0]])
                begun.append((each, each.comm.start_gather(mine, each.sizes)))

            @torch.no_grad()
            def arrived() -> dict[str, torch.Tensor]:
                found = {n: like[n].new_empty(shapes[n]) for n in shared}
                for each, later in begun:
                    each.unpack(later.wait(), found)
                return found | {name: wait() for name, wait in coming.items()}

            return arrived

        return Unit(path, params, fetch)

    def unit_of(self, name: str) -> Unit | None:
        """What brings a parameter that is not here; None: nothing does."""
        return self._unit_of.get(name)

    def present(self) -> dict[str, nn.Parameter]:
        """What this rank computes with, as far as it is here between steps."""
        return {name: p for name, p in self.params.items() if name not in self.absent}

    def begin(self, before: Before, may_begin: Callable[[], bool], step: int) -> None:
        """Before a step; all is as of `Updater`."""
        self._leaving.clear()  # what comes to the device waits for them there
        while self._outlived:
            self._outlived.popleft().drop()
        for unit in self.units.values():
            unit.changed.clear()
        self.refuse_writes()
        self.grads.begin()
        self.updater.begin(before, may_begin, step)

    def reduce(self, update: Update) -> None:
        """A bucket of gradients is complete: its sum over ranks begins, if it has not."""
        self.grads.reduce(update.number)

    def wait(self) -> None:
        """All sums are there."""
        self.grads.wait()

    @contextmanager
    def brought(self, names: AbstractSet[str]) -> Iterator[None]:
        """Inside, what of these is kept on the host and updated on the device is there."""
        host: dict[str, torch.Tensor] = {}
        for name in names & self.streamed:
            kept = self.kept[name]
            host[name] = kept.data
            unit = self._unit_of.get(name)  # what no Layer runs with has none
            found = None if unit is None else unit.held(name, kept.dtype)
            kept.data = self._mover.fetch(kept.data, kept.dtype)() if found is None else found
        try:
            yield
        finally:
            for name, waiting in host.items():
                kept = self.kept[name]
                here, kept.data = kept.data, waiting
                self._leaving.append(self._mover.park(here, waiting))

    def _outlives(self, unit: Unit) -> bool:
        """A Layer's last backward is over; the update that follows wants its weights once more.

        Where that waits for other gradients, the weights of a few Layers stay here, not of all.
        """
        if not self.grads.is_last(unit.params):
            return False
        self._outlived.append(unit)
        if len(self._outlived) > _OUTLIVING:
            self._outlived.popleft().drop()
        return True

    def settle(self) -> None:
        """Before the host reads what is kept: all copies are complete."""
        for done in self._leaving:
            done()
        self._leaving.clear()

    def moved_bytes(self) -> tuple[int, int]:
        """What of the weights came from the host so far, and what went back."""
        return self._mover.brought, self._mover.returned

    def value(self, name: str) -> torch.Tensor:
        """What this rank keeps of a parameter, in the dtype in which it is updated."""
        self.settle()
        return self.masters.value(name)

    def assign(self, name: str, value: torch.Tensor) -> None:
        """Gives what this rank keeps of a parameter another value; `publish` must follow."""
        self.settle()
        self.masters.assign(name, value)

    def gradient(self, name: str) -> torch.Tensor | None:
        """What this rank keeps of a gradient, if it keeps any of the parameter."""
        kept = self.kept.get(name)
        return None if kept is None else kept.grad

    def refuse_writes(self) -> None:
        """A script may write to what the optimizer holds: what computes would not hear of it."""
        for name, version in self._versions.items():
            if self.kept[name]._version != version:
                raise WhaleError(
                    f"{name} was written to between two steps, by way of the optimizer's "
                    "parameters; what computes with it is another tensor (zero.level, amp.level, "
                    "offload.level), which does not follow",
                    hint="change weights with step.load_state_dict(...)",
                )

    def _note_versions(self) -> None:
        """What others compute with a copy of, by how often it was written to."""
        copied = (name for name in self._apart if name not in self.absent)
        self._versions = {name: self.kept[name]._version for name in copied}

    def publish(self, names: AbstractSet[str] | None = None) -> None:
        """What is kept has changed: brings it to all that compute with it; None: all of it."""
        self.renew(names)
        self.share(names)
        self._note_versions()

    @torch.no_grad()
    def renew(self, names: AbstractSet[str] | None = None) -> None:
        """The part of it that no other rank has to do with."""
        for unit in self.units.values():
            if names is None or not unit.params.keys().isdisjoint(names):
                unit.settle(names)
        shared = {name for shards in self._published for name in shards.names} | self.absent
        for name in self._apart if names is None else names:
            if name in self._apart and name not in shared:
                self.params[name].copy_(self.kept[name], non_blocking=True)

    @torch.no_grad()
    def share(self, names: AbstractSet[str] | None = None) -> None:
        """The part that ranks gather from each other: all of them, in one order."""
        coming: list[tuple[Shards, Later]] = []
        for shards in self._published:
            if names is not None and shards.names[0] not in names:
                continue
            like = self.params[shards.names[0]].new_empty(0)
            mine = shards.mine(self.kept, like)
            coming.append((shards, shards.comm.start_gather(mine, shards.sizes)))
        for shards, later in coming:
            shards.unpack(later.wait(), self.params)

    # ---- the update -----------------------------------------------------------------------------

    def train(self, optimizer: torch.optim.Optimizer, trainable: Sequence[str], **how: Any) -> None:
        """From here on it can update; `how` is as of `Updater`."""
        homes = {home.name: home for home in self.plan.homes}
        groups: dict[int, set[str]] = {}
        for name in self.params:
            groups.setdefault(homes[name].apply_group, set()).add(name)
        names = {number: frozenset(own) for number, own in groups.items()} or {0: frozenset()}
        waiting = {name for name in self.kept if self._tiers[name] == "state"}
        self.updater = Updater(self, optimizer, trainable, names, waiting=waiting, **how)
        if self.plan.early:
            self.grads.early = self.updater.early
            for unit in self.units.values():
                if not self.streamed.isdisjoint(unit.params):
                    unit.outlives = self._outlives
        self.grads.watch()
        self._note_versions()

    def apply(self, update: Update, add: Add) -> dict[str, Any]:
        """Updates a group's parameters by their gradients; says what there is to say of it."""
        self.wait()
        says = self.updater.apply(update, add)
        self._note_versions()
        return says

    def forget(self) -> None:
        """Ranks have parted: nothing that others have begun is waited for."""
        for unit in self.units.values():
            unit.forget()

    def close(self) -> None:
        """Gives all memory back.

        Modules, hooks and graphs refer to parameters in circles that are collected late or never;
        it goes now. The user's own parameters have their own.
        """
        self.settle()
        self.grads.close()
        self.updater.optimizer.state.clear()
        for parameter in (*self.params.values(), *self.kept.values()):
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        self.params.clear()
        self.kept.clear()
