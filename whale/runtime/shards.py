"""Shards: what several ranks compute with and share out, packed for the way there and back.

Place in the flow: under `runtime.grads`, which sums gradients into what each rank keeps, and
`runtime.store`, which brings parameters together again. `ir.keeping` says who keeps what.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from whale.ir.homes import Slice
from whale.ir.keeping import Shared
from whale.ir.sharding import Piece
from whale.runtime.groups import Communicator


def stretch_of(local: torch.Tensor, piece: Slice, held: Piece) -> torch.Tensor:
    """The part of a rank's piece that a slice names in global positions."""
    if piece.span is None:
        return local
    low, high = piece.span
    start = 0
    for a, b in dict(held.dims).get(piece.dim, ((0, piece.home.shape[piece.dim]),)):
        if a <= low and high <= b:
            return local.narrow(piece.dim, start + low - a, high - low)
        start += b - a
    raise AssertionError(f"{piece.home.name}: slice {piece.span} outside {held}")


class Shards:
    """Slices of one Sync that its ranks share out.

    A flat tensor of them has member 0's part of each slice, then member 1's, and so on.

    Args:
        comm: The ranks.
        slices: How each slice is shared out.
        pieces: What this rank computes with, by parameter.
        kept: What it keeps.
    """

    def __init__(
        self,
        comm: Communicator,
        slices: Sequence[Shared],
        pieces: Mapping[str, Piece],
        kept: Mapping[str, Piece],
    ) -> None:
        self.comm, self.slices, self.pieces, self.kept = comm, slices, pieces, kept
        members = range(comm.size)
        self.sizes = [sum(s.numel(member) for s in slices) for member in members]
        self.names = tuple(dict.fromkeys(s.slice.home.name for s in slices))

    def pack(self, tensors: Mapping[str, torch.Tensor | None], like: torch.Tensor) -> torch.Tensor:
        """A flat tensor of what each parameter has in `tensors`; zeros where it has nothing."""
        parts = []
        for member in range(self.comm.size):
            for index, how in enumerate(self.slices):
                tensor = tensors[how.slice.home.name]
                if tensor is None:
                    parts.append(like.new_zeros(how.numel(member)))
                else:
                    parts.append(self._part(tensor, index, member).reshape(-1))
        return torch.cat(parts).to(like.dtype) if parts else like.new_zeros(0)

    def unpack(self, flat: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
        """Puts a flat tensor where each parameter has its place in `tensors`."""
        targets, sources, offset = [], [], 0
        for member in range(self.comm.size):
            for index, how in enumerate(self.slices):
                size = how.numel(member)
                if size:
                    part = self._part(tensors[how.slice.home.name], index, member)
                    targets.append(part)
                    sources.append(flat[offset : offset + size].view(part.shape))
                offset += size
        if targets:
            torch._foreach_copy_(targets, sources)

    def _part(self, local: torch.Tensor, index: int, member: int) -> torch.Tensor:
        how = self.slices[index]
        low, high = how.part(member)
        if not how.shape:
            return local.reshape(1)[low:high]
        whole = stretch_of(local, how.slice, self.pieces[how.slice.home.name])
        return whole.narrow(how.dim, low, high - low)

    def own(self, flat: torch.Tensor) -> Iterator[tuple[Shared, torch.Tensor]]:
        """By slice, this rank's part in a flat tensor of its own parts."""
        offset, member = 0, self.comm.index
        for how in self.slices:
            size = how.numel(member)
            low, high = how.part(member)
            shape = [high - low if d == how.dim else n for d, n in enumerate(how.shape)]
            yield how, flat[offset : offset + size].view(shape if size else (0,))
            offset += size

    def mine(self, kept: Mapping[str, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """A flat tensor of what this rank keeps."""
        parts = [
            self.place(kept[how.slice.home.name], how).reshape(-1)
            for how in self.slices
            if how.numel(self.comm.index)
        ]
        return torch.cat(parts).to(like) if parts else like.new_zeros(0)

    def place(self, kept: torch.Tensor, how: Shared) -> torch.Tensor:
        """Where in a parameter's kept tensor this rank's part of a slice is."""
        if how.slice.span is None or not how.shape:
            return kept
        # Those of one parameter lie in the order of their positions, each in its own Sync.
        low, high = how.part(self.comm.index)
        start, offset = how.slice.span[0] + low, 0
        for a, b in dict(self.kept[how.slice.home.name].dims)[how.dim]:
            if a <= start < b:
                return kept.narrow(how.dim, offset + start - a, high - low)
            offset += b - a
        raise AssertionError((how, self.kept))
