"""Blocks as in every textbook: MLPs, norms, convolutions, recurrences, embeddings."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tests.odd.vocabulary import VOCAB, block

ACTIVATIONS = (nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.Softplus, nn.ELU, nn.Mish)


@block("mlp", easy=True)
class Mlp(nn.Module):
    """Pre-norm MLP with a residual."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        hidden = pick.choice((20, 2 * dim, 3 * dim))
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden, bias=pick.random() < 0.7)
        self.act = pick.choice(ACTIVATIONS)()
        self.down = nn.Linear(hidden, dim, bias=pick.random() < 0.7)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(self.act(self.up(self.norm(h))))


@block("post-norm", easy=True)
class PostNorm(nn.Module):
    """A Sequential MLP whose sum is normed after."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(dim, 18), pick.choice(ACTIVATIONS)(), nn.Linear(18, dim))
        self.norm = nn.LayerNorm(dim, elementwise_affine=pick.random() < 0.5)

    def forward(self, h: Tensor) -> Tensor:
        return self.norm(h + self.net(h))


@block("gated-mlp", easy=True)
class GatedMlp(nn.Module):
    """SwiGLU with separate gate and up."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.gate = nn.Linear(dim, 20, bias=False)
        self.up = nn.Linear(dim, 20, bias=False)
        self.down = nn.Linear(20, dim, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        n = self.norm(h)
        return h + self.down(F.silu(self.gate(n)) * self.up(n))


@block("fused-gate")
class FusedGate(nn.Module):
    """SwiGLU whose gate and up are one Linear, chunked."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 40)
        self.down = nn.Linear(20, dim)
        self.interleaved = pick.random() < 0.3

    def forward(self, h: Tensor) -> Tensor:
        both = self.up(h)
        a, b = (both[..., ::2], both[..., 1::2]) if self.interleaved else both.chunk(2, -1)
        return h + self.down(F.gelu(a, approximate="tanh") * b)


@block("low-rank")
class LowRank(nn.Module):
    """A frozen Linear with a trained low-rank correction, as LoRA writes it."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.base = nn.Linear(dim, dim)
        self.base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(3, dim) * 0.2)
        self.b = nn.Parameter(torch.randn(dim, 3) * 0.2)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.base(h) + (h @ self.a.T) @ self.b.T


@block("bilinear")
class Bilinear(nn.Module):
    """nn.Bilinear and a squeeze-excite over time."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.pair = nn.Bilinear(dim, 3, dim)
        self.side = nn.Linear(dim, 3)
        self.gate = nn.Linear(dim, dim)

    def forward(self, h: Tensor) -> Tensor:
        out = self.pair(h, self.side(h))
        return h + out * torch.sigmoid(self.gate(h.mean(1))).unsqueeze(1)


@block("conv1d")
class Conv(nn.Module):
    """Convolutions over time on transposed states, one grouped or dilated."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.depth = nn.Conv1d(dim, dim, 3, padding=1, groups=pick.choice((1, 3, dim)))
        self.point = nn.Conv1d(dim, dim, 1)
        self.wide = nn.Conv1d(dim, dim, 3, padding=2, dilation=2, padding_mode="replicate")

    def forward(self, h: Tensor) -> Tensor:
        x = h.transpose(1, 2)
        x = self.point(F.gelu(self.depth(x))) + self.wide(x)
        return h + x.transpose(1, 2)


@block("conv2d")
class Picture(nn.Module):
    """The states as a picture: 2D and transposed convolutions, pooling back."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4) if pick.random() < 0.5 else nn.InstanceNorm2d(4, affine=True)
        self.back = nn.ConvTranspose2d(4, 1, 3, padding=1)

    def forward(self, h: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(h.unsqueeze(1))))
        return h + self.back(x).squeeze(1)


@block("batch-norm", mixes=True)
class Normed(nn.Module):
    """BatchNorm1d over channels, of a chosen kind."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, dim)
        kind: dict[str, Any] = pick.choice(
            ({}, {"affine": False}, {"momentum": None}, {"track_running_stats": False})
        )
        self.norm = nn.BatchNorm1d(dim, **kind)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.norm(self.proj(h).transpose(1, 2)).transpose(1, 2)


class ScaledBatchNorm(nn.BatchNorm1d):
    """A subclass with a forward of its own around super's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.5 + 0.1


@block("batch-norm-subclass", mixes=True)
class SubclassNormed(nn.Module):
    """A BatchNorm subclass that scales what super gives."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.norm = ScaledBatchNorm(dim)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.norm(h.flatten(0, 1)).view_as(h)


