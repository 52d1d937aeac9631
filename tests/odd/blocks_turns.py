"""Blocks whose code takes another turn: by length, in evaluation, after some calls, by rows."""

from __future__ import annotations

import copy
import random

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.func import functional_call

from tests.odd.blocks_state import Projected
from tests.odd.vocabulary import LENGTH, block


class Pair(Projected):
    """The base of some: two Linears with something between them."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(pick, dim)
        self.up, self.kind = nn.Linear(dim, dim), pick.randrange(4)

    def between(self, y: Tensor) -> Tensor:
        kinds = (
            lambda: torch.softmax(y, -1),
            lambda: y / y.shape[-1],
            lambda: torch.tanh(y),
            lambda: torch.tanh(y) * (1 + self.up.bias.norm()),
        )
        return kinds[self.kind]()


@block("turns-by-length")
class ByLength(Pair):
    """Other operations inside a pair for other lengths than the usual one."""

    def forward(self, h: Tensor) -> Tensor:
        y = self.up(h)
        return h + self.proj(self.between(y) if h.shape[1] != LENGTH else torch.tanh(y))


@block("turns-in-evaluation")
class InEvaluation(Pair):
    """Other operations inside a pair in evaluation."""

    def forward(self, h: Tensor) -> Tensor:
        y = self.up(h)
        return h + self.proj(torch.tanh(y) if self.training else self.between(y))


@block("centred-in-evaluation", mixes=True)
class CentredInEvaluation(Projected):
    """Rows meet in evaluation only."""

    def forward(self, h: Tensor) -> Tensor:
        y = self.proj(h)
        return h + (y if self.training else y - y.mean(0, keepdim=True))


@block("turns-late")
class Late(Pair):
    """Other operations from the second call of training on."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(pick, dim)
        self.calls = 0

    def forward(self, h: Tensor) -> Tensor:
        self.calls += self.training
        y = self.up(h)
        return h + self.proj(self.between(y) if self.calls > 2 else torch.tanh(y))


@block("centred-late", mixes=True)
class CentredLate(Projected):
    """Rows meet from the second call of training on."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(pick, dim)
        self.calls = 0

    def forward(self, h: Tensor) -> Tensor:
        self.calls += self.training
        y = self.proj(h)
        return h + (y - y.mean(0, keepdim=True) if self.calls > 2 else y)


@block("norm-in-groups", mixes=True)
class InGroups(Projected):
    """Batch norm of groups of rows, of selected rows, or beside a table."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(pick, dim)
        self.norm, self.kind = nn.BatchNorm1d(dim), pick.randrange(4)
        self.table = nn.Parameter(torch.randn(3, dim))

    def forward(self, h: Tensor) -> Tensor:
        y = self.proj(h)
        if self.kind == 0:
            return h + torch.cat([self.norm(p.flatten(0, 1)) for p in y.split(2)]).view_as(h)
        if self.kind == 1:
            both = self.norm(torch.cat([y.flatten(0, 1), self.table]))
            return h + both[: -len(self.table)].view_as(h)
        if self.kind == 2:
            first, second = self.norm(torch.cat([y, y.flip(1)]).flatten(0, 1)).chunk(2)
            return h + (first * second).view_as(h)
        return h + self.norm(y.transpose(1, 2)).transpose(1, 2)


@block("other-weights")
class OtherWeights(Projected):
    """A Linear called a second time with other weights."""

    def forward(self, h: Tensor) -> Tensor:
        moved = {name: p * 1.1 for name, p in self.proj.named_parameters()}
        return h + self.proj(h) - 0.5 * functional_call(self.proj, moved, (h,))


@block("half-of-rows", mixes=True)
class HalfOfRows(Projected):
    """The first half of the rows passes no gradient on, or is scaled."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(pick, dim)
        self.kind = pick.randrange(2)

    def forward(self, h: Tensor) -> Tensor:
        y, half = self.proj(h), len(h) // 2
        if self.kind:
            return h + torch.cat([y[:half].detach(), y[half:]])
        return h + y * max(len(h), 4) / 4


@block("two-views")
class TwoViews(Projected):
    """Two views of the rows as twice as many rows."""

    def forward(self, h: Tensor) -> Tensor:
        first, second = self.proj(torch.cat([h, h.flip(2)])).chunk(2)
        return h + torch.tanh(first) * second


@block("time-major")
class TimeMajor(Projected):
    """All tokens in one dim, the time first."""

    def forward(self, h: Tensor) -> Tensor:
        y = self.proj(h.transpose(0, 1).reshape(-1, h.shape[2]))
        return h + y.view(h.shape[1], -1, h.shape[2]).transpose(0, 1)


@block("encoder-padding", masked=True)
class Encoder(nn.Module):
    """nn.TransformerEncoder with a padding mask: in evaluation torch leaves zeros there."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(dim, 2, dim, dropout=0.0, batch_first=True)
        norm = nn.LayerNorm(dim) if pick.random() < 0.5 else None
        self.encoder = nn.TransformerEncoder(layer, 2, norm=norm)

    def forward(self, h: Tensor, mask: Tensor) -> Tensor:
        y = self.encoder(h, src_key_padding_mask=~mask)
        return h + y.mean(1, keepdim=True)


@block("slow-teacher")
class Teacher(Projected):
    """A slow copy of a Linear that follows it in training."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(pick, dim)
        self.teacher = copy.deepcopy(self.proj).requires_grad_(False)

    def forward(self, h: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for slow, fast in zip(
                    self.teacher.parameters(), self.proj.parameters(), strict=True
                ):
                    slow.lerp_(fast, 0.1)
        return h + self.proj(h) - 0.3 * self.teacher(h)


@block("probe", aux=True)
class Probe(Projected):
    """A loss of its own by a mean over some tokens, with more Layers after it."""

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        y = self.proj(h)
        weight = (h.detach()[..., 0] > 0).to(h.dtype)
        loss = (F.mse_loss(y, h, reduction="none").mean(-1) * weight).sum()
        return h + y, 0.1 * loss / weight.sum().clamp(min=1)
