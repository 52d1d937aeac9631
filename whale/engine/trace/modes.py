"""Modes: `torch.no_grad` and `torch.autocast` around code between stages, written down with it.

Place in the flow: `engine.trace` notes the mode of every operation of the glue and of every call of
a Layer, `engine.trace.program` runs it in the same one. Without it a `no_grad` in a user's forward
would be lost where a pipeline runs the recorded glue, and gradients would flow where they must not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

Autocast = tuple[bool, torch.dtype]


@dataclass(frozen=True, slots=True)
class Mode:
    """The mode of an operation; None: as it is around the whole forward."""

    grad: bool | None = None
    autocast: Autocast | None = None

    @contextmanager
    def entered(self, device: torch.device) -> Iterator[None]:
        """Inside, it is in force; gradients stay off where they are off around it."""
        enabled = torch.is_grad_enabled() and self.grad is not False
        if self.autocast is None:
            with torch.set_grad_enabled(enabled):
                yield
            return
        on, dtype = self.autocast
        # A cache of casts would outlive the operation.
        with (
            torch.set_grad_enabled(enabled),
            torch.autocast(device.type, dtype, enabled=on, cache_enabled=False),
        ):
            yield


PLAIN = Mode()


def _autocast() -> Autocast:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")


def _for_any_device() -> Autocast:
    """Capture runs on fake CPU tensors: a model made for a GPU has autocast for that kind."""
    if torch.is_autocast_enabled("cuda"):
        return True, torch.get_autocast_dtype("cuda")
    return _autocast()


class Modes:
    """Tells modes from that around a forward, which it was made in."""

    def __init__(self) -> None:
        self._grad, self._cast = torch.is_grad_enabled(), _for_any_device()

    def now(self) -> Mode:
        """The mode that the user's code is in."""
        grad, cast = torch.is_grad_enabled(), _for_any_device()
        if (grad, cast) == (self._grad, self._cast):
            return PLAIN
        return Mode(
            grad=None if grad == self._grad else grad,
            autocast=None if cast == self._cast else cast,
        )
