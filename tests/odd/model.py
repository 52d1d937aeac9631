"""Model: an odd model built from its spec, with its loss and its optimizer.

Place in the flow: `judge` builds one on each rank for Whale and one for the truth, both from the
same seed. All is plain torch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tests.odd import blocks as _all  # noqa: F401 - fills the vocabulary
from tests.odd import losses_research as _losses  # noqa: F401 - so does this one
from tests.odd.glue import GLUES
from tests.odd.losses import LOSSES, SIZES, call
from tests.odd.spec import Spec
from tests.odd.vocabulary import BLOCKS, DIM, VOCAB

SKELETONS = (
    "list",
    "named",
    "dict",
    "sequential",
    "wrapped",
    "object",
    "shared",
    "skips",
    "nested",
    "mutating",
)
STEMS = ("ids", "ids-padding", "ids-scaled", "features", "features-conv")
HEADS = ("linear", "normed", "deep", "tied", "tied-function", "no-bias")


class Stem(nn.Module):
    """Hidden states [B, T, D] of ids or features, and positions."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind.startswith("ids"):
            padding = 0 if kind == "ids-padding" else None
            self.table = nn.Embedding(VOCAB, DIM, padding_idx=padding)
        elif kind == "features":
            self.table = nn.Linear(DIM, DIM)
        else:
            self.table = nn.Conv1d(DIM, DIM, 3, padding=1)
        self.places = nn.Parameter(torch.randn(16, DIM) * 0.3)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        if self.kind == "features-conv":
            h = self.table(x.transpose(1, 2)).transpose(1, 2)
        else:
            h = self.table(x)
        if self.kind == "ids-scaled":
            h = h * DIM**0.5
        if positions is None:
            return h + self.places[: x.shape[1]]
        return h + self.places[positions]


class Head(nn.Module):
    """The output: one of its kind per token, or per row where `pool`."""

    def __init__(self, kind: str, size: int, pool: str) -> None:
        super().__init__()
        self.kind, self.pool = kind, pool
        self.norm = nn.LayerNorm(DIM) if kind == "normed" else nn.Identity()
        self.inner = nn.Sequential(nn.Linear(DIM, 16), nn.GELU(), nn.Linear(16, DIM))
        if kind != "deep":
            self.inner = nn.Sequential()
        self.out = nn.Linear(DIM, size, bias=kind != "no-bias")

    def forward(self, h: Tensor, mask: Tensor, weight: Tensor | None = None) -> Tensor:
        if self.pool == "mean":
            h = h.mean(1)
        elif self.pool == "first":
            h = h[:, 0]
        elif self.pool == "masked":
            m = mask.to(h.dtype)[..., None]
            h = (h * m).sum(1) / m.sum(1).clamp(min=1)
        h = self.inner(self.norm(h))
        return self.out(h) if weight is None else F.linear(h, weight)


