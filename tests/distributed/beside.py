"""A model trained by a plain loop and by Whale, side by side: how far apart, or the refusal."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import whale as wh

Before = Callable[[Any, int], None]
"""What the script does with the model before step i."""


def sgd(named: Any) -> torch.optim.Optimizer:
    """Momentum, so that a wrong step shows in all later ones."""
    return torch.optim.SGD(named, lr=0.1, momentum=0.9)


def beside(
    model: nn.Module,
    batches: Sequence[Any],
    annotations: Mapping[str, Any],
    *,
    before: Before = lambda model, index: None,
    config: Mapping[str, Any] | None = None,
    evaluated: Sequence[Any] = (),
    rules: set[str] | None = None,
) -> str | float:
    """The greatest difference of a loss or of a tensor of the state, or the text of the refusal.

    A batch is the model's arguments, then the target of `F.mse_loss`. `evaluated` are batches to
    evaluate after training; `rules` gets the rules of the plan's splits.
    """
    plain = copy.deepcopy(model)
    optimizer, losses = sgd(plain.parameters()), []
    for index, given in enumerate(batches):
        before(plain, index)
        optimizer.zero_grad()
        value = F.mse_loss(plain(*given[:-1]), given[-1])
        value.backward()
        optimizer.step()
        losses.append(value.item())
    plain.eval()
    with torch.no_grad():
        wanted = [F.mse_loss(plain(*given[:-1]), given[-1]).item() for given in evaluated]
    try:
        step = wh.parallelize(
            wh.annotate(model, annotations),
            optimizer=sgd,
            batch=batches[0],
            loss=F.mse_loss,
            config={"timeout_seconds": 20, **(config or {})},
        )
    except wh.WhaleError as error:
        return str(error)
    try:
        if rules is not None:
            rules.update(split.rule for t in step.plan.taskgraphs for split in t.splits)
        far = []
        for index, (given, want) in enumerate(zip(batches, losses, strict=True)):
            before(model, index)
            far.append(abs(float(step(given)["loss"]) - want))
        for given, want in zip(evaluated, wanted, strict=True):
            far.append(abs(float(step.evaluate(given)["loss"]) - want))
        state = step.state_dict()
        far += [float((state[k] - v).abs().max()) for k, v in plain.state_dict().items()]
        return max(far)
    except wh.WhaleError as error:
        return str(error)
    finally:
        step.close(forget=True)
