"""Gatherer: the whole model's tensors out of the ranks' pieces, under the user's own names.

Place in the flow: behind `Step.state_dict` and `Step.gradients`. Every rank knows from the plan who
owns what, so pieces are broadcast one by one and nothing about them has to be said first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property

import torch
import torch.distributed as dist
from torch import nn

from whale.engine.checkpoint.blocks import Cells, cells_of, part_of, slices
from whale.engine.lower.lowered import Lowered, stage_of_module
from whale.engine.state.copies import cast_buffers
from whale.errors import WhaleError
from whale.ir.keeping import kept_pieces
from whale.ir.plan import Plan


def owners(plan: Plan) -> dict[str, Cells]:
    """By parameter, blocks that together are the whole, and a rank that keeps each."""
    every = [kept_pieces(plan, rank) for rank in range(plan.num_ranks)]
    return {
        home.name: [
            (spans, min(holders))
            for spans, holders in cells_of(
                home.shape,
                {rank: own[home.name] for rank, own in enumerate(every) if home.name in own},
            )
        ]
        for home in plan.homes
    }


class Gatherer:
    """Brings whole tensors together on every rank's CPU."""

    def __init__(self, model: nn.Module, plan: Plan, lowered: Lowered, rank: int) -> None:
        self.model, self.plan, self.lowered, self.rank = model, plan, lowered, rank

    @cached_property
    def _owners(self) -> dict[str, Cells]:
        return owners(self.plan)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Exactly the keys of the original model's state dict."""
        first_names = {id(p): name for name, p in self.model.named_parameters()}
        by_name = {
            name: first_names[id(p)]
            for name, p in self.model.named_parameters(remove_duplicate=False)
        }
        tensors = dict(self._parameters(self.lowered.store.value))
        buffers = {
            name: buffer.to(self._buffer_dtypes.get(name, buffer.dtype))
            for name, buffer in self._buffers()
        }
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

    @property
    def _buffer_dtypes(self) -> dict[str, torch.dtype]:
        """Those that a rank has in another precision are the user's again."""
        cast = cast_buffers(self.model, self.plan.precision)
        return {name: t.dtype for name, t in self._original().items() if name in cast}

    def _original(self) -> dict[str, torch.Tensor]:
        return dict(self.model.named_buffers(remove_duplicate=False))

    def gradients(self) -> dict[str, torch.Tensor]:
        """By first name; trainable parameters only."""
        trainable = {n for n, p in self.model.named_parameters() if p.requires_grad}

        def gradient(name: str) -> torch.Tensor:
            kept = self.lowered.store.kept[name]
            return kept.grad if kept.grad is not None else torch.zeros_like(kept)

        return {n: g for n, g in self._parameters(gradient) if n in trainable}

    def _parameters(
        self, read: Callable[[str], torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        shapes = {name: p for name, p in self.model.named_parameters()}
        store = self.lowered.store
        for home in self.plan.homes:
            dtype = shapes[home.name].dtype
            whole = torch.empty(home.shape, dtype=dtype)
            for spans, owner in self._owners[home.name]:
                local = None
                if owner == self.rank:
                    mine = read(home.name).to(dtype)
                    local = part_of(mine, store.kept_pieces[home.name], home.shape, spans)
                shape = tuple(high - low for low, high in spans)
                whole[slices(spans)] = self._share(local, owner, shape, dtype)
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
