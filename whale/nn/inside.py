"""Inside: what holds only while a split module's own forward runs.

Place in the flow: put around forwards by `engine.split.unit_marks`, `engine.lower` and the experts'
forwards. A module that computes on some of its units must believe in as many heads or experts as
are here, while everyone else who asks it (the model's own code, a hook, the loss) means all of
them. And a Linear whose output is a part of the columns is of use to nobody outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from whale.errors import WhaleError
from whale.runtime import recompute


class Count:
    """An attribute that counts units: all of them outside, `local` of them inside.

    Args:
        holder: A module, or a config.
        name: Of the attribute.
        local: How many are here.
        where: The attribute as the user would write it.
    """

    __slots__ = ("before", "holder", "local", "name", "where", "whole")

    def __init__(self, holder: Any, name: str, local: int, where: str) -> None:
        self.holder, self.name, self.local, self.where = holder, name, local, where
        self.whole = self.before = getattr(holder, name)

    def check(self) -> None:
        """Raises if it is not what the split was made with; local where it is inside of another."""
        self.before = now = getattr(self.holder, self.name)
        if now != self.whole and now != self.local:
            raise WhaleError(
                f"{self.where} is {now!r}, and was {self.whole!r} when its module was split",
                hint="leave this module out of the split, or change the number before "
                "wh.parallelize",
            )

    def set(self, value: int) -> None:
        """Past `__setattr__` of modules, which looks for parameters."""
        if isinstance(self.holder, nn.Module):
            self.holder.__dict__[self.name] = value
        else:
            setattr(self.holder, self.name, value)

    def put_back(self) -> None:
        """What it was again, unless the forward has set another number."""
        if getattr(self.holder, self.name) == self.local:
            self.set(self.before)


class Inside:
    """Whether a forward runs; its counts are the local ones while it does.

    A checkpoint inside runs parts of it again in backward, where it is inside once more.
    """

    def __init__(self, path: str, counts: Sequence[Count] = ()) -> None:
        self.path, self.counts, self.depth = path, counts, 0

    def __enter__(self) -> None:
        """The forward begins."""
        if not self.depth:
            for count in self.counts:
                count.check()
            for count in self.counts:
                count.set(count.local)
        self.depth += 1
        recompute.push(self)

    def __exit__(self, *exc: object) -> None:
        """The forward is over."""
        recompute.pop()
        self.depth -= 1
        if not self.depth:
            for count in self.counts:
                count.put_back()

    def position(self) -> None:
        """Inside is all there is to say."""
        return

    def at(self, position: None) -> Inside:
        """Inside once more."""
        return self

    def check(self, module: nn.Module) -> None:
        """Raises if a part is called from elsewhere: it has some of the columns."""
        if not self.depth:
            raise WhaleError(
                f"a {type(module).__name__} of {self.path or 'the model'}, whose columns are split "
                f"over ranks, is called while {self.path or 'the model'} does not run: its output "
                "is a part",
                hint="call it inside its module's forward only, as training does, or leave it out "
                "of the split",
            )


class InsideForward:
    """The forward of a Layer that says when it runs."""

    def __init__(self, forward: Callable[..., Any], inside: Inside) -> None:
        self.forward, self.inside = forward, inside

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The replaced forward."""
        with self.inside:
            return self.forward(*args, **kwargs)
