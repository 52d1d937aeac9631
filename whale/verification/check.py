"""verify: does a plan compute what one device computes? Tried on real processes, tensor by tensor.

Place in the flow: `wh.verify` and `whale verify`. The plan and the program are the ordinary ones;
special here are float64, so that a wrong factor cannot hide behind rounding, and CPU processes, so
that any plan can be tried anywhere.
"""

from __future__ import annotations

import importlib
import math
import os
import pickle
import socket
import tempfile
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from whale import parallel
from whale.annotations import TAG, ambient_cluster, tag_of
from whale.annotations import cluster as make_cluster
from whale.config import Config
from whale.engine.capture.captured import capture
from whale.engine.lower.lowered import norms_of_own_rows
from whale.engine.updating import OptimizerFactory
from whale.engine.watch.face import plainly
from whale.errors import PlanError, RankError, WhaleError
from whale.ir.cluster import Cluster
from whale.ir.plan import Plan
from whale.planner.given import check_given
from whale.runtime import batch as batches
from whale.verification.comparison import Report
from whale.verification.feeds import CHECKS, check_names, make_feeds
from whale.verification.fold import MAX_RANKS, check_size, fold, scaled_tags
from whale.verification.on_rank import at, run_on_rank, so_far
from whale.verification.one_device import aliases_of, run_one_device
from whale.verification.precision import (
    about_dtype,
    as_dtype,
    batch_in,
    loss_in,
    model_in,
    runnable,
)
from whale.verification.processes import RankFailed, run_forked
from whale.verification.task import Reference, Task
from whale.verification.verdict import Check, Mismatch, Verdict

MAX_PARAMETERS = 50_000_000
"""More would be float64 copies of gigabytes in each of several processes."""

MAX_FOR_ALL_CHECKS = 10_000_000
"""Of a model with more parameters the first steps are compared, and what needs no more of them."""

_FLOATING = ("float64", "float32", "bfloat16", "float16")
_CHEAP = frozenset({"steps", "optimizer state", "evaluate"})


