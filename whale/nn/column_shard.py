"""ColumnShard: the output of a column-split Linear, left sharded until something needs it whole.

Place in the flow: what a lone split Linear (a classifier, a vocabulary head) returns. To the user's
code it looks like the whole tensor (same shape). Cross-entropy and argmax work on the shards
(vocabulary parallel: the logits are never gathered); views that keep the last dim stay sharded;
anything else gathers first, which is always correct.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from whale.nn.shard import Shard
from whale.runtime import collectives
from whale.runtime.recompute import WHOLE


class ColumnShard(torch.Tensor):
    """A tensor whose last dim is sharded over a split group; it has no storage of its own."""

    local: torch.Tensor
    shard: Shard

    @staticmethod
    def __new__(
        cls: type[ColumnShard], local: torch.Tensor, shard: Shard, columns: int
    ) -> ColumnShard:
        """Wraps this rank's columns of a tensor with `columns` in all."""
        shape = list(local.shape)
        shape[-1] = columns
        if shard.rows is not None and shape[0]:
            own = shard.rows.scaled(shape[0])
            shape[0] = own[shard.index]
        made: ColumnShard = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, torch.Size(shape), dtype=local.dtype, device=local.device, requires_grad=False
        )
        made.local, made.shard = local, shard
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ColumnShard(shape={tuple(self.shape)}, local={tuple(self.local.shape)})"

    def full(self) -> torch.Tensor:
        """The whole tensor, gathered."""
        return self.shard.join(self.local, self.local.dim() - 1, self.shape[-1])

    def with_local(self, local: torch.Tensor) -> ColumnShard:
        """The same columns of another tensor."""
        return ColumnShard(local, self.shard, self.shape[-1])

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = _HANDLERS.get(getattr(func, "__name__", ""))
        if handler is not None and args and isinstance(args[0], ColumnShard):
            done = handler(*args, **kwargs)
            if done is not NotImplemented:
                return done
        if getattr(func, "__name__", "") == "__get__":
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return func(*_whole(args), **{key: _whole(value) for key, value in kwargs.items()})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise TypeError(
            f"{func} reached a sharded output below torch functions; call `.full()` on it first"
        )


WHOLE[ColumnShard] = ColumnShard.full


def _whole(value: Any) -> Any:
    if isinstance(value, ColumnShard):
        return value.full()
    if isinstance(value, (tuple, list)):
        return type(value)(_whole(item) for item in value)
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    return value


def plain(value: Any) -> Any:
    """`value` with every ColumnShard gathered."""
    return _whole(value)


_HANDLERS: dict[str, Callable[..., Any]] = {}


