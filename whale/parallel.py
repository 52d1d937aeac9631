"""READ FIRST: the whole system in one function: capture -> plan -> check -> lower -> run.

`wh.parallelize` is what a training script calls; `wh.plan` is its first half, on any machine. This
is where the torch-free side (planner) and the torch side (engine) meet, through two values: a
ModelGraph and a Plan.
"""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from whale.annotations import ClusterLayout, ambient_cluster, discover
from whale.annotations import cluster as make_cluster
from whale.config import Config
from whale.cost.compute import Training
from whale.engine.capture.captured import Captured, capture
from whale.engine.lower.lowered import lower
from whale.engine.state.copies import in_precision
from whale.engine.state.loose_ends import refuse_loose_ends
from whale.engine.state.stillness import leaves_no_trace
from whale.engine.state.wrappers import refuse_wrapped
from whale.engine.step import Step
from whale.engine.trials.look import Looked, look
from whale.engine.trials.rehearsal import rehearse
from whale.engine.updating import OptimizerFactory
from whale.engine.watch.face import hide_from_compiler, plainly
from whale.engine.watch.outsiders import refuse_own_parameters
from whale.errors import PlanError, WhaleError
from whale.ir.cluster import Cluster
from whale.ir.plan import Plan
from whale.ir.precision import Precision
from whale.ir.profile import Profile
from whale.ir.reasons import grouped_reasons
from whale.ir.schedule import Action, Schedule
from whale.planner.applying import check_early
from whale.planner.given import check_given, check_kind, check_settings
from whale.planner.make_plan import make_plan, orders_of
from whale.planner.precision import precision_of
from whale.planner.schedules import rank_actions
from whale.runtime import batch as batches
from whale.runtime.agreement import check_same_program, check_same_weights, found_once
from whale.runtime.compat import compiled_parts, drop_cached_fakes, uncompiled_function
from whale.runtime.heartbeat import says_who_is_lost
from whale.runtime.optimizer import kind_of
from whale.runtime.outputs import Merge
from whale.runtime.preflight import check_versions
from whale.runtime.signature import autocast_of
from whale.sim.report import Report
from whale.sim.simulate import simulate as run_on_clock

__all__ = ["Step", "init", "parallelize", "plan", "simulate"]


@dataclass(slots=True)
class _Session:
    """What `wh.init` set."""

    config: Config | None = None
    device: str | None = None


_session = _Session()


def init(config: Config | Mapping[str, Any] | None = None, *, device: str | None = None) -> None:
    """Joins the process group when launched by torchrun or `whale launch`, else stays one process.

    `config` becomes the Config of every `parallelize` that gets none of its own. `device` is
    `"cpu"` or `"cuda"`; default: CUDA where there is any.
    """
    if device is not None:
        _session.device = device
    if config is not None:
        _session.config = config if isinstance(config, Config) else Config.from_dict(config)
    if "RANK" not in os.environ or dist.is_initialized():
        return
    timeout = timedelta(seconds=(_session.config or Config()).timeout_seconds)
    backend = "gloo"
    if _local_device().type == "cuda":
        torch.cuda.set_device(_local_device())
        backend = "nccl"
    dist.init_process_group(backend, timeout=timeout)
    store = dist.distributed_c10d._get_default_store()
    check_versions(store, dist.get_rank(), dist.get_world_size())


def _local_device(config: Config | None = None) -> torch.device:
    """The rank's own GPU among `cluster.run_visible_devices`, or the CPU."""
    if _session.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    settings = config or _session.config or Config()
    listed = settings.cluster.run_visible_devices
    visible = [int(i) for i in listed.split(",")] if listed else range(torch.cuda.device_count())
    return torch.device("cuda", visible[int(os.environ.get("LOCAL_RANK", "0")) % len(visible)])


@says_who_is_lost
@plainly
@leaves_no_trace
def parallelize(
    model: nn.Module,
    *,
    optimizer: OptimizerFactory,
    batch: Any,
    loss: Callable[[Any, Any], Any] | None = None,
    config: Config | Mapping[str, Any] | None = None,
    cluster: str | Cluster | ClusterLayout | None = None,
    plan: Plan | None = None,
    outputs: Mapping[str, Merge] | None = None,
) -> Step:
    """An annotated model, ready to train on the devices there are; every rank calls it alike.

    Args:
        model: Any nn.Module; it is not changed. On the meta device it is initialised by Whale.
        optimizer: A factory called with `[(name, parameter), ...]`, for example
            `partial(torch.optim.AdamW, lr=1e-4)`.
        batch: One global batch (dim 0 is the batch); its shapes are what matters.
        loss: `loss(output, target)`, or None when the model returns its loss.
        config: A Config or a mapping of dotted keys; default: the one given to `wh.init`.
        cluster: The devices; default: the ranks of this job.
        plan: A Plan made before; default: planned here.
        outputs: Named outputs to merge, such as `{"accuracy": wh.mean}`.
    """
    settings = _config(config)
    precision = plan.precision if plan is not None else precision_of(settings)
    with autocast_of(precision, _local_device(settings)):
        return _parallelize(
            model, optimizer, batch, loss, settings, cluster, plan, outputs or {}, precision
        )


