"""Agreement: do all ranks start from the same model? Asked once, when a Step is built.

Place in the flow: called by `wh.parallelize`. Ranks that built their models from different seeds
would train, report one loss, and never agree; that is refused here.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from whale.errors import RankError


def check_same_weights(model: nn.Module, rank: int, num_ranks: int, device: torch.device) -> None:
    """Compares two sums over every parameter with rank 0's. Meta parameters have no values yet."""
    named = [(name, p) for name, p in model.named_parameters() if not p.is_meta]
    if num_ranks == 1 or not named:
        return
    with torch.no_grad():
        mine = torch.stack([fingerprint(p) for _, p in named]).to(device)
    first = mine.clone()
    dist.broadcast(first, 0)
    scale = first.abs().clamp(min=1e-6)
    wrong = ((mine - first).abs() > 1e-6 * scale).any(1)
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


NUMBERS = 3
"""Of a fingerprint."""


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """Three numbers that tell tensors apart: two sums of its values, and how many there are."""
    values = tensor.detach().flatten()
    if values.is_complex():
        values = torch.view_as_real(values).flatten()
    values = values.double().nan_to_num(nan=3.0, posinf=5.0, neginf=-7.0)
    places = torch.linspace(1.0, 2.0, values.numel(), dtype=torch.float64, device=values.device)
    count = places.new_tensor(float(values.numel()))
    return torch.stack([values.abs().sum(), (values * places).sum(), count]).cpu()
