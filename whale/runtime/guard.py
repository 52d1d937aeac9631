"""The guard: while a Step trains, do ranks that hold the same tensor still hold the same bits?

Place in the flow: called by Step every `Config.guard` steps. Replicas that drift apart train,
report one loss, and are no longer one model: code that draws its own random numbers, buffers that
a forward changes by its own rows, broken memory. The fingerprints of all parameters and buffers
are gathered with one small collective; a difference names the tensor and the ranks, on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from whale.errors import RankError
from whale.runtime.fingerprint import fingerprint_tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A tensor, and the sets of ranks that each hold the same piece of it."""

    name: str
    kind: str
    sharers: tuple[tuple[int, ...], ...]


class Guard:
    """Compares what one Step's ranks hold in common."""

    def __init__(self, held: list[Held], rank: int, num_ranks: int, device: torch.device) -> None:
        self.held = [item for item in held if any(len(ranks) > 1 for ranks in item.sharers)]
        self.rank, self.num_ranks, self.device = rank, num_ranks, device

    def check(self, tensors: Mapping[str, torch.Tensor], step: int) -> None:
        """Raises a RankError on every rank if any two ranks differ in a piece both hold."""
        if not self.held:
            return
        mine = torch.stack([self._fingerprint(tensors, item) for item in self.held])
        everyone = [torch.empty_like(mine) for _ in range(self.num_ranks)]
        dist.all_gather(everyone, mine)
        table = torch.stack(everyone).tolist()
        for place, item in enumerate(self.held):
            for ranks in item.sharers:
                found = {rank: table[rank][place] for rank in ranks}
                if len(set(found.values())) > 1:
                    raise self._error(item, found, step)

    def _fingerprint(self, tensors: Mapping[str, torch.Tensor], item: Held) -> torch.Tensor:
        holds = any(self.rank in ranks for ranks in item.sharers)
        tensor = tensors.get(item.name) if holds else None
        if tensor is None or tensor.is_meta:
            return torch.zeros((), dtype=torch.int64, device=self.device)
        return fingerprint_tensor(tensor).to(self.device)

    def _error(self, item: Held, found: dict[int, int], step: int) -> RankError:
        shown = ", ".join(f"rank {r}: {value % 2**64:016x}" for r, value in found.items())
        return RankError(
            f"after step {step} the ranks differ in {item.kind} {item.name}, of which they hold "
            f"the same piece ({shown})",
            hint="something changes it on each rank alone: a forward or a hook that writes to it, "
            "random numbers Whale does not key, code under `if rank`; Config guard=0 turns this "
            "comparison off",
        )
