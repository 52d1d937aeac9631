"""messages: when what one stage sends another arrives.

Place in the flow: under `simulate`. A message begins when it is ready, its receive is posted and
the one before it on its line has come: a line is one producer or consumer stage's replica, one
receiving lane and one direction, and keeps its order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from whale.ir.prices import MessagePrice
from whale.ir.schedule import Action

Receive = tuple[str, int, int, int]
"""Kind, stage, micro-batch and peer stage."""


class Messages:
    """All messages of a step."""

    def __init__(
        self, prices: Iterable[MessagePrice], orders: Mapping[int, Sequence[Action]]
    ) -> None:
        self.seconds: dict[tuple[str, int, int], float] = {}
        for m in prices:
            self.seconds["RF", m.producer, m.consumer] = m.seconds
            self.seconds["RB", m.producer, m.consumer] = m.back_s
        self._posted = {group: _posted(actions) for group, actions in orders.items()}
        self._arrived: dict[tuple[int, int, int, str], float] = {}

    def clear(self) -> None:
        """Before the step is played again."""
        self._arrived.clear()

    def posted_after(self, group: int, receive: Receive, otherwise: int) -> int:
        """The number of computes of its group before a receive is posted."""
        return self._posted[group].get(receive, otherwise)

    def arrival(
        self, edge: tuple[int, int], receive: Receive, replicas: tuple[int, int], begin_s: float
    ) -> float:
        """When a message arrives that could begin at `begin_s`, from one replica to another."""
        kind, _, _, peer = receive
        line = (peer, *replicas, kind)
        end = max(begin_s, self._arrived.get(line, 0.0)) + self.seconds.get((kind, *edge), 0.0)
        self._arrived[line] = end
        return end


def _posted(actions: Sequence[Action]) -> dict[Receive, int]:
    found = {}
    done = 0
    for action in actions:
        if action.is_compute:
            done += 1
        elif action.is_receive:
            assert action.peer is not None
            found[action.kind, action.stage, action.micro_batch, action.peer] = done
    return found
