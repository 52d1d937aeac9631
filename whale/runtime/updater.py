"""Updater: the optimizer of one rank, group by group, on gradients that are summed by then.

Place in the flow: behind `runtime.store`, which knows where parameters and gradients are. A step's
update is decided once, by numbers of all ranks (count, norm, overflow, who had a gradient), and
then done one apply group after another: what the update of one makes is gone before the next.

[Note: the division] Gradients are those of sums, and are divided by the global count once. That
takes no pass over them where it can be had for nothing: a rank that computes the whole batch at
once begins its backward with it (`ahead`), and a fused optimizer divides while it reads.

[Note: inside the backward] With `early`, a group is updated as soon as its gradients are complete,
while the backward still runs, and they are let go. That needs the count alone, which is known when
the last forward has run. A rank that misses a gradient, or has something to look at first, waits
for the end, where all say who had which. So a rank never knows what another one does in its
backward: what ranks gather from each other waits for the end, where all do it in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from whale.errors import WhaleError
from whale.ir.updates import Update
from whale.runtime.absent import Presence
from whale.runtime.grads import GradientBuckets
from whale.runtime.loss_scale import LossScale, overflow
from whale.runtime.masters import Masters
from whale.runtime.optimizer import (
    check_no_hooks,
    check_parameters,
    check_step,
    has_hooks,
    is_torchs,
    only,
    own_step,
    widens_itself,
)
from whale.runtime.state_tier import StateTier

Add = Callable[[torch.Tensor], torch.Tensor]
"""Adds numbers up over all ranks."""
Before = Callable[[], torch.Tensor]
"""Looks at all that could refuse a step; gives what its gradients are to be multiplied by."""


class Holder(Protocol):
    """Who has parameters and gradients: the store."""

    params: dict[str, nn.Parameter]
    kept: dict[str, nn.Parameter]
    streamed: frozenset[str]
    grads: GradientBuckets
    masters: Masters
    device: torch.device

    def brought(self, names: AbstractSet[str]) -> AbstractContextManager[None]:
        """Inside, what of these is kept on the host and updated on the device is there."""
        ...

    def settle(self) -> None:
        """Before the host reads what is kept."""
        ...

    def renew(self, names: AbstractSet[str] | None = None) -> None:
        """What is kept has changed: the part of bringing it to all that is this rank's alone."""
        ...

    def share(self, names: AbstractSet[str] | None = None) -> None:
        """The part that ranks gather from each other."""
        ...


