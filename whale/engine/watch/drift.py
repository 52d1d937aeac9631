"""Drift: what several ranks hold of one tensor must stay one tensor. Looked at while training.

Place in the flow: asked by Step after its first steps and then ever more rarely (1, 2, 4, 8, ...).
Capture and the trial at build time see most of what a forward changes (`engine.state.changes`);
code that they could not run, or that writes around torch (`buffer.data`), shows only here. A
difference is an error that names the tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn

from whale.engine.lower.lowered import Lowered
from whale.engine.state.changes import Changes, attributes_of, changed, stages_running
from whale.engine.state.rarely import rarely
from whale.errors import WhaleError
from whale.ir.plan import Plan

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.complex128: 1e-9}


class Drift:
    """Compares what forwards change over the ranks that run them: buffers, weights, attributes.

    Args:
        model: The user's own.
        plan: Who runs what.
        lowered: This rank's copy.
        rank: This one.
        changes: What is known of what forwards change.
    """

    def __init__(
        self, model: nn.Module, plan: Plan, lowered: Lowered, rank: int, changes: Changes
    ) -> None:
        self.plan, self.lowered, self.rank = plan, lowered, rank
        whole = {home.name for home in plan.homes if not home.splits}
        self.copies = frozenset(_copies(plan)) & whole
        """Weights that several members of a replica hold whole, each computing its gradient."""
        own_names = changes.names | self.copies
        names = [n for n, _ in model.named_parameters() if n in own_names and n in whole]
        kept = set(model.state_dict())
        buffers = [n for n, _ in model.named_buffers() if n in kept or not changes.tried]
        own = {id(norm.module) for norm in lowered.own_norms}
        apart = {path for path, module in lowered.model.named_modules() if id(module) in own}
        names += [n for n in buffers if n.rpartition(".")[0] not in apart]
        self.ranks = {name: self._holders(name) for name in names}
        self.ranks = {name: ranks for name, ranks in self.ranks.items() if len(ranks) > 1}
        self.replicas = [
            s.virtual_device.active for s in plan.stages if len(s.virtual_device.active) > 1
        ]
        self.known = changes.names if changes.tried else None
        """What was seen to change at build, and was judged then; None: nobody looked."""
        self.start = attributes_of(lowered.model) if self.replicas else {}

    def _holders(self, name: str) -> tuple[int, ...]:
        stages = stages_running(self.plan, name.rpartition(".")[0])
        return tuple(sorted({r for s in stages for r in self.plan.stages[s].virtual_device.active}))

    def check(self, num_steps: int) -> None:
        """After step `num_steps`, where it is time; all ranks call it."""
        if not rarely(num_steps):
            return
        self._check_attributes(num_steps)
        if not self.ranks:
            return
        # Rounding takes copies apart too, ever further; what is wrong shows in the first steps.
        seen = {n: r for n, r in self.ranks.items() if num_steps <= 64 or n not in self.copies}
        mine = self._tensors()
        table = torch.full((len(seen), 3), torch.nan, dtype=torch.float64)
        for row, (name, ranks) in enumerate(seen.items()):
            if self.rank in ranks and name in mine:
                table[row] = _sums(mine[name])
        tables = [torch.empty_like(table, device=self.lowered.device) for _ in self._world()]
        dist.all_gather(tables, table.to(self.lowered.device))
        every = torch.stack(tables).cpu()
        for row, (name, ranks) in enumerate(seen.items()):
            dtype = mine[name].dtype if name in mine else torch.float32
            different = _different(every[list(ranks), row], dtype)
            if different:
                pair = f"{ranks[0]} and {ranks[different]} differ"
                raise self._refusal(name, f"ranks {list(ranks)} after step {num_steps} ({pair})")

    def _refusal(self, name: str, where: str) -> WhaleError:
        if name in self.copies:
            return WhaleError(
                f"{name} is no longer the same on {where}: each of them computes its gradient, and "
                "they found different ones, so a module that is split over them does something "
                "that was not seen when it was tried",
                hint="code inside a split must not depend on a length, a value or an attribute "
                "that is met late: give wh.parallelize such a batch, or `replicate` the module",
            )
        return WhaleError(
            f"{name} is no longer the same on {where}: the forward changes it by the rows that a "
            "rank has",
            hint="exact over replicas are batch norms and wh.nn.MoE; give its stage one "
            "replica, or compute it from values that are the same for all rows",
        )

    def _check_attributes(self, num_steps: int) -> None:
        """Attributes that no forward changed at build, and one changed since, by its own rows."""
        if not self.replicas or self.known is None:
            return
        model = self.lowered.model
        moved = changed(self.start, attributes_of(model)) - self.known
        mine = {name: repr(token) for name, token in attributes_of(model, moved).items()}
        every: list[dict[str, str]] = [{} for _ in self._world()]
        dist.all_gather_object(every, mine)
        for ranks in self.replicas:
            for name in sorted({name for rank in ranks for name in every[rank]}):
                found = [every[rank].get(name) for rank in ranks]
                other = next((r for r, x in zip(ranks, found, strict=True) if x != found[0]), None)
                if other is not None and len(self._holders(name)) == len(ranks):
                    raise WhaleError(
                        f"the forward began to change {name}, and after step {num_steps} ranks "
                        f"{ranks[0]} and {other} no longer have the same there: each changes it by "
                        "its own rows",
                        hint="exact over replicas are batch norms and wh.nn.MoE; give its stage "
                        "one replica, or compute it from values that are the same for all rows",
                    )

    def _world(self) -> Iterable[int]:
        return range(self.plan.num_ranks)

    def _tensors(self) -> Mapping[str, torch.Tensor]:
        model = self.lowered.model
        return {**self.lowered.store.present(), **dict(_buffers(model))}


def _buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if not buffer.is_meta:
            yield name, buffer


def _copies(plan: Plan) -> Iterator[str]:
    """Parameters of stages whose replicas have several devices."""
    for home in plan.homes:
        devices = [plan.stages[s].virtual_device for s in home.stages]
        if any(len(r.ranks) > 1 for device in devices for r in device.replicas):
            yield home.name


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """Two sums of its values, and how many there are: alike where the values are nearly so.

    Not the bits: members of a split compute copies, and on a GPU two sums may differ in the last.
    """
    values = tensor.detach().flatten()
    if values.is_complex():
        values = torch.view_as_real(values).flatten()
    values = values.double().nan_to_num(nan=3.0, posinf=5.0, neginf=-7.0)
    places = torch.linspace(1.0, 2.0, values.numel(), dtype=torch.float64, device=values.device)
    count = places.new_tensor(float(values.numel()))
    return torch.stack([values.abs().sum(), (values * places).sum(), count]).cpu()


def _different(rows: torch.Tensor, dtype: torch.dtype) -> int:
    """The first row that is not like row 0; 0: all are alike."""
    exact = not (dtype.is_floating_point or dtype.is_complex)
    tolerance = 0.0 if exact else _TOLERANCE.get(dtype, 1e-5 if dtype.itemsize >= 4 else 1e-2)
    scale = rows[0].abs().clamp(min=1e-12)
    # A NaN is a rank that has none of it.
    off = ((rows - rows[0]).abs() > tolerance * scale).any(1)
    return int(off.nonzero()[0]) if off.any() else 0
