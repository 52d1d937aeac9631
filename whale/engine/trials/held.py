"""Held: a model whose rows do not interact and which draws nothing, for trials.

Place in the flow: used by `engine.trials.parts`. What rows do to each other by design (batch norm,
experts with limited room, balancing losses) Whale computes over all replicas. Here it is held
fixed, so that what is left can be compared in parts. The user's model, its buffers and its
generator stay as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from whale.engine.state.copies import copied, module_in
from whale.engine.state.stillness import Attributes
from whale.errors import WhaleError
from whale.nn.moe.layer import MoE
from whale.runtime import generators
from whale.runtime.compat import version
from whale.runtime.recompute import RerunMode

MOST_COPIED = 100_000_000
"""Parameters of the largest model that is copied to float64 for a trial."""
HELD_LOSS = 0.37
"""What a balancing loss is held at."""
NOISE = 0.1
"""Of a parameter's size, added to it: a head of zeros would hide which row weighs what."""


def noisy_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model in `dtype`, its weights a little off."""
    return with_noise(module_in(copied(model), dtype))


def with_noise(model: nn.Module) -> nn.Module:
    """The same model, whose weights are now a little off."""
    generator = torch.Generator().manual_seed(20)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.numel():
                size = float(parameter.square().mean().sqrt()) or 1.0
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
                parameter.add_((NOISE * size * noise).to(parameter))
    return model


@contextmanager
def held(model: nn.Module, *, training: bool = True) -> Iterator[None]:
    """Inside, it trains or evaluates, but batch norms evaluate, and experts have room for all.

    Modules that a training model keeps in eval mode stay so; one in eval mode is seen as it trains.
    """
    flags = [(module, module.training) for module in model.modules()]
    if not training or not model.training:
        for module, _ in flags:
            module.training = training  # not by `train`, in which modules may change their weights
    changes: list[tuple[nn.Module, dict[str, Any]]] = []
    untracked: list[tuple[nn.Module, dict[str, Tensor | None]]] = []
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.training = False
            if module.running_mean is None:  # it would take the rows' own in evaluation too
                untracked.append((module, dict(module._buffers)))
                module._buffers.update(_statistics(model, module))
        elif isinstance(module, MoE):
            changes.append((module, _experts(module)))
        elif isinstance(module, nn.MultiheadAttention | nn.RNNBase):
            changes.append((module, {"dropout": 0.0}))
    before = [{k: vars(m)[k] for k in new if k in vars(m)} for m, new in changes]
    for module, new in changes:
        vars(module).update(new)
    try:
        yield
    finally:
        for (module, new), old in zip(changes, before, strict=True):
            for key in new:
                del vars(module)[key]
            vars(module).update(old)
        for module, buffers in untracked:
            module._buffers.update(buffers)
        for module, flag in flags:
            module.training = flag


def _statistics(model: nn.Module, norm: Any) -> dict[str, Tensor | None]:
    """Running averages for a batch norm that keeps none."""
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
    found = like.detach().new_zeros(norm.num_features)
    return {"running_mean": found, "running_var": torch.ones_like(found)}


def _experts(module: MoE) -> dict[str, Any]:
    """Attributes with which every token finds room, and the loss is a constant."""

    def loss(logits: Tensor, *_: Any) -> Tensor:
        return logits.new_full((), HELD_LOSS)

    kind = "top-k" if module.router_kind == "expert-choice" else module.router_kind
    # A bias that moved would choose other experts in a second call.
    return {"capacity_factor": None, "router_kind": kind, "_loss": loss, "balance_rate": 0.0}


class Quiet(RerunMode):
    """Watches precision; with `draws`, random functions give constants, dropout its input.

    Attributes:
        narrow: Whether anything was computed in less than float64.
        half: Whether in less than float32.
        unchecked: Whether labels go where nobody checks them: other ones than the user's would
        be read from memory that is no label's.
    """

    def __init__(self, *, draws: bool) -> None:
        super().__init__()
        self.draws = draws
        self.narrow = self.half = self.unchecked = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        special = _is_special(func)  # most are not
        if special:
            given = dict(given)
            self.unchecked = self.unchecked or func.__name__ in _UNCHECKED
            _refuse_frequencies(func.__name__, args, given)
        out = self._quiet(func, args, given) if special and self.draws else func(*args, **given)
        if isinstance(out, Tensor):
            dtype = out.dtype
            if dtype is not torch.float64 and dtype.is_floating_point:
                self.narrow = True
                self.half = self.half or dtype is not torch.float32
        return out

    @staticmethod
    def _quiet(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if name in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if name == "scaled_dot_product_attention":
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            kwargs.pop("dropout_p", None)
        if name in _FILLS:
            with torch.no_grad():
                return args[0].fill_(0.5)
        if name in ("bernoulli", "normal") and args and isinstance(args[0], Tensor):
            return torch.full_like(args[0], 0.5) if name == "bernoulli" else args[0].clone()
        if name in _DRAWS:
            like = name.endswith("_like")
            made = func(*args, **kwargs)
            return torch.full_like(args[0] if like else made, 0.5).to(made.dtype)
        return func(*args, **kwargs)


@functools.lru_cache(maxsize=4096)
def _is_special(func: Any) -> bool:
    """Whether a function draws, or counts rows."""
    return getattr(func, "__name__", "") in _SPECIAL


def _refuse_frequencies(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Embeddings whose gradient is divided by how often an id occurs in the rows at hand."""
    if name not in _COUNTS:
        return
    scales = kwargs.get("scale_grad_by_freq", args[3] if len(args) > 3 else False)
    weights = [t for t in (*args[:2], kwargs.get("weight")) if isinstance(t, Tensor)]
    if scales is True and any(weight.requires_grad for weight in weights):
        shape = next(tuple(weight.shape) for weight in weights if weight.requires_grad)
        raise WhaleError(
            f"`{name}` of a weight {shape} divides gradients by how often each id occurs in a "
            "batch (scale_grad_by_freq=True), and a part of the rows has other counts",
            hint="leave scale_grad_by_freq off, or compute all rows of a step on one replica, in "
            "one micro-batch",
        )


