"""Merging named outputs over micro-batches and replicas: `wh.mean`, `wh.sum`, `wh.concat`.

Place in the flow: used by Step for `outputs={"accuracy": wh.mean}`. EPL's graph collections, as
values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from whale.errors import WhaleError


class Merge:
    """How an output of many parts becomes one."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"wh.{self.name}"


mean = Merge("mean")
"""Mean of the parts, each weighed by its rows."""
sum = Merge("sum")  # noqa: A001 - the public name is wh.sum
"""Sum of the parts."""
concat = Merge("concat")
"""The parts along dim 0, in the order of the global batch."""

Part = tuple[int, int, dict[str, Any]]
"""(first row in the global batch, rows, named outputs) of one micro-batch on one replica."""


def merge(parts: list[Part], wanted: Mapping[str, Merge], num_ranks: int) -> dict[str, Any]:
    """Every wanted output, merged over all ranks' parts; the same on every rank."""
    if not wanted:
        return {}
    mine = [
        (row, rows, {name: _on_cpu(named.get(name)) for name in wanted})
        for row, rows, named in parts
    ]
    gathered: list[list[Part]] = [mine]
    if num_ranks > 1:
        gathered = [[] for _ in range(num_ranks)]
        dist.all_gather_object(gathered, mine)
    every = sorted((p for ps in gathered for p in ps), key=lambda part: part[0])
    return {name: merge_one(name, how, every) for name, how in wanted.items()}


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def merge_one(name: str, how: Merge, parts: list[Part]) -> Any:
    """One output of these parts, in the order of their rows."""
    values = [(rows, named[name]) for _, rows, named in parts if rows]
    if not values or any(not isinstance(v, torch.Tensor) for _, v in values):
        raise WhaleError(
            f"outputs asks for {name!r}, which the model does not return as a tensor",
            hint="name a key of the mapping the model or the loss returns (`output` is the "
            "model's own output)",
        )
    if how.name == "concat":
        return torch.cat([v.reshape(1) if v.dim() == 0 else v for _, v in values])
    if how.name == "sum":
        return torch.stack([v for _, v in values]).sum(0)
    weights = torch.tensor([float(rows) for rows, _ in values], dtype=torch.float64)
    stacked = torch.stack([v.double() for _, v in values])
    shape = [-1] + [1] * (stacked.dim() - 1)
    return (stacked * weights.view(shape)).sum(0) / weights.sum()
