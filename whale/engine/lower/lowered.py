"""lower: a Plan and the user's module -> this rank's program.

Weights cut, rules installed, stages, groups.

Place in the flow: last step of `wh.parallelize`. It never searches: every choice is in the Plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from whale.engine.capture.captured import Captured
from whale.engine.lower.loss_parts import LossParts, loss_parts
from whale.engine.lower.random import Surroundings, install_randomness, with_heads
from whale.engine.lower.recomputing import recompute_layers
from whale.engine.lower.stages import CutStage, WholeStage, check_outputs, parts_of
from whale.engine.lower.weights import local_copy
from whale.engine.split.rules import install
from whale.engine.state.changes import Changes, stages_of_changes
from whale.engine.trace.program import Program
from whale.errors import PlanError
from whale.ir.check import check_offers, check_order
from whale.ir.homes import sum_groups
from whale.ir.levels import level_groups
from whale.ir.plan import Plan, SplitLayer, StageLayer
from whale.ir.schedule import Action
from whale.ir.sharding import Piece
from whale.ir.updates import RankStep, rank_step
from whale.ir.wire import Wire
from whale.nn.batch_norm import OwnBatchNorm, install_synced
from whale.nn.deferred import WeightQueue
from whale.nn.forwards import replace_forward, take_hooks
from whale.nn.inside import Inside, InsideForward
from whale.nn.moe.courier import Courier
from whale.nn.moe.layer import MoE, own_parts
from whale.nn.moe.parallel import ExpertForward, MeetingForward, Replicas
from whale.nn.moe.stacked import StackedForward
from whale.nn.randomness import CallNames
from whale.nn.router_losses import has_router_losses
from whale.nn.shard import Shard
from whale.nn.sharded import RowsAround, can_defer, defer_weights
from whale.runtime import batch as batches
from whale.runtime.buckets import DTYPES
from whale.runtime.context import RowLayout, StepContext
from whale.runtime.executor import Executor
from whale.runtime.groups import Groups
from whale.runtime.half import HalfSums
from whale.runtime.parking import Garage, ParkedForward
from whale.runtime.stage import Stages
from whale.runtime.store import ParameterStore
from whale.runtime.transfers import Channels
from whale.runtime.units import AcquiredForward
from whale.runtime.weighing import Trial

Rehearsal = Callable[[nn.Module, dict[str, Piece], StepContext], list[str]]
"""`engine.trials.rehearsal`, knowing all but this copy: it raises, or says what it left out."""


@dataclass(slots=True, kw_only=True)
class Lowered:
    """One rank's program."""

    model: nn.Module
    store: ParameterStore
    context: StepContext
    groups: Groups
    planned: RankStep
    """What it does in a step."""
    defers: bool
    """Whether weight gradients are put off."""
    executor: Executor
    stages: Stages
    """For batches of the kind that it was captured with."""
    device: torch.device
    own_norms: list[OwnBatchNorm]
    parts: dict[int, LossParts]
    notes: list[str]
    """Splits that could not be tried beside the whole module, and why."""
    surroundings: Surroundings
    program: Program | None
    """The glue as traced; None: it could not be, for it may read the values of the batch."""
    result: dict[str, Any]
    """The model's outputs by name, as values of the program."""

    @property
    def params(self) -> dict[str, nn.Parameter]:
        """What this rank computes with, by name."""
        return self.store.params

    @property
    def pieces(self) -> dict[str, Piece]:
        """Which parts of the model's parameters these are."""
        return self.store.pieces


