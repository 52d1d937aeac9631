"""Named outputs of one device: of what parts they are made, and how.

Place in the flow: under the one-device run of `wh.verify`; the truth for `outputs=` of a Step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from whale.verification.shares import Span


def merge_of(whole: Any, parts: list[tuple[int, Any]]) -> str | None:
    """How an output of some rows is made of those of its parts; None: in no way Whale has."""
    values = [value for _, value in parts]
    if not isinstance(whole, Tensor) or any(not isinstance(v, Tensor) for v in values):
        return None
    if not whole.is_floating_point():
        return None
    rows = sum(count for count, _ in parts)
    made: dict[str, Callable[[], Tensor]] = {
        "concat": lambda: torch.cat(values),
        "mean": lambda: torch.stack([v * count for count, v in parts]).sum(0) / rows,
        "sum": lambda: torch.stack(values).sum(0),
    }
    for how, make in made.items():
        try:
            if torch.allclose(make(), whole, rtol=1e-5, atol=1e-6):
                return how
        except RuntimeError:
            continue
    return None


def merged(
    wanted: dict[str, str], named: list[dict[str, Any]], spans: list[Span]
) -> dict[str, Tensor]:
    """The named outputs of the global batch."""
    made = {}
    sizes = [high - low for low, high in spans]
    for name, how in wanted.items():
        values = [part[name].detach() for part in named]
        if how == "concat":
            made[name] = torch.cat(values)
        elif how == "sum":
            made[name] = torch.stack(values).sum(0)
        else:
            weighed = [v.double() * size for v, size in zip(values, sizes, strict=True)]
            made[name] = torch.stack(weighed).sum(0) / sum(sizes)
    return made
