"""Router calls: what the router losses of a model were computed from, at once and in parts.

Place in the flow: beside `engine.trials.trial_rows`. A router loss is no sum over rows, so parts
take the value of the whole (`whale.nn.router_losses` puts the tokens of all replicas together);
what is tried here is that the parts' tensors, put together, are those of the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from whale.errors import WhaleError
from whale.nn.router_losses import leaves


class RouterCalls:
    """The calls of one run.

    Args:
        whole: Those of all rows, whose values parts take; None: these are of all rows.
    """

    def __init__(self, whole: RouterCalls | None = None) -> None:
        self.whole = whole
        self.given: list[list[Tensor]] = []
        self.values: list[Any] = []

    def compute(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Stands in for one call: its value is a constant."""
        place = len(self.given)
        self.given.append([t.detach() for t in leaves((args, kwargs)) if t.dim()])
        if self.whole is not None and place < len(self.whole.values):
            return self.whole.values[place]
        value = function(*args, **kwargs)
        value = value.detach() if isinstance(value, Tensor) else value
        self.values.append(value)
        return value

    def refuse_other_parts(self, parts: list[RouterCalls]) -> None:
        """Raises WhaleError unless what the parts were given, put together, is what these were."""
        same = all(len(part.given) == len(self.given) for part in parts)
        for place, tensors in enumerate(self.given if same else ()):
            given = [part.given[place] for part in parts]
            same = same and all(len(part) == len(tensors) for part in given)
            for index, tensor in enumerate(tensors if same else ()):
                same = same and all(p[index].shape[1:] == tensor.shape[1:] for p in given)
                joined = torch.cat([p[index] for p in given]) if same else tensor
                same = same and joined.shape == tensor.shape
                same = same and torch.allclose(joined.double(), tensor.double(), 1e-4, 1e-5)
        if not same:
            raise WhaleError(
                "the model's router loss is computed from tensors whose first dim is not the "
                "tokens in the order of rows, so replicas cannot put theirs together",
                hint="turn the router loss off (output_router_logits=False), or use wh.nn.MoE",
            )