def lower(
    model: nn.Module,
    plan: Plan,
    captured: Captured,
    loss: batches.Loss | None,
    *,
    actions: Sequence[Action],
    rank: int,
    device: torch.device,
    seed: int,
    timeout: timedelta,
    outputs: frozenset[str] = frozenset(),
    changes: Changes | None = None,
    trial: Trial | None = None,
    rehearsal: Rehearsal | None = None,
) -> Lowered:
    """This rank's program for `plan`; the user's module stays as it is.

    `actions` are those of its device group.
    """
    if plan.model_hash != captured.graph.hash:
        raise PlanError(
            f"the plan is for model {plan.model_hash}, this model is {captured.graph.hash}",
            hint="make a plan for this model: wh.plan(model, ...)",
        )
    check_order(plan, captured.graph)
    check_offers(plan, captured.graph)
    context = StepContext(seed=seed)
    groups = Groups(plan, rank, timeout, symmetric=plan.wire.symmetric)
    local, held = local_copy(model, plan, rank, device, seed)
    trainable = frozenset(n for n, p in model.named_parameters() if p.requires_grad)
    planned = rank_step(plan, rank, actions, trainable)
    store = ParameterStore(plan, rank, held, groups, planned, _half(plan.wire), device, seed)
    modules = dict(local.named_modules(remove_duplicate=False))
    names = CallNames(context)
    shards = _install_splits(plan, rank, modules, groups, context, names, captured)
    _install_couriers(plan, rank, modules, groups, None)
    own_norms = _install_norms(plan, rank, local, groups)
    _install_meetings(plan, rank, local, groups)
    _install_units(modules, store)
    notes = rehearsal(local, held.pieces, context) if rehearsal is not None else []
    # Only now: what half precision rounds on the way is no fault of a split.
    _install_couriers(plan, rank, modules, groups, DTYPES.get(plan.wire.tokens))
    surroundings = install_randomness(local, plan, captured, names, shards)
    queue = _install_deferral(plan, local, captured)
    _install_units(modules, store)
    mine = [layer for stage in plan.stages_of(rank) for layer in plan.stages[stage].layers]
    recompute_layers(mine, modules, changes.names if changes is not None else ())
    _install_parking(mine, modules, store)
    parts = loss_parts(
        plan,
        rank,
        groups,
        context,
        trial,
        router_losses=has_router_losses(model),
        divides=plan.wire.divides,
    )
    stages = make_stages(plan, rank, local, captured, loss, outputs, surroundings, device, parts)
    executor = Executor(
        plan,
        rank,
        Channels(rank, groups.channels, timeout),
        context,
        device,
        _skippable(plan, set(stages.modules), trial)
        - (stages_of_changes(plan, changes, rank) if changes is not None else set()),
        queue,
    )
    return Lowered(
        model=local,
        store=store,
        context=context,
        groups=groups,
        planned=planned,
        defers=queue is not None and not captured.differentiates,
        executor=executor,
        stages=stages,
        device=device,
        own_norms=own_norms,
        parts=parts,
        notes=notes,
        surroundings=surroundings,
        program=captured.program,
        result=captured.result,
    )


def _half(wire: Wire) -> HalfSums | None:
    return HalfSums(DTYPES[wire.gradients], wire.room) if wire.gradients else None


def make_stages(
    plan: Plan,
    rank: int,
    local: nn.Module,
    captured: Captured,
    loss: batches.Loss | None,
    outputs: frozenset[str],
    surroundings: Surroundings,
    device: torch.device,
    loss_parts: dict[int, LossParts],
) -> Stages:
    """The stages this rank runs."""
    if len(plan.stages) == 1:
        whole = {
            s: WholeStage(local, loss, outputs, surroundings, p) for s, p in loss_parts.items()
        }
        return Stages(modules=whole)
    assert captured.program is not None
    parts = parts_of(plan, captured.graph, captured.program, captured.result)
    check_outputs(parts, captured.result, outputs)
    cut = {
        s: CutStage(parts[s], local, outputs, surroundings, device, own)
        for s, own in loss_parts.items()
    }
    program = captured.program
    return Stages(modules=cut, borders=program.specs, origins=program.origins())


