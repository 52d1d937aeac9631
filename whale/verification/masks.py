"""Masks: plain torch with the random numbers that Whale draws, handed to it.

Place in the flow: under the one-device run of `wh.verify`, for models that draw. Whale keys its
draws by sample, so that they do not depend on the layout; torch's own generator cannot give them.
Of dropout only *which* elements stay is asked of Whale, by dropping a tensor of ones; what is done
with the mask is torch's documented arithmetic, written here once more. The masks themselves are
looked at: how many stay, and whether they change with sample and step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from whale.engine.trace.draw_recorder import Randomness
from whale.nn.random_dropouts import COMPOSED, opened
from whale.nn.randomness import KeyedRandom, PlainDraws
from whale.runtime import generators
from whale.runtime.hashing import key_of
from whale.runtime.recompute import RerunMode

_FEW = 64
"""Masks of fewer elements may be alike by chance."""

_SELU_FLOOR = -1.7580993408473766
"""What alpha dropout puts in the place of what it drops: minus scale times alpha of SELU."""


class Handed:
    """A plain model's random numbers: those of Whale, by sample."""

    def __init__(self, model: nn.Module, random: Randomness, seed: int, watch: Watch) -> None:
        self._draws = PlainDraws(model, random.dims, seed)
        self._mode = _Handing(self._draws.mode, watch)
        self._seed, self._foreign, self._watch = seed, bool(random.foreign), watch

    @contextmanager
    def at(self, step: int, micro_batch: int, low: int, high: int) -> Iterator[None]:
        """Inside, rows [low, high) of the global batch of a step are computed."""
        self._watch.begin(step, micro_batch)
        key = key_of(self._seed, step, "Python", micro_batch)
        keyed = self._draws.at(step=step, micro_batch=micro_batch, first_row=low, rows=high - low)
        with generators.seeded(key) if self._foreign else nullcontext(), keyed, self._mode:
            yield


class Watch:
    """Looks at the masks: a mask that is always the same is no dropout."""

    def __init__(self) -> None:
        self.complaints: list[str] = []
        self._position = (0, 0)
        self._number = 0
        self._before: dict[tuple[int, int], tuple[int, Tensor]] = {}

    def begin(self, step: int, micro_batch: int) -> None:
        """The masks of another forward follow."""
        self._position, self._number = (step, micro_batch), 0

    def see(self, kept: Tensor, p: float) -> None:
        """A mask that was handed over."""
        number, self._number = self._number, self._number + 1
        if kept.numel() < _FEW or not 0.1 <= p <= 0.9:
            return
        size = kept.numel()
        share = float(kept.double().mean())
        # Six deviations: one in a billion, were they independent.
        if abs(share - (1 - p)) > 6 * math.sqrt(p * (1 - p) / size) + 1 / size:
            self.complaints.append(f"a mask keeps {share:.3f} of {size} elements at p = {p}")
        step, micro_batch = self._position
        rows = kept.flatten(1) if kept.dim() > 1 else kept.unsqueeze(1)
        if len(rows) > 1 and rows.shape[1] >= _FEW and bool((rows == rows[:1]).all()):
            self.complaints.append("a mask is the same for all samples")
        before = self._before.get((micro_batch, number))
        if before is not None and before[0] != step and torch.equal(before[1], kept):
            self.complaints.append("a mask is the same in two steps")
        self._before[micro_batch, number] = (step, kept)


class _Handing(RerunMode):
    """Around Whale's own mode, which is asked for the masks and for all other draws."""

    def __init__(self, keyed: KeyedRandom, watch: Watch) -> None:
        super().__init__()
        self._keyed, self._watch = keyed, watch

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in COMPOSED:
            with self:
                return opened(func, self._keyed)(*args, **kwargs)
        if func in _DROPOUTS:
            return self._dropout(func, *args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(
        self,
        func: Callable[..., Tensor],
        input: Tensor,
        p: float = 0.5,
        training: bool | None = None,
        inplace: bool = False,
        train: bool = False,
    ) -> Tensor:
        alpha = func in _ALPHA
        if training is None:
            training = train or (not alpha and func not in _BUILTIN)
        if not training or p == 0.0:
            return func(input, p, training)  # counted as a draw that was spared
        kept = func(torch.ones_like(input), p, training) > 0
        self._watch.see(kept, p)
        out = _alpha_dropped(input, kept, p) if alpha else _dropped(input, kept, p)
        return input.copy_(out) if inplace or func is torch.dropout_ else out

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if dropout_p == 0.0:
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if enable_gqa:
            repeat = query.shape[-3] // key.shape[-3]
            key, value = (t.repeat_interleave(repeat, -3) for t in (key, value))
        # Even probabilities times the unit matrix are the mask itself.
        size = key.shape[-2]
        unit = torch.eye(size, dtype=query.dtype).expand(*query.shape[:-2], size, size)
        even = torch.zeros_like(query), torch.zeros_like(key)
        kept = F.scaled_dot_product_attention(*even, unit, dropout_p=dropout_p) != 0
        self._watch.see(kept, dropout_p)
        bias = torch.zeros(query.shape[-2], size, dtype=query.dtype)
        if is_causal:
            bias = bias.masked_fill(torch.ones_like(bias).triu(1).bool(), -torch.inf)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            shut = torch.zeros_like(attn_mask, dtype=query.dtype)
            bias = bias + shut.masked_fill(~attn_mask, -torch.inf)
        elif attn_mask is not None:
            bias = bias + attn_mask
        factor = query.shape[-1] ** -0.5 if scale is None else scale
        weights = torch.softmax(query @ key.mT * factor + bias, -1)
        return _dropped(weights, kept, dropout_p) @ value


_ALPHA = frozenset({F.alpha_dropout, F.feature_alpha_dropout})
_BUILTIN = frozenset({torch.dropout, torch.dropout_, torch.feature_dropout})
_DROPOUTS = _ALPHA | _BUILTIN | {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d}


def _dropped(x: Tensor, kept: Tensor, p: float) -> Tensor:
    """Dropout as torch defines it: what stays is divided by the chance to stay."""
    return x * 0 if p == 1.0 else torch.where(kept, x / (1.0 - p), torch.zeros_like(x))


def _alpha_dropped(x: Tensor, kept: Tensor, p: float) -> Tensor:
    """Alpha dropout as torch defines it: mean 0 and variance 1 stay as they are."""
    if p == 1.0:
        return x * 0
    a = math.pow((1.0 - p) * (1.0 + p * _SELU_FLOOR**2), -0.5)
    return a * torch.where(kept, x, torch.full_like(x, _SELU_FLOOR)) - a * p * _SELU_FLOOR
