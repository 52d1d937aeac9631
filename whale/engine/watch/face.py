"""Face: while a Step is open, the user's module stands for what the Step trains.

Place in the flow: put on by Step, taken off by `Step.close`. What trains is this rank's copy; the
user's own tensors stay as they were, so that the same model can be parallelized again. But the
module is what a script holds, so its methods are answered by the Step:

| the user calls | what happens |
|---|---|
| `model.state_dict()` | `step.state_dict()`: all ranks call it |
| `model.load_state_dict(d)` | `step.load_state_dict(d)`: all ranks call it |
| `model(x)` | the trained weights, without gradients, where all of it is here; else an error |
| `model.train()`, `model.eval()`, of any part | taken over by the next step |
| `model.parameters()` | the user's own; said once that they are not those that train |
| `model.block.weight`, a buffer | the user's own, from before training; said too |
| the same in code that runs in a step (a hook, a closure) | an error, where it is another value |
| `model.block.temperature = 0.5` | the copy that trains has it too, where its code reads it |
| `model.config.scale = 2`, `model.sizes[0] = 3` | so do the copy's objects, before the next step |
| another tensor, module or method set | an error |
| `requires_grad_`, `half()`, writing to a tensor | an error at the next step |

All parts of the model have faces of their own. They are attributes of the instances, which `copy`
and `pickle` turn back into the plain methods.
"""

from __future__ import annotations

import copy
import functools
import logging
import threading
import types
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import nn

from whale.engine.state.boxes import PLAIN
from whale.engine.state.copies import reachable
from whale.engine.state.following import Following
from whale.engine.state.tally import Tally
from whale.engine.state.unchanged import Unchanged
from whale.engine.trace.tracer import user_line
from whale.errors import WhaleError
from whale.runtime.compat import has_compiled_forward, in_backward, uncompiled

_LOG = logging.getLogger("whale")
_METHODS = ("forward", "state_dict", "load_state_dict", "named_parameters", "named_buffers")
_OWN_MODE = "train"
"""Where a module has code of its own for it."""
_TENSORS = ("_parameters", "_buffers")
_MOST_SAID = 3
"""Tensors of which it is said that they are not those that train."""


class Trained(Protocol):
    """What a face asks of its Step."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Of the whole model."""
        ...

    def load_into(self, path: str, state: Any, strict: bool) -> Any:
        """A state dict of the part at `path`."""
        ...

    def runnable(self, path: str) -> nn.Module:
        """The trained part at `path`, where it can be called here; else an error."""
        ...


def stale(name: str, where: str | None) -> WhaleError:
    """Code that runs in a step reads the user's own tensor of that name."""
    return WhaleError(
        f"{name} is read from the model that was given to parallelize, whose tensors do not "
        "change: what trains is a copy of it",
        hint="let the model return what the loss needs of it (parallelize(model) without `loss`), "
        "and let hooks use the module they are called with",
        where=where,
    )


