"""Which optimizers may run on shards: the ones that treat every element by itself.

Place in the flow: asked by Step when it makes the optimizer. An optimizer that looks at whole
tensors (norms, rows and columns, matrices) would silently compute something else on a shard, so it
is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from whale.errors import WhaleError

_ELEMENTWISE = tuple(
    "SGD Adam AdamW Adamax NAdam RAdam RMSprop Adagrad Adadelta Rprop ASGD SparseAdam".split()
)


def check_elementwise(
    optimizer: torch.optim.Optimizer, split: Sequence[str], promised: bool | None
) -> None:
    """Refuses an optimizer that is not known to be elementwise where parameters are split."""
    known = type(optimizer).__name__ in _ELEMENTWISE and type(optimizer).__module__.startswith(
        "torch.optim"
    )
    if known or not split or promised:
        return
    raise WhaleError(
        f"{type(optimizer).__name__} is not known to update every element by itself, and "
        f"{len(split)} "
        f"parameters are split ({split[0]}, ...)",
        hint="use an elementwise optimizer ("
        + ", ".join(_ELEMENTWISE[:4])
        + ", ...), or promise it with "
        "Config optimizer.elementwise=True",
    )


def state_tensors(factory: Callable[[Any], torch.optim.Optimizer]) -> tuple[str, float]:
    """The optimizer's class, and bytes of state per byte of parameter, found by one real step.

    A factory that cannot take a lone parameter (parameter groups by name, say) counts as Adam.
    """
    parameter = torch.nn.Parameter(torch.zeros(64, 64))
    parameter.grad = torch.ones_like(parameter)
    try:
        made = factory([("weight", parameter)])
        made.step()
    except Exception:  # noqa: BLE001 - a user's factory may want its own names
        return "unknown", 2.0
    state = made.state.get(parameter, {})
    size = sum(v.numel() * v.element_size() for v in state.values() if torch.is_tensor(v))
    return type(made).__name__, size / (parameter.numel() * parameter.element_size())
