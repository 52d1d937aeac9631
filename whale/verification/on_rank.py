"""One rank's part of a verification: runs the plan as any job would, compares what it holds.

Place in the flow: second half of `wh.verify`, in each forked process. A rank compares its own
pieces, so that a copy that goes astray is named even where the gathered tensor comes from another
rank; the gathered ones are compared as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from whale import parallel
from whale.engine.lower import stage_of_module
from whale.engine.step import Step
from whale.ir.sharding import WHOLE, Piece
from whale.verification.one_device import SMALL, Reference, Task, error_of, greatest, read_truth
from whale.verification.verdict import Mismatch


@dataclass(slots=True, kw_only=True)
class Report:
    """What one rank found: in its own pieces, and in the tensors gathered from all ranks."""

    worst: float = 0.0
    local: list[Mismatch] = field(default_factory=list)
    gathered: list[Mismatch] = field(default_factory=list)


def run_on_rank(task: Task, reference: Reference, rank: int) -> Report:
    """Trains this rank's part; compares after every step."""
    parallel.init(device="cpu")
    step = parallel.parallelize(
        task.model,
        optimizer=task.make_optimizer(reference.float32),
        batch=task.inputs[0],
        loss=task.loss,
        config=task.config,
        plan=task.plan,
    )
    comparison = _Comparison(step, rank, task.allowed(reference.float32))
    comparison.state(0, read_truth(task, 0))
    for number, batch in enumerate(task.inputs, 1):
        metrics = step(batch)
        truth = read_truth(task, number)
        comparison.loss(number, metrics, truth)
        comparison.gradients(number, truth)
        comparison.state(number, truth)
    comparison.gathered(len(task.inputs), read_truth(task, len(task.inputs)))
    return comparison.report


class _Comparison:
    """Collects what differs on this rank."""

    def __init__(self, step: Step, rank: int, tolerance: float) -> None:
        self.step, self.rank, self.tolerance = step, rank, tolerance
        self.report = Report()

    def _compare(
        self,
        kind: str,
        number: int,
        truth: Mapping[str, Tensor],
        got: Mapping[str, Tensor],
        pieces: Mapping[str, Piece],
        into: list[Mismatch],
    ) -> None:
        largest = max((greatest(t) for t in truth.values()), default=0.0)
        for name, tensor in got.items():
            piece = pieces.get(name, WHOLE)
            scale = max(greatest(truth[name]), SMALL * largest)
            error, location = error_of(tensor, _part(truth[name], piece), scale)
            self.report.worst = max(self.report.worst, error)
            if not error <= self.tolerance:
                into.append(
                    Mismatch(
                        kind=kind,
                        tensor=name,
                        rank=self.rank,
                        step=number,
                        error=error,
                        location=_in_whole(location, piece),
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

    def gradients(self, number: int, truth: Mapping[str, Any]) -> None:
        """This rank's gradients: summed, divided and clipped, as the optimizer saw them."""
        lowered = self.step._lowered
        got = {n: _gradient(p) for n, p in lowered.params.items() if p.requires_grad}
        self._compare(
            "gradient", number, truth["gradients"], got, lowered.pieces, self.report.local
        )

    def state(self, number: int, truth: Mapping[str, Any]) -> None:
        """This rank's weights, and the buffers of the stages it runs."""
        lowered = self.step._lowered
        self._compare(
            "weight", number, truth["weights"], lowered.params, lowered.pieces, self.report.local
        )
        plan = self.step.plan
        buffers = {
            name: buffer
            for name, buffer in lowered.model.named_buffers()
            if stage_of_module(plan, name.rpartition(".")[0]) in plan.stages_of(self.rank)
        }
        self._compare("buffer", number, truth["buffers"], buffers, {}, self.report.local)

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
        gradients = self.step.gradients()
        self._compare("gradient", number, truth["gradients"], gradients, {}, into)
        self._missing("gradient", number, truth["gradients"], gradients)

    def _missing(
        self, kind: str, number: int, want: Mapping[str, Tensor], got: Mapping[str, Tensor]
    ) -> None:
        for name in want.keys() - got.keys():
            self.report.worst = float("inf")
            self.report.gathered.append(
                Mismatch(kind=kind, tensor=name, rank=self.rank, step=number, error=float("inf"))
            )


def _part(whole: Tensor, piece: Piece) -> Tensor:
    """What a piece names of the truth, element by element and not as the engine cuts."""
    for dim, spans in piece.dims:
        index = torch.tensor([i for low, high in spans for i in range(low, high)], dtype=torch.long)
        whole = whole.index_select(dim, index)
    return whole


def _gradient(parameter: nn.Parameter) -> Tensor:
    return parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)


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
