"""Backwards: user code in the backward pass, which Whale runs on sums where one device has means.

Place in the flow: called by `wh.parallelize`, beside the check that a loss is the same in parts.
Every rank computes the gradient of a sum over its rows, and the total is divided once, at the end.
That is exact where a backward is linear in the gradient, as all of torch's are. A tensor hook that
clamps, or a `torch.autograd.Function` that takes a sign, sees another gradient than on one device.
So does a hook on a parameter: its gradient is complete only after the backward, in a piece of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from whale.engine.state.copies import copied
from whale.engine.state.outside import as_it_was
from whale.engine.trace.draw_recorder import is_random
from whale.errors import WhaleError
from whale.ir.plan import Plan
from whale.runtime import batch as batches
from whale.runtime import compat, generators, recompute

_ROWS = 2
_SCALE = 2.0**20
"""A power of two: a linear backward gives the same digits."""
_HALF_SCALE = 2.0**8
_TOLERANCE = 1e-3
"""Of a gradient's greatest entry: for backwards that add in another order each time."""


def check_backwards(model: nn.Module, batch: Any, loss: batches.Loss | None, plan: Plan) -> None:
    """Refuses hooks on parameters, and code in the backward that is not linear in the gradient.

    Also what cannot be tried, where the plan cuts the batch: a model that does not take a few rows.

    A few rows run forward; only where the model's backward holds code of the user's it runs too,
    from a gradient of 1 and from a greater one. A model on the meta device has no values to try.
    """
    _refuse_parameters(model)
    tensors = [*model.parameters(), *model.buffers(), *batches.leaves(batch)]
    rows = min(_ROWS, batches.num_rows(batch))
    if not rows or any(t.is_meta for t in tensors):
        return
    watch = _Hooks()
    try:
        # A forward may move buffers, and even weights (`max_norm` does).
        tried = copied(model)
        trained = [(name, p) for name, p in tried.named_parameters() if p.requires_grad]
        if not trained:
            return
        with as_it_was(tried, loss), generators.kept(), torch.enable_grad(), watch:
            few = batches.spread_rows(batch, rows, trained[0][1].device)
            value = batches.call_model(tried, loss, batches.own(few))["loss"]
    except WhaleError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a user's forward says of few rows
        _refuse_rows(model, batch, loss, plan, error)
        return
    where = watch.places + _module_hooks(tried) + _functions(value)
    if not where or not value.requires_grad:
        return
    _compare(value, trained, where)


def _compare(
    value: torch.Tensor, trained: list[tuple[str, nn.Parameter]], where: list[str]
) -> None:
    scale = _SCALE if value.dtype in (torch.float32, torch.float64) else _HALF_SCALE
    parameters = [p for _, p in trained]

    draws = _Draws()

    def gradients(seed: float) -> list[torch.Tensor | None]:
        for parameter in parameters:
            parameter.grad = None
        with draws:
            compat.backward_under_modes(value, torch.full_like(value, seed))
        return [parameter.grad for parameter in parameters]

    recompute.install()
    try:
        with generators.kept():
            once, greater = gradients(1.0), gradients(scale)
    except RuntimeError:  # a graph that cannot be gone through twice
        return
    if draws.found:
        raise WhaleError(
            f"user code in the backward draws random numbers ({draws.found}), which only draws of "
            f"a forward are keyed for: {', '.join(dict.fromkeys(where))}",
            hint="to run a part of the forward again in the backward, use torch.utils.checkpoint, "
            "whose second run draws what its first drew",
        )
    for (name, _), one, other in zip(trained, once, greater, strict=True):
        if one is None or other is None:
            continue
        if not one.numel():
            continue
        once_more = other.to_dense().double() / scale
        difference = (once_more - one.to_dense().double()).abs().max()
        if float(difference) > _TOLERANCE * float(one.to_dense().abs().max()):
            raise WhaleError(
                f"the backward is not linear in the gradient: from {scale:g} times the loss, the "
                f"gradient of {name} is not {scale:g} times as great. User code in it: "
                f"{', '.join(dict.fromkeys(where))}",
                hint="Whale adds up gradients of sums and divides once at the end, so that code "
                "would see other numbers than on one device; clip with Config "
                "optimizer.max_grad_norm, or keep hooks and backwards linear",
            )


def _refuse_parameters(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        after = getattr(parameter, "_post_accumulate_grad_hooks", None)
        if parameter._backward_hooks or after:
            raise WhaleError(
                f"the parameter {name} has a hook on its gradient",
                hint="a gradient is complete only after all ranks and micro-batches were summed, "
                "so no hook could see it; change it in the optimizer, or put the hook on what the "
                "module returns",
            )
        if parameter.requires_grad and not parameter.is_floating_point():
            raise WhaleError(
                f"the parameter {name} is {parameter.dtype}; what trains is float64, float32, "
                "bfloat16 or float16",
                hint="keep torch.view_as_real of it as the parameter, and use "
                "torch.view_as_complex in the forward",
            )


def _refuse_rows(
    model: nn.Module, batch: Any, loss: batches.Loss | None, plan: Plan, error: Exception
) -> None:
    """Says which tensors were taken for rows, if the whole batch works and a part does not."""
    replicas = max(len(stage.virtual_device.replicas) for stage in plan.stages)
    if replicas == 1 and plan.num_micro_batch == 1:
        return
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            batches.call_model(copied(model), loss, batches.own(batch))
    except Exception:  # noqa: BLE001 - then it is not for the rows
        return
    rows = batches.num_rows(batch)
    taken = [tuple(t.shape) for t in batches.leaves(batch) if batches.has_rows(t, rows)]
    raise WhaleError(
        f"the model takes the batch of {rows} rows, and not {min(_ROWS, rows)} of them: "
        f"{type(error).__name__}: {error}. Every tensor whose first dim is {rows} is taken for "
        f"rows: {', '.join(map(str, taken))}",
        hint="give a tensor that has no rows another first dim (unsqueeze(0)), or keep it in the "
        "model as a buffer; pass an example batch with a number of rows that is no other size",
    ) from error


def _module_hooks(model: nn.Module) -> list[str]:
    return [
        f"a backward hook on {path or type(model).__name__}"
        for path, module in model.named_modules()
        if module._backward_hooks or module._backward_pre_hooks
    ]


def _functions(value: torch.Tensor) -> list[str]:
    """The user's own autograd Functions that a value was made by."""
    found: list[str] = []
    seen: set[Any] = set()
    waiting = [value.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        made_by = getattr(node, "_forward_cls", None)
        if made_by is not None and made_by.__module__.partition(".")[0] not in ("torch", "whale"):
            found.append(made_by.__qualname__)
        waiting += [following for following, _ in node.next_functions]
    return found


class _Draws(TorchFunctionMode):
    """Notices random functions, but for those that torch's checkpoint runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.found = ""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        before = torch.default_generator.get_state() if is_random(func) else None
        out = func(*args, **(kwargs or {}))
        if before is None or recompute.rerunning():
            return out
        if not torch.equal(before, torch.default_generator.get_state()):
            self.found = getattr(func, "__name__", str(func))
        return out


class _Hooks(TorchFunctionMode):
    """Notices hooks that a forward puts on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") == "register_hook":
            self.places.append("a hook on a tensor")
        return func(*args, **(kwargs or {}))
