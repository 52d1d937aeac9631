"""Sharded forwards: what a Linear, embedding or convolution does with only its part of the weight.

Place in the flow: installed by `engine.split.rules` on this rank's copy of a module. The module
keeps its class and its parameter names; only `forward` is replaced, so state dicts and breakpoints
stay the user's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from whale.nn.column_shard import ColumnShard, plain
from whale.nn.deferred import QUEUE, WeightQueue, deferred, queue_of
from whale.nn.forwards import has_own_call, replace_forward, runs
from whale.nn.linear_kinds import is_linear_kind
from whale.nn.shard import Shard, rows_by_member
from whale.runtime import collectives
from whale.runtime.compat import assert_later
from whale.runtime.context import RowLayout


def is_conv1d(module: nn.Module) -> bool:
    """Transformers' Conv1D: a Linear whose weight is stored [in, out]."""
    kind = type(module)
    return (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")


def is_linear(module: nn.Module) -> bool:
    """What runs the code of nn.Linear or Conv1D, or writes it out, and holds its weight itself."""
    known = is_conv1d(module) or is_linear_kind(type(module))
    return known and not has_own_call(module) and holds(module, "weight", "bias")


def holds(module: nn.Module, *names: str) -> bool:
    """Whether these are parameters of the module, or None; not made anew before every call.

    So are those of weight norm and other parametrizations.
    """
    return all(n in module._parameters and not hasattr(type(module), n) for n in names)


def linear_dims(module: nn.Module) -> tuple[int, int]:
    """(out dim, in dim) of the weight."""
    return (1, 0) if is_conv1d(module) else (0, 1)


def is_tied(module: nn.Module, modules: Mapping[str, nn.Module], name: str | None = None) -> bool:
    """Whether another of these modules has one of its own parameters, or the one of this name."""
    own = {id(p) for n, p in module._parameters.items() if p is not None and name in (None, n)}
    others = (m for m in modules.values() if m is not module)
    return any(id(p) in own for m in others for p in m._parameters.values() if p is not None)


def features(module: nn.Module) -> tuple[int, int]:
    """(out, in) features."""
    out_dim, in_dim = linear_dims(module)
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight.shape[out_dim], weight.shape[in_dim]


def product(
    module: Any,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    queue: WeightQueue | None = None,
) -> torch.Tensor:
    """`x` times the module's weight, which may be a shard.

    Weight gradients wait in the schedule's queue where it defers them, else in `queue` if given.
    """
    weights = [module.weight] if bias is None else [module.weight, bias]

    def run(x: torch.Tensor) -> torch.Tensor:
        if is_conv1d(module):
            flat = x.reshape(-1, x.shape[-1])
            out = flat.mm(module.weight) if bias is None else torch.addmm(bias, flat, module.weight)
            return out.view(*x.shape[:-1], out.shape[-1])
        return F.linear(x, module.weight, bias)

    return deferred(run, x, weights, queue_of(module) or queue)


def with_bias(out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A sum of products and the bias, in the dtype of the products: autocast's, under autocast."""
    return out if bias is None else out + bias.to(out.dtype)


def convolve(module: Any, x: torch.Tensor) -> torch.Tensor:
    """The module's convolution with whatever channels it holds."""
    weights = [module.weight] if module.bias is None else [module.weight, module.bias]

    def run(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = module._conv_forward(x, module.weight, module.bias)
        return out

    return deferred(run, x, weights, queue_of(module))


def look_up(module: nn.Embedding, ids: torch.Tensor, padding_idx: int | None) -> torch.Tensor:
    """Rows of the embedding table this module holds."""

    def run(ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(
            ids,
            module.weight,
            padding_idx,
            module.max_norm,
            module.norm_type,
            module.scale_grad_by_freq,
            module.sparse,
        )

    return deferred(run, ids, [module.weight], queue_of(module))


def defer_weights(module: nn.Module, queue: WeightQueue) -> None:
    """Makes a module put its weight gradients off.

    One that is not sharded gets a forward that can.
    """
    module.__dict__[QUEUE] = queue
    if "forward" in module.__dict__:
        return
    whole: Any = module
    if is_linear(module):
        replace_forward(module, lambda x: product(whole, plain(x), whole.bias))
    elif isinstance(module, nn.Embedding):
        replace_forward(module, lambda ids: look_up(whole, ids, whole.padding_idx))
    else:
        replace_forward(module, lambda x: convolve(whole, plain(x)))


def can_defer(module: nn.Module) -> bool:
    """Whether W can compute this module's weight gradients."""
    if runs(module, nn.Embedding):
        return holds(module, "weight")
    return is_linear(module) or is_conv(module)


def is_conv(module: nn.Module) -> bool:
    """What runs the code of a convolution, and holds its weight itself."""
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    own = any(
        isinstance(module, kind) and type(module)._conv_forward is kind._conv_forward
        for kind in kinds
    )
    return own and runs(module, *kinds) and holds(module, "weight", "bias")


class SharedInput:
    """One `enter` for all columns that read the same tensor (query, key and value).

    In backward there is one sum for all of them, and their weight gradients are computed while it
    travels: the products leave them in a queue that the `enter` empties.
    """

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.source: torch.Tensor | None = None
        self.version = 0
        self.grad = False
        self.entered: torch.Tensor | None = None
        self.queue: WeightQueue | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x`, entered once."""
        version = 0 if x.is_inference() else x._version
        known = self.source is x and self.version == version
        # What was entered without gradients has none to give to who asks for them.
        grad = torch.is_grad_enabled()
        if not known or self.entered is None or (grad and not self.grad):
            whole = plain(x)
            # Without a gradient for x, or across replicas, nothing would ever empty the queue; a
            # weight used twice would be taken for final after its first use.
            inside = self.shard.overlap and self.shard.rows is None
            overlaps = inside and whole.requires_grad and grad
            self.queue = WeightQueue() if overlaps else None
            meanwhile = self.queue.run if self.queue is not None else None
            self.source, self.entered = x, self.shard.enter(whole, meanwhile)
            self.version, self.grad = version, grad
        return self.entered

    def clear(self) -> None:
        """Forgets the tensor, so that it can be freed."""
        self.source = self.entered = self.queue = None


class Column:
    """Output columns of a Linear; the result stays sharded for the row split that follows."""

    def __init__(self, module: Any, shared: SharedInput) -> None:
        self.module, self.shared, self.inside = module, shared, shared.shard.inside

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The replaced forward."""
        if self.inside is not None:
            self.inside.check(self.module)
        entered = self.shared(x)
        return product(self.module, entered, self.module.bias, self.shared.queue)


class Row:
    """Input rows of a Linear: partial products, summed, then the bias once."""

    def __init__(self, module: Any, shard: Shard, shared: SharedInput) -> None:
        self.module, self.shard, self.shared = module, shard, shared

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The replaced forward."""
        if self.shard.inside is not None:
            self.shard.inside.check(self.module)
        self.shared.clear()
        out = self.shard.leave(product(self.module, x, None))
        return with_bias(out, self.module.bias)


class LoneColumn:
    """A Linear split by columns with nothing to pair it with.

    The output is gathered, or left a ColumnShard where all that reads it works on shards.
    """

    def __init__(self, module: Any, shard: Shard, columns: int) -> None:
        self.module, self.shard, self.columns = module, shard, columns

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The replaced forward."""
        shared = SharedInput(self.shard)
        local = product(self.module, shared(x), self.module.bias, shared.queue)
        if self.shard.stays:
            return ColumnShard(local, self.shard, self.columns)
        return self.shard.join(local, local.dim() - 1, self.columns)


class LoneRow:
    """A Linear split by rows with nothing to pair it with: it takes its own columns of the input.

    Inside a replica they are there; across replicas they are exchanged for the own rows.
    """

    def __init__(self, module: Any, shard: Shard) -> None:
        self.module, self.shard = module, shard

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The replaced forward."""
        x = plain(x)
        own = self.shard.cut(x, x.dim() - 1, x.shape[-1])
        out = self.shard.leave(product(self.module, own, None))
        return with_bias(out, self.module.bias)


class _Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, counts: bool) -> torch.Tensor:
        ctx.counts = counts
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] if ctx.counts else torch.zeros_like(grads[0]), None


def _counted_once(x: torch.Tensor, counts: bool) -> torch.Tensor:
    """`x`, whose gradient is the same on every member and counts on one of them."""
    if not x.requires_grad:
        return x
    return _Counted.apply(x, counts)  # type: ignore[no-untyped-call,no-any-return]


class RowsAround:
    """A module that sees the rows of all members: gathered on the way in, cut on the way out.

    For modules whose code reads the batch size (attention): everything inside is an ordinary split.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        group: str,
        index: int,
        rows: RowLayout,
        dims: tuple[tuple[int | None, ...], tuple[int | None, ...]],
    ) -> None:
        self.forward, self.group, self.index, self.rows, self.dims = (
            forward,
            group,
            index,
            rows,
            dims,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The replaced forward."""
        collectives.refuse_transforms()
        taken = iter(self.dims[0])
        gathered: dict[int, torch.Tensor] = {}

        def once(x: torch.Tensor) -> torch.Tensor:
            dim = next(taken)
            if id(x) not in gathered:
                gathered[id(x)] = self._gather(plain(x), dim)
            return gathered[id(x)]

        args, kwargs = map_tensors((args, kwargs), once)
        made = iter(self.dims[1])
        with self.rows.all_rows():
            out = self.forward(*args, **kwargs)
        return map_tensors(out, lambda x: self._scatter(plain(x), next(made)))

    def _gather(self, x: torch.Tensor, dim: int | None) -> torch.Tensor:
        if dim is None:
            # Every member computes the gradient of all rows; outside, replicas add up theirs.
            return _counted_once(x, self.index == 0)
        return collectives.gather(
            x, 0, rows_by_member(self.rows, x, self.index, self.group), self.group
        )

    def _scatter(self, x: torch.Tensor, dim: int | None) -> torch.Tensor:
        if dim is None:
            # The other way round: each replica's gradient is of its own rows only.
            return collectives.enter(x, self.group)
        return collectives.scatter(x, 0, self.rows.scaled(x.shape[0]), self.group)


def map_tensors(value: Any, fn: Callable[[torch.Tensor], Any]) -> Any:
    """Nested tuples, lists and dicts with `fn` on their tensors, in order."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, (tuple, list)):
        items = [map_tensors(item, fn) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        mapped = {key: map_tensors(item, fn) for key, item in value.items()}
        return mapped if type(value) is dict else type(value)(**mapped)
    return value


class VocabEmbedding:
    """Rows of an embedding table: each member looks up its own ids, the sum has them all."""

    def __init__(self, module: nn.Embedding, shard: Shard) -> None:
        self.module, self.shard = module, shard

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """The replaced forward."""
        ids = self.shard.gather_rows(ids)
        _check_ids(ids, self.shard.cuts[-1])
        own = (ids >= self.shard.low) & (ids < self.shard.high)
        weight = self.module.weight
        if weight.shape[0] == 0:
            found = weight.new_zeros((*ids.shape, weight.shape[1])) + weight.sum()
        else:
            local = torch.where(own, ids - self.shard.low, torch.zeros_like(ids))
            padding = self.module.padding_idx
            if padding is not None:
                inside = self.shard.low <= padding < self.shard.high
                padding = padding - self.shard.low if inside else None
            found = look_up(self.module, local, padding) * own.unsqueeze(-1)
        return self.shard.leave(found)


def _check_ids(ids: torch.Tensor, rows: int) -> None:
    """Ids that no member has would be looked up as zeros; torch refuses them."""
    wrong = (ids < 0) | (ids >= rows)
    if ids.is_cuda:
        assert_later(~wrong.any())
    elif wrong.any():
        raise IndexError(f"id {int(ids[wrong][0])} is out of the {rows} rows of an embedding")


class ColumnConv:
    """Output channels of a convolution, gathered along the channel dim."""

    def __init__(self, module: Any, shard: Shard, channels: int) -> None:
        self.module, self.shard, self.channels = module, shard, channels

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The replaced forward."""
        entered = self.shard.enter(plain(x))
        module = self.module
        if module.weight.shape[0] == 0:
            out = _no_channels(module, entered)
        else:
            out = convolve(module, entered)
        return self.shard.join(out, out.dim() - module.weight.dim() + 1, self.channels)


def _no_channels(module: Any, x: torch.Tensor) -> torch.Tensor:
    """The output of a convolution that holds no channel here: right shape, still on the graph."""
    with torch.no_grad():
        probe = module.weight.new_zeros((1, *module.weight.shape[1:]))
        made = module._conv_forward(x, probe, None)
    shape, dim = made.shape, x.dim() - module.weight.dim() + 1
    empty = made.new_empty((*shape[:dim], 0, *shape[dim + 1 :]))
    return empty + (x.sum() + module.weight.sum()) * 0
