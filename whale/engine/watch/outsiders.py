"""Outsiders: tensors that take part in a step and do not train.

Place in the flow: Step looks for them in its first two steps and after a load. What trains is a
copy of the user's model. Code that Whale does not copy (a loss, a hook, a closure) may still hold
the model it was given, or a parameter of its own: it would read weights that never change, and no
optimizer would see its gradient. Two looks find all of these:

- a mode around the forwards sees every torch function that reads a tensor of the user's model;
- before a backward, the leaves of the graph are this rank's parameters, values that other stages
  sent, and tensors made in this very forward (forces are gradients of positions); a Parameter of
  someone else is refused at once, any other tensor when it comes a second time.

Between stages, a value that nobody sends a gradient back for is refused as well.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from whale.engine.trace.program import tensors_in
from whale.engine.trace.tracer import user_line
from whale.engine.watch.face import stale
from whale.errors import WhaleError
from whale.runtime.executor import Executor

STEPS = 2
"""Steps that are watched: a tensor that outlives its forward is seen in both."""

# Of a tensor's looks, not of its values.
LOOKS = frozenset(
    "shape dtype device ndim requires_grad is_leaf is_cuda is_meta is_sparse is_quantized layout "
    "grad_fn names size dim numel stride is_floating_point is_complex is_contiguous element_size "
    "__len__ nelement get_device itemsize nbytes _version is_cpu is_nested __hash__".split()
)


def refuse_own_parameters(model: nn.Module, loss: Any) -> None:
    """A loss with trainable parameters of its own: nothing would train them."""
    while isinstance(loss, partial):
        loss = loss.func
    module = loss if isinstance(loss, nn.Module) else getattr(loss, "__self__", None)
    if not isinstance(module, nn.Module) or module is model:
        return
    inside = {id(p) for p in model.parameters()}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and id(parameter) not in inside:
            raise WhaleError(
                f"the loss ({type(module).__name__}) has a trainable parameter {name!r} of its "
                "own, which no optimizer here would update",
                hint="make the loss a part of the model and let the model return it "
                "(`parallelize(model)` without `loss`), or freeze it with requires_grad_(False)",
            )


class _Reads(TorchFunctionMode):
    """Refuses a torch function that reads a tensor of the user's own model."""

    def __init__(self, named: Mapping[int, str]) -> None:
        super().__init__()
        self.named = named

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in tensors_in((args, kwargs)):
            name = self.named.get(id(tensor))
            if name is not None and name_of(func) not in LOOKS:
                raise stale(name, user_line())
        return func(*args, **kwargs)


def name_of(func: Any) -> str:
    """Of a function, or of the property that a getter reads."""
    name = getattr(func, "__name__", "")
    return str(getattr(getattr(func, "__self__", None), "__name__", "") if "get" in name else name)


class Outsiders:
    """Watches the first steps of a Step.

    Args:
        model: The user's own.
        params: This rank's.
        num_stages: Of the plan.
    """

    def __init__(
        self, model: nn.Module, params: Mapping[str, nn.Parameter], num_stages: int
    ) -> None:
        self.num_stages = num_stages
        tensors: dict[str, torch.Tensor] = {
            **dict(model.named_parameters()),
            **dict(model.named_buffers()),
        }
        self.named = {id(tensor): name for name, tensor in tensors.items()}
        self.own = {id(p) for p in params.values()}
        self.seen: dict[int, weakref.ref[torch.Tensor]] = {}
        self.left = STEPS
        self.due = False

    def again(self) -> None:
        """Watches the next steps too."""
        self.left = STEPS

    @contextmanager
    def watching(self, executor: Executor) -> Iterator[ExitStack]:
        """One step, until the stack is closed; costs nothing once all was seen."""
        watched = self.left > 0
        self.left -= watched
        executor.before_backward = self._check if watched else None
        self.due = watched and self.num_stages > 1
        with ExitStack() as stack:
            if watched:
                stack.enter_context(_Reads(self.named))
            yield stack

    def after(self, executor: Executor) -> None:
        """Once this step's sums are there: ranks compare what they saw; all call it."""
        if self.due:
            _refuse_dead_ends(executor.used)

    def _check(self, roots: Iterable[torch.Tensor], received: Iterable[torch.Tensor]) -> None:
        allowed = self.own | {id(tensor) for tensor in received}
        for leaf in _leaves(roots):
            if id(leaf) in allowed:
                continue
            name = self.named.get(id(leaf))
            if name is not None:
                raise stale(name, None)
            before = self.seen.get(id(leaf))
            if isinstance(leaf, nn.Parameter) or (before is not None and before() is leaf):
                kind = "parameter" if isinstance(leaf, nn.Parameter) else "tensor"
                raise WhaleError(
                    f"a {kind} of shape {tuple(leaf.shape)} that requires a gradient takes part in "
                    "the loss and is none of the model's, so nothing would update it",
                    hint="make it a parameter of the model, or detach it",
                )
            self.seen[id(leaf)] = weakref.ref(leaf)


def _refuse_dead_ends(used: Mapping[int, bool]) -> None:
    """A value that no later stage sends a gradient back for; all ranks call it.

    Messages have no None: zeros would come back, and what was computed before it would be decayed
    as if it had a gradient.
    """
    everyone: list[Mapping[int, bool]] = [used]
    if dist.is_initialized():
        everyone = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, dict(used))
    alive = {value for theirs in everyone for value, grad in theirs.items() if grad}
    dead = sorted({value for theirs in everyone for value in theirs} - alive)
    if dead:
        raise WhaleError(
            f"{len(dead)} values travel to a later stage and have no gradient there, though "
            "parameters were used for them: on one device those would not be updated",
            hint="detach them where they are made (x.detach()), or compute and use them in one "
            "stage",
        )


def _leaves(roots: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The leaves a backward from these roots would reach."""
    waiting: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    yield from (root for root in roots if root.grad_fn is None)
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting += [after for after, _ in node.next_functions if after is not None]