def _parallelize(
    model: nn.Module,
    optimizer: OptimizerFactory,
    batch: Any,
    loss: Callable[[Any, Any], Any] | None,
    settings: Config,
    cluster: str | Cluster | ClusterLayout | None,
    plan: Plan | None,
    outputs: Mapping[str, Merge],
    precision: Precision,
) -> Step:
    refuse_wrapped(model)
    loss = uncompiled_function(loss)  # the trials look into it, and one device's result is the same
    refuse_own_parameters(model, loss)
    _say_eager(model)
    batches.refuse_layouts(batch)
    # What computes, where that is not the model in its own dtype; what is kept is made of `model`.
    computed, example = in_precision(model, precision), batches.in_precision(batch, precision, loss)
    captured = capture(computed, example, loss)
    drop_cached_fakes()
    if plan is None:
        plan = _plan(
            captured, _cluster(cluster), settings, batches.num_rows(batch), _training(optimizer)
        )
        plan = _agreed(plan)
        _refuse_overflow(plan)
    else:
        check_given(plan, captured.graph)
        check_settings(plan, settings)
        if plan.early:
            check_early(plan, settings.optimizer.max_grad_norm)
    _warn_of_low_share(plan)
    rank, num_ranks = _rank()
    if plan.num_ranks != num_ranks:
        raise PlanError(
            f"the plan is for {plan.num_ranks} ranks, this job has {num_ranks}",
            hint=f"start it with `whale launch -n {plan.num_ranks}`, or plan for {num_ranks} "
            "devices",
        )
    check_same_weights(model, rank, num_ranks, _local_device(settings))
    if len(plan.stages) > 1 and captured.program is not None:
        check_same_program(captured.program.digest(), num_ranks)
    refuse_loose_ends(model, captured.changes)

    def look_at_it() -> Looked:
        # In the model's own dtype, where a difference is seen in more digits.
        wide = captured if computed is model else capture(model, batch, loss)
        return look(model, batch, loss, plan, wide, outputs=outputs, check=settings.check_parts)

    # Code that could not be traced might wait for other ranks.
    looked = found_once(look_at_it, num_ranks) if captured.program is not None else look_at_it()
    names = frozenset(outputs)
    group = _group_of(plan, rank)
    lowered = lower(
        model,
        plan,
        captured,
        loss,
        actions=rank_actions(plan.schedule, group) if group is not None else [],
        rank=rank,
        device=_local_device(settings),
        seed=settings.seed,
        timeout=timedelta(seconds=settings.timeout_seconds),
        outputs=names,
        changes=looked.changes,
        trial=looked.trial,
        rehearsal=partial(
            rehearse,
            model=computed,
            plan=plan,
            captured=captured,
            batch=example,
            loss=loss,
            rank=rank,
            device=_local_device(settings),
        )
        if settings.check_splits
        else None,
    )
    for note in lowered.notes:
        logging.getLogger("whale").info(note)
    return Step(
        model,
        plan,
        lowered,
        loss=loss,
        optimizer=optimizer,
        config=settings,
        forward_actions=forward_actions(plan.schedule, group) if group is not None else [],
        outputs=outputs,
        batch=example,
        rank=rank,
        predict=lambda measured: replace(
            simulate(plan, title=type(model).__name__), measured=measured
        ),
        changes=looked.changes,
        judge=partial(check_kind, plan),
    )


@plainly
@leaves_no_trace
def plan(
    model: nn.Module,
    *,
    cluster: str | Cluster | ClusterLayout | None = None,
    batch: Any,
    loss: Callable[[Any, Any], Any] | None = None,
    config: Config | Mapping[str, Any] | None = None,
    optimizer: OptimizerFactory | None = None,
) -> Plan:
    """The Plan `parallelize` would run, for any cluster, without touching a device.

    `optimizer` is only asked how much state it keeps; default: as AdamW.
    """
    refuse_wrapped(model)
    batches.refuse_layouts(batch)
    settings = _config(config)
    precision, loss = precision_of(settings), uncompiled_function(loss)
    with autocast_of(precision, torch.device("cpu")):
        example = batches.in_precision(batch, precision, loss)
        captured = capture(in_precision(model, precision), example, loss)
    training = _training(optimizer) if optimizer is not None else Training()
    return _plan(captured, _cluster(cluster), settings, batches.num_rows(batch), training)


