"""Whose forward a module runs, and replacing it: how this project changes what modules do.

Place in the flow: below every sharded, keyed or watched module. Forwards are replaced on copies,
never on the user's module, and only where the code that would run is the code the replacement was
written for (`runs`): a subclass with a `forward` of its own, or an instance that was given one, is
the user's. Where such a subclass calls the forward of its base, that call alone is replaced
(`replace_base`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, cast

from torch import nn
from torch.nn.modules import module as global_hooks

_GIVEN = "_given_forward"
_HOOKED = "_hooked"
_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """From now on, calling this instance runs `forward`; its class and parameters stay."""
    module.__dict__.setdefault(_GIVEN, module.__dict__.get("forward"))
    module.__dict__["forward"] = forward


def has_own_call(module: nn.Module) -> bool:
    """Whether the user gave this instance a forward, or its class another way to be called."""
    given = module.__dict__.get(_GIVEN, module.__dict__.get("forward"))
    own = type(module)
    return (
        given is not None
        or own.__call__ is not nn.Module.__call__
        or own._call_impl is not nn.Module._call_impl
    )


def runs(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether calling this module runs the forward of one of `kinds`, as it was before Whale."""
    forward = type(module).forward
    return not has_own_call(module) and any(
        isinstance(module, kind) and forward is kind.forward for kind in kinds
    )


def mark_hooks(model: nn.Module) -> None:
    """Notes which modules of a fresh copy have hooks of the user, before Whale adds its own."""
    for module in model.modules():
        module.__dict__[_HOOKED] = has_hooks(module)


def has_hooks(module: nn.Module) -> bool:
    """Whether a hook of the user sees what this module reads or makes."""
    marked = module.__dict__.get(_HOOKED)
    if marked is not None:
        return bool(marked)
    everywhere = any(getattr(global_hooks, f"_global{name}", None) for name in _HOOKS)
    return everywhere or any(getattr(module, name, None) for name in _HOOKS)


_CALL_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


def take_hooks(module: nn.Module) -> Callable[..., Any]:
    """Takes forward hooks off a module; what comes back calls it with them, as it was.

    A trace in which they ran around a Layer would run them once more with the Layer.
    """
    own, replaced = module.forward, module.__dict__.get("forward")
    if not module._forward_hooks and not module._forward_pre_hooks:
        return own
    hooks = {name: module.__dict__[name] for name in _CALL_HOOKS}
    for name in hooks:
        module.__dict__[name] = OrderedDict()

    def call(*args: Any, **kwargs: Any) -> Any:
        now = {name: module.__dict__.get(name) for name in (*hooks, "forward")}
        module.__dict__.update(hooks)
        if replaced is None:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = replaced
        try:
            return module(*args, **kwargs)
        finally:
            module.__dict__.update(now)

    return call


def global_forward_hooks() -> bool:
    """Whether hooks on all modules change or see every forward."""
    return bool(global_hooks._global_forward_hooks or global_hooks._global_forward_pre_hooks)


def replace_base(module: nn.Module, base: type[nn.Module], forward: Callable[..., Any]) -> BaseCall:
    """From now on, `super().forward(...)` of this instance's class runs `forward`.

    `base` is the class whose forward was written for; one that calls it twice, or not at all, is
    for the caller to judge by what the BaseCall counted.
    """
    count = BaseCall()

    def replaced(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        count.calls += 1
        return forward(*args, **kwargs)

    own = type(module)
    between = next(k for k in own.__mro__ if getattr(k, "forward", None) is base.forward)
    inserted = type(between.__name__, (between,), {"forward": replaced})
    joined = type(own.__name__, (own, inserted), {"__module__": own.__module__})
    module.__class__ = cast(type[nn.Module], joined)
    return count


class BaseCall:
    """Counts the calls of a base's forward."""

    def __init__(self) -> None:
        self.calls = 0