def _install_splits(
    plan: Plan,
    rank: int,
    modules: dict[str, nn.Module],
    groups: Groups,
    context: StepContext,
    names: CallNames,
    captured: Captured,
) -> dict[str, Shard]:
    """Puts the sharded forwards in place.

    Gives the Shard of every dropout or attention inside one.
    """
    inside: dict[str, Shard] = {}
    around_pairs: dict[str, Inside] = {}
    for taskgraph in plan.taskgraphs:
        device = taskgraph.virtual_device
        if not taskgraph.splits or rank not in device.ranks:
            continue
        replica, index = device.position(rank)
        members = device.replicas[replica].ranks
        base = plan.stages[taskgraph.stage].virtual_device
        rows = None if base == device else RowLayout(context, base, members, rank)
        for split in taskgraph.splits:
            # Attention reads the batch size in its own code, so its rows are gathered around it.
            around = split.around and rows is not None
            shard = Shard(
                group=groups.name_of(members),
                index=index,
                cuts=split.cuts_of(replica),
                params=dict(split.params),
                rows=None if around else rows,
                overlap=_used_once(captured, split),
                marks=split.marks,
                stays=split.joined == "loss",
                inside=(
                    _around_pair(plan, split.path, modules, around_pairs)
                    if split.rule == "pair"
                    else None
                ),
            )
            install(split.rule, split.path, split.modules, shard, modules)
            if around and rows is not None:
                outer = modules[split.path]
                replace_forward(
                    outer, RowsAround(outer.forward, shard.group, index, rows, split.dims)
                )
            inside.update(dict.fromkeys(split.inside, shard))
            inside.update((path, shard) for what, path in split.marks if what == "head dropout")
            if split.around:
                inside[split.path] = shard
                with_heads(modules[split.path], shard, names)
    return inside


def _around_pair(
    plan: Plan, path: str, modules: dict[str, nn.Module], known: dict[str, Inside]
) -> Inside:
    """Says when a Layer of a pair runs, be it another one that holds the same modules."""
    home = layer_of_module(plan, path) or ""
    if home not in known:
        known[home] = Inside(home)
        for layer in (layer for t in plan.taskgraphs for layer in t.layers):
            if any(part is modules[path] for part in modules[layer].modules()):
                outer = modules[layer]
                replace_forward(outer, InsideForward(outer.forward, known[home]))
    return known[home]


def _install_units(modules: dict[str, nn.Module], store: ParameterStore) -> None:
    """Around all else of each Layer whose parameters are there only while it runs."""
    for path, unit in store.units.items():
        module = modules[path]
        if not isinstance(module.__dict__.get("forward"), AcquiredForward):
            replace_forward(module, AcquiredForward(take_hooks(module), unit))


def _install_parking(
    layers: Iterable[StageLayer], modules: dict[str, nn.Module], store: ParameterStore
) -> None:
    """Around Layers whose kept tensors wait on the host."""
    paths = {layer.path for layer in layers if layer.parked}
    garage = Garage(store.device, store.params)
    for path in paths:
        module = modules[path]
        replace_forward(module, ParkedForward(take_hooks(module), garage))


def _install_couriers(
    plan: Plan,
    rank: int,
    modules: dict[str, nn.Module],
    groups: Groups,
    dtype: torch.dtype | None,
) -> None:
    """How tokens travel to their experts: in what, on how many levels, in how many parts."""
    for taskgraph in plan.taskgraphs:
        device = taskgraph.virtual_device
        if rank not in device.ranks:
            continue
        members = device.replicas[device.position(rank)[0]].ranks
        for split in taskgraph.splits:
            module = modules[split.path]
            forward = module.runner if isinstance(module, MoE) else module.__dict__.get("forward")
            if not isinstance(forward, ExpertForward | StackedForward):
                continue
            levels = None
            if split.per_node:
                inside, between = level_groups(members, split.per_node, rank)
                levels = groups.name_of(inside), groups.name_of(between)
            forward.exchange.courier = Courier(
                groups.name_of(members), dtype=dtype, levels=levels, per_node=split.per_node
            )
            forward.exchange.num_chunks = split.chunks


def _used_once(captured: Captured, split: SplitLayer) -> bool:
    """Whether every weight of a split is used exactly once in a forward."""
    if captured.program is None:
        return False
    layers = [op.layer for op in captured.program.ops if op.layer is not None]
    around = [p for p in layers if split.path == p or split.path.startswith(f"{p}.") or p == ""]
    alone = split.rule != "column" or split.path in layers
    tied = any(captured.graph.parameter(name).aliases for name, _ in split.params)
    return len(around) == 1 and alone and not tied


