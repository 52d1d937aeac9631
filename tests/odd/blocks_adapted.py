"""Blocks of research code: adapters, samples of states, odd structures."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.odd.blocks_research import Based
from tests.odd.vocabulary import block


@block("row-loop")
class RowLoop(Based):
    """Each row by itself, in a list."""

    def forward(self, h: Tensor) -> Tensor:
        found = []
        for row in h:
            weights = torch.softmax(self.proj(row) @ row.T, -1)
            found.append(weights @ row)
        return torch.stack(found, dim=0)


@block("queue")
class Queue(Based):
    """A queue of former rows that states are compared with."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(pick, dim)
        self.register_buffer("kept", torch.randn(16, dim) * 0.1)
        self.register_buffer("at", torch.zeros((), dtype=torch.long))

    def forward(self, h: Tensor) -> Tensor:
        y = self.proj(h)
        near = torch.softmax(y @ self.kept.clone().T, -1) @ self.kept.clone()
        if self.training:
            rows = y.detach().mean(1)
            places = (self.at + torch.arange(len(rows))) % 16
            self.kept[places] = rows
            self.at.add_(len(rows))
        return y + near


@block("act-norm")
class ActNorm(nn.Module):
    """An affine map that the first batch initialises."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(dim)), nn.Parameter(torch.ones(dim))
        self.register_buffer("ready", torch.tensor(False))

    def forward(self, h: Tensor) -> Tensor:
        if self.training and not self.ready:
            with torch.no_grad():
                self.shift.copy_(-h.mean((0, 1)))
                self.scale.copy_(1 / (h.std((0, 1)) + 1e-2))
                self.ready.fill_(True)
        return (h + self.shift) * self.scale


@block("weights-clamped")
class WeightsClamped(Based):
    """Weights are clamped in every forward."""

    def forward(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            self.proj.weight.clamp_(-0.2, 0.2)
        return h + self.proj(h)


class OwnNorm(nn.Module):
    """A batch norm over the features of [B, T, D]."""

    def __init__(self, pick: random.Random, dim: int, **how: Any) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(dim, **how)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.norm(h.transpose(1, 2)).transpose(1, 2)


@block("norm-cumulative")
class NormCumulative(OwnNorm):
    """A batch norm with momentum None."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(pick, dim, momentum=None)


@block("norm-untracked")
class NormUntracked(OwnNorm):
    """A batch norm without running averages."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(pick, dim, track_running_stats=False, affine=pick.random() < 0.5)


@block("norm-momentum-moves")
class NormMomentumMoves(OwnNorm):
    """A batch norm whose momentum a counter lowers."""

    def forward(self, h: Tensor) -> Tensor:
        out = super().forward(h)
        if self.training:
            self.norm.momentum = max(0.01, self.norm.momentum * 0.5)
        return out


@block("norm-then-average")
class NormThenAverage(OwnNorm):
    """The running mean is read right after the norm."""

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h) - self.norm.running_mean


@block("average-then-norm")
class AverageThenNorm(OwnNorm):
    """The running variance is read right before the norm."""

    def forward(self, h: Tensor) -> Tensor:
        scale = self.norm.running_var.clone().sqrt()
        return super().forward(h) * scale


@block("norm-twice")
class NormTwice(OwnNorm):
    """One batch norm is called twice, the second time on half of the tokens."""

    def forward(self, h: Tensor) -> Tensor:
        out = super().forward(h)
        return out + 0.1 * super().forward(h[:, : (h.shape[1] + 1) // 2]).mean(1, keepdim=True)


@block("norm-checkpointed")
class NormCheckpointed(OwnNorm):
    """A batch norm inside a checkpoint, which moves its averages twice."""

    def forward(self, h: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return super().forward(h)
        return checkpoint(super().forward, h, use_reentrant=False)


@block("norm-functional")
class NormFunctional(nn.Module):
    """F.batch_norm with buffers of its own."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("var", torch.ones(dim))
        self.gain = nn.Parameter(torch.ones(dim))

    def forward(self, h: Tensor) -> Tensor:
        flat = h.flatten(0, 1)
        out = F.batch_norm(flat, self.mean, self.var, self.gain, None, self.training, 0.3)
        return h + out.view_as(h)


@block("norm-masked-rows")
class NormSome(OwnNorm):
    """A batch norm over the tokens whose first feature is positive."""

    def forward(self, h: Tensor) -> Tensor:
        keep = torch.ones(h.shape[:2], dtype=torch.bool)
        keep[:, ::2] = False
        out = h.clone()
        if keep.any():
            out[keep] = self.norm(h[keep])
        return out


