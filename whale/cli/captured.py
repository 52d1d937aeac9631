"""A MODEL captured as large as it is, on the meta device: where no shipped graph serves.

Place in the flow: the torch side of `whale plan`, loaded only when it is needed. Presets are built
from the registry; `file.py:factory` is called as `whale verify` calls it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from whale.annotations import cluster as find_cluster
from whale.cli.shipped import PlanSubject
from whale.cli.verify import find_subject
from whale.engine.capture import capture
from whale.errors import ConfigError
from whale.ir.cluster import Cluster
from whale.ir.model_graph import ModelGraph
from whale.models.registry import PRESETS, Preset
from whale.runtime import batch as batches

_DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def captured(
    name: str, *, rows: int | None = None, seq: int | None = None, precision: str | None = None
) -> PlanSubject:
    """The model that MODEL names, captured; None leaves a choice to the preset or the file."""
    if name in PRESETS:
        return _preset(PRESETS[name], rows, seq, precision)
    if seq is not None and name.rpartition(":")[0].endswith(".py"):
        raise ConfigError(
            f"--seq {seq} with {name!r}; allowed: only with a preset",
            hint="the batch that the factory returns has the sequence length",
        )
    found = find_subject(name, rows)
    model, batch = found.model, found.batch
    if precision is not None:
        model, batch = _cast(model, batch, _DTYPES[precision])
    made = capture(model, batch, found.loss)
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
    preset: Preset, rows: int | None, seq: int | None, precision: str | None
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
    model, batch = _cast(model, batch, _DTYPES[precision])
    made = capture(model, batch, preset.loss)
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


def _precision_of(model: nn.Module) -> str:
    """What most of its weights are in; what no flag names counts as fp32."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        sizes[parameter.dtype] += parameter.numel()
    names = {dtype: name for name, dtype in _DTYPES.items() if name != "tf32"}
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
