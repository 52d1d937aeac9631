"""A MODEL captured as large as it is, on the meta device: where no shipped graph serves.

Place in the flow: the torch side of `whale plan`, loaded only when it is needed. Presets are built
from the registry; `file.py:factory` is called as `whale verify` calls it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from whale.annotations import cluster as find_cluster
from whale.cli.precisions import PRECISIONS
from whale.cli.shipped import PlanSubject
from whale.cli.verify import find_subject
from whale.config import Config
from whale.engine.capture.captured import Captured, capture
from whale.engine.state.copies import in_precision
from whale.errors import ConfigError
from whale.ir.cluster import Cluster
from whale.ir.model_graph import ModelGraph
from whale.models.registry import PRESETS, Preset
from whale.planner.precision import precision_of
from whale.runtime import batch as batches
from whale.runtime.signature import autocast_of


def captured(
    name: str,
    *,
    rows: int | None = None,
    seq: int | None = None,
    precision: str | None = None,
    more: Mapping[str, Any] | None = None,
) -> PlanSubject:
    """The model that MODEL names, captured; None leaves a choice to the preset or the file.

    `more` are settings of precision that go before those that its name stands for.
    """
    if name in PRESETS:
        return _preset(PRESETS[name], rows, seq, precision, more or {})
    if seq is not None and name.rpartition(":")[0].endswith(".py"):
        raise ConfigError(
            f"--seq {seq} with {name!r}; allowed: only with a preset",
            hint="the batch that the factory returns has the sequence length",
        )
    found = find_subject(name, rows)
    model, batch = found.model, found.batch
    if precision is not None:
        model, batch = _cast(model, batch, getattr(torch, PRECISIONS[precision].model))
    made = _captured(model, batch, found.loss, precision, more or {})
    return PlanSubject(
        graph=made.graph,
        rows=batches.num_rows(batch),
        precision=precision or _precision_of(model),
        refusal=made.refusal,
    )


def local_cluster() -> Cluster:
    """The devices of this machine."""
    return find_cluster("local").cluster


def _preset(
    preset: Preset,
    rows: int | None,
    seq: int | None,
    precision: str | None,
    more: Mapping[str, Any],
) -> PlanSubject:
    if preset.seq is None and seq is not None:
        raise ConfigError(
            f"--seq {seq} with preset {preset.name!r}, which has no sequences",
            hint="leave --seq out",
        )
    precision = precision or preset.precision
    with torch.device("meta"):
        model = preset.build()
        batch = preset.batch(rows or preset.rows, seq)
    if preset.annotate is not None:
        model = preset.annotate(model)
    model, batch = _cast(model, batch, getattr(torch, PRECISIONS[precision].model))
    made = _captured(model, batch, preset.loss, precision, more)
    return PlanSubject(
        graph=_portable(made.graph, preset.name),
        rows=rows or preset.rows,
        seq=seq or preset.seq,
        precision=precision,
        optimizer=preset.optimizer,
        num_micro_batch=preset.num_micro_batch,
        about=preset.about,
        refusal=made.refusal,
    )


def _captured(
    model: nn.Module, batch: Any, loss: Any, precision: str | None, more: Mapping[str, Any]
) -> Captured:
    """As it will compute: see `wh.plan`."""
    settings = {**(PRECISIONS[precision].settings if precision else {}), **more}
    low = precision_of(Config.from_dict(settings))
    with autocast_of(low, torch.device("cpu")):
        return capture(in_precision(model, low), batches.in_precision(batch, low, loss), loss)


def _precision_of(model: nn.Module) -> str:
    """What most of its weights are in; what no flag names counts as fp32."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        sizes[parameter.dtype] += parameter.numel()
    names = {getattr(torch, PRECISIONS[name].model): name for name in ("fp32", "bf16", "fp16")}
    return names.get(sizes.most_common(1)[0][0], "fp32") if sizes else "fp32"


def _cast(model: nn.Module, batch: Any, dtype: torch.dtype) -> tuple[nn.Module, Any]:
    """Weights and inputs in `dtype`; tokens stay what they are."""
    leaves = [
        leaf.to(dtype) if leaf.is_floating_point() else leaf for leaf in batches.leaves(batch)
    ]
    return model.to(dtype), batches.rebuild(batch, leaves)


def _portable(graph: ModelGraph, name: str) -> ModelGraph:
    """The same on every machine and in every process: no paths, scopes numbered as they come."""
    numbers: dict[int, int] = {}
    taskgraphs = tuple(
        replace(
            taskgraph,
            tag=tuple(
                replace(
                    scope,
                    uid=numbers.setdefault(scope.uid, len(numbers)),
                    where=f"preset {name}",
                )
                for scope in taskgraph.tag
            ),
        )
        for taskgraph in graph.taskgraphs
    )
    return replace(graph, taskgraphs=taskgraphs)
