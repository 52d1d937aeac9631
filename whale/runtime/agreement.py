"""Agreement: do all ranks start from the same model? Asked once, when a Step is built.

Place in the flow: called by `wh.parallelize`. Ranks that built their models from different seeds
would train, report one loss, and never agree; that is refused here, bit by bit. What trains is
compared again every `Config.guard` steps (`runtime.guard`). After that, what looks at the model
alone need not run on every rank (`found_once`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from whale.errors import RankError, WhaleError
from whale.runtime.fingerprint import fingerprint_tensor

Found = TypeVar("Found")


def found_once(find: Callable[[], Found], num_ranks: int) -> Found:
    """What rank 0 finds, on all ranks: so is the error that it raises."""
    if num_ranks == 1:
        return find()
    told: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            told[0] = find()
        except WhaleError as error:
            told[1] = error
        except Exception as error:
            told[1] = RankError(f"rank 0 raised {type(error).__name__}: {error}")
            dist.broadcast_object_list(told, src=0)
            raise
    dist.broadcast_object_list(told, src=0)
    found, refused = told
    if refused is not None:
        raise refused
    return found  # type: ignore[no-any-return]


def check_same_program(digest: str, num_ranks: int) -> None:
    """Compares what ranks traced: stages cut from another trace would send other values."""
    if num_ranks == 1:
        return
    found: list[Any] = [None] * num_ranks
    dist.all_gather_object(found, digest)
    others = [rank for rank, theirs in enumerate(found) if theirs != found[0]]
    if others:
        raise RankError(
            f"ranks {others} run other code between the model's modules, or in another order, than "
            "rank 0",
            hint="iterate over lists or sorted(...), not over sets of strings, whose order is "
            "another in every process, and let no code depend on the rank",
        )


def check_same_weights(model: nn.Module, rank: int, num_ranks: int, device: torch.device) -> None:
    """Compares all parameters and buffers with rank 0's. Meta tensors have no values yet."""
    state = [*model.named_parameters(), *model.named_buffers()]
    named = [(name, tensor) for name, tensor in state if not tensor.is_meta]
    if num_ranks == 1 or not named:
        return
    mine = torch.stack([fingerprint_tensor(tensor).to(device) for _, tensor in named])
    first = mine.clone()
    dist.broadcast(first, 0)
    wrong = mine != first
    flags = torch.zeros(num_ranks, device=device)
    flags[rank] = float(wrong.any())
    dist.all_reduce(flags)
    others = [r for r, flag in enumerate(flags.tolist()) if flag]
    if others:
        where = f" (first: {named[int(wrong.nonzero()[0])][0]})" if wrong.any() else ""
        raise RankError(
            f"rank {rank}: ranks {others} built a model with other weights than rank 0{where}",
            hint="call torch.manual_seed with the same seed on every rank before building the "
            "model, load the same checkpoint, or build it on the meta device",
        )