_DROPOUTS = frozenset(
    "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout feature_dropout "
    "dropout_ rrelu".split()
)
_FILLS = frozenset("uniform_ normal_ bernoulli_ exponential_ log_normal_ cauchy_".split())
_DRAWS = frozenset("rand randn rand_like randn_like normal".split())
_COUNTS = frozenset(["embedding", "embedding_bag"])
_UNCHECKED = frozenset(["ctc_loss"])
_OTHERS = frozenset(["scaled_dot_product_attention", "bernoulli"])
_SPECIAL = _DROPOUTS | _FILLS | _DRAWS | _COUNTS | _UNCHECKED | _OTHERS


class StandIns:
    """Parameters of one run alone, in the place of those that its forward may write to.

    Other objects, not values put back: a backward after it may still need what the forward read.
    """

    def __init__(self, model: nn.Module, written: Collection[str] | None) -> None:
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._names: dict[int, str] = {}
        self._others: list[tuple[str, nn.Parameter, int]] = []
        self._given = written
        own: dict[int, nn.Parameter] = {}
        for name, parameter in model.named_parameters():
            if type(parameter) is nn.Parameter and (written is None or name in written):
                made = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                made.__dict__.update(parameter.__dict__)
                own[id(parameter)] = made
                self.pairs.append((parameter, made))
                self._names[id(made)] = name
            else:
                self._others.append((name, parameter, version(parameter)))
        for module in model.modules() if own else ():
            for name, held_there in module._parameters.items():
                if held_there is not None and id(held_there) in own:
                    module._parameters[name] = own[id(held_there)]
        self._versions = {id(made): version(made) for _, made in self.pairs}

    def written(self) -> frozenset[str]:
        """Names of the parameters that were written to, as far as it was not known before."""
        for name, parameter, before in self._others:
            if version(parameter) != before:
                raise WhaleError(
                    f"the forward writes to the weight {name}, which it did not do before",
                    hint="write to it in every forward from the first one on, or between steps",
                )
        if self._given is not None:
            return frozenset(self._given)
        return frozenset(
            self._names[id(made)]
            for parameter, made in self.pairs
            if version(made) != self._versions[id(made)]
            or made.shape != parameter.shape
            or not torch.equal(made.detach(), parameter.detach())
        )


@contextmanager
def undisturbed(
    model: nn.Module, dtype: torch.dtype, written: Collection[str] | None = ()
) -> Iterator[StandIns]:
    """Inside, code may draw and may change what modules hold; afterwards it is as before.

    `written`: names of the parameters that it may write to; None: all.
    """
    # Copies, not values put back: a backward after it may still need what the forward read.
    copies: dict[int, Tensor] = {}
    kept = [Attributes(module) for module in model.modules()]
    weights = [(parameter, parameter.data) for parameter in model.parameters()]
    stand_ins = StandIns(model, written)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = copies.setdefault(id(buffer), buffer.detach().clone())
    before = torch.get_default_dtype()
    with generators.kept():
        if dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
        try:
            yield stand_ins
        finally:
            torch.set_default_dtype(before)
            for each in kept:
                each.put_back()
            for parameter, data in weights:
                if parameter.data_ptr() != data.data_ptr():  # a teacher that follows the model
                    parameter.data = data
