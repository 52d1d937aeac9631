"""Stages: the model cut at stage borders, or left whole where there is only one.

Place in the flow: used by `engine.lower`. One stage runs the user's own `forward`, untouched;
several run the recorded glue around the user's Layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from whale.engine.lower.loss_parts import LossParts
from whale.engine.lower.random import Surroundings
from whale.engine.trace.program import Op, Program, Ref, ValueSpec, run_ops, tree_map
from whale.engine.trace.regions import Segment, run_region, segments
from whale.errors import CaptureError, PlanError
from whale.ir.model_graph import ModelGraph, placed
from whale.ir.plan import Plan
from whale.nn.column_shard import plain
from whale.runtime import batch as batches
from whale.runtime.stage import Outcome
from whale.runtime.transfers import opened


@dataclass(slots=True, kw_only=True)
class StageProgram:
    """The operations of one stage and the values that cross its borders, by the other stage."""

    index: int
    ops: list[Op]
    incoming: dict[int, list[int]]
    outgoing: dict[int, list[int]]
    result: dict[str, Any] | None
    watched: int
    """The first of its operations that is watched for means: see `Program.loss_from`."""
    dtypes: list[torch.dtype]
    """Of every value of the program, when it was traced."""
    writes: frozenset[int]
    """Values from other stages that its code writes to."""


def cut(
    program: Program, stage_of_op: tuple[int | None, ...], num_stages: int, result: dict[str, Any]
) -> list[StageProgram]:
    """The program of every stage. Pure operations are repeated in each stage that reads them."""
    producer = {value: i for i, op in enumerate(program.ops) for value in op.outputs}
    loss = result["loss"]
    assert isinstance(loss, Ref)
    loss_stage = stage_of_op[producer[loss.index]] if loss.index in producer else None
    if loss_stage is None:
        raise CaptureError(
            "the loss depends on no Layer and no parameter",
            hint="return the loss of the model's own output",
        )
    for asked in program.asked:
        if asked.hangs:
            raise CaptureError(
                f"the glue between stages hangs something on a tensor (`{asked.name}`), which its "
                "record does not repeat",
                hint="move this code into an annotated module, where it runs as it stands",
                where=asked.where,
            )
    stages = []
    for stage in range(num_stages):
        own = {i for i, s in enumerate(stage_of_op) if s == stage}
        incoming: dict[int, list[int]] = {}
        reads = [v for i in sorted(own) for v in program.ops[i].inputs]
        if stage == loss_stage:
            reads += _refs(_local_result(result, stage_of_op, producer, stage))
        seen: set[int] = set()
        while reads:
            value = reads.pop(0)
            if value in seen or value not in producer:
                continue
            seen.add(value)
            maker = producer[value]
            source = stage_of_op[maker]
            if source is None:
                own.add(maker)
                reads += program.ops[maker].inputs
            elif source != stage:
                incoming.setdefault(source, []).append(value)
        stages.append(
            StageProgram(
                index=stage,
                ops=[program.ops[i] for i in sorted(own)],
                incoming={s: sorted(v) for s, v in sorted(incoming.items())},
                outgoing={},
                result=_local_result(result, stage_of_op, producer, stage)
                if stage == loss_stage
                else None,
                watched=sum(i < program.loss_from for i in own),
                dtypes=[spec.dtype for spec in program.specs],
                writes=program.written & {v for values in incoming.values() for v in values},
            )
        )
    for part in stages:
        for source, values in part.incoming.items():
            stages[source].outgoing[part.index] = values
            for value in values:
                _check_border(program, program.specs[value], producer[value])
    return stages


def parts_of(
    plan: Plan, graph: ModelGraph, program: Program, result: dict[str, Any]
) -> list[StageProgram]:
    """The program cut as a plan says."""
    stage_of_op, edges = placed(graph, plan.taskgraphs)
    if edges != plan.schedule.edges:
        raise PlanError(
            f"values travel between stages {edges}, the plan's schedule has {plan.schedule.edges}",
            hint="make the plan again for this model and batch",
        )
    return cut(program, stage_of_op, len(plan.stages), result)


def check_outputs(
    parts: list[StageProgram], result: Mapping[str, Any], outputs: frozenset[str]
) -> None:
    """Outputs are merged where the loss is: one of an earlier stage is not at hand there."""
    for part in parts:
        if part.result is None:
            continue
        for name in sorted(outputs & result.keys()):
            if name not in part.result:
                raise CaptureError(
                    f"the output {name!r} is made in another stage than the loss (stage "
                    f"{part.index}), which alone returns outputs",
                    hint="make it of something that the last stage computes, leave it out of "
                    "`outputs`, or use one stage",
                )


def _check_border(program: Program, spec: ValueSpec, maker: int) -> None:
    if spec.batch_dim == -1:
        raise CaptureError(
            f"{program.ops[maker].where}: a value of shape {spec.shape} crosses a stage border, "
            "but its size does "
            "not grow with the rows of the batch along one dim",
            hint="move the border, or keep this value inside one annotated module",
        )


def _refs(value: Any) -> list[int]:
    found: list[int] = []
    tree_map(value, lambda leaf: found.append(leaf.index) if isinstance(leaf, Ref) else None)
    return found


def _local_result(
    result: dict[str, Any],
    stage_of_op: tuple[int | None, ...],
    producer: dict[int, int],
    stage: int,
) -> dict[str, Any]:
    """The named outputs that the loss's stage has at hand."""
    return {
        name: value
        for name, value in result.items()
        if all(
            index not in producer or stage_of_op[producer[index]] in (stage, None)
            for index in _refs(value)
        )
    }