@block("frozen-batch-norm")
class FrozenNorm(nn.Module):
    """A BatchNorm put into eval mode once, as fine-tuning does."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(dim).eval()
        self.norm.running_mean.normal_()  # type: ignore[union-attr]
        self.proj = nn.Linear(dim, dim)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.proj(self.norm(h.transpose(1, 2)).transpose(1, 2))


@block("instance-norm")
class Instance(nn.Module):
    """InstanceNorm with running statistics: buffers of means over rows."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(dim, affine=True, track_running_stats=pick.random() < 0.5)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.norm(h.transpose(1, 2)).transpose(1, 2)


@block("hand-norms", easy=True)
class HandNorms(nn.Module):
    """Norms written by hand, and F.normalize."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(dim) + 0.5)
        self.proj = nn.Linear(dim, dim)

    def forward(self, h: Tensor) -> Tensor:
        n = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        n = F.layer_norm(n, (n.shape[-1],))
        return h + F.normalize(self.proj(n), dim=-1)


@block("lstm")
class Recurrent(nn.Module):
    """LSTM or GRU, batch first or not."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.first = pick.random() < 0.5
        self.rnn = pick.choice((nn.LSTM, nn.GRU, nn.RNN))(
            dim, dim // 2, batch_first=self.first, bidirectional=True
        )

    def forward(self, h: Tensor) -> Tensor:
        if self.first:
            return h + self.rnn(h)[0]
        return h + self.rnn(h.transpose(0, 1))[0].transpose(0, 1)


@block("lstm-cell")
class Cells(nn.Module):
    """A cell looped over time, with a state made from the shape."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(dim, dim)

    def forward(self, h: Tensor) -> Tensor:
        state = h.new_zeros(h.shape[0], h.shape[2])
        states = []
        for t in range(h.shape[1]):
            state = self.cell(h[:, t], state)
            states.append(state)
        return h + torch.stack(states, 1)


@block("lookup")
class Lookup(nn.Module):
    """An embedding of the states' argmax, with a padding index or a norm limit."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        kind: dict[str, Any] = pick.choice(
            ({}, {"padding_idx": 0}, {"max_norm": 1.0}, {"scale_grad_by_freq": True})
        )
        self.kind = kind
        self.table = nn.Embedding(dim, dim, **kind)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.table(h.detach().argmax(-1))


@block("bag")
class Bag(nn.Module):
    """EmbeddingBag over the tokens of a row, added to all of them."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCAB, dim, mode=pick.choice(("mean", "sum", "max")))

    def forward(self, h: Tensor) -> Tensor:
        ids = (h.detach()[..., 0].abs() * 5).long() % VOCAB
        return h + self.bag(ids).unsqueeze(1)


@block("state-space")
class StateSpace(nn.Module):
    """A diagonal recurrence with its own decay, and a cumulative sum."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.randn(dim))
        self.inner = nn.Linear(dim, 2 * dim)
        self.outer = nn.Linear(dim, dim)

    def forward(self, h: Tensor) -> Tensor:
        x, gate = self.inner(h).chunk(2, dim=-1)
        decay = torch.sigmoid(self.decay)
        state = torch.zeros_like(x[:, 0])
        out = []
        for t in range(x.size(1)):
            state = state * decay + x[:, t]
            out.append(state)
        mixed = torch.stack(out, dim=1) + x.cumsum(1) * 0.1
        return h + self.outer(mixed * torch.sigmoid(gate))


@block("fourier")
class Fourier(nn.Module):
    """A complex filter in frequency space."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(dim, 2) * 0.3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, h: Tensor) -> Tensor:
        f = torch.fft.rfft(self.proj(h), dim=1)
        f = f * torch.view_as_complex(self.filter)
        return h + torch.fft.irfft(f, n=h.shape[1], dim=1)


@block("complex-parameter")
class ComplexParameter(nn.Module):
    """A parameter of complex numbers."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        real = torch.randn(dim, dim, 2, dtype=torch.get_default_dtype()) * 0.2
        self.weight = nn.Parameter(torch.view_as_complex(real))

    def forward(self, h: Tensor) -> Tensor:
        return h + (h.to(self.weight.dtype) @ self.weight).abs()


@block("lists")
class Lists(nn.Module):
    """ParameterList, ParameterDict and nested ModuleLists, walked in a loop."""

    def __init__(self, pick: random.Random, dim: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.rand(dim)) for _ in range(3)])
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.randn(dim) * 0.1)})
        self.grid = nn.ModuleList(
            [nn.ModuleList([nn.Linear(dim, 8), nn.Linear(8, dim)]) for _ in range(2)]
        )

    def forward(self, h: Tensor) -> Tensor:
        for scale in self.scales:
            h = h * (1 + 0.1 * scale)
        for up, down in self.grid:  # type: ignore[misc]
            h = h + down(torch.relu(up(h)))
        return h + self.named["shift"]