class _Method:
    """One method of one module, answered by the Step."""

    def __init__(self, face: Face, module: nn.Module, path: str, name: str) -> None:
        self.face, self.module, self.path, self.name = face, module, path, name
        self.before = module.__dict__.get(name)
        functools.update_wrapper(self, self.plain())

    def plain(self) -> Any:
        """The method as it is without a face."""
        if self.before is not None:
            return self.before
        return types.MethodType(getattr(type(self.module), self.name), self.module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _answers[-1](self, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self.face.say_copied()
        if self.before is not None:
            return copy.deepcopy(self.before, memo)
        made = memo.get(id(self.module), self.module)
        return types.MethodType(getattr(type(made), self.name), made)

    def __reduce__(self) -> Any:
        self.face.say_copied()
        return getattr, (self.module, self.name)

    def _forward(self, step: Trained, *args: Any, **kwargs: Any) -> Any:
        module = step.runnable(self.path)
        with torch.no_grad():
            # Its own call: hooks of the user's module run around this one already.
            return module.forward(*args, **kwargs)

    def _refuse_in_step(self) -> None:
        called = f"model.{self.path}.{self.name}" if self.path else f"model.{self.name}"
        self.face.refuse_in_step(f"{called}()")

    def _state_dict(
        self,
        step: Trained,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> Any:
        found = OrderedDict() if destination is None else destination
        inside = f"{self.path}." if self.path else ""
        for key, tensor in step.state_dict().items():
            if key.startswith(inside):
                found[f"{prefix}{key[len(inside) :]}"] = tensor
        return found

    def _load_state_dict(
        self, step: Trained, state_dict: Any, strict: bool = True, assign: bool = False
    ) -> Any:
        return step.load_into(self.path, state_dict, strict)

    def _named_parameters(self, step: Trained, *args: Any, **kwargs: Any) -> Any:
        self.face.say_own()
        return self.plain()(*args, **kwargs)

    def _named_buffers(self, step: Trained, *args: Any, **kwargs: Any) -> Any:
        self.face.say_stale("model.named_buffers()")
        return self.plain()(*args, **kwargs)

    def _train(self, step: Trained, *args: Any, **kwargs: Any) -> Any:
        """Its own code may do more than turn flags, to weights that are not those that train."""
        tensors = [*self.module.parameters(), *self.module.buffers()]
        before = [tensor.detach().clone() for tensor in tensors]
        done = self.plain()(*args, **kwargs)
        for tensor, values in zip(tensors, before, strict=True):
            same = (tensor == values) | ((tensor != tensor) & (values != values))  # noqa: PLR0124
            if not bool(same.all()):
                raise WhaleError(
                    f"{type(self.module).__name__}.train writes to its weights or buffers while a "
                    "step is open, which trains a copy: what it merges or freezes here would be "
                    "missing there",
                    hint="step.evaluate puts what trains into eval mode by itself: leave "
                    "model.eval() and model.train() out while the step is open",
                )
        return done


def has_own_mode(module: nn.Module) -> bool:
    """Whether code of the user's runs when a module is put into another mode."""
    return "train" in module.__dict__ or type(module).train is not nn.Module.train


class _Tensors(dict[str, Any]):
    """The parameters or buffers of one module, which notice that someone reads one.

    `module.weight` comes here, as `get_parameter` does; all that goes over them has a method above.
    """

    def __init__(self, face: Face, path: str, plain: dict[str, Any]) -> None:
        super().__init__(plain)
        self.face, self.path = face, path

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if value is not None and self.face.step() is not None:
            what = f"model.{self.path}.{name}" if self.path else f"model.{name}"
            self.face.refuse_in_step(what, self.path, name, value)
            self.face.say_stale(what)
        return value

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (), None, None, iter(self.items())


def _answer(method: _Method, args: Any, kwargs: Any) -> Any:
    step = method.face.step()
    if step is None:
        return method.plain()(*args, **kwargs)
    if method.name != _OWN_MODE:
        method._refuse_in_step()
    return getattr(method, f"_{method.name}")(step, *args, **kwargs)


_answers: list[Callable[[_Method, Any, Any], Any]] = [_answer]
"""The last one is called: dynamo must not look into it once something is compiled."""


def hide_from_compiler() -> None:
    """After `torch.compile`: dynamo is loaded, and would follow a call into the step."""
    if len(_answers) == 1:
        _answers.append(torch.compiler.disable(_answer))


class Face:
    """The faces of a model and its parts, and what of the model the next step must follow."""

    def __init__(
        self, model: nn.Module, local: nn.Module, step: Trained, layers: Collection[str] | None
    ) -> None:
        self.model = model
        self.layers = layers
        """Of which this rank runs the code as it stands; None: of the whole model."""
        self.steps = 0
        self._step: weakref.ref[Trained] | None = weakref.ref(step)
        self._said: set[str] = set()
        self._tally = Tally()
        parts = dict(local.named_modules(remove_duplicate=False))
        modules = list(model.named_modules())
        self.pairs = [(module, parts[path]) for path, module in modules]
        self.copies = {path: parts[path] for path, _ in modules}
        each = [(path, module, parts[path]) for path, module in modules]
        self.following = Following(each, lambda path: not self._runs(path), self._tally)
        self.unchanged = Unchanged(model)
        self._fresh = 0
        self._runner: int | None = None
        """The thread in which a batch runs."""
        self.methods = [
            _Method(self, module, path, name)
            for path, module in modules
            for name in (*_METHODS, *([_OWN_MODE] if has_own_mode(module) else []))
        ]
        _put_on(self.methods)
        for path, module in modules:
            for name in _TENSORS:
                module.__dict__[name] = _Tensors(self, path, module.__dict__[name])
        _watch(self)

    def step(self) -> Trained | None:
        """The open Step."""
        return self._step() if self._step is not None else None

    def take_off(self) -> None:
        """The model is the user's alone again."""
        self._step = None
        self.following.take_back()
        _unwatch(self)
        _take_off(self.methods)
        for module, _ in self.pairs:
            for name in _TENSORS:
                if isinstance(held := module.__dict__[name], _Tensors):
                    module.__dict__[name] = dict(held)
        self.methods.clear()
        self.pairs.clear()

    def note(self) -> None:
        """The user's tensors are those that train."""
        self._fresh = self.steps
        self.following.keep()
        self.unchanged.note()

    def follow(self) -> bool:
        """Takes over the user's flags; whether any was new. Refuses what a step cannot follow."""
        self.following.follow()
        changed = False
        for user, local in self.pairs:
            if local.training is not user.training:
                local.training = user.training
                changed = True
        self.unchanged.check()
        self.steps += 1
        return changed

    def set(self, module: nn.Module, path: str, name: str, value: Any) -> None:
        """The user sets an attribute of a part of the model while the step is open."""
        if name == "training" or name.startswith("_whale"):
            return
        known = {**module._parameters, **module._buffers, **module._modules}
        code = name in known or (callable(value) and hasattr(type(module), name))
        here = self._runs(path)
        tensors = isinstance(value, nn.Module) or next(reachable(value), None) is not None
        if here and not code and not tensors:
            # Every rank sets it; one that does not run this part has no use for it.
            setattr(self.copies[path], name, value)
            self._tally.note(f"{path}.{name}", value)
            self.following.stale |= not isinstance(value, PLAIN)
            return
        raise WhaleError(
            f"{path or 'the model'}.{name} is set while a step is open, which trains a copy"
            + ("" if here else ": its code between Layers was traced with the value it had"),
            hint="numbers that change in training belong into modules that are Layers, or into the "
            "batch; anything else is changed before wh.parallelize",
        )

    def settings(self) -> Hashable:
        """What the script has set since; of numbers that move all the time, how often, roughly."""
        return self._tally.key()

    def _runs(self, path: str) -> bool:
        """Whether the code of a module runs as it stands; else it was traced."""
        return self.layers is None or any(
            path == x or path.startswith(f"{x}.") or not x for x in self.layers
        )

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Around the run of a batch, in which only the copies are read."""
        self._runner = threading.get_ident()
        try:
            yield
        finally:
            self._runner = None

    def refuse_in_step(self, what: str, path: str = "", name: str = "", value: Any = None) -> None:
        """Code that runs in a step reads the user's tensors: not those that train.

        What never changes is the same in both.
        """
        if self._runner is None or not (in_backward() or self._runner == threading.get_ident()):
            return
        copied = self.copies[path] if value is not None else None
        own = copied.__dict__["_buffers"].get(name) if copied is not None else None
        if copied is not None and own is None and not value.requires_grad:
            return
        if own is not None and own.shape == value.shape and torch.equal(own.to(value), value):
            return
        raise stale(what.removeprefix("model."), user_line())

    def say_mode(self) -> None:
        """A step begins."""
        if not self.model.training:
            self._say(
                "eval",
                "the model is in eval mode, and so it trains: no dropout, batch norms as they are; "
                "call model.train() for training",
            )

    def flags(self) -> tuple[bool, ...]:
        """The user's `training` flags."""
        return tuple(user.training for user, _ in self.pairs)

    def say_own(self) -> None:
        """Someone reads the user's parameters."""
        self._say(
            "own",
            "model.parameters() are the user's own tensors, not those that train: an optimizer or "
            "a clip_grad_norm_ over them does nothing; the optimizer is step.optimizer, clipping "
            "is Config optimizer.max_grad_norm, trained values are in step.state_dict()",
        )

    def say_stale(self, what: str) -> None:
        """Someone reads one of the user's tensors."""
        said = sum(key.startswith("model.") for key in self._said)
        if self.steps > self._fresh and said < _MOST_SAID:
            self._say(
                what,
                f"{what} is the user's own, with the values from before training: trained ones are "
                "in step.state_dict(), or in the model after step.write_back()",
            )

    def say_copied(self) -> None:
        """Someone copies or pickles the user's module."""
        self._say(
            "copied",
            "a copy of the model has the weights from before training: call step.write_back() "
            "first, or load step.state_dict() into the copy",
        )

    def _say(self, key: str, text: str) -> None:
        if key not in self._said:
            self._said.add(key)
            _LOG.warning("%s", text)


_open: weakref.WeakSet[Face] = weakref.WeakSet()
"""Faces that are on: only then attributes are watched."""
_set_plainly: list[Any] = []
"""How modules set attributes without that."""


def _set_attribute(module: nn.Module, name: str, value: Any) -> None:
    method = module.__dict__.get("state_dict")
    if isinstance(method, _Method) and method.face.step() is not None:
        method.face.set(module, method.path, name, value)
    _set_plainly[-1](module, name, value)


def _watch(face: Face) -> None:
    _open.add(face)
    now: Any = nn.Module.__setattr__
    if now is not _set_attribute:
        _set_plainly.append(now)
        nn.Module.__setattr__ = _set_attribute  # type: ignore[method-assign, assignment]


def _unwatch(face: Face) -> None:
    _open.discard(face)
    now: Any = nn.Module.__setattr__
    if not _open and now is _set_attribute:  # else somebody else stands before it, and calls it
        nn.Module.__setattr__ = _set_plainly.pop()  # type: ignore[method-assign]


def _put_on(methods: list[_Method]) -> None:
    for method in methods:
        method.module.__dict__[method.name] = method


def _take_off(methods: list[_Method]) -> None:
    for method in methods:
        if method.module.__dict__.get(method.name) is method:
            if method.before is None:
                del method.module.__dict__[method.name]
            else:
                method.module.__dict__[method.name] = method.before


@contextmanager
def bare(model: nn.Module) -> Iterator[None]:
    """The model without any face, for code of ours that reads or copies it."""
    found = [
        method
        for module in model.modules()
        for name in (*_METHODS, _OWN_MODE)
        if isinstance(method := module.__dict__.get(name), _Method)
    ]
    held = [
        (module, name, tensors)
        for module in model.modules()
        for name in _TENSORS
        if isinstance(tensors := module.__dict__[name], _Tensors)
    ]
    _take_off(found)
    for module, name, tensors in held:
        module.__dict__[name] = dict(tensors)
    # A copy would take them with it, and run the user's own module.
    compiled = [(m, m.__dict__.pop("forward")) for m in model.modules() if has_compiled_forward(m)]
    try:
        yield
    finally:
        for module, forward in compiled:
            now = module.__dict__.get("forward")
            if isinstance(now, _Method):
                now.before = forward
            else:
                module.__dict__["forward"] = forward
        for module, name, tensors in held:
            now = module.__dict__[name]
            if not isinstance(now, _Tensors) and tensors.face.step() is not None:
                module.__dict__[name] = _Tensors(tensors.face, tensors.path, now)
        # One that was put on meanwhile stays.
        _put_on([m for m in found if not isinstance(m.module.__dict__.get(m.name), _Method)])


Function = TypeVar("Function", bound=Callable[..., Any])


def plainly(function: Function) -> Function:
    """Calls a function of a model with the plain module: no face, not what torch.compile made."""

    @functools.wraps(function)
    def called(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        inside = uncompiled(model)
        if inside is not model or any(has_compiled_forward(m) for m in inside.modules()):
            hide_from_compiler()
            warnings.warn(
                f"{type(inside).__name__} is compiled: Whale runs its own code instead, with the "
                "same result",
                stacklevel=2,
            )
        with bare(inside):
            return function(inside, *args, **kwargs)

    return cast(Function, called)