@plainly
def verify(
    model: nn.Module,
    plan: Plan | None = None,
    batch: Any = None,
    *,
    loss: batches.Loss | None = None,
    optimizer: OptimizerFactory | None = None,
    config: Config | Mapping[str, Any] | None = None,
    cluster: str | Cluster | None = None,
    steps: int = 3,
    tolerance: float | None = None,
    timeout: float = 120.0,
    dtype: torch.dtype | str | None = None,
    checks: Collection[str] | None = None,
) -> Verdict:
    """Runs a plan on CPU processes; compares loss, gradients, weights and buffers with one device.

    And what else a training script does: it evaluates, saves, loads, feeds a short last batch,
    another length, autocast. `Verdict.checks` says what was compared, and what was not and why.

    Args:
        model: An annotated model of at most 50 million parameters; it is not changed.
        plan: The plan to try; default: planned here for `cluster`. More than 8 ranks are folded.
        batch: One global batch with real values; step k sees it rolled by k - 1 rows.
        loss: `loss(output, target)`, or None when the model returns its loss.
        optimizer: A factory as for `parallelize`; default: AdamW with a learning rate of 1e-2.
        config: As for `parallelize`.
        cluster: The devices to plan for; their number and relative speeds are what matters.
        steps: Optimizer steps to compare before the other checks, which take steps too.
        tolerance: Allowed relative error; default: 1e-9, or 1e-6 where the loss is float32, or
            1e-4 where everything is.
        timeout: Seconds for one device, and again for the ranks.
        dtype: `float64` or `float32`; default: float64, or float32 where the model makes float32
            tensors of its own and cannot run in float64.
        checks: Names of the checks to make, see `Verdict.checks`; default: all.

    Returns:
        The verdict; a rank that raises, dies or hangs makes one that is not ok.
    """
    start = time.monotonic()
    settings = Config.from_dict(
        {
            **parallel._config(config).to_dict(),
            # Longer than ours: a rank that hangs is then named here, not by one that gave up on it.
            "timeout_seconds": timeout + 60.0,
            # What these would stop at is for the comparison to find, and to name.
            "check_splits": False,
            "guard": 0,
        }
    )
    wanted = check_names(checks)
    _check(model, batch, steps)
    given = _cluster(cluster)
    if plan is not None and cluster is not None and given is not None:
        check_size(plan, given)
    # The first optimizer step imports it, which takes seconds: here once instead of in every rank.
    importlib.import_module("torch._dynamo")
    with tempfile.TemporaryDirectory(prefix="whale-verify-") as name:
        folder = Path(name)
        precision, note = as_dtype(dtype), ""
        if precision is None:
            precision, note = runnable(model, batch, loss, timeout=timeout, folder=folder)
        own = model_in(model, precision)
        own_batch, own_loss = batch_in(batch, precision), loss_in(loss, precision)
        if plan is not None:
            planned = _adopt(plan, model, batch, loss, own, own_batch, own_loss)
        elif given is not None:
            planned = parallel.plan(
                own, cluster=given, batch=own_batch, loss=own_loss, config=settings
            )
        else:
            raise PlanError(
                "verify got neither a plan nor a cluster",
                hint='pass the plan to try, or cluster="1x4xCPU" to plan for',
            )
        _refuse_own_norms(planned, model)
        folded = ""
        if planned.num_ranks > MAX_RANKS:
            planned, folded = _fold(own, planned, given, settings, own_batch, own_loss)
        skipped = _not_made(wanted, own, planned)
        task = Task(
            model=own,
            feeds=make_feeds(own_batch, steps, wanted - skipped.keys()),
            loss=own_loss,
            optimizer=optimizer,
            config=settings,
            plan=planned,
            folder=folder,
            tolerance=tolerance,
            wanted=wanted - skipped.keys(),
            dtype=precision,
        )
        if "autocast" in task.wanted:
            task = replace(task, low=_in_float32(task))
        reference = _run_reference(task, timeout)
        reports, failure = _run_ranks(task, reference, timeout)
    mismatches = _merge(reference, reports, aliases_of(own))
    made = _checks(task, {**skipped, **reference.skipped}, reports, mismatches)
    errors = [c.worst_error for c in made if c.name != "autocast"]
    return Verdict(
        ok=not mismatches and not failure,
        worst_error=math.inf if failure else max(errors, default=0.0),
        tolerance=task.allowed(reference.float32),
        mismatches=mismatches,
        failure=failure,
        num_ranks=planned.num_ranks,
        num_tensors=len(dict(own.named_parameters())) + len(dict(own.named_buffers())),
        reference=reference.text + (f"; in float32, for in float64: {note}" if note else ""),
        folded=folded,
        seconds=time.monotonic() - start,
        checks=() if failure else made,
        dtype=str(precision).removeprefix("torch."),
    )


def _check(model: nn.Module, batch: Any, steps: int) -> None:
    if "RANK" in os.environ or dist.is_initialized():
        raise RankError(
            f"this process is rank {os.environ.get('RANK', '?')} of a job, verify starts its own",
            hint="call wh.verify in a process of its own, without `whale launch` or torchrun",
        )
    if batch is None:
        raise WhaleError(
            "verify got no batch", hint="pass one global batch: wh.verify(model, plan, batch)"
        )
    if any(leaf.is_meta for leaf in batches.leaves(batch)):
        raise WhaleError(
            "the batch is on the meta device: shapes without values",
            hint="pass a batch with real values; random ones will do",
        )
    if steps < 1:
        raise WhaleError(f"steps is {steps}; allowed: 1 or more", hint="3 is the default")
    size = sum(p.numel() for p in model.parameters())
    if size > MAX_PARAMETERS:
        raise WhaleError(
            f"the model has {size:,} parameters; allowed: at most {MAX_PARAMETERS:,}",
            hint="pass a smaller configuration of it: the same modules and annotations, fewer and "
            "narrower layers",
        )


# ---- the checks ----------------------------------------------------------------------------------


def _not_made(wanted: frozenset[str], model: nn.Module, plan: Plan) -> dict[str, str]:
    """The checks that are left out, and why."""
    found = dict.fromkeys(CHECKS.keys() - wanted, "not asked for")
    size = sum(p.numel() for p in model.parameters())
    if size > MAX_FOR_ALL_CHECKS:
        why = f"the model has {size:,} parameters, more than {MAX_FOR_ALL_CHECKS:,}"
        found |= dict.fromkeys(wanted - _CHEAP, why)
    if not plan.wire.divides:
        found["autocast"] = "gradients are summed, not averaged"
    if any(t.is_meta for t in (*model.parameters(), *model.buffers())):
        found["autocast"] = "the model is on the meta device"
    return found


