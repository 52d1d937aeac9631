"""Gatherer: the whole model's tensors out of the ranks' pieces, under the user's own names.

Place in the flow: behind `Step.state_dict` and `Step.gradients`. Every rank knows from the plan who
owns what, so pieces are broadcast one by one and nothing about them has to be said first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from whale.engine.lower import Lowered, stage_of_module
from whale.errors import WhaleError
from whale.ir.plan import Home, Plan
from whale.ir.sharding import Piece, Span


def owners(plan: Plan, home: Home) -> list[tuple[int, Piece]]:
    """A smallest set of (rank, piece) that covers a parameter, lowest ranks first."""
    found: dict[Piece, int] = {}
    for rank in range(plan.num_ranks):
        piece = plan.piece(home, rank)
        if piece is None:
            continue
        if piece.whole:
            return [(rank, piece)]
        found.setdefault(piece, rank)
    return _cover(home, [(rank, piece) for piece, rank in found.items()])


def _cover(home: Home, pieces: list[tuple[int, Piece]]) -> list[tuple[int, Piece]]:
    """Pieces that together hold every element: replicas may be cut at different points."""
    dim = pieces[0][1].dims[0][0]
    missing: list[Span] = [(0, home.shape[dim])]
    chosen: list[tuple[int, Piece]] = []
    for rank, piece in pieces:
        left = missing
        for span in piece.dims[0][1]:
            left = [rest for gap in left for rest in _without(gap, span)]
        if left != missing:
            chosen.append((rank, piece))
            missing = left
    assert not missing, (home.name, missing)
    return chosen


def _without(gap: Span, span: Span) -> list[Span]:
    """What of `gap` is outside `span`."""
    low, high = max(gap[0], span[0]), min(gap[1], span[1])
    if low >= high:
        return [gap]
    return [part for part in ((gap[0], low), (high, gap[1])) if part[0] < part[1]]


class Gatherer:
    """Brings whole tensors together on every rank's CPU."""

    def __init__(self, model: nn.Module, plan: Plan, lowered: Lowered, rank: int) -> None:
        self.model, self.plan, self.lowered, self.rank = model, plan, lowered, rank

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Exactly the keys of the original model's state dict."""
        first_names = {id(p): name for name, p in self.model.named_parameters()}
        by_name = {
            name: first_names[id(p)]
            for name, p in self.model.named_parameters(remove_duplicate=False)
        }
        tensors = dict(self._parameters(lambda p: p.detach()))
        buffers = dict(self._buffers())
        keys = [key for key in self.model.state_dict() if key in by_name or key in buffers]
        strange = [k for k in self.model.state_dict() if k not in {*keys, *self._original()}]
        if strange:
            raise WhaleError(
                f"{strange[0]} in the model's state dict is neither a parameter nor a buffer",
                hint="what get_extra_state or a hook adds must be kept by yourself",
            )
        kept = set(self.lowered.model.state_dict())
        # A forward may fill buffers that were None: they come last.
        keys += [name for name in buffers if name in kept and name not in keys]
        return {key: tensors[by_name[key]] if key in by_name else buffers[key] for key in keys}

    def _original(self) -> dict[str, torch.Tensor]:
        return dict(self.model.named_buffers(remove_duplicate=False))

    def gradients(self) -> dict[str, torch.Tensor]:
        """By first name; trainable parameters only."""
        trainable = {n for n, p in self.model.named_parameters() if p.requires_grad}

        def gradient(parameter: nn.Parameter) -> torch.Tensor:
            return parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)

        return {n: g for n, g in self._parameters(gradient) if n in trainable}

    def _parameters(
        self, read: Callable[[nn.Parameter], torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        shapes = {name: p for name, p in self.model.named_parameters()}
        for home in self.plan.homes:
            dtype = shapes[home.name].dtype
            whole = torch.empty(home.shape, dtype=dtype)
            for owner, piece in owners(self.plan, home):
                local = None
                if owner == self.rank:
                    local = read(self.lowered.params[home.name])
                part = self._share(local, owner, piece.shape(home.shape), dtype)
                for inside, outside in piece.blocks(home.shape):
                    whole[_slices(outside)] = part[_slices(inside)]
            yield home.name, whole

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each from a rank that runs its module, as it is there: a forward may replace it."""
        local = dict(self.lowered.model.named_buffers(remove_duplicate=False))
        owners = {name: self._runs(name) for name in local}
        mine = {
            name: (tuple(buffer.shape), buffer.dtype)
            for name, buffer in local.items()
            if owners[name] == self.rank
        }
        forms = [mine]
        if self.plan.num_ranks > 1:
            forms = [{} for _ in range(self.plan.num_ranks)]
            dist.all_gather_object(forms, mine)
        for owner, held in enumerate(forms):
            for name, (shape, dtype) in held.items():
                source = local[name] if owner == self.rank else None
                yield name, self._share(source, owner, shape, dtype)

    def _runs(self, name: str) -> int:
        stage = stage_of_module(self.plan, name.rpartition(".")[0])
        return min(self.plan.stages[stage].virtual_device.active)

    def _share(
        self, local: torch.Tensor | None, owner: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        if local is not None:
            data = local.detach().contiguous().clone()
        else:
            data = torch.empty(shape, dtype=dtype, device=self.lowered.device)
        if self.plan.num_ranks > 1:
            # As bytes: not every dtype that a buffer may have is one that backends send.
            dist.broadcast(data.view(-1).view(torch.uint8), owner)
        return data.cpu()


def _slices(spans: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    return tuple(slice(low, high) for low, high in spans)