def _install_deferral(plan: Plan, local: nn.Module, captured: Captured) -> WeightQueue | None:
    """Where W computes weight gradients; none of a model whose forward asks for some itself."""
    if plan.schedule.kind != "zero-bubble":
        return None
    queue = WeightQueue()
    for module in local.modules() if not captured.differentiates else ():
        if can_defer(module) and not any(p.is_meta for p in module.parameters(recurse=False)):
            defer_weights(module, queue)
    return queue


def _skippable(plan: Plan, stages: set[int], trial: Trial | None) -> frozenset[int]:
    """Stages that a replica without rows may leave out: nobody waits for it there."""
    if trial is not None and trial.meets:
        return frozenset()
    return plan.stages_apart() & stages


def norms_of_own_rows(plan: Plan, model: nn.Module) -> list[str]:
    """Batch norms that the plan lets each of several replicas compute from its own rows."""
    layers = [layer for stage in plan.stages for layer in stage.layers]
    apart = {layer.path for layer in layers if "norm" not in layer.meets}
    found = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.modules.batchnorm._BatchNorm):
            continue
        device = plan.stages[stage_of_module(plan, path)].virtual_device
        layer = layer_of_module(plan, path)
        if len(device.replicas) > 1 and layer in apart:
            found.append(path)
    return found


def _install_norms(plan: Plan, rank: int, local: nn.Module, groups: Groups) -> list[OwnBatchNorm]:
    """Joins the batch norms of replicas; gives those that stay each replica's own."""
    own = set(norms_of_own_rows(plan, local))
    kept = []
    for path, module in local.named_modules():
        if not isinstance(module, nn.modules.batchnorm._BatchNorm):
            continue
        stage = stage_of_module(plan, path)
        device = plan.stages[stage].virtual_device
        if rank not in device.ranks or len(device.replicas) == 1:
            continue
        columns = sum_groups([replica.ranks for replica in device.replicas])
        mine = next(sync for sync in columns if rank in sync.ranks)
        if path in own:
            share = device.weights[device.position(rank)[0]] if rank in mine.leads else 0.0
            kept.append(OwnBatchNorm(module, groups.name_of(mine.ranks), share))
            continue
        if mine.leads != mine.ranks:
            raise PlanError(
                f"batch norm {path} is in stage {stage}, whose replicas have different widths",
                hint="give its replicas the same number of devices, or keep batch norm out of the "
                "split",
            )
        install_synced(module, path, groups.name_of(mine.ranks))
    return kept


def _install_meetings(plan: Plan, rank: int, local: nn.Module, groups: Groups) -> None:
    """Mixtures of experts in a stage of several replicas: statistics are those of all rows."""
    for path, module in local.named_modules():
        if not isinstance(module, MoE):
            continue
        stage = stage_of_module(plan, path)
        device = plan.stages[stage].virtual_device
        if rank not in device.ranks or len(device.replicas) == 1:
            continue
        mine = next(g for g in sum_groups([r.ranks for r in device.replicas]) if rank in g.ranks)
        if mine.leads != mine.ranks:
            raise PlanError(
                f"the experts of {path} are in stage {stage}, whose replicas have different widths",
                hint="give its replicas the same number of devices",
            )
        if own := own_parts(module):
            raise PlanError(
                f"{path} ({type(module).__name__}) has its own `{own[0]}`, which knows nothing of "
                f"the {len(device.replicas)} replicas of stage {stage}",
                hint="override `forward` and call super().forward(x) there, or derive from "
                "nn.Module",
            )
        meeting = Replicas(groups.name_of(mine.ranks))
        if isinstance(module.runner, ExpertForward):
            module.runner.meet(meeting, mine.ranks)
        else:
            module.run_by(MeetingForward(module, meeting))


def layer_of_module(plan: Plan, path: str) -> str | None:
    """The Layer a module belongs to; None for one of the glue."""
    for taskgraph in plan.taskgraphs:
        for layer in taskgraph.layers:
            if path == layer or path.startswith(f"{layer}.") or layer == "":
                return layer
    return None


def stage_of_module(plan: Plan, path: str) -> int:
    """The stage of the Layer a module belongs to; glue modules are in the first."""
    layer = layer_of_module(plan, path)
    return next((t.stage for t in plan.taskgraphs if layer in t.layers), 0)
