"""Comparison: what a rank holds against the truth, tensor by tensor, and its report.

Place in the flow: used by `on_rank` after every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from whale.engine.lower.lowered import stage_of_module
from whale.engine.step import Step
from whale.ir.sharding import WHOLE, Piece
from whale.verification.compare import ROUNDING, error_of, scales
from whale.verification.one_device import slots_of
from whale.verification.task import Reference, Task
from whale.verification.verdict import Mismatch

Truth = Mapping[str, Tensor | None]


@dataclass(slots=True, kw_only=True)
class Report:
    """What one rank found: in its own pieces, and in the tensors gathered from all ranks.

    Attributes:
        worst: By check, the greatest error.
        made: The checks that came to their end.
        refused: The check that Whale refused and the reason; no reason: another rank has it.
    """

    worst: dict[str, float] = field(default_factory=dict)
    local: list[Mismatch] = field(default_factory=list)
    gathered: list[Mismatch] = field(default_factory=list)
    made: list[str] = field(default_factory=list)
    refused: tuple[str, str] | None = None


class Comparison:
    """Collects what differs on this rank."""

    def __init__(
        self, task: Task, reference: Reference, report: Report, step: Step, rank: int
    ) -> None:
        self.step, self.rank, self.report = step, rank, report
        self.tolerance = task.allowed(reference.float32)
        self.rounding = ROUNDING[task.dtype]
        self.check = "steps"

    def _compare(
        self,
        kind: str,
        number: int,
        truth: Truth,
        got: Mapping[str, Tensor],
        pieces: Mapping[str, Piece],
        into: list[Mismatch],
    ) -> None:
        divide = scales(kind, truth, self.rounding)
        for name, tensor in got.items():
            piece = pieces.get(name, WHOLE)
            want = truth[name]
            part = torch.zeros_like(tensor) if want is None else part_of(want, piece)
            error, location = error_of(tensor, part, divide[name])
            self._note(kind, number, name, error, _in_whole(location, piece), into)

    def _note(
        self,
        kind: str,
        number: int,
        name: str,
        error: float,
        location: tuple[int, ...],
        into: list[Mismatch],
    ) -> None:
        worst = self.report.worst
        worst[self.check] = max(worst.get(self.check, 0.0), error)
        if not error <= self.tolerance:
            into.append(
                Mismatch(
                    kind=kind,
                    tensor=name,
                    rank=self.rank,
                    step=number,
                    error=error,
                    location=location,
                    check=self.check,
                )
            )

    def loss(self, number: int, metrics: Mapping[str, Any], truth: Mapping[str, Any]) -> None:
        """The mean over the global batch, which every rank is told; and the norm when clipping."""
        local = self.report.local
        self._compare("loss", number, {"loss": truth["loss"]}, {"loss": metrics["loss"]}, {}, local)
        if truth["norm"] is not None:
            norm = {"grad_norm": truth["norm"]}
            got = {"grad_norm": metrics["grad_norm"]}
            self._compare("gradient", number, norm, got, {}, local)

    def evaluation(self, number: int, metrics: Mapping[str, Any], truth: Mapping[str, Any]) -> None:
        """The same in eval mode."""
        want, got = {"loss": truth["evaluation"]}, {"loss": metrics["loss"]}
        self._compare("evaluation", number, want, got, {}, self.report.local)
        self.outputs(number, metrics, truth["evaluation outputs"])

    def outputs(self, number: int, metrics: Mapping[str, Any], truth: Truth) -> None:
        """The named outputs, as far as this Step was asked for any."""
        got = {name: metrics[name] for name in truth if name in metrics}
        if got:
            own, self.check = self.check, "outputs"
            self._compare("output", number, truth, got, {}, self.report.local)
            self.check = own

    def gradients(self, number: int, truth: Mapping[str, Any]) -> None:
        """This rank's gradients: summed, divided and clipped, as the optimizer saw them.

        None is as good as zeros here; what becomes of the weights is compared as well.
        """
        if self.step.plan.early:
            return  # let go by then: what they made of the weights is compared
        store = self.step._lowered.store
        got = {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in store.kept.items()
            if p.requires_grad
        }
        self._compare(
            "gradient", number, truth["gradients"], got, store.kept_pieces, self.report.local
        )

    def state(self, number: int, truth: Mapping[str, Any]) -> None:
        """This rank's weights, and the buffers of the stages it runs."""
        lowered = self.step._lowered
        store = lowered.store
        for held, pieces in (
            ({name: store.value(name) for name in store.kept}, store.kept_pieces),
            (store.present(), store.pieces),
        ):
            self._compare("weight", number, truth["weights"], held, pieces, self.report.local)
        plan = self.step.plan
        buffers = {
            name: buffer
            for name, buffer in lowered.model.named_buffers()
            if stage_of_module(plan, name.rpartition(".")[0]) in plan.stages_of(self.rank)
        }
        self._compare("buffer", number, truth["buffers"], buffers, {}, self.report.local)

    def optimizer(self, number: int, truth: Mapping[str, Any]) -> None:
        """What the optimizer keeps of each piece; of a parameter without gradient it keeps none."""
        lowered = self.step._lowered
        own = {n: p for n, p in lowered.store.kept.items() if p.requires_grad}
        wants: dict[str, Tensor] = {}
        gots: dict[str, Tensor] = {}
        pieces: dict[str, Piece] = {}
        for name, slots in truth["optimizer"].items():
            held = slots_of(self.step.optimizer, own[name]) if name in own else {}
            for slot, want in slots.items():
                key = f"{slot} of {name}"
                wants[key] = want
                if name not in own:
                    continue
                if slot not in held:
                    self._note("state", number, key, float("inf"), (), self.report.local)
                    continue
                gots[key] = held[slot]
                if want.shape == truth["weights"][name].shape:
                    pieces[key] = lowered.store.kept_pieces.get(name, WHOLE)
        self._compare("state", number, wants, gots, pieces, self.report.local)

    def gathered(self, number: int, truth: Mapping[str, Any]) -> None:
        """The whole model's tensors as `Step.state_dict` and `Step.gradients` give them."""
        aliases: dict[str, str] = truth["aliases"]
        state = self.step.state_dict()
        into = self.report.gathered
        for kind, source in (("weight", truth["weights"]), ("buffer", truth["buffers"])):
            want = {key: source[name] for key, name in aliases.items() if name in source}
            self._compare(
                kind, number, want, {k: t for k, t in state.items() if k in want}, {}, into
            )
            self._missing(kind, number, want, state)
        if self.step.plan.early:
            return
        gradients = {n: g for n, g in self.step.gradients().items() if g is not None}
        self._compare("gradient", number, truth["gradients"], gradients, {}, into)
        needed = {n: g for n, g in truth["gradients"].items() if g is not None}
        self._missing("gradient", number, needed, gradients)

    def _missing(
        self, kind: str, number: int, want: Mapping[str, Tensor], got: Mapping[str, Tensor]
    ) -> None:
        for name in want.keys() - got.keys():
            self._note(kind, number, name, float("inf"), (), self.report.gathered)


def part_of(whole: Tensor, piece: Piece) -> Tensor:
    """What a piece names of the truth, element by element and not as the engine cuts."""
    for dim, spans in piece.dims:
        index = torch.tensor([i for low, high in spans for i in range(low, high)], dtype=torch.long)
        whole = whole.index_select(dim, index)
    return whole


def _in_whole(location: tuple[int, ...], piece: Piece) -> tuple[int, ...]:
    """A position in a piece as a position in the whole tensor."""
    found = list(location)
    for dim, spans in piece.dims:
        if dim >= len(found):
            continue
        rest = found[dim]
        for low, high in spans:
            if rest < high - low:
                found[dim] = low + rest
                break
            rest -= high - low
    return tuple(found)