class Updater:
    """One Step's updates.

    Args:
        store: What there is to update.
        optimizer: Over what this rank keeps and trains.
        trainable: Names of all parameters of the model that train, in its order.
        groups: By apply group, its parameters on this rank.
        ahead: Whether gradients come divided: the executor seeds the backward with the factor.
        in_pieces: Whether the optimizer has not all of the model, or parts of its parameters.
        max_norm: Above which the norm of all gradients is clipped.
        loss_scale: What gradients come multiplied with.
        waiting: Parameters whose state waits on the host.
    """

    def __init__(
        self,
        store: Holder,
        optimizer: torch.optim.Optimizer,
        trainable: Sequence[str],
        groups: Mapping[int, frozenset[str]],
        *,
        ahead: bool,
        in_pieces: bool,
        max_norm: float | None,
        loss_scale: LossScale | None,
        waiting: AbstractSet[str],
    ) -> None:
        self.store, self.optimizer, self.groups = store, optimizer, groups
        self.ahead, self.in_pieces, self.max_norm = ahead, in_pieces, max_norm
        self.loss_scale = loss_scale
        self._presence = Presence(trainable, store.params, store.device)
        self._members = self._all_members()
        self._own_step = own_step(optimizer)
        self._narrow = all(p.dtype.itemsize <= 4 for p in store.kept.values())
        self._state = StateTier(optimizer, store.kept, waiting, store.device) if waiting else None
        self._order = sorted(groups)
        self._before: Before | None = None
        self._may_begin: Callable[[], bool] = lambda: False
        self._factor: torch.Tensor | None = None
        """What gradients are multiplied by, once it is known."""
        self._everyone: torch.Tensor | None = None
        self._done: set[int] = set()
        self._step = 0
        self.says: dict[str, Any] = {}
        self.on_apply: Callable[[int], None] | None = None
        """Is told of each group as it is updated."""

    def begin(self, before: Before, may_begin: Callable[[], bool], step: int) -> None:
        """Before a step.

        Args:
            before: Called once, before anything is updated.
            may_begin: Whether that may be while the backward runs.
            step: Its number.
        """
        self._before, self._may_begin, self._step = before, may_begin, step
        self._factor = self._everyone = None
        self._done.clear()
        self.says = {}

    def _begun(self) -> torch.Tensor:
        if self._factor is None:
            assert self._before is not None
            factor = self._before()
            self._factor = torch.ones_like(factor) if self.ahead else factor
        return self._factor

    def is_done(self, name: str) -> bool:
        """Whether a parameter is updated already in the step that runs."""
        return any(name in self.groups[number] for number in self._done)

    def settle(self) -> None:
        """Before anybody reads the optimizer's state."""
        self.store.settle()
        if self._state is not None:
            self._state.settle()

    # ---- inside the backward --------------------------------------------------------------------

    @torch.no_grad()
    def early(self, group: int) -> None:
        """All of a group's gradients are on their way, and this rank had every one of them."""
        if self._factor is None and not self._may_begin():
            return
        factor = self._begun()
        names = self.groups.get(group, frozenset())
        self.store.grads.finish(names)
        self._run(group, None if self.ahead else factor, ())
        self.store.grads.let_go(names)

    # ---- after it -------------------------------------------------------------------------------

    def apply(self, update: Update, add: Add) -> dict[str, Any]:
        """Updates a group, if it is not yet; all ranks call it.

        Returns:
            What there is to say of the step: the norm of all gradients before it was clipped, the
            loss scale it was computed with, whether it was left out.
        """
        first = self._everyone is None
        everyone = self._decide(add) if first else self._everyone
        assert everyone is not None and self._factor is not None
        if self.says.get("overflowed"):
            return self.says
        if update.number not in self._done:
            absent = self._presence.absent(self.store.grads.touched, everyone[2:])
            plain = self.ahead and self.loss_scale is None and self.max_norm is None
            self._run(update.number, None if plain else self._factor, absent)
        self.store.share(self.groups.get(update.number, frozenset()))
        return self.says

    def _decide(self, add: Add) -> torch.Tensor:
        """What all ranks together say of this step's gradients; sets the factor."""
        grads, scale, device = self.store.grads, self.loss_scale, self.store.device
        factor = self._begun()
        squares = grads.square_sum(device) if self.max_norm is not None else factor
        bad = overflow(grads.all(), device) if scale is not None else squares
        flags = self._presence.flags(grads.touched)
        parts = [squares.double().reshape(1), bad.double().reshape(1), flags]
        everyone = self._everyone = add(torch.cat(parts))
        if scale is not None:
            overflowed = bool(everyone[1] > 0)
            self.says = {"loss_scale": scale.value, "overflowed": overflowed}
            count, factor = float(factor), factor / scale.seed
            scale.after(overflowed, count)
        if self.max_norm is not None and not self.says.get("overflowed"):
            norm = everyone[0].sqrt() * factor
            self.says["grad_norm"] = norm
            factor = factor * (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
        self._factor = factor
        return everyone

    def _run(self, group: int, factor: torch.Tensor | None, absent: Sequence[str]) -> None:
        """One update of a group's parameters, by their gradients times `factor`."""
        self._done.add(group)
        if self.on_apply is not None:
            self.on_apply(group)
        names = self.groups.get(group, frozenset())
        self._check_optimizer()
        with (
            self._state_of(group),
            self._brought(names),
            self._wide(names),
            self._only(names),
        ):
            self.store.grads.complete(names, absent)
            self._update(factor, names)
        self.store.renew(names)

    @contextmanager
    def _brought(self, names: frozenset[str]) -> Iterator[None]:
        """Inside, what waits on the host between steps is here, and so is its state."""
        with self.store.brought(names):
            for name in names & self.store.streamed:
                kept = self.store.kept[name]
                state = self.optimizer.state.get(kept, {})
                for key, value in state.items():  # a checkpoint brings it to where the weights wait
                    if isinstance(value, torch.Tensor) and value.dim():
                        state[key] = value.to(kept.device)
            yield

    def _wide(self, names: frozenset[str]) -> AbstractContextManager[None]:
        """Inside, half precision is updated as float32, by the optimizer itself where it can."""
        masters, optimizer = self.store.masters, self.optimizer
        if masters.kind == "split" or not widens_itself(optimizer):
            return masters.widened(names, self._step)
        vars(optimizer)["rounding"] = masters.roundings(names, self._step)
        return nullcontext()

    def _state_of(self, group: int) -> AbstractContextManager[None]:
        """Inside, a group's state is where it is used; the next one's is on its way."""
        if self._state is None:
            return nullcontext()
        later = self._order[self._order.index(group) + 1 :][:1] if group in self.groups else []
        after = self.groups[later[0]] if later else frozenset()
        return self._state.here(self.groups.get(group, frozenset()), after)

    def _only(self, names: AbstractSet[str]) -> AbstractContextManager[None]:
        """Inside, the optimizer has the parameters of one group."""
        if len(self.groups) == 1:
            return nullcontext()
        kept = self.store.kept
        return only(self.optimizer, {id(kept[name]) for name in names if name in kept})

    def _check_optimizer(self) -> None:
        """A script may have hung something on it, or added parameters, since the last step."""
        if self.in_pieces:
            check_no_hooks(self.optimizer)
            check_step(self.optimizer, self._own_step)
        members = self._all_members()
        if members == self._members:
            return
        check_parameters(self.optimizer, list(self.store.kept.items()))
        if self.in_pieces and not self._members <= members:
            raise WhaleError(
                "the optimizer's groups lost parameters after wh.parallelize; ranks hold different "
                "parts of the model, so what is left of a list is not the same on all of them",
                hint="leave parameters out in the factory that is given to wh.parallelize, or set "
                "the group's lr to 0",
            )
        self._members = members

    def _all_members(self) -> set[int]:
        return {id(p) for group in self.optimizer.param_groups for p in group["params"]}

    def _update(self, factor: torch.Tensor | None, names: frozenset[str]) -> None:
        """One step of the optimizer on gradients times `factor`."""
        optimizer = self.optimizer
        if factor is None or not self._divides():
            if factor is not None:
                self.store.grads.scale(factor, names)
            with torch.no_grad():  # one of the user's may leave it out: gradients are views here
                optimizer.step()
            return
        # As torch's GradScaler hands it over.
        vars(optimizer)["grad_scale"] = (1.0 / factor).float().reshape(())
        try:
            optimizer.step()
        finally:
            del vars(optimizer)["grad_scale"]

    def _divides(self) -> bool:
        """Whether the optimizer's step divides by `grad_scale`, in the kernel that reads gradients.

        That number is a float32, so nothing here may be exact to more digits; and nobody else may
        look at the gradients first.
        """
        optimizer = self.optimizer
        return (
            self._narrow
            and is_torchs(optimizer)
            and not has_hooks(optimizer)
            and getattr(optimizer, "_step_supports_amp_scaling", False)
            and all(group.get("fused") for group in optimizer.param_groups)
        )