def simulate(plan: Plan, *, title: str = "") -> Report:
    """A step of a plan on a clock: time, memory and energy of every device, and all its events."""
    return run_on_clock(plan, orders_of(plan.schedule), title=title)


def _plan(
    captured: Captured, cluster: Cluster, config: Config, rows: int, training: Training
) -> Plan:
    path = config.cluster.profile
    return make_plan(
        captured.graph,
        cluster,
        config,
        batch_rows=rows,
        refusal=captured.refusal,
        training=training,
        profile=Profile.read(path) if path else None,
    )


def _agreed(plan: Plan) -> Plan:
    """Rank 0's plan on every rank: a search that ran out of time may end differently elsewhere."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return plan
    texts = [json.dumps(plan.to_dict()) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(texts, src=0)
    return Plan.from_dict(json.loads(str(texts[0])))


def _say_eager(model: nn.Module) -> None:
    found = compiled_parts(model)
    if found:
        hide_from_compiler()
        warnings.warn(
            f"{len(found)} modules are compiled ({found[0] or 'the model'} ...): Whale runs their "
            "own code instead, with the same result",
            stacklevel=4,
        )


def _training(optimizer: OptimizerFactory) -> Training:
    kind = kind_of(optimizer)
    return Training(
        optimizer=kind.name,
        state_tensors=kind.state_tensors,
        scratch_tensors=0.0 if kind.widens_itself else 1.0,
        widens_itself=kind.widens_itself,
        tf32=torch.get_float32_matmul_precision() != "highest",
    )


OVERFLOW_MARGIN = 1.1
"""A plan predicted to need this much more than there is will not run; closer calls may."""


def _refuse_overflow(plan: Plan) -> None:
    """An out-of-memory error that can be foreseen is an error now."""
    if plan.prices is None:
        return
    for device, peak in zip(plan.prices.devices, plan.peak_bytes, strict=True):
        kind = plan.device_types[device.rank]
        if kind != "CPU" and peak > OVERFLOW_MARGIN * device.capacity_bytes:
            raise PlanError(
                f"rank {device.rank} ({kind}) would need {peak / 1e9:.1f} GB, it has "
                f"{device.capacity_bytes / 1e9:.1f} GB",
                hint="more micro-batches, fewer rows, more devices or stages; `whale plan` shows "
                "what takes the memory",
            )


def _warn_of_low_share(plan: Plan) -> None:
    """A `split` that leaves most of its parameters whole on every device is not what was asked."""
    for taskgraph in plan.taskgraphs:
        if taskgraph.is_low:
            why = "; ".join(grouped_reasons(taskgraph.reasons, most=3))
            warnings.warn(
                f"only {taskgraph.split_share:.0%} of the parameters of {taskgraph.name} are "
                f"split, the rest is whole on every device ({why}); print(step.plan) says more",
                stacklevel=3,
            )


def _config(config: Config | Mapping[str, Any] | None) -> Config:
    if config is None:
        return _session.config or Config()
    return config if isinstance(config, Config) else Config.from_dict(config)


def _cluster(cluster: str | Cluster | ClusterLayout | None) -> Cluster:
    if cluster is not None:
        return make_cluster(cluster).cluster
    ambient = ambient_cluster()
    return ambient.cluster if ambient is not None else discover()


def _rank() -> tuple[int, int]:
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise WhaleError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but this process has not joined the others",
            hint="call wh.init() first",
        )
    return 0, 1


def _group_of(plan: Plan, rank: int) -> int | None:
    for index, stages in enumerate(plan.schedule.groups):
        if rank in plan.stages[stages[0]].virtual_device.ranks:
            return index
    return None


def forward_actions(schedule: Schedule, group: int) -> list[Action]:
    """Forwards only, micro-batch by micro-batch: what evaluation runs."""
    orders = tuple(
        tuple(
            str(Action(kind="F", stage=stage, micro_batch=m))
            for m in range(schedule.num_micro_batch)
            for stage in stages
        )
        for stages in schedule.groups
    )
    only = Schedule(
        kind=schedule.kind,
        num_micro_batch=schedule.num_micro_batch,
        groups=schedule.groups,
        edges=schedule.edges,
        orders=orders,
    )
    return [a for a in rank_actions(only, group) if a.kind in ("F", "SF", "RF")]
