"""State tier: optimizer state that waits on the host and comes to the device for its update.

Place in the flow: around the update of an apply group (`runtime.updater`). With several groups the
state of the next comes while one is updated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager

import torch
from torch import nn

from whale.runtime.moving import HostMemory, Mover

Key = tuple[str, str]
"""A parameter's name, and a key of its state."""


class StateTier:
    """The state of those parameters that the plan keeps so.

    Args:
        optimizer: Whose state it is.
        kept: Its parameters by name.
        names: Those whose state waits on the host.
        device: Where it is used.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        kept: Mapping[str, nn.Parameter],
        names: AbstractSet[str],
        device: torch.device,
    ) -> None:
        self.optimizer, self.kept, self.names = optimizer, kept, names
        self._memory, self._mover = HostMemory(device), Mover(device)
        self._host: dict[Key, torch.Tensor] = {}
        self._coming: dict[Key, tuple[torch.Tensor, Callable[[], torch.Tensor]]] = {}
        self._leaving: list[Callable[[], None]] = []

    @contextmanager
    def here(
        self, names: AbstractSet[str], after: AbstractSet[str] = frozenset()
    ) -> Iterator[None]:
        """Inside, the state of `names` is on the device; that of `after` is on its way."""
        self._leaving.clear()  # what comes to the device waits for them there
        self._start(names)
        self._start(after)
        for name in names & self.names:
            for key in self._keys(name):
                _, wait = self._coming.pop((name, key))
                self._state(name)[key] = wait()
        try:
            yield
        finally:
            for name in names & self.names:
                self._leave(name)

    def _start(self, names: AbstractSet[str]) -> None:
        self._mover.after_parking()
        for name in names & self.names:
            for key in self._keys(name):
                host = self._state(name)[key]
                known = self._coming.get((name, key))
                if known is None or known[0] is not host:  # a checkpoint may have brought another
                    self._coming[name, key] = host, self._mover.fetch(host, host.dtype)

    def _leave(self, name: str) -> None:
        state = self._state(name)
        for key in self._keys(name):
            here = state[key]
            host = self._host.get((name, key))
            if host is None or host.shape != here.shape or host.dtype != here.dtype:
                host = self._host[name, key] = self._memory.like(here)
            self._leaving.append(self._mover.park(here, host))
            state[key] = host

    def settle(self) -> None:
        """Before the host reads it: all copies are complete."""
        for done in self._leaving:
            done()
        self._leaving.clear()

    def _keys(self, name: str) -> list[str]:
        """What of a parameter's state is worth moving: not a count of steps."""
        return [k for k, v in self._state(name).items() if isinstance(v, torch.Tensor) and v.dim()]

    def _state(self, name: str) -> dict[str, torch.Tensor]:
        kept = self.kept.get(name)
        found: dict[str, torch.Tensor] = (
            self.optimizer.state[kept] if kept is not None and kept in self.optimizer.state else {}
        )
        return found
