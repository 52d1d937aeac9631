"""Standing: where a trained part stands complete on this rank, and how values get into it.

Place in the flow: behind the face of the user's module (`engine.watch.face`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from whale.engine.lower.lowered import Lowered
from whale.engine.lower.weights import take
from whale.engine.state.copies import copied
from whale.errors import WhaleError
from whale.ir.plan import Plan
from whale.nn.moe.layer import MoE
from whale.runtime.agreement import check_same_weights

_ELSE = "use step.evaluate(batch), or step.write_back() and step.close() to have the model whole"


def runnable(plan: Plan, lowered: Lowered, rank: int, path: str) -> nn.Module:
    """The trained part at `path`, if calling it here computes what one device would."""
    name = f"model.{path}" if path else "model"
    if len(plan.stages) > 1 or not plan.stages_of(rank):
        raise WhaleError(
            f"{name}(...) is called, but rank {rank} has only a part of the model: the plan has "
            f"{len(plan.stages)} stages",
            hint=_ELSE,
        )
    prefix = f"{path}." if path else ""
    for split in (split for t in plan.taskgraphs for split in t.splits):
        if any(f"{p}.".startswith(prefix) or prefix.startswith(f"{p}.") for p in split.modules):
            raise WhaleError(
                f"{name}(...) is called, but {split.path} is split over several ranks", hint=_ELSE
            )
    module = lowered.model.get_submodule(path)
    away = next((home.name for home in plan.homes if home.zero > 2), None)
    if away is not None:
        raise WhaleError(
            f"{name}(...) is called, but {away} is shared out over several ranks", hint=_ELSE
        )
    meets = [m for m in module.modules() if isinstance(m, MoE) or _waits(m)]
    if meets and len(plan.stages[0].virtual_device.replicas) > 1:
        raise WhaleError(
            f"{name}(...) is called, but its {type(meets[0]).__name__} waits for other replicas",
            hint=f"call model.eval() first if it is a batch norm, or {_ELSE}",
        )
    stage = lowered.stages.modules[0]
    drops = any(isinstance(m, nn.Dropout) and m.training and m.p > 0 for m in module.modules())
    if module.training and (drops or getattr(stage, "draws", False)):
        raise WhaleError(
            f"{name}(...) is called in training mode, in which it draws random numbers that "
            "belong to a step",
            hint="call model.eval() first, or use the step",
        )
    return module


def _waits(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training


def load_into(
    model: nn.Module,
    lowered: Lowered,
    path: str,
    state: Any,
    strict: bool,
    rank: int,
    ranks: int,
    trained: Mapping[str, torch.Tensor],
) -> Any:
    """Loads a state dict of a part as torch does, then takes this rank's pieces of what it set.

    Modules may fill in what is missing from what they have: they have the `trained` values.
    """
    part = model.get_submodule(path)
    scratch = copied(part)
    if any(t.is_meta for t in (*scratch.parameters(), *scratch.buffers())):
        scratch = scratch.to_empty(device="cpu")
    with torch.no_grad():
        for name, tensor in _all(scratch).items():
            now = trained.get(f"{path}.{name}" if path else name)
            if now is not None and now.shape == tensor.shape:
                tensor.copy_(now)
    before = {id(t): t._version for t in (*scratch.parameters(), *scratch.buffers())}
    result = scratch.load_state_dict(state, strict=strict)
    check_same_weights(scratch, rank, ranks, lowered.device)
    first = {id(p): name for name, p in model.named_parameters()}
    names = dict(zip(_all(scratch), (first.get(id(t)) for t in _all(part).values()), strict=True))
    buffers = dict(lowered.model.named_buffers(remove_duplicate=False))
    store = lowered.store
    with torch.no_grad():
        for name, tensor in _all(scratch).items():
            if tensor._version == before.get(id(tensor)):
                continue
            home = names[name]
            if home is not None and home in store.kept:
                store.assign(home, take(tensor, store.kept_pieces[home]))
            elif home is None and not buffers[full := f"{path}.{name}" if path else name].is_meta:
                buffers[full].copy_(tensor)
    store.publish()
    return result


def _all(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(_tensors(module))


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def write_back(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Copies whole tensors into the user's module."""
    tensors = _all(model)
    for name, tensor in tensors.items():
        if tensor.is_meta and name in state:
            raise WhaleError(
                f"{name} of the user's model is on the meta device: there is nothing to write to",
                hint='call model.to_empty(device="cpu") before step.write_back()',
            )
    with torch.no_grad():
        for name, value in state.items():
            if name in tensors and tensors[name].shape == value.shape:
                tensors[name].copy_(value)
                continue
            owner, _, leaf = name.rpartition(".")
            like = tensors.get(name)
            device = like.device if like is not None else value.device
            model.get_submodule(owner)._buffers[leaf] = value.to(device)
