"""Layouts of odd models: how one is annotated, for how many ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

import whale as wh
from tests.odd.spec import Spec
from whale.ir.cluster import Cluster, Device, Node

STAGED = ("stages", "stages-split", "stages-data", "interleaved", "half-split")
"""Layouts that run a pipeline, where there are ranks enough for one."""


def _chunks(units: list[str], parts: int) -> list[str]:
    sizes = [len(units) // parts + (i < len(units) % parts) for i in range(parts)]
    found, start = [], 0
    for size in sizes:
        found.append("|".join(units[start : start + size]))
        start += size
    return found


def _stages(model: nn.Module, units: list[str], count: int, *inner: Callable[[], Any]) -> None:
    wh.annotate(
        model, {p: (wh.stage(), *(make() for make in inner)) for p in _chunks(units, count)}
    )


def annotate(spec: Spec, model: Any) -> None:
    """Writes the layout of a spec on a model."""
    kind, n, units = spec.layout, spec.ranks, model.units()
    if kind in ("one", "auto"):
        return
    if kind == "data":
        wh.annotate(model, {"": wh.replicate()})
    elif kind == "split":
        wh.annotate(model, {"": wh.split()})
    elif kind == "data-split":
        wh.annotate(model, {"": (wh.replicate(n), wh.split(2))})
    elif kind == "stages":
        _stages(model, units, n)
    elif kind == "stages-data":
        _stages(model, units, 2)
    elif kind == "interleaved":
        _stages(model, units, min(2 * n, len(units)))
    elif kind == "stages-split":
        _stages(model, units, max(1, n // 2), lambda: wh.split(2))
    elif kind == "half-split":
        first, second = _chunks(units, 2)
        wh.annotate(
            model,
            {first: (wh.stage(), wh.replicate(n - 2)), second: (wh.stage(), wh.split(2))},
        )
    elif kind == "head":
        wh.annotate(model, {"|".join(units[:-1]): wh.replicate(), units[-1]: wh.split()})
    elif kind == "stem":
        wh.annotate(model, {units[0]: wh.split(), "|".join(units[1:]): wh.replicate()})
    elif kind == "mixed":
        wh.annotate(
            model, {"|".join(units[::2]): wh.replicate(), "|".join(units[1::2]): wh.split()}
        )
    else:
        raise AssertionError(kind)


RANKS: dict[str, tuple[int, ...]] = {
    "one": (1,),
    "data": (2, 2, 3, 4),
    "split": (2, 2, 3, 4),
    "data-split": (4,),
    "stages": (2, 2, 3),
    "stages-data": (4,),
    "interleaved": (2,),
    "stages-split": (4,),
    "half-split": (3,),
    "head": (2, 3),
    "stem": (2,),
    "mixed": (2, 3),
    "auto": (2,),
}


MEMORY: dict[str, dict[str, Any]] = {
    "share-update": {"zero.level": "v0"},
    "share-gradients": {"zero.level": "v1"},
    "share-weights": {"zero.level": "v2"},
    "host-state": {"offload.level": "state"},
    "host-weights": {"offload.level": "weights"},
    "host-update": {"offload.level": "update"},
    "host-all": {"offload.level": "v0"},
    "host-activations": {"offload.activations": True},
    "again": {"gradient_checkpoint.type": "collection"},
    "again-from-products": {
        "gradient_checkpoint.type": "collection",
        "gradient_checkpoint.keep": "products",
    },
    "apply-groups": {"optimizer.num_apply_group": 3},
    "apply-early": {"optimizer.num_apply_group": 3, "optimizer.apply_in_backward": True},
}
"""Settings that save memory and change no number, by the word that a spec has for them."""

KINDS_OF_MEMORY = ("share", "host", "again", "apply")
"""Of each a spec has one word at most, and `host-activations` beside another."""


def config(spec: Spec) -> dict[str, Any]:
    """The settings of a spec."""
    values: dict[str, Any] = {
        "pipeline.num_micro_batch": spec.micro,
        "pipeline.schedule": spec.schedule,
        "timeout_seconds": 8.0,
    }
    if spec.seed % 2:  # most models here would be one bucket
        values["communication.bucket_bytes"] = 256
    if spec.speeds:
        values["cluster.balance"] = "speed"
    if spec.max_norm is not None:
        values["optimizer.max_grad_norm"] = spec.max_norm
    for word in spec.memory:
        values |= MEMORY[word]
    if spec.layout == "auto":
        values["auto.auto_parallel"] = True
    return values


def cluster(spec: Spec) -> Cluster:
    """Its devices."""
    speeds = spec.speeds or (1.0,) * spec.ranks
    devices = tuple(
        Device(rank=r, node=0, type="CPU", memory_bytes=8 * 10**9, speed=s)
        for r, s in enumerate(speeds)
    )
    return Cluster(devices=devices, nodes=(Node(index=0),))