@block("norm-evaluates")
class NormEvaluates(OwnNorm):
    """A batch norm that runs in eval mode every other forward."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(pick, dim)
        self.turn = 0

    def forward(self, h: Tensor) -> Tensor:
        if not self.training:
            return super().forward(h)
        self.turn += 1
        before = self.norm.training
        self.norm.train(self.turn % 2 == 1)
        out = super().forward(h)
        self.norm.train(before)
        return out


@block("instance-norm-tracks")
class InstanceTracks(nn.Module):
    """An instance norm with running averages."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(dim, track_running_stats=True, affine=True)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.norm(h.transpose(1, 2)).transpose(1, 2) if h.shape[1] > 1 else h


@block("entropy-aux", aux=True)
class EntropyAux(Based):
    """A term for the entropy of a gate, a mean over tokens."""

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        p = self.proj(h).softmax(-1)
        return h * p, -0.05 * (p * p.log()).sum(-1).mean()


@block("usage-aux", aux=True)
class UsageAux(Based):
    """A balance term: a square of means over all tokens."""

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        p = self.proj(h).softmax(-1)
        return h * p, 0.5 * p.mean((0, 1)).pow(2).sum()


@block("decorrelates", aux=True)
class Decorrelates(Based):
    """A term on the covariance over the rows."""

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        y = self.proj(h)
        z = y.mean(1)
        c = z.T @ z / len(z)
        return h + y, 0.01 * (c - torch.diag(c.diag())).pow(2).sum()


@block("scatter-by-feature")
class ScatterByFeature(Based):
    """Tokens are added into slots by the sign of a score, in place."""

    def forward(self, h: Tensor) -> Tensor:
        slot = (self.proj(h)[..., 0] > 0).long()
        slots = h.new_zeros(h.shape[0], 2, h.shape[2])
        slots.scatter_add_(1, slot[..., None].expand_as(h), h)
        return h + 0.3 * slots.gather(1, slot[..., None].expand_as(h))


@block("layers-skipped-by-turn")
class SkippedByTurn(nn.Module):
    """Two layers, which take turns by a counter in a buffer."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.register_buffer("turn", torch.zeros((), dtype=torch.long))

    def forward(self, h: Tensor) -> Tensor:
        if self.training:
            self.turn += 1
        layer = self.a if int(self.turn) % 2 else self.b
        return h + layer(h)


@block("delayed-codes")
class Delayed(Based):
    """The mean state of the former forward is added from the second forward on."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__(pick, dim)
        self.former: Tensor | None = None

    def forward(self, h: Tensor) -> Tensor:
        y = self.proj(h)
        out = y if self.former is None else y + 0.1 * self.former
        if self.training:
            self.former = y.detach().mean((0, 1))
        return out


@block("weight-normed-by-hand")
class WeightNormed(nn.Module):
    """Direction and length, as parameters of odd shapes."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.randn(dim, dim))
        self.g = nn.Parameter(torch.ones(dim, 1))
        self.zero = nn.Parameter(torch.zeros(()))

    def forward(self, h: Tensor) -> Tensor:
        w = self.g * self.v / self.v.norm(dim=1, keepdim=True)
        return h * self.zero + torch.einsum("...d,ed->...e", h, w)


@block("scaled-by-largest")
class ScaledByLargest(Based):
    """States are scaled by the largest of the batch, detached."""

    def forward(self, h: Tensor) -> Tensor:
        return self.proj(h) / h.detach().abs().max().clamp(min=1.0)


@block("clipped-by-quantile")
class ClippedByQuantile(Based):
    """States are clipped at a quantile of the whole batch."""

    def forward(self, h: Tensor) -> Tensor:
        y = self.proj(h)
        high = torch.quantile(y.detach().flatten(), 0.95)
        return h + y.clamp(max=high.item()) if self.training else h + y


@block("memory-tokens")
class MemoryTokens(nn.Module):
    """Learned tokens are prepended, attended to, and cut off again."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(2, dim))
        self.attend = nn.MultiheadAttention(dim, 2, batch_first=True)

    def forward(self, h: Tensor) -> Tensor:
        long = torch.cat([self.tokens.expand(h.shape[0], -1, -1), h], 1)
        return self.attend(long, long, long, need_weights=False)[0][:, 2:]
