"""Which optimizers may run on shards: the ones that treat every element by itself.

Place in the flow: asked by Step when it makes the optimizer. An optimizer that looks at whole
tensors (norms, rows and columns, matrices) would silently compute something else on a shard, so it
is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

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
