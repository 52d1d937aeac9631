"""Members of a group that take turns in one process: collectives without processes.

Place in the flow: under tests of modules that make collectives, on any device. Everything is run
again and again; each run makes one collective more a true one, with what the members sent in the
run before.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from whale.runtime import groups

Result = TypeVar("Result")
_serial = itertools.count()


class _Member(groups.Communicator):
    """Gives the true result of a collective whose inputs are on the tape, else a placeholder."""

    def __init__(self, name: str, index: int, count: int, tape: list[list[torch.Tensor]]) -> None:
        super().__init__(name, tuple(range(count)), index, None)
        self.tape = tape
        self.sent: list[torch.Tensor] = []
        self.kinds: list[str] = []
        self.record = lambda kind, ranks: self.kinds.append(kind)

    def _all(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        number = len(self.sent)
        self.sent.append(tensor.detach().clone())
        return self.tape[number] if number < len(self.tape) else [tensor] * self.size

    def all_gather(self, tensor: torch.Tensor, dim: int, sizes: list[int]) -> torch.Tensor:
        self._note("all_gather")
        assert sizes[self.index] == tensor.shape[dim]
        return torch.cat(self._all(tensor), dim)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self._note("all_reduce")
        return torch.stack(self._all(tensor)).sum(0)


def together(
    parts: Sequence[Callable[[str], Result]],
) -> tuple[list[Result], list[str]]:
    """Runs each member's part with the name of its group; the results, and the collectives made.

    A part must do the same each time: it makes its own modules.
    """
    tape: list[list[torch.Tensor]] = []
    while True:
        members = []
        results = []
        for index, part in enumerate(parts):
            member = _Member(f"members{next(_serial)}", index, len(parts), tape)
            groups._open[member.name] = member
            try:
                results.append(part(member.name))
            finally:
                del groups._open[member.name]
            members.append(member)
        assert len({tuple(m.kinds) for m in members}) == 1, [m.kinds for m in members]
        done = len(tape)
        if done == len(members[0].sent):
            return results, members[0].kinds
        tape.append([member.sent[done] for member in members])
