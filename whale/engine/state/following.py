"""Following: what a script changes inside the objects that its modules hold, and what forwards do.

Place in the flow: made by `engine.watch.face`, asked before and after every step. What trains is a
copy, with a copy of each config, dict, list, schedule or array. `model.config.scale = 2` sets no
attribute of a module, so nobody is told: what the user's objects hold is compared with what they
held before the last step, and the difference is made in the copy's too. What cannot be is refused.
The other way round, numbers and words that a forward moves (a counter, a meter) are moved in the
user's model after the step: scripts read them, and set them back to where they began.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from whale.engine.state.boxes import (
    GONE,
    PLAIN,
    Array,
    Box,
    Fields,
    Items,
    Plain,
    Values,
    box_of,
    changes,
    children,
    inside_of,
    plain,
)
from whale.engine.state.copies import reachable
from whale.engine.state.rarely import rarely
from whale.engine.state.tally import Tally
from whale.engine.state.unchanged import sample
from whale.errors import WhaleError

_MOST = 3000
"""Things that are looked at, nearest first."""
_LARGE = 2000
"""Items or elements of what is compared ever more rarely."""
_THEIRS = object()
_OF_MODULES = frozenset(nn.Module().__dict__)
_HINT = (
    "set it on the module itself (model.scale = 2) or pass it in the batch; anything else is "
    "changed before wh.parallelize, or after step.save and step.close"
)
_HINT_IN_GLUE = (
    "numbers that change in training belong into modules that are Layers, or into the batch as "
    "tensors without dims; anything else is changed before wh.parallelize"
)


@dataclass(slots=True)
class _Watched:
    """Something of the user's, its counterpart in the copy, and what it held."""

    box: Box
    local: Any
    glue: bool
    values: Values
    theirs: Box | None
    """The counterpart's, where a forward may change it."""
    held: Values
    """What the counterpart held."""


class Following:
    """Objects in the attributes of a model and of its copy.

    Args:
        pairs: Modules by path, each with the one of the copy.
        traced: Whether the code of the module at a path was traced, with the values it had.
        tally: Where changes are noted.
    """

    def __init__(
        self,
        pairs: Sequence[tuple[str, nn.Module, nn.Module]],
        traced: Callable[[str], bool],
        tally: Tally,
    ) -> None:
        # Of one object that several modules hold, code that was traced decides.
        self._pairs = sorted(pairs, key=lambda pair: not traced(pair[0]))
        self._traced, self._tally = traced, tally
        self._steps = 0
        self._given: dict[tuple[int, str], tuple[dict[str, Any], Any, Any]] = {}
        """By attribute that was moved in the user's model: where, what it was, what it was made."""
        self._filled: dict[int, tuple[Box, Values]] = {}
        """The same of things that hold values."""
        self.stale = False
        """Whether the script gave a module another object since."""
        self._again()

    def _again(self) -> None:
        self.stale = False
        self._watched: list[_Watched] = []
        self._rare: list[_Watched] = []
        self._tensors: list[tuple[str, torch.Tensor, int, torch.Tensor]] = []
        self._numbers = [
            (name, vars(user), vars(local))
            for _, user, local in self._pairs
            if not type(user).__module__.startswith("torch.")
            for name, value in vars(user).items()
            if name not in _OF_MODULES
            and isinstance(value, PLAIN)
            # A split may have set another in the copy.
            and vars(local).get(name, GONE) == value
        ]
        modules = [user for _, user, _ in self._pairs]
        tensors = [t for m in modules for t in (*m._parameters.values(), *m._buffers.values())]
        seen = {id(x): x for x in (*modules, *tensors)}
        waiting: deque[tuple[Any, Any, str, bool]] = deque()
        for path, user, local in self._pairs:
            if type(user).__module__.startswith("torch."):
                continue
            for name, value in vars(user).items():
                if name not in _OF_MODULES and "_whale" not in name and name in vars(local):
                    full = f"{path}.{name}" if path else name
                    waiting.append((value, vars(local)[name], full, self._traced(path)))
        count = 0
        while waiting and count < _MOST:
            user, local, name, glue = waiting.popleft()
            if isinstance(user, PLAIN) or id(user) in seen:
                continue
            count += 1
            seen[id(user)] = user
            waiting.extend(self._look(user, local, name, glue))

    def _look(
        self, user: Any, local: Any, name: str, glue: bool
    ) -> Iterable[tuple[Any, Any, str, bool]]:
        """Watches one thing; gives what it holds."""
        if type(user) is not type(local):
            return
        if isinstance(user, torch.Tensor):
            if user is not local:
                self._tensors.append((name, user, user._version, sample(user)))
            return
        box = box_of(user, name)
        if box is not None and not isinstance(box, Plain):
            large = user.size if isinstance(box, Array) else len(box.read())
            found = self._rare if large > _LARGE else self._watched
            own = box_of(local, name) if local is not user and large <= _LARGE else None
            held = own.read() if own is not None else ()
            found.append(_Watched(box, local, glue, box.read(), own, held))
        if isinstance(user, set | frozenset):
            return
        theirs = dict(children(local))
        for key, value in children(user):
            if key in theirs:
                yield value, theirs[key], inside_of(name, key, user), glue

    def follow(self) -> None:
        """Makes the copy hold what the script has put into its objects since."""
        self._steps += 1
        changed = [each for each in self._watched if not each.box.holds(each.values)]
        if self._rare and rarely(self._steps):
            changed += [each for each in self._rare if not each.box.holds(each.values)]
        new = [self._take_over(each) for each in changed]
        again = rarely(self._steps)
        for name, tensor, version, before in self._tensors:
            # Through `.data`, or an array that shares its memory, it is written to unseen.
            looks = again or (tensor.numel() <= _LARGE and tensor.device.type == "cpu")
            if tensor._version != version or (looks and not torch.equal(sample(tensor), before)):
                raise WhaleError(
                    f"the tensor {name} of the user's model was written to while a step is open, "
                    "which trains a copy",
                    hint="make it a number that is set (model.scale = 2.0), pass it in the batch, "
                    "or change the model before wh.parallelize",
                )
        if any(new) or self.stale:
            self._again()

    def give_back(self) -> None:
        """What forwards have moved in the copy is moved in the user's model too."""
        moved = [each for each in self._numbers if each[2].get(each[0]) is not each[1].get(each[0])]
        for name, user, local in moved:
            if isinstance(value := local.get(name, GONE), PLAIN):
                _, old, _ = self._given.get((id(user), name), (user, user.get(name), None))
                self._given[id(user), name] = user, old, value
                user[name] = value
        for each in self._watched:
            if each.theirs is not None and not each.theirs.holds(each.held):
                now = each.theirs.read()
                self._filled.setdefault(id(each.box.thing), (each.box, each.values))
                _copy_back(each.box, each.theirs, changes(each.theirs, each.held, now))
                each.values, each.held = each.box.read(), now

    def keep(self) -> None:
        """What was given back is the user's own from here on."""
        self._given.clear()
        self._filled.clear()

    def take_back(self) -> None:
        """The user's model holds again what it held before the step moved it."""
        for (_, name), (user, old, made) in self._given.items():
            if user.get(name) is made:  # else the script has set another since
                user[name] = old
        for box, values in self._filled.values():
            box.write(values)
        self.keep()

    def _take_over(self, watched: _Watched) -> bool:
        """Whether anything came that holds more."""
        box, before, now = watched.box, watched.values, watched.box.read()
        found = changes(box, before, now)
        if isinstance(box, Array):
            found = {None: ("some values", "others")}
        for key, (old, new) in found.items():
            name = inside_of(box.name, key, box.thing)
            if watched.glue:
                said = "its code between Layers was traced with the value it had"
                raise _refusal(name, old, new, said, hint=_HINT_IN_GLUE)
            if isinstance(new, nn.Module) or any(t.requires_grad for t in reachable(new)):
                raise _refusal(name, old, new, "what the script computed is not what trains")
            self._tally.note(name, new)
        if found and watched.local is not box.thing:
            _merge(box, watched.local, before, found)
        watched.values = now
        if watched.theirs is not None:
            watched.held = watched.theirs.read()
        return not plain(*(new for _, new in found.values() if new is not GONE))


