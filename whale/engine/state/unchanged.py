"""Unchanged: what of the user's module must stay as it was while a Step is open.

Place in the flow: made by `engine.watch.face`, asked before every step. What trains is a copy, so a
hook, a tensor or a module that a script puts into its own model between steps would do nothing. All
of it is compared with lists made when the Step was built, in a few C calls a step; only where they
differ is it worked out what is new, and said.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from whale.engine.state.loose_ends import hooked
from whale.engine.state.rarely import rarely
from whale.errors import WhaleError

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TABLES = ("_parameters", "_buffers", "_modules")
_SAMPLE = 256
_looks_of = tuple(map(attrgetter, ("requires_grad", "dtype", "_version")))
_hooks_of = tuple(
    attrgetter(name)
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
    if hasattr(torch.Tensor, name)
)


class Unchanged:
    """The modules and tensors of a model, as they were when `note` was last called."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = list(model.modules())
        self.tensors = [*model.named_parameters(), *model.named_buffers()]
        self._steps = 0
        self._own = [tensor for _, tensor in self.tensors]
        self._tables = [module.__dict__ for module in self.modules]
        self._hook_tables = [table[name] for table in self._tables for name in _HOOKS]
        self.note()

    def note(self) -> None:
        """They are as they should be now."""
        self._now = self._all()
        self._looks = [_looks(tensor) for _, tensor in self.tensors]
        self._samples = [sample(tensor) for _, tensor in self.tensors]
        self._hooks = [_hooks(module) for module in self.modules]
        self._held = [_held(module) for module in self.modules]
        self._members = [tuple(module._modules.values()) for module in self.modules]

    def _all(self) -> list[Any]:
        """Equal as long as nothing has changed; past the face, which watches who reads."""
        found: list[Any] = []
        for name in _TABLES:
            held = [table[name] for table in self._tables]
            found.append(list(map(id, chain.from_iterable(map(dict.values, held)))))
        found.append([list(hooks) for hooks in self._hook_tables if hooks])
        found += [list(map(look, self._own)) for look in _looks_of]
        found += [any(map(hooks, self._own)) for hooks in _hooks_of]
        return found

    def check(self) -> None:
        """Refuses a step on a model that a script has changed since."""
        if self._all() != self._now:
            self._say()
        self._steps += 1
        if rarely(self._steps):
            # `tensor.data` is written to unseen: some elements tell, ever more rarely.
            for (name, tensor), before in zip(self.tensors, self._samples, strict=True):
                if not torch.equal(sample(tensor), before):
                    raise _changed(name, _looks(tensor), _looks(tensor))

    def refuse_exchanged(self) -> None:
        """A call with other tensors in the place of the model's (`torch.func.functional_call`)."""
        for module, held in zip(self.modules, self._held, strict=True):
            if _held(module) != held:
                said = f"a {type(module).__name__} is called with other tensors than its own, where"
                hint = "call a copy of the model made before wh.parallelize"
                raise WhaleError(f"{said} the open step's trained ones would run", hint=hint)

    def _say(self) -> None:
        every = zip(self.modules, self._hooks, self._members, self._held, strict=True)
        for module, hooks, members, held in every:
            kind = type(module).__name__
            if _hooks(module) != hooks:
                raise WhaleError(
                    f"a hook was put on a {kind}, or taken off it, while a step is open, which "
                    "trains a copy",
                    hint="register hooks before wh.parallelize",
                )
            if tuple(module._modules.values()) != members:
                raise WhaleError(
                    f"a {kind} has {len(module._modules)} modules in it now, other than the "
                    f"{len(members)} it had when the model was parallelized: what trains is a copy",
                    hint="leave modules out by a flag that the forward looks at, or step.save, "
                    "step.close and parallelize again",
                )
            if _held(module) != held:
                raise WhaleError(
                    f"a {kind} has other parameters or buffers than when the model was "
                    "parallelized (register_buffer, register_parameter, a conversion): what trains "
                    "is a copy",
                    hint="change values in place through model.load_state_dict, pass what changes "
                    "in the batch, or step.save, step.close and parallelize again",
                )
        for (name, tensor), look in zip(self.tensors, self._looks, strict=True):
            if _looks(tensor) != look:
                raise _changed(name, look, _looks(tensor))


def _held(module: nn.Module) -> tuple[int, ...]:
    """Which tensors a module has, asked past the face."""
    tables = (dict.values(module.__dict__[name]) for name in ("_parameters", "_buffers"))
    return tuple(id(tensor) for table in tables for tensor in table)


def _hooks(module: nn.Module) -> tuple[Any, ...]:
    """Of a module: which there are."""
    return tuple(chain.from_iterable(module.__dict__[name] for name in _HOOKS))


def _looks(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.requires_grad, tensor.dtype, tensor._version, hooked(tensor)


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """A few elements from all over it, by their bits."""
    if tensor.is_meta or tensor.layout != torch.strided:
        return torch.empty(0)
    flat = tensor.detach().flatten()
    taken = flat[:: max(1, flat.numel() // _SAMPLE)].clone()
    return taken.view(torch.uint8) if taken.numel() else torch.empty(0, dtype=torch.uint8)


def _changed(name: str, before: Sequence[Any], now: Sequence[Any]) -> WhaleError:
    if before[0] != now[0]:
        return WhaleError(
            f"{name} has requires_grad={now[0]} now, {before[0]} when the model was parallelized",
            hint="freeze parameters before wh.parallelize, or step.save, step.close and "
            "parallelize again",
        )
    if before[1] != now[1]:
        return WhaleError(
            f"{name} is {now[1]} now, {before[1]} when the model was parallelized",
            hint="convert the model before wh.parallelize, or train under torch.autocast",
        )
    if before[3] != now[3]:
        return WhaleError(
            f"a gradient hook was put on {name} while a step is open, which trains a copy",
            hint="change gradients in the optimizer, or in the model with an autograd.Function",
        )
    return WhaleError(
        f"{name} of the user's model was written to while a step is open, which trains a copy",
        hint="load values with model.load_state_dict or step.load, or change the model before "
        "wh.parallelize",
    )