def _handles(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            _HANDLERS[name] = handler
        return handler

    return register


@_handles("size")
def _size(x: ColumnShard, dim: int | None = None) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return x.shape if dim is None else x.shape[dim]


@_handles("dim", "ndimension")
def _dim(x: ColumnShard) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return x.dim()


def _same(name: str) -> Callable[..., Any]:
    def handler(x: ColumnShard, *args: Any, **kwargs: Any) -> Any:
        return x.with_local(getattr(x.local, name)(*args, **kwargs))

    return handler


for _name in ("float", "double", "half", "bfloat16", "contiguous", "clone", "detach", "to"):
    _HANDLERS[_name] = _same(_name)


@_handles("view", "reshape")
def _view(x: ColumnShard, *shape: Any) -> Any:
    if len(shape) == 1 and isinstance(shape[0], (tuple, list, torch.Size)):
        shape = tuple(shape[0])
    if not all(isinstance(size, int) for size in shape) or not shape:
        return NotImplemented
    if shape[-1] not in (x.shape[-1], -1):
        return NotImplemented
    lead = list(shape[:-1])
    kept = x.shape[:-1].numel()
    known = 1
    for size in lead:
        known *= size if size != -1 else 1
    if shape[-1] == -1 and known != kept:
        return NotImplemented
    if x.shard.rows is not None:
        # Locally there are the rows of all members, so only a shape with one leading dim is sure.
        if len(lead) != 1:
            return NotImplemented
        lead = [-1]
    if lead == [-1]:  # a shard may hold no column at all, then -1 cannot be inferred
        lead = [x.local.shape[:-1].numel()]
    return x.with_local(x.local.reshape(*lead, x.local.shape[-1]))


@_handles("flatten")
def _flatten(x: ColumnShard, start_dim: int = 0, end_dim: int = -1) -> Any:
    last = x.dim() - 1
    if end_dim in (last, -1) or start_dim != 0 or end_dim not in (last - 1, -2):
        return NotImplemented
    return x.with_local(x.local.reshape(x.local.shape[:-1].numel(), x.local.shape[-1]))


@_handles("__getitem__")
def _getitem(x: ColumnShard, index: Any) -> Any:
    items = index if isinstance(index, tuple) else (index,)
    # Only slices of dims that are neither the rows (when bridged) nor the columns keep the shards
    # apart.
    if not all(isinstance(i, slice) or i is Ellipsis for i in items) or Ellipsis not in items:
        return NotImplemented
    before = items[: items.index(Ellipsis)]
    after = items[items.index(Ellipsis) + 1 :]
    if not after or after[-1] != slice(None):
        return NotImplemented
    if x.shard.rows is not None and (before or len(after) >= x.dim()):
        return NotImplemented
    return x.with_local(x.local[index])


@_handles("argmax")
def _argmax(x: ColumnShard, dim: int | None = None, keepdim: bool = False) -> Any:
    if dim not in (-1, x.dim() - 1):
        return NotImplemented
    return _maximum(x, keepdim)[1]


def _maximum(x: ColumnShard, keepdim: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest value of each row and its column, without gathering the columns."""
    shard = x.shard
    unit = x.shape[-1] // shard.cuts[-1]
    local = x.local.detach()
    if local.shape[-1]:
        best, where = local.max(-1, keepdim=True)
        where = where + shard.low * unit
    else:
        best = local.new_full((*local.shape[:-1], 1), -torch.inf)
        where = torch.zeros_like(best, dtype=torch.long)
    ones = [1] * shard.communicator.size
    every = shard.communicator.all_gather(best, best.dim() - 1, ones)
    columns = shard.communicator.all_gather(where, where.dim() - 1, ones)
    top, member = every.max(-1, keepdim=True)
    column = columns.gather(-1, member)
    if shard.rows is not None:
        sizes = shard.rows.scaled(column.shape[0])
        start = sum(sizes[: shard.index])
        top, column = (t.narrow(0, start, sizes[shard.index]) for t in (top, column))
    return (top, column) if keepdim else (top.squeeze(-1), column.squeeze(-1))


@_handles("cross_entropy")
def cross_entropy(
    x: ColumnShard,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Vocabulary-parallel cross-entropy: two small sums over the group instead of the logits."""
    if (
        x.dim() != 2
        or target.dim() != 1
        or target.is_floating_point()
        or weight is not None
        or label_smoothing
        or size_average is not None
        or reduce is not None
    ):
        return NotImplemented
    losses = _losses(x, target, ignore_index)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (target != ignore_index).sum()


def _losses(x: ColumnShard, target: torch.Tensor, ignore_index: int) -> torch.Tensor:
    shard, local = x.shard, x.local
    unit = x.shape[-1] // shard.cuts[-1]
    labels = target
    if shard.rows is not None:
        labels = shard.communicator.all_gather(target, 0, shard.rows.scaled(local.shape[0]))
    low = shard.low * unit
    valid = labels != ignore_index
    own = valid & (labels >= low) & (labels < low + local.shape[-1])
    with torch.no_grad():
        if local.shape[-1]:
            best = local.max(-1, keepdim=True).values
        else:
            best = local.new_full((local.shape[0], 1), -torch.inf)
        ones = [1] * shard.communicator.size
        top = shard.communicator.all_gather(best, 1, ones).max(-1, keepdim=True).values
    shifted = local - top
    partition = collectives.leave(shifted.exp().sum(-1), shard.group)
    index = torch.where(own, labels - low, torch.zeros_like(labels))
    if local.shape[-1]:
        picked = shifted.gather(1, index.unsqueeze(1)).squeeze(1) * own
    else:
        picked = shifted.sum(-1)
    losses = (partition.log() - collectives.leave(picked, shard.group)) * valid
    if shard.rows is not None:
        losses = collectives.scatter(losses, 0, shard.rows.scaled(local.shape[0]), shard.group)
    return losses