def _in_float32(task: Task) -> Task:
    """The same task for autocast, which leaves float64 as it is."""
    model = model_in(task.model, torch.float32)
    batch, loss = batch_in(task.first, torch.float32), loss_in(task.loss, torch.float32)
    plan = _retyped(task.plan, capture(model, batch, loss).graph.hash, "float32")
    feeds = (replace(task.feeds[0], batches=(batch,)),)
    return replace(task, model=model, loss=loss, feeds=feeds, plan=plan, dtype=torch.float32)


def _checks(
    task: Task,
    skipped: Mapping[str, str],
    reports: list[Report],
    mismatches: tuple[Mismatch, ...],
) -> tuple[Check, ...]:
    refused = {r.refused[0]: r.refused[1] for r in reports if r.refused and r.refused[1]}
    wrong = {m.check for m in mismatches}
    made = set.intersection(*(set(r.made) for r in reports)) if reports else set()
    found = []
    for name, what in CHECKS.items():
        worst = max((r.worst.get(name, 0.0) for r in reports), default=0.0)
        if name in wrong:
            status, note = "not equal", what
        elif name in refused:
            status, note = "refused", refused[name]
        elif name in skipped:
            status, note = "not checked", skipped[name]
        elif name in made:
            status, note = "equal", what
        else:
            after = next(iter(refused), "a failure")
            status, note = "not checked", f"the ranks stopped at {after}"
        found.append(Check(name=name, status=status, worst_error=worst, note=note))
    return tuple(found)


# ---- the plan ------------------------------------------------------------------------------------


def _cluster(cluster: str | Cluster | None) -> Cluster | None:
    if cluster is not None:
        return make_cluster(cluster).cluster
    ambient = ambient_cluster()
    return ambient.cluster if ambient is not None else None


def _refuse_own_norms(plan: Plan, model: nn.Module) -> None:
    own = norms_of_own_rows(plan, model)
    if own:
        raise PlanError(
            f"the plan lets every replica normalise by its own rows in {len(own)} batch norms "
            f"({own[0]} ...), which one device does not: there is nothing to compare with",
            hint='verify with communication.batch_norm = "global"',
        )


def _adopt(
    plan: Plan,
    model: nn.Module,
    batch: Any,
    loss: batches.Loss | None,
    model64: nn.Module,
    batch64: Any,
    loss64: batches.Loss | None,
) -> Plan:
    """The user's plan for the copy; a plan for another model is refused."""
    graph = capture(model64, batch64, loss64).graph
    double = graph.hash
    if plan.model_hash == double:
        return check_given(plan, graph)
    own = capture(model, batch, loss).graph.hash
    if plan.model_hash != own:
        raise PlanError(
            f"the plan is for model {plan.model_hash}, this model is {own}",
            hint="make a plan for this model: wh.plan(model, ...)",
        )
    dtype = next((p.dtype for p in model64.parameters() if p.is_floating_point()), torch.float64)
    return check_given(_retyped(plan, double, str(dtype).removeprefix("torch.")), graph)


def _retyped(plan: Plan, model_hash: str, dtype: str) -> Plan:
    """A plan for a copy of its model in another precision."""
    homes = tuple(
        replace(home, dtype=dtype) if home.dtype in _FLOATING else home for home in plan.homes
    )
    return replace(plan, model_hash=model_hash, homes=homes)


def _fold(
    model: nn.Module,
    plan: Plan,
    cluster: Cluster | None,
    config: Config,
    batch: Any,
    loss: batches.Loss | None,
) -> tuple[Plan, str]:
    """A plan for at most 8 ranks and what was folded; the model's tags get the scaled counts."""
    settings = Config.from_dict(
        {
            **config.to_dict(),
            "pipeline.num_micro_batch": plan.num_micro_batch,
            "pipeline.schedule": plan.schedule.kind,
            # The small world keeps the shares of the large one, whatever its own balance would be.
            "cluster.balance": "speed",
        }
    )
    captured = capture(model, batch, loss)
    described = cluster if config.cluster.balance == "speed" else None
    small = fold(plan, captured.graph, described, settings, refusal=captured.refusal)
    tags = scaled_tags([tag_of(module) for module in model.modules()], small.counts)
    for module in model.modules():
        if tag_of(module):
            module.__dict__[TAG] = tags[tag_of(module)]
    return small.plan, small.text


