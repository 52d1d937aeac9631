"""Draws: random numbers of any distribution that are functions of a key and a place.

Place in the flow: below `nn.randomness`, which says what a call's key and place are. Two hashes of
an element's place are 64 bits; every distribution is made of them by its own inverse, in float64,
and only the result is cast. No generator is asked, none moves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from whale.errors import WhaleError
from whale.runtime.compat import gamma_grad
from whale.runtime.hashing import key_of, position_hash

_LARGEST_COUNT = 1 << 12
"""Of a binomial: its distribution is written out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A tensor of numbers: its key, its shape, and where it starts in the whole one."""

    key: int
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    batch_dim: int
    device: torch.device

    def wider(self, size: int) -> Place:
        """The same with a last dim of `size` more numbers for each."""
        return Place(
            key=self.key,
            shape=(*self.shape, size),
            offsets=(*self.offsets, 0),
            batch_dim=self.batch_dim,
            device=self.device,
        )

    def hash(self, number: int) -> torch.Tensor:
        """32 bits of each element, as int64; `number` tells hashes of one draw apart."""
        key = key_of(self.key, number, "bits", 0)
        if not self.shape:
            place = position_hash((1,), key, (0,), 0, self.device)
            return place.reshape(())
        return position_hash(self.shape, key, self.offsets, self.batch_dim, self.device)


def bits(place: Place) -> torch.Tensor:
    """63 bits of each element, not negative."""
    return (place.hash(0) << 31) | (place.hash(1) >> 1)


def uniform(place: Place, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """In [0, 1), in steps that `dtype` can tell apart."""
    digits = 1 - int(math.log2(torch.finfo(dtype).eps))
    return ((bits(place) >> (63 - digits)).double() * 2.0**-digits).to(dtype)


def between(place: Place) -> torch.Tensor:
    """In (0, 1), both ends left out."""
    return ((bits(place) >> 11).double() + 0.5) * 2.0**-52


def normal(place: Place) -> torch.Tensor:
    """Mean 0, deviation 1."""
    return torch.special.ndtri(between(place))


def exponential(place: Place) -> torch.Tensor:
    """Rate 1."""
    return -between(place).log()


def gumbel(place: Place) -> torch.Tensor:
    """Location 0, scale 1."""
    return -exponential(place).log()


def cauchy(place: Place) -> torch.Tensor:
    """Median 0, scale 1."""
    return torch.tan(math.pi * (between(place) - 0.5))


def geometric(place: Place, p: Any) -> torch.Tensor:
    """Trials until the first success: 1, 2, ..."""
    p = torch.as_tensor(p, dtype=torch.float64, device=place.device)
    return (between(place).log() / torch.log1p(-p)).ceil().clamp(min=1.0)


def integers(place: Place, low: int, high: int) -> torch.Tensor:
    """In [low, high), as int64."""
    if high <= low:
        raise RuntimeError(f"random integers in [{low}, {high}): there are none")
    return bits(place) % (high - low) + low


def permutation(place: Place) -> torch.Tensor:
    """The numbers below the only size, in some order."""
    return bits(place).argsort()


def chosen(
    place: Place, weights: torch.Tensor, count: int, replacement: bool, samples: Place
) -> torch.Tensor:
    """Columns of each row of `weights`, by weight: torch.multinomial.

    Without replacement, the largest of log-weights with Gumbel noise at `place` (that of the
    weights); with replacement, where a number at `samples` falls in the running sum.
    """
    weights = weights.detach().double()
    if replacement:
        sums = weights.cumsum(-1)
        drawn = between(samples) * sums[..., -1:]
        return torch.searchsorted(sums, drawn.contiguous(), right=True).clamp(
            max=weights.shape[-1] - 1
        )
    return (weights.log() + gumbel(place)).topk(count, -1).indices


def poisson(place: Place, rates: torch.Tensor) -> torch.Tensor:
    """Counts at these rates: the least k with P(X <= k) above a uniform number."""
    rates = rates.detach().double().expand(place.shape)
    drawn = between(place)
    low = torch.zeros_like(rates)
    high = rates + 40.0 * rates.sqrt() + 60.0
    steps = math.ceil(math.log2(float(high.max()) + 2)) if rates.numel() else 0
    for _ in range(steps):
        middle = ((low + high) / 2).floor()
        enough = torch.special.gammaincc(middle + 1, rates) >= drawn
        high = torch.where(enough, middle, high)
        low = torch.where(enough, low, middle + 1)
    return torch.where(rates > 0, high, torch.zeros_like(high))


def binomial(place: Place, counts: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Successes of `counts` trials, out of the running sum of their probabilities."""
    counts, p = torch.broadcast_tensors(counts.detach().double(), p.detach().double())
    most = int(counts.max()) if counts.numel() else 0
    if most > _LARGEST_COUNT:
        raise WhaleError(
            f"a binomial of {most} trials is drawn; keyed numbers go to {_LARGEST_COUNT}",
            hint="draw a normal number of the same mean and deviation instead",
        )
    k = torch.arange(most + 1, dtype=torch.float64, device=place.device)
    n, q = counts.unsqueeze(-1), p.unsqueeze(-1).clamp(0.0, 1.0)
    ways = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma((n - k).clamp(min=0) + 1)
    logs = ways + torch.xlogy(k, q) + torch.xlogy((n - k).clamp(min=0), 1 - q)
    sums = torch.where(k <= n, logs.exp(), torch.zeros_like(logs)).cumsum(-1)
    drawn = between(place).unsqueeze(-1) * sums[..., -1:]
    found = torch.searchsorted(sums, drawn.contiguous()).squeeze(-1)
    return torch.minimum(found.double(), counts)


class _Gamma(torch.autograd.Function):
    """The gradient is the one torch's own draw has: that of the sample along its distribution."""

    @staticmethod
    def forward(ctx: Any, alpha: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(alpha, sample)
        return sample.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        alpha, sample = ctx.saved_tensors
        return grads[0] * gamma_grad(alpha, sample), None


def gamma(place: Place, alpha: torch.Tensor) -> torch.Tensor:
    """Shape `alpha`, rate 1."""
    with torch.no_grad():
        wide = alpha.detach().double()
        drawn = between(place)
        # In the logarithm: small shapes have samples of any small size.
        low = torch.full_like(wide, -700.0)
        high = (wide + 40.0 * wide.sqrt() + 60.0).log()
        for _ in range(64):
            middle = (low + high) / 2
            enough = torch.special.gammainc(wide, middle.exp()) >= drawn
            low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
        tiny = torch.finfo(alpha.dtype).tiny
        sample = high.exp().to(alpha.dtype).clamp(min=tiny)
    return _Gamma.apply(alpha, sample)  # type: ignore[no-any-return]


def size_of(args: Sequence[Any]) -> tuple[int, ...]:
    """A shape given as one sequence or as several numbers."""
    if len(args) == 1 and isinstance(args[0], Sequence | torch.Size):
        return tuple(int(s) for s in args[0])
    return tuple(int(s) for s in args)
