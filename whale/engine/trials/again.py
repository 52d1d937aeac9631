"""Again: Layers that the plan recomputes, or whose weights it brings, beside the same without.

Place in the flow: called by `engine.trials.look` for such plans. What a Layer finds outside of its
arguments (an attribute that another one sets, a table that grows) may be another thing by the time
its forward runs again, and weights that are here only while it runs may be read when it does not;
no trace shows that, a trial does. Two micro-batches run as they will, and what they give must be
what the model gives.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from whale.engine.capture.captured import Captured
from whale.engine.lower.recomputing import recompute_layers
from whale.engine.state.copies import copied
from whale.engine.state.outside import as_it_was
from whale.engine.trials.relay import MOST_TRIED, Ran, Team, difference, few_rows, two_feeds
from whale.errors import CaptureError
from whale.ir.plan import Plan, StageLayer
from whale.nn.forwards import replace_forward, take_hooks
from whale.runtime import batch as batches
from whale.runtime.recomputed import HINT
from whale.runtime.units import AcquiredForward, Unit, stand_in


def check_again(
    model: nn.Module,
    batch: Any,
    loss: batches.Loss | None,
    plan: Plan,
    captured: Captured,
    changes: Collection[str],
) -> None:
    """Raises CaptureError, with the Layer, where what a plan puts around Layers changes the result.

    Nothing is tried on the meta device, nor where the model's own code does not run on a few rows.
    """
    tensors = [*model.parameters(), *model.buffers(), *batches.leaves(batch)]
    size = sum(p.numel() for p in model.parameters())
    if any(t.is_meta for t in tensors) or not batches.num_rows(batch) or size > MOST_TRIED:
        return
    layers = {x.path: x for stage in plan.stages for x in stage.layers}
    trial = _Trial(model, batch, loss, plan, captured, size)

    def again(chosen: Sequence[StageLayer], modules: Mapping[str, nn.Module]) -> None:
        recompute_layers(chosen, modules, changes)

    def bring(chosen: Sequence[StageLayer], modules: Mapping[str, nn.Module]) -> Update:
        return _bring(chosen, modules, plan.away)

    trial.judge(
        [x for x in layers.values() if x.recompute],
        again,
        "run again in the backward, does not compute what it did in the forward",
        HINT,
    )
    trial.judge(
        [x for x in layers.values() if not plan.away.isdisjoint(x.params)],
        bring,
        "with weights that are there only while it runs, does not compute what it does with them",
        "its code may keep no view of a weight for later forwards; and code that runs in the "
        "backward (a hook, an autograd.Function) may read what was saved for it "
        "(ctx.save_for_backward), and no weight by other ways; leave the Layer out of "
        "offload.layers, and zero.level below v2",
    )


Update = Callable[[], None]


def _bring(
    layers: Sequence[StageLayer], modules: Mapping[str, nn.Module], away: Collection[str]
) -> Update:
    """Their weights come when a Layer runs, and are gone afterwards; gives an update of them."""
    names = {id(p): n for n, p in modules[""].named_parameters()}
    kept = {n: p.data for n, p in modules[""].named_parameters() if n in away}
    brought: set[str] = set()
    for layer in layers:
        module = modules[layer.path]
        own = {names[id(p)]: p for p in module.parameters()}
        params = {n: p for n, p in own.items() if n in away and n not in brought}
        brought |= params.keys()
        unit = Unit(layer.path, params, partial(partial, _copies, {n: kept[n] for n in params}))
        for param in params.values():
            param.data = stand_in(param.data.new_empty(0), tuple(param.shape))
        replace_forward(module, AcquiredForward(take_hooks(module), unit))

    @torch.no_grad()
    def update() -> None:
        for value in kept.values():
            if value.is_floating_point() or value.is_complex():
                value.mul_(0.75)

    return update


def _copies(values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in values.items()}


Around = Callable[[Sequence[StageLayer], Mapping[str, nn.Module]], Update | None]
"""Puts something around Layers of a copy, which has these modules; may give an update of it, which
happens between two micro-batches.
"""


@dataclass(slots=True)
class _Trial:
    model: nn.Module
    batch: Any
    loss: batches.Loss | None
    plan: Plan
    captured: Captured
    size: int

    def judge(self, layers: Sequence[StageLayer], around: Around, said: str, hint: str) -> None:
        """Raises where they do not compute the same."""
        if not layers:
            return
        try:
            want = self._run((), around)
        except Exception:  # noqa: BLE001 - the step itself says what is wrong
            return
        what = self._differs(want, layers, around)
        if not what:
            return
        # The first that differs by itself; else all of them together.
        one = next((x.path for x in layers if self._differs(want, [x], around)), None)
        who = "all Layers together" if one is None else one or "the model"
        raise CaptureError(f"{who}, {said}: {what}", hint=hint)

    def _differs(self, want: Ran, layers: Sequence[StageLayer], around: Around) -> str:
        """What is not the same; empty: all is."""
        try:
            got = self._run(layers, around)
        except Exception as error:  # noqa: BLE001 - whatever the user's code raises there
            return f"{type(error).__name__}: {error}"[:600]
        return difference(want, got)

    def _run(self, layers: Sequence[StageLayer], around: Around) -> Ran:
        team = Team(self.model, [], self.captured, True, self.size)
        if team.model is self.model:  # too large to copy: the values stay its own
            memo: dict[int, Any] = {
                id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad)
                for p in self.model.parameters()
            }
            team.model = copied(self.model, memo)
            around(layers, dict(team.model.named_modules()))
            update = None
        else:
            update = around(layers, dict(team.model.named_modules()))
        fed = two_feeds(self.batch, few_rows(self.batch, self.size), team.device)
        overlaps = len(self.plan.stages) > 1 and self.plan.num_micro_batch > 1
        overlaps = overlaps and bool(layers) and update is None
        with as_it_was(team.model, self.loss), torch.enable_grad():
            return team.alone(fed, self.loss, overlaps=overlaps, between=update)
