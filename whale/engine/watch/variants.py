"""Variants: the stages of a pipeline for each kind of batch it meets.

Place in the flow: asked by Step before it runs a batch. The glue between stages was traced for the
shapes, dtypes, Python values, autocast and mode of one batch, which it holds as constants; a batch
of another Signature is traced once more, under the same plan. What all ranks then send and expect
is known to all of them without a word. A model in one stage runs the user's own code and needs no
variants.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from whale.engine.capture.captured import Captured, capture, trace
from whale.engine.capture.fake_run import ROWS
from whale.engine.lower.lowered import Lowered, make_stages
from whale.engine.state.changes import refuse_across_stages
from whale.engine.state.copies import in_precision
from whale.engine.state.outside import as_it_was
from whale.engine.state.rarely import rarely
from whale.engine.trace.program import Program, check_rows
from whale.engine.trials.replay import gives_the_same
from whale.engine.watch.face import bare
from whale.errors import CaptureError, WhaleError
from whale.ir.model_graph import placed
from whale.ir.plan import Plan
from whale.ir.virtual_device import micro_batch_cuts
from whale.runtime import batch as batches
from whale.runtime.batch import LocalBatch
from whale.runtime.signature import Signature, autocast
from whale.runtime.stage import Stages

Flags = tuple[bool, ...]
"""`training` of every module: glue may branch on it."""
_FEW = 8
"""Rows kept of the batch that the Step was built with."""
_MOST = 64
"""Variants kept; the one used longest ago is traced again when it is needed."""


@dataclass(slots=True, kw_only=True)
class Variant:
    """The stages of this rank, and the program they were cut from."""

    stages: Stages
    program: Program
    result: Mapping[str, Any]
    """The model's outputs by name, as values of the program."""
    checked: set[int] = field(default_factory=lambda: {*ROWS})
    """Numbers of rows for which the program was held against a trace of its own."""
    totals: set[int] = field(default_factory=set)
    """Sizes of global batches all of whose parts were."""
    before: set[int] = field(default_factory=set)
    """Numbers of rows for which it once was, as `checked`."""
    settings: Hashable = ()
    uses: int = 0


class Variants:
    """The variants of one Step on one rank."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        lowered: Lowered,
        loss: batches.Loss | None,
        outputs: frozenset[str],
        rank: int,
        batch: Any,
    ) -> None:
        self.model, self.plan, self.lowered = model, plan, lowered
        self.loss, self.outputs, self.rank = loss, outputs, rank
        self.few = batches.take_rows(batch, 0, min(_FEW, batches.num_rows(batch)))
        self._layers = [path for t in plan.taskgraphs for path in t.layers]
        self._first: Signature | None = None
        self._written: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
        self._known: OrderedDict[tuple[Signature, Flags, bool], Variant] = OrderedDict()

    def built(self, signature: Signature, settings: Hashable) -> None:
        """The stages the Step was built with are those of this signature."""
        program, self._first = self.lowered.program, signature
        if program is not None:
            flags = flags_in_training(self.model, self.lowered.model)
            self._known[signature, flags, True] = Variant(
                stages=self.lowered.stages,
                program=program,
                result=self.lowered.result,
                settings=settings,
            )

    def of(self, batch: LocalBatch, signature: Signature, settings: Hashable) -> Variant | None:
        """The variant for a batch of this signature; None: one stage, which is always the same.

        `settings`: numbers that code reads beside the batch, as they are now.
        """
        if len(self.plan.stages) == 1:
            return None
        key = (signature, flags_of(self.lowered.model), torch.is_grad_enabled())
        found = self._known.pop(key, None)
        if found is None:
            found = self._make(batch.data, signature)
            found.settings = settings
        self._known[key] = found
        found.uses += 1
        moved, found.settings = settings != found.settings, settings
        if moved or (found.uses > 1 and rarely(found.uses)):
            # A Python number that code between stages or the loss reads may be another now.
            found.before |= found.checked
            found.checked.clear()
            found.totals.clear()
        self._check_rows(found, batch, signature)
        self._refuse_written(found.program, batch)
        if len(self._known) > _MOST:
            self._known.popitem(last=False)
        return found

    def _refuse_written(self, program: Program, batch: LocalBatch) -> None:
        """Refuses a batch that comes again where code writes to it: it did so in one stage only."""
        for index, tensor in enumerate(batches.leaves(batch.data)):
            if index not in program.written:
                continue
            if self._written.get(id(tensor)) is tensor:
                raise WhaleError(
                    "the model or its loss writes to its batch in place, and the same tensor of "
                    f"shape {tuple(tensor.shape)} comes once more: on one device it would have "
                    "changed, in stages it has not",
                    hint="write to a copy (x = x.clone()), or pass a fresh batch every step",
                )
            self._written[id(tensor)] = tensor

    def _check_rows(self, variant: Variant, batch: LocalBatch, signature: Signature) -> None:
        """Sizes of micro-batches that were not met before: what one device's code would see."""
        if batch.total_rows in variant.totals:
            return
        points = micro_batch_cuts(batch.total_rows, self.plan.num_micro_batch)
        sizes = {high - low for low, high in zip(points, points[1:], strict=False)}
        example = batches.rebuild(batch.data, signature.example())
        for rows in sorted(sizes - variant.checked - {0}):
            try:
                grad = torch.is_grad_enabled()
                with self._as_run(signature):
                    traced = trace(
                        self.model, example, self.loss, rows, grad=grad, layers=self._layers
                    )
            except WhaleError:
                raise
            except Exception as error:
                raise CaptureError(
                    f"the model cannot be traced for {rows} rows, as it could for a few: "
                    f"{type(error).__name__}: {error}"[:600],
                    hint="put code that depends on the batch size inside one annotated module",
                ) from error
            try:
                check_rows(variant.program, traced, rows)
            except CaptureError as error:
                if not self._replays(variant, rows, signature):
                    if rows not in variant.before:
                        raise
                    raise _moved(error) from error
            variant.checked.add(rows)
        variant.totals.add(batch.total_rows)

    def _replays(self, variant: Variant, rows: int, signature: Signature) -> bool:
        if signature != self._first or rows > batches.num_rows(self.few):
            return False
        few = batches.take_rows(self.few, 0, rows)
        grad = torch.is_grad_enabled()
        dims = self.lowered.surroundings.draws.dims
        program, result = variant.program, variant.result
        with self._as_run(signature):
            try:
                return gives_the_same(self.model, self.loss, program, result, few, dims, grad=grad)
            except Exception:  # noqa: BLE001 - the trace's own refusal says what is wrong
                return False

    @contextmanager
    def _as_run(self, signature: Signature) -> Iterator[None]:
        """Around a trace: the modes and the autocast of the run it is for."""
        with (
            bare(self.model),
            as_it_was(self.model, self.loss),
            modes_of(self.model, self.lowered.model),
            torch.inference_mode(False),
            torch.enable_grad(),
            autocast(torch.device("cpu"), signature.autocast)(),
        ):
            yield

    def _make(self, batch: Any, signature: Signature) -> Variant:
        example = batches.rebuild(batch, signature.example())
        local = self.lowered
        grad = torch.is_grad_enabled()
        with self._as_run(signature):
            model = in_precision(self.model, self.plan.precision)
            captured = capture(
                model, example, self.loss, training=False, grad=grad, layers=self._layers
            )
        if captured.program is None:
            assert captured.refusal is not None
            raise captured.refusal
        _check_same_model(captured, self.plan, signature)
        # Code of this kind of batch may change what that of the first left alone.
        refuse_across_stages(self.plan, self.model, captured)
        stages = make_stages(
            self.plan,
            self.rank,
            local.model,
            captured,
            self.loss,
            self.outputs,
            local.surroundings,
            local.device,
            local.parts,
        )
        return Variant(stages=stages, program=captured.program, result=captured.result)


