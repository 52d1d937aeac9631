"""The layouts of the parity matrix.

How each annotates a model, on how many ranks, with what settings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import nn

import whale as wh
from whale.engine.capture.captured import capture
from whale.ir.cluster import Cluster, Device, Node

Annotate = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True)
class Layout:
    """One layout. `speeds` makes it uneven, in exactly these ratios; equal devices otherwise."""

    name: str
    num_ranks: int
    annotate: Annotate
    config: dict[str, Any] = field(default_factory=dict)
    speeds: tuple[float, ...] | None = None
    nested: bool = False
    paces: tuple[float, ...] | None = None
    """Declared FLOPs per second, by which the planner chooses shares, cuts and order itself."""
    num_nodes: int = 1
    """Nodes among which the devices stand, as many in each."""

    def __post_init__(self) -> None:
        if self.speeds is not None:
            object.__setattr__(self, "config", {**self.config, "cluster.balance": "speed"})

    def cluster(self) -> Cluster:
        """Its devices."""
        speeds = self.speeds or (1.0,) * self.num_ranks
        devices = tuple(
            Device(
                rank=r,
                node=r * self.num_nodes // self.num_ranks,
                type="CPU",
                memory_bytes=8 * 10**9,
                speed=s,
                pace_flops=self.paces[r] if self.paces else None,
            )
            for r, s in enumerate(speeds)
        )
        return Cluster(devices=devices, nodes=tuple(Node(index=i) for i in range(self.num_nodes)))


class LayerPaths(Sequence[str]):
    """The model's Layers in execution order, found when a layout asks for them."""

    def __init__(self, model: nn.Module, batch: Any, loss: Any) -> None:
        self._of = (model, batch, loss)

    @cached_property
    def _found(self) -> list[str]:
        return layer_paths(*self._of)

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, index: Any) -> Any:
        return self._found[index]


def layer_paths(model: nn.Module, batch: Any, loss: Any) -> list[str]:
    """The model's Layers in execution order."""
    return [layer.path for layer in capture(model, batch, loss).graph.layers]


def chunks(paths: list[str], parts: int) -> list[str]:
    """Consecutive patterns covering all Layers."""
    sizes = [len(paths) // parts + (i < len(paths) % parts) for i in range(parts)]
    found, start = [], 0
    for size in sizes:
        found.append("|".join(paths[start : start + size]))
        start += size
    return found


def whole(*primitives: Callable[[], Any]) -> Annotate:
    """The whole model under one (nested) primitive."""
    return lambda model, paths: wh.annotate(model, {"": tuple(p() for p in primitives)})


def staged(*kinds: Callable[[], tuple[Any, ...]]) -> Annotate:
    """One stage per kind, Layers spread evenly."""

    def annotate(model: nn.Module, paths: list[str]) -> Any:
        entries = zip(chunks(paths, len(kinds)), kinds, strict=True)
        return wh.annotate(model, {p: (wh.stage(), *kind()) for p, kind in entries})

    return annotate


def head(*primitives: Callable[[], Any]) -> Annotate:
    """A data parallel trunk and a sharded last Layer, on the same devices."""

    def annotate(model: nn.Module, paths: list[str]) -> Any:
        entries = {"|".join(paths[:-1]): wh.replicate(), paths[-1]: tuple(p() for p in primitives)}
        return wh.annotate(model, entries)

    return annotate


def mixed_blocks(model: nn.Module, paths: list[str]) -> Any:
    """Every second Layer sharded, the others data parallel, all on the same devices."""
    return wh.annotate(
        model,
        {"|".join(paths[::2]): wh.replicate(), "|".join(paths[1::2]): wh.split()},
    )


def _none() -> tuple[Any, ...]:
    return ()


def _split() -> tuple[Any, ...]:
    return (wh.split(),)


def _split2() -> tuple[Any, ...]:
    return (wh.split(2),)


def _replicate(count: int) -> Callable[[], tuple[Any, ...]]:
    return lambda: (wh.replicate(count),)


def pipeline(kind: str, micro: int, **more: Any) -> dict[str, Any]:
    """Config of a pipeline."""
    return {"pipeline.schedule": kind, "pipeline.num_micro_batch": micro, **more}


M2 = {"pipeline.num_micro_batch": 2}
M3 = {"pipeline.num_micro_batch": 3}

LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout("one", 1, lambda model, paths: model),
        Layout("data", 2, whole(wh.replicate)),
        Layout("data-uneven", 3, whole(wh.replicate), speeds=(3.0, 1.0, 2.0)),
        Layout("accumulate", 2, whole(wh.replicate), M3),
        Layout("accumulate-uneven", 2, whole(wh.replicate), M3, (2.0, 1.0)),
        Layout("tensor", 2, whole(wh.split)),
        Layout("tensor-uneven", 2, whole(wh.split), speeds=(2.0, 1.0)),
        Layout("tensor-accumulate", 2, whole(wh.split), M3),
        Layout("tensor-accumulate-uneven", 3, whole(wh.split), M3, (2.0, 1.0, 3.0)),
        Layout("gpipe", 2, staged(_none, _none), pipeline("gpipe", 3)),
        Layout("1f1b", 3, staged(_none, _none, _none), pipeline("1f1b", 4)),
        Layout("interleaved", 2, staged(*(_none,) * 4), pipeline("interleaved", 4)),
        Layout("zero-bubble", 3, staged(_none, _none, _none), pipeline("zero-bubble", 4)),
        *(
            Layout(
                f"{kind}-uneven", 4, staged(*(_none,) * n), pipeline(kind, 3), (2.0, 1.0, 1.0, 3.0)
            )
            for kind, n in (("gpipe", 2), ("1f1b", 2), ("interleaved", 4), ("zero-bubble", 2))
        ),
        Layout("data-tensor", 4, whole(lambda: wh.replicate(4), lambda: wh.split(2)), nested=True),
        Layout(
            "data-tensor-uneven",
            4,
            whole(lambda: wh.replicate(4), lambda: wh.split(2)),
            M3,
            (2.0, 1.0, 1.0, 3.0),
            nested=True,
        ),
        Layout("data-pipeline", 4, staged(_none, _none), pipeline("1f1b", 3), nested=True),
        Layout(
            "data-pipeline-uneven",
            4,
            staged(_none, _none),
            pipeline("1f1b", 3),
            (2.0, 1.0, 1.0, 1.0),
            nested=True,
        ),
        Layout(
            "data-zero-bubble", 4, staged(_none, _none), pipeline("zero-bubble", 3), nested=True
        ),
        Layout("pipeline-tensor", 4, staged(_none, _split), pipeline("1f1b", 3), nested=True),
        Layout(
            "pipeline-tensor-uneven",
            4,
            staged(_split, _none),
            pipeline("gpipe", 3),
            (1.0, 2.0, 3.0, 1.0),
            nested=True,
        ),
        Layout("tensor-pipeline", 4, staged(_split2, _split2), pipeline("1f1b", 2), nested=True),
        Layout("3d", 8, staged(_split2, _split2), pipeline("1f1b", 2), nested=True),
        Layout(
            "3d-uneven",
            8,
            staged(_split2, _split2),
            pipeline("1f1b", 2),
            (1.0, 2.0, 3.0, 1.0, 2.0, 1.0, 1.0, 1.0),
            nested=True,
        ),
        Layout("head", 2, head(wh.split), nested=True),
        Layout("head-uneven", 3, head(wh.split), M2, (2.0, 1.0, 2.0), nested=True),
        Layout("head-part", 4, head(lambda: wh.split(2)), nested=True),
        Layout("colocated", 2, mixed_blocks, M3, nested=True),
        Layout("colocated-uneven", 3, mixed_blocks, M2, (1.0, 2.0, 1.0), nested=True),
        Layout("widths", 3, staged(_replicate(1), _replicate(2)), pipeline("1f1b", 3), nested=True),
        Layout(
            "widths-tensor",
            5,
            staged(_replicate(3), _split2),
            pipeline("1f1b", 3),
            (1.0, 2.0, 1.0, 2.0, 1.0),
            nested=True,
        ),
        Layout(
            "interleaved-tensor", 4, staged(*(_split,) * 4), pipeline("interleaved", 3), nested=True
        ),
        Layout("widths-disjoint", 3, lambda m, p: _disjoint(m, p), M3, nested=True),
    )
}


