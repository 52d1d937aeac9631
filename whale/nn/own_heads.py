"""Own heads: the forward of a module that computes on this rank's units only.

Place in the flow: installed by `engine.split.unit_marks` around attention split by heads. A mode
gives functions that read whole values beside units (a mask, ALiBi, a bias of each head) this rank's
part of them; parameters that are whole but meet units get their gradient summed over the members.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from whale.errors import WhaleError
from whale.nn.attention import own_mask
from whale.nn.column_shard import plain
from whale.nn.inside import Inside
from whale.nn.shard import Shard
from whale.nn.sharded import map_tensors
from whale.runtime import collectives
from whale.runtime.recompute import RerunMode


class _Operands(RerunMode):
    """Cuts whole operands to the own units; every other function runs as it is."""

    def __init__(
        self,
        shard: Shard,
        operands: Mapping[tuple[str, int], Sequence[int]],
        means: Sequence[int],
    ) -> None:
        super().__init__()
        self.shard = shard
        self.sizes: dict[str, dict[int, Sequence[int]]] = {}
        for (name, dim), sizes in operands.items():
            self.sizes.setdefault(name, {})[dim] = sizes
        self.means = {shard.local(width): width for width in means}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        sizes = self.sizes.get(getattr(func, "__name__", ""))
        if sizes:
            fitted = self._fitted([*args, *kwargs.values()], sizes)
            args = tuple(fitted[: len(args)])
            kwargs = dict(zip(kwargs, fitted[len(args) :], strict=True))
        made = func(*args, **kwargs)
        if self.means and getattr(func, "__name__", "") == "mean":
            return self._mean(args[0], made)
        return made

    def _mean(self, x: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        """The mean over the columns of all units out of that over the own."""
        whole = self.means.get(x.shape[-1])
        if whole is None:
            return local
        with torch._C.DisableTorchFunction():
            return collectives.all_sum(local * (x.shape[-1] / whole), self.shard.group)

    def _fitted(self, fitted: list[Any], sizes: dict[int, Sequence[int]]) -> list[Any]:
        """The arguments, of which one that has all units where another has the own is cut."""
        tensors = [a for a in fitted if isinstance(a, torch.Tensor)]
        for dim, of_unit in sizes.items():
            seen = {t.shape[-dim] for t in tensors if t.dim() >= dim}
            whole, units = max(seen, default=0), self.shard.cuts[-1]
            own = whole // units * self.shard.num_units
            size = next((s for s in of_unit if s * units == whole), of_unit[0])
            if whole % (units * size) or own not in seen or own == whole:
                continue
            if len(of_unit) > 1 and size * units != whole:
                raise WhaleError(
                    f"a value of {whole} elements meets heads of {list(of_unit)} elements each, "
                    f"{units} of them",
                    hint="leave this attention out of the split",
                )
            fitted = [
                self._own(a, dim, size)
                if isinstance(a, torch.Tensor) and a.dim() >= dim and a.shape[-dim] == whole
                else a
                for a in fitted
            ]
        return fitted

    def _own(self, whole: torch.Tensor, dim: int, size: int) -> torch.Tensor:
        """This rank's units of a whole operand, whose gradient is a sum over members."""
        shard = self.shard
        whole = plain(whole)
        with torch._C.DisableTorchFunction():
            at = whole.dim() - dim
            by_unit = shard.enter(whole).unflatten(at, (-1, shard.cuts[-1], size))
            own = by_unit.narrow(at + 1, shard.low, shard.num_units)
            return own.flatten(at, at + 2)

    def _attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if attn_mask is not None:
            whole = query.shape[-3] // self.shard.num_units * self.shard.cuts[-1]
            mask = plain(attn_mask)
            # One that the module made itself, alike for all heads, has as many as it believes in.
            if mask.dim() < 3 or mask.shape[-3] != query.shape[-3] or mask.requires_grad:
                with torch._C.DisableTorchFunction():
                    attn_mask = own_mask(mask, self.shard, whole)
        return F.scaled_dot_product_attention(query, key, value, attn_mask, *args, **kwargs)


class OwnHeads:
    """The forward of a module that computes attention on this rank's heads."""

    def __init__(
        self,
        forward: Callable[..., Any],
        shard: Shard,
        operands: Mapping[tuple[str, int], Sequence[int]] | None = None,
        gathered: Mapping[int, int] | None = None,
        means: Sequence[int] = (),
        spread: Mapping[int, tuple[int, int]] | None = None,
    ) -> None:
        self.inside = shard.inside or Inside("")
        self.forward, self.mode = forward, _Operands(shard, operands or {}, means)
        self.shard, self.gathered, self.spread = shard, gathered or {}, spread or {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The replaced forward; outputs that others may read are gathered."""
        with self.inside, self.mode:
            out = self.forward(*args, **kwargs)
        if not self.gathered and not self.spread:
            return out
        places = itertools.count()
        return map_tensors(out, lambda x: self._whole(x, next(places)))

    def _whole(self, x: torch.Tensor, place: int) -> torch.Tensor:
        shard = self.shard
        if place in self.spread:
            dim, size = self.spread[place]
            if x.shape[dim] != shard.local(size):
                return x  # it was whole all along
            with torch._C.DisableTorchFunction():
                sizes = [size if i == dim else -1 for i in range(x.dim())]
                return x.narrow(dim, 0, 1).expand(sizes)
        dim_ = self.gathered.get(place)
        if dim_ is None:
            return x
        dim = dim_
        with torch._C.DisableTorchFunction():
            return shard.join(x, dim, x.shape[dim] // shard.num_units * shard.cuts[-1])


class SummedParameters:
    """A module that is called on units: its own parameters' gradients are summed over members."""

    def __init__(
        self, module: nn.Module, forward: Callable[..., Any], names: list[str], shard: Shard
    ) -> None:
        self.module, self.forward, self.names, self.shard = module, forward, names, shard

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The replaced forward: attributes of the instance come before its parameters."""
        own = self.module.__dict__
        for name in self.names:
            own[name] = _entered(self.module._parameters[name], self.shard)  # type: ignore[arg-type]
        try:
            return self.forward(*args, **kwargs)
        finally:
            for name in self.names:
                del own[name]


class EnteredOutput:
    """A module whose whole output meets units: its gradient is summed over members."""

    def __init__(self, forward: Callable[..., Any], shard: Shard) -> None:
        self.forward, self.shard = forward, shard

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The replaced forward."""
        return _entered(plain(self.forward(*args, **kwargs)), self.shard)


def _entered(x: torch.Tensor, shard: Shard) -> torch.Tensor:
    """`x`, entered; no mode sees it, for it is not the user's code."""
    with torch._C.DisableTorchFunction():
        return shard.enter(x)