def _moved(error: CaptureError) -> CaptureError:
    return CaptureError(
        f"{error.message}: it was the same before, so it reads a number that is another now",
        hint="code between Layers and the loss are traced with the numbers they read; pass one "
        "that changes in the batch, as a tensor without dims, or read it inside one annotated "
        "module",
        where=error.where,
    )


def flags_of(model: nn.Module) -> Flags:
    """`training` of its modules."""
    return tuple(module.training for module in model.modules())


def flags_in_training(model: nn.Module, running: nn.Module) -> Flags:
    """Those of the running copy that capture saw: a model in eval mode as it trains."""
    flags = flags_of(running)
    return flags if model.training else (True,) * len(flags)


@contextmanager
def modes_of(model: nn.Module, running: nn.Module) -> Iterator[None]:
    """The user's model in the modes of the copy that runs: glue may branch on `training`."""
    modules = dict(model.named_modules(remove_duplicate=False))
    flags = {module: module.training for module in modules.values()}
    for path, module in running.named_modules(remove_duplicate=False):
        if path in modules:
            modules[path].training = module.training
    try:
        yield
    finally:
        for module, flag in flags.items():
            module.training = flag


def _check_same_model(captured: Captured, plan: Plan, signature: Signature) -> None:
    """Layers and weights must be where the plan put them; edges are `make_stages`'s to check."""
    assert captured.program is not None
    stage_of_path = {path: t.stage for t in plan.taskgraphs for path in t.layers}
    unknown = [layer.path for layer in captured.graph.layers if layer.path not in stage_of_path]
    homes = {home.name: home for home in plan.homes}
    misplaced: list[str] = []
    if not unknown:
        stage_of_op, _ = placed(captured.graph, plan.taskgraphs)
        for node, stage in zip(captured.graph.nodes, stage_of_op, strict=True):
            read = node.params
            if node.layer is not None:
                read = (*read, *captured.graph.layers[node.layer].params)
            misplaced += [
                name
                for name in read
                if stage is not None and name in homes and stage not in homes[name].stages
            ]
    if unknown or misplaced:
        what = f"calls {unknown[0]}" if unknown else f"reads {misplaced[0]} in another stage"
        raise CaptureError(
            f"on a batch of {signature.lines()['tensors']} the model {what}, unlike on the batch "
            "the plan was made with",
            hint="make the plan with such a batch, or keep code that branches on shapes inside "
            "one annotated module",
        )