def _disjoint(model: nn.Module, paths: list[str]) -> Any:
    """Counted TaskGraphs without `stage`: disjoint devices, hence a pipeline."""
    first, second = chunks(paths, 2)
    return wh.annotate(model, {first: wh.replicate(2), second: wh.replicate(1)})


def _plain(model: nn.Module, paths: list[str]) -> Any:
    return model


AUTO: dict[str, Any] = {"auto.auto_parallel": True}
# What the planner makes of unequal devices by itself. The paces are so high that nobody sleeps.
HETEROGENEOUS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout("aware-data", 3, whole(wh.replicate), paces=(3e12, 1e12, 2e12)),
        Layout("aware-idle", 3, whole(wh.replicate), M2, paces=(3e12, 1e6, 2e12)),
        Layout("aware-tensor", 2, whole(wh.split), paces=(2e12, 1e12)),
        Layout(
            "aware-data-tensor",
            4,
            whole(lambda: wh.replicate(4), lambda: wh.split(2)),
            M3,
            paces=(2e12, 1e12, 1e12, 3e12),
        ),
        Layout(
            "aware-order", 3, staged(*(_none,) * 3), pipeline("1f1b", 4), paces=(4e12, 1e12, 2e12)
        ),
        Layout(
            "aware-stages",
            2,
            _plain,
            {**AUTO, **pipeline("1f1b", 4), "pipeline.num_stages": 2},
            paces=(1e12, 2e12),
        ),
        Layout(
            "aware-widths",
            4,
            _plain,
            {**AUTO, **pipeline("1f1b", 3), "pipeline.num_stages": 2},
            paces=(3e12, 1e12, 1e12, 1e12),
        ),
        Layout(
            "aware-unused",
            3,
            _plain,
            {**AUTO, **pipeline("1f1b", 3), "pipeline.num_stages": 2},
            paces=(2e12, 2e12, 1e5),
        ),
        # Data parallel on two of three: the third is in no sum either.
        Layout(
            "aware-subset",
            3,
            _plain,
            {**AUTO, "pipeline.num_stages": 1},
            paces=(2e12, 2e12, 1e5),
        ),
        Layout("aware-auto", 4, _plain, {**AUTO}, paces=(3e12, 1e12, 1e12, 1e12)),
    )
}