class WholeStage:
    """The only stage: the user's forward as it stands."""

    incoming: Mapping[int, list[int]] = {}
    outgoing: Mapping[int, list[int]] = {}
    has_loss = True

    def __init__(
        self,
        model: nn.Module,
        loss: batches.Loss | None,
        outputs: frozenset[str],
        surroundings: Surroundings,
        parts: LossParts,
    ) -> None:
        self.model, self.loss, self.outputs = model, loss, outputs
        self.surroundings, self.parts = surroundings, parts

    def forward(self, batch: Any, received: dict[int, torch.Tensor], rows: int) -> Outcome:
        """Runs the model on this rank's rows."""
        tracker = self.parts.tracker(rows)
        loss = self.loss

        def tracked(output: Any, target: Any) -> Any:
            assert loss is not None
            with tracker or nullcontext():
                return loss(output, target)

        with self.surroundings.around(), self.parts.around(self.model):
            if loss is None:
                with tracker or nullcontext():
                    named = batches.call_model(self.model, None, batch)
            else:
                named = batches.call_model(self.model, tracked, batch)
        return Outcome(
            loss=self.parts.weigh(tracker, named["loss"]),
            named={name: plain(named.get(name)) for name in self.outputs},
        )


def called(layer: nn.Module) -> Callable[..., Any]:
    """What calls a Layer: a `__call__` of its own is in the glue that was traced around it."""
    own = type(layer).__call__ is not nn.Module.__call__
    return partial(nn.Module.__call__, layer) if own else layer


class Around(Protocol):
    """What a stage's forward runs in: see `engine.lower.random`."""

    def around(self) -> AbstractContextManager[None]:
        """Around one forward."""
        ...

    def before(self, op: Op) -> None:
        """Before each operation of it."""
        ...


class CutStage:
    """One of several stages: its Layers, and the recorded glue around them."""

    def __init__(
        self,
        part: StageProgram,
        model: nn.Module,
        outputs: frozenset[str],
        surroundings: Around,
        device: torch.device,
        parts: LossParts,
    ) -> None:
        self.part, self.outputs, self.device = part, outputs, device
        self.surroundings, self.parts = surroundings, parts
        self.incoming: Mapping[int, list[int]] = part.incoming
        self.outgoing: Mapping[int, list[int]] = part.outgoing
        self.has_loss = part.result is not None
        modules = dict(model.named_modules(remove_duplicate=False))
        self.layers = {
            op.layer: called(modules[op.layer]) for op in part.ops if op.layer is not None
        }
        self.model = model
        # What the trial of `engine.trials.parts` watched: its weights are for those sums and means.
        tail = part.watched if self.has_loss else len(part.ops)
        sent = {v for group in part.outgoing.values() for v in group} | set(_refs(part.result))
        self.head = segments(part.ops[:tail], sent | {v for o in part.ops[tail:] for v in o.inputs})
        self.tail = segments(part.ops[tail:], sent)
        self._checked = False

    def _run(
        self,
        parts: list[Segment],
        values: dict[int, torch.Tensor],
        run: Callable[[Sequence[Op], dict[int, torch.Tensor]], None],
    ) -> None:
        for part in parts:
            if part.region is None or not torch.is_grad_enabled():
                run(part.ops, values)
            else:
                run_region(part, values, run)

    def _state(self, name: str) -> torch.Tensor:
        owner, _, leaf = name.rpartition(".")
        value = getattr(self.model.get_submodule(owner), leaf)
        assert isinstance(value, torch.Tensor)
        return value

    def _check_dtypes(self, ops: Sequence[Op], values: Mapping[int, torch.Tensor]) -> None:
        """Glue may hold the dtype of what a Layer gave in the trace (`mask.to(x.dtype)`)."""
        for op in ops:
            for value in op.outputs if op.layer is not None else ():
                found, traced = values[value].dtype, self.part.dtypes[value]
                if found != traced:
                    raise CaptureError(
                        f"{op.layer} gives {found}, and {traced} when it was traced on the CPU",
                        hint="under autocast, let Layers next to glue end in a module whose dtype "
                        "does not depend on the device, or put the glue inside one annotated "
                        "module",
                        where=op.where,
                    )

    def forward(self, batch: Any, received: dict[int, torch.Tensor], rows: int) -> Outcome:
        """Runs this stage on its rows; `received` are the values from earlier stages."""
        # Code may write to its rows, and a stage of the same rank may read the same memory.
        values = dict(enumerate(batches.leaves(batches.own(batch))))
        values.update(received)
        values.update((v, opened(received[v])) for v in self.part.writes)
        tracker = self.parts.tracker(rows)

        def run(ops: Sequence[Op], values: dict[int, torch.Tensor]) -> None:
            before = self.surroundings.before
            run_ops(ops, values, rows, self.layers, self._state, self.device, before)
            if not self._checked:
                self._check_dtypes(ops, values)

        with self.surroundings.around(), self.parts.around(self.model):
            self._run(self.head, values, run)
            with tracker or nullcontext():
                self._run(self.tail, values, run)
        self._checked = True
        sent = {v for group in self.outgoing.values() for v in group}
        outcome = Outcome(values={v: plain(values[v]) for v in sorted(sent)})
        if self.part.result is not None:
            wanted = {"loss": None, **dict.fromkeys(self.outputs)}
            named = tree_map(
                {name: self.part.result.get(name) for name in wanted},
                lambda leaf: values[leaf.index] if isinstance(leaf, Ref) else leaf,
            )
            outcome.loss = self.parts.weigh(tracker, named["loss"])
            outcome.named = {name: plain(named[name]) for name in self.outputs}
        return outcome