# ---- the processes -------------------------------------------------------------------------------


def _run_reference(task: Task, timeout: float) -> Reference:
    """In a process of its own: a backward pass in this one could make it unfit for forking."""
    try:
        (reference,) = run_forked(
            {"one device": partial(run_one_device, task)}, timeout=timeout, folder=task.folder
        )
    except RankFailed as error:
        text = str(error)
        raise WhaleError(
            f"the model does not train on one device: {text.splitlines()[0]}",
            hint=_hint(text),
        ) from error
    assert isinstance(reference, Reference)
    return reference


def _hint(text: str) -> str:
    if "fork-based multiprocessing" in text:
        return "call verify before this process's first backward pass"
    if about_dtype(text.splitlines()[0]):
        return (
            'a model that makes float32 tensors of its own takes dtype="float32" (--dtype float32)'
        )
    return "run its forward and backward on this batch alone first, in float64 on the CPU"


def _run_ranks(task: Task, reference: Reference, timeout: float) -> tuple[list[Report], str]:
    """Every rank's report, or what stopped them."""
    number = task.plan.num_ranks
    ranks = {f"rank {r}": partial(_join_and_run, task, reference, r) for r in range(number)}
    try:
        reports = run_forked(
            ranks,
            timeout=timeout,
            folder=task.folder,
            environments=[_environment(r, number) for r in range(number)],
            # Others may wait in a collective for one that refused; not for one that was told so.
            is_last=lambda report: bool(report and report.refused and report.refused[1]),
        )
    except RankFailed as error:
        return [], _with_check(task, str(error))
    for rank, report in enumerate(reports):
        if report is None and not so_far(task, rank).exists():
            return [], f"rank {rank} never came to the check that another one refused"
    known = [
        report or pickle.loads(so_far(task, rank).read_bytes())
        for rank, report in enumerate(reports)
    ]
    return known, _silent_echo(known)


def _with_check(task: Task, failure: str) -> str:
    """What stopped a rank, and in which check, if that is not the first steps themselves."""
    who = [r for r in range(task.plan.num_ranks) if failure.startswith(f"rank {r} ")]
    said = [path.read_text() for r in who if (path := at(task, r)).exists()]
    return failure + (f"\nwhile checking: {said[0]}" if said and said[0] != "steps" else "")


def _silent_echo(reports: list[Report]) -> str:
    """Ranks that lost a peer in a check although none has refused it."""
    lost = [(rank, r.refused[0]) for rank, r in enumerate(reports) if r.refused]
    if not lost or any(r.refused and r.refused[1] for r in reports):
        return ""
    return f"rank {lost[0][0]} lost another one while checking: {lost[0][1]}"


def _environment(rank: int, number: int) -> dict[str, str]:
    values = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(number),
        "LOCAL_WORLD_SIZE": str(number),
        "OMP_NUM_THREADS": "1",
    }
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    return values | ({"GLOO_SOCKET_IFNAME": loopback[0]} if loopback else {})


def _join_and_run(task: Task, reference: Reference, rank: int) -> Report:
    number = task.plan.num_ranks
    if number > 1:
        # A file, not a port: nothing listens, and nothing outside this folder can get in.
        store = dist.FileStore(str(task.folder / "store"), number)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=number)
    else:
        os.environ.pop("RANK")
    return run_on_rank(task, reference, rank)


def _merge(
    reference: Reference, reports: list[Report], aliases: Mapping[str, str]
) -> tuple[Mismatch, ...]:
    """Worst first. A gathered tensor counts only where no rank's own piece explains it."""
    local = [*reference.mismatches, *(m for report in reports for m in report.local)]
    explained = {(m.kind, m.tensor, m.step) for m in local}
    gathered = [
        m
        for report in reports
        for m in report.gathered
        if (m.kind, aliases.get(m.tensor, m.tensor), m.step) not in explained
    ]
    return tuple(sorted(local + gathered, key=lambda m: (-m.error, m.step, m.rank)))
