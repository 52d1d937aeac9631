"""Bridges between stages: whose rows go to whom, and the messages that carry them.

Place in the flow: run by the executor's send and receive actions. Rows of a micro-batch are
intervals on both sides, so a transfer is an intersection of intervals: any number of replicas, any
shares, any widths. Inside a split group every member holds the whole value: consumer shard j hears
from producer shard j mod width, and the other way round for gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from whale.ir.sharding import Span, intersect
from whale.ir.virtual_device import VirtualDevice


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows [low, high) of a micro-batch between this rank and `peer`; None.

    A value without rows.
    """

    peer: int
    rows: Span | None


def _spans(device: VirtualDevice, rows: int) -> list[Span]:
    points = device.row_cuts(rows)
    return list(zip(points, points[1:], strict=False))


@lru_cache(maxsize=4096)
def incoming(
    source: VirtualDevice, target: VirtualDevice, rank: int, rows: int, batched: bool
) -> list[Piece]:
    """What `rank` of `target` receives from `source`, in row order.

    A value without a batch dim comes from one replica: number c hears from c mod replicas.
    """
    replica, shard = target.position(rank)
    if not batched:
        sender = source.replicas[replica % len(source.replicas)].ranks
        return [Piece(sender[shard % len(sender)], None)]
    mine = _spans(target, rows)[replica]
    found = []
    for other, span in zip(source.replicas, _spans(source, rows), strict=True):
        part = intersect(mine, span)
        if part is not None:
            found.append(Piece(other.ranks[shard % len(other.ranks)], part))
    return found


@lru_cache(maxsize=4096)
def outgoing(
    source: VirtualDevice, target: VirtualDevice, rank: int, rows: int, batched: bool
) -> list[Piece]:
    """What `rank` of `source` sends to `target`: the mirror of `incoming`."""
    found = []
    for replica in target.replicas:
        for peer in replica.ranks:
            found += [
                Piece(peer, piece.rows)
                for piece in incoming(source, target, peer, rows, batched)
                if piece.peer == rank
            ]
    return found


@lru_cache(maxsize=4096)
def gradient_incoming(
    source: VirtualDevice, target: VirtualDevice, rank: int, rows: int, batched: bool
) -> list[Piece]:
    """The gradients `rank` of `source` gets back for what its replica sent to `target`."""
    replica, shard = source.position(rank)
    if batched:
        return incoming(target, source, rank, rows, True)
    return [
        Piece(other.ranks[shard % len(other.ranks)], None)
        for index, other in enumerate(target.replicas)
        if index % len(source.replicas) == replica
    ]


@lru_cache(maxsize=4096)
def gradient_outgoing(
    source: VirtualDevice, target: VirtualDevice, rank: int, rows: int, batched: bool
) -> list[Piece]:
    """The gradients `rank` of `target` sends back to `source`.

    The mirror of `gradient_incoming`.
    """
    found = []
    for replica in source.replicas:
        for peer in replica.ranks:
            found += [
                Piece(peer, piece.rows)
                for piece in gradient_incoming(source, target, peer, rows, batched)
                if piece.peer == rank
            ]
    return found


@dataclass(frozen=True, slots=True)
class Message:
    """A message on its way. Gloo's wait without end unless told how long."""

    work: dist.Work
    timeout: timedelta | None

    def wait(self) -> None:
        """Until it has arrived, or was sent."""
        if self.timeout is None:
            self.work.wait()
        else:
            self.work.wait(self.timeout)


class Channels:
    """Ordered point-to-point messages.

    With NCCL every ordered pair of ranks has a communicator of its own
    (it knows no tags); with Gloo a tag per message does the same on one group.
    """

    def __init__(
        self,
        rank: int,
        groups: dict[tuple[int, int], dist.ProcessGroup | None],
        timeout: timedelta,
    ) -> None:
        self.rank, self.groups, self.timeout = rank, groups, timeout
        self.sent: dict[int, int] = {}
        self.received: dict[int, int] = {}
        self.pending: list[tuple[Message, torch.Tensor]] = []

    def send(self, tensor: torch.Tensor, peer: int) -> None:
        """Posts a send; the tensor is kept until it is done."""
        number = self.sent[peer] = self.sent.get(peer, 0) + 1
        group = self.groups.get((self.rank, peer))
        data = tensor.contiguous()
        work = dist.isend(data, peer, group=group, tag=0 if group is not None else number)
        self.pending.append((self._message(work, group), data))
        self.pending = [item for item in self.pending if not item[0].work.is_completed()]

    def receive(self, buffer: torch.Tensor, peer: int) -> Message:
        """Posts a receive into a contiguous buffer."""
        number = self.received[peer] = self.received.get(peer, 0) + 1
        group = self.groups.get((peer, self.rank))
        work = dist.irecv(buffer, peer, group=group, tag=0 if group is not None else number)
        return self._message(work, group)

    def _message(self, work: dist.Work | None, group: dist.ProcessGroup | None) -> Message:
        assert work is not None
        # A wait of NCCL's with a timeout would block the host; its heartbeats end it instead.
        return Message(work, self.timeout if group is None else None)

    def drain(self) -> None:
        """Waits for all sends of the step."""
        for message, _ in self.pending:
            message.wait()
        self.pending.clear()
        self.sent.clear()
        self.received.clear()


class _Opened(torch.autograd.Function):
    """The same memory under another tensor, which is no leaf."""

    @staticmethod
    def forward(ctx: Any, received: torch.Tensor) -> torch.Tensor:
        # `set_` makes no view: code may write to one, where a leaf or a view of it allows none.
        alias = received.new_empty(0)
        place = received.storage_offset(), received.size(), received.stride()
        return alias.set_(received.untyped_storage(), *place)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


def opened(received: torch.Tensor) -> torch.Tensor:
    """What a stage computes with: as in the whole model, code may write to it in place."""
    if not received.requires_grad:
        return received
    alias: torch.Tensor = _Opened.apply(received)
    return alias