class Mutating(nn.Module):
    """A block that changes the list it is given, and returns nothing."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, states: list[Tensor]) -> None:
        states[0] = self.block(states[0])


class Wrapped(nn.Module):
    """A block that passes a dict, or an object, along."""

    def __init__(self, block: nn.Module, masked: bool, aux: bool, as_object: bool) -> None:
        super().__init__()
        self.block, self.masked, self.aux, self.as_object = block, masked, aux, as_object

    def forward(self, state: Any) -> Any:
        fields = dict(vars(state)) if self.as_object else dict(state)
        args = (fields["h"], fields["mask"]) if self.masked else (fields["h"],)
        out = self.block(*args)
        if self.aux:
            out, loss = out
            fields["aux"] = [*fields["aux"], loss]
        fields["h"] = out
        return SimpleNamespace(**fields) if self.as_object else fields


class Model(nn.Module):
    """Stem, blocks and head as the spec says."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        word = LOSSES[spec.loss]
        self.stem = Stem(spec.stem)
        made = []
        for name, choice in zip(spec.blocks, spec.choices, strict=True):
            block = BLOCKS[name].make(random.Random(choice), DIM)
            if spec.skeleton in ("wrapped", "object"):
                flags = BLOCKS[name].masked, BLOCKS[name].aux
                block = Wrapped(block, *flags, spec.skeleton == "object")
            elif spec.skeleton == "mutating":
                block = Mutating(block)
            made.append(block)
        self.paths = self._hold(made)
        pool = ("mean", "first", "masked")[spec.seed % 3] if word.output == "classes" else ""
        self.head = Head(spec.head, SIZES[word.output], pool)
        if spec.head == "tied" and spec.stem.startswith("ids") and word.output == "tokens":
            self.head.out.weight = self.stem.table.weight
        self.shift = nn.Parameter(torch.randn(DIM) * 0.1)
        self.drop = nn.Dropout(0.2)
        self.calls = 0
        if "counter" in spec.glue:
            self.register_buffer("counter", torch.zeros((), dtype=torch.long))
        if "shift" not in spec.glue:
            del self.shift

    def _hold(self, made: list[nn.Module]) -> list[str]:
        """Registers the blocks; returns their paths."""
        kind = self.spec.skeleton
        if kind == "named":
            for index, block in enumerate(made):
                setattr(self, f"block_{index}", block)
            return [f"block_{i}" for i in range(len(made))]
        if kind == "dict":
            self.blocks: Any = nn.ModuleDict({f"b{i}": b for i, b in enumerate(made)})
            return [f"blocks.b{i}" for i in range(len(made))]
        if kind == "sequential":
            self.blocks = nn.Sequential(*made)
            return [f"blocks.{i}" for i in range(len(made))]
        if kind == "nested":
            half = (len(made) + 1) // 2
            self.blocks = nn.ModuleList([nn.ModuleList(made[:half]), nn.ModuleList(made[half:])])
            lows = [f"blocks.0.{i}" for i in range(half)]
            return lows + [f"blocks.1.{i}" for i in range(len(made) - half)]
        self.blocks = nn.ModuleList(made)
        return [f"blocks.{i}" for i in range(len(made))]

    def units(self) -> list[str]:
        """Paths that cover the model, in the order they run."""
        return ["stem", *self.paths, "head"]

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        scale: float = 1.0,
        flag: bool = False,
        name: str = "",
        nothing: None = None,
    ) -> Any:
        spec = self.spec
        h = self.stem(x, positions) if positions is not None else self.stem(x)
        if flag:
            h = h * scale
        real = mask if mask is not None else torch.ones(x.shape[:2], dtype=torch.bool)
        h, aux = self._run(h, real)
        weight = None
        if spec.head == "tied-function" and spec.stem.startswith("ids"):
            weight = self.stem.table.weight if LOSSES[spec.loss].output == "tokens" else None
        out = self.head(h, real, weight) if weight is not None else self.head(h, real)
        if not spec.inside:
            return (out, aux) if aux is not None else out
        loss = call(LOSSES[spec.loss], out, labels, mask, self)
        if aux is not None:
            loss = loss + aux
        if spec.returns == "dict":
            return {"loss": loss, "logits": out}
        if spec.returns == "tuple":
            return loss, out
        if spec.returns == "object":
            return SimpleNamespace(loss=loss, logits=out, hidden=None)
        return loss

    def _run(self, h: Tensor, mask: Tensor) -> tuple[Tensor, Tensor | None]:
        spec = self.spec
        modules = [self.get_submodule(path) for path in self.paths]
        if spec.skeleton == "sequential":
            return self.blocks(h), None
        if spec.skeleton == "mutating":
            states = [h]
            for module in modules:
                module(states)
            return states[0], None
        if spec.skeleton in ("wrapped", "object"):
            state: Any = {"h": h, "mask": mask, "aux": []}
            for module in modules:
                state = module(SimpleNamespace(**state) if spec.skeleton == "object" else state)
                state = vars(state) if spec.skeleton == "object" else state
            return state["h"], sum(state["aux"]) if state["aux"] else None
        aux: Tensor | None = None
        seen = [h]
        if spec.skeleton == "shared" and modules:
            modules = [*modules, modules[0]]
        for index, module in enumerate(modules):
            word = BLOCKS[spec.blocks[index % len(spec.blocks)]]
            out = module(h, mask) if word.masked else module(h)
            if word.aux:
                out, loss = out
                aux = loss if aux is None else aux + loss
            h = GLUES[spec.glue[index % len(spec.glue)]](self, out, mask) if spec.glue else out
            seen.append(h)
        if spec.skeleton == "skips" and len(seen) > 2:
            h = h + 0.5 * seen[1] + seen[0]
        return h, aux


def loss_of(spec: Spec, model: nn.Module) -> Callable[[Any, Any], Tensor] | None:
    """What is given as `loss=`; None where the model returns its own."""
    if spec.inside:
        return None
    word = LOSSES[spec.loss]

    def loss(out: Any, target: Any) -> Tensor:
        aux = None
        if isinstance(out, tuple):
            out, aux = out
        value = call(word, out, target, None, model)
        return value if aux is None else value + aux

    return loss


@contextmanager
def defaults(spec: Spec) -> Iterator[None]:
    """The dtype and the seed a model is built with."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if spec.autocast else torch.float64)
    try:
        torch.manual_seed(spec.seed)
        yield
    finally:
        torch.set_default_dtype(before)


def build(spec: Spec) -> Model:
    """The model, in training mode but for what it froze itself."""
    with defaults(spec):
        return Model(spec)


def _groups(named: Any) -> torch.optim.Optimizer:
    named = list(named)
    return torch.optim.AdamW(
        [
            {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for _, p in named if p.dim() <= 1], "weight_decay": 0.0, "lr": 3e-3},
        ],
        lr=1e-2,
        eps=1e-6,
    )


def _by_name(named: Any) -> torch.optim.Optimizer:
    named = list(named)
    return torch.optim.SGD(
        [
            {"params": [(n, p) for n, p in named if "head" in n], "lr": 0.02},
            {"params": [(n, p) for n, p in named if "head" not in n]},
        ],
        lr=1e-2,
        momentum=0.8,
    )


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda named: torch.optim.SGD(named, lr=1e-2),
    "momentum": lambda named: torch.optim.SGD(
        named, lr=1e-2, momentum=0.9, weight_decay=0.1, nesterov=True
    ),
    "adamw": lambda named: torch.optim.AdamW(named, lr=1e-2, weight_decay=0.1, eps=1e-6),
    "adam": lambda named: torch.optim.Adam(named, lr=1e-2, amsgrad=True, eps=1e-6),
    "rmsprop": lambda named: torch.optim.RMSprop(named, lr=1e-3, eps=1e-5),
    "adagrad": lambda named: torch.optim.Adagrad(named, lr=1e-2, eps=1e-5),
    "groups": _groups,
    "by-name": _by_name,
    "plain": lambda named: torch.optim.SGD([p for _, p in named], lr=1e-2, weight_decay=0.1),
    "scheduled": lambda named: torch.optim.SGD(named, lr=1e-2, momentum=0.5),
}