def _merge(box: Box, local: Any, before: Values, found: Mapping[Any, tuple[Any, Any]]) -> None:
    """The same changes in the copy's counterpart, which a forward may have changed too."""
    if isinstance(box, Array):
        if local.tobytes() != before[0]:
            raise _refusal(box.name, "the last values", "others", "the forward changes it too")
        np.copyto(local, box.thing)
        return
    if isinstance(box.thing, set):
        for item, (_, new) in found.items():
            local.discard(item) if new is GONE else local.add(item)
        return
    own = box_of(local, box.name)
    assert isinstance(own, Fields | Items)
    theirs = own.named(own.read())
    for key, (old, new) in found.items():
        has = theirs.get(key, GONE)
        if plain(old) and not (plain(has) and has == old):
            said = f"the forward changes it too, and it is {has!r} in the copy that trains"
            raise _refusal(inside_of(box.name, key, box.thing), old, new, said)
    if isinstance(box.thing, list | deque):
        if len(theirs) != len(before):
            raise _refusal(box.name, f"{len(before)} items", "others", "the forward changes it too")
        for key, (_, new) in found.items():
            theirs[key] = new if new is GONE else _own(new)
        own.write(tuple(value for _, value in sorted(theirs.items()) if value is not GONE))
        return
    for key, (_, new) in found.items():
        _put(local, key, new)


def _copy_back(box: Box, theirs: Box, found: Mapping[Any, tuple[Any, Any]]) -> None:
    """The same changes in the user's own, of what is no part of the copy."""
    if isinstance(box, Array):
        np.copyto(box.thing, theirs.thing)
        return
    new = {key: _plain_copy(value) for key, (_, value) in found.items()}
    new = {key: value for key, value in new.items() if value is not _THEIRS}
    if isinstance(box.thing, set):
        for item, value in new.items():
            box.thing.discard(item) if value is GONE else box.thing.add(item)
    elif isinstance(box.thing, list | deque):
        values = {**box.named(box.read()), **new}
        box.write(tuple(value for _, value in sorted(values.items()) if value is not GONE))
    else:
        for key, value in new.items():
            _put(box.thing, key, value)


def _plain_copy(value: Any) -> Any:
    """A number or a word as it is, a tensor without its graph; what else it holds is the copy's."""
    if value is GONE or isinstance(value, PLAIN):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, nn.Module | nn.Parameter) or callable(value):
        return _THEIRS
    return _THEIRS if any(True for _ in reachable(value)) else copy.deepcopy(value)


def _put(local: Any, key: Any, new: Any) -> None:
    if isinstance(local, dict):
        if new is GONE:
            local.pop(key, None)
        else:
            local[key] = _own(new)
    elif new is GONE:
        object.__delattr__(local, key)
    else:
        object.__setattr__(local, key, _own(new))


def _own(value: Any) -> Any:
    return value if callable(value) else copy.deepcopy(value)


def _refusal(name: str, old: Any, new: Any, why: str, hint: str = _HINT) -> WhaleError:
    said = ["nothing" if v is GONE else repr(v)[:60] for v in (old, new)]
    return WhaleError(
        f"{name} is changed from {said[0]} to {said[1]} while a step is open, which trains a copy: "
        f"{why}",
        hint=hint,
    )
