"""ColumnShard: the output of a column-split Linear, left sharded until something needs it whole.

Place in the flow: what a lone split Linear (a classifier, a vocabulary head) returns where the
trace shows that all that reads it works on shards (`engine.split.lone`; anywhere else it is
gathered at once). To the user's code it looks like the whole tensor (same shape). Cross-entropy and
argmax work on the shards (vocabulary parallel: the logits are never gathered); views that keep the
last dim stay sharded. Code that only another run takes (evaluation, say) may still do anything
else: torch functions gather first, and what passes by them or changes the tensor is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from whale.errors import WhaleError
from whale.nn.shard import Shard
from whale.runtime import collectives
from whale.runtime.compat import assert_later
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
        grad = local.requires_grad and torch.is_grad_enabled()
        made: ColumnShard = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, torch.Size(shape), dtype=local.dtype, device=local.device, requires_grad=grad
        )
        made.local, made.shard = local, shard
        if grad:
            with torch._C.DisableTorchFunction():
                made.register_hook(_lost)
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
        name = getattr(func, "__name__", "")
        handler = _HANDLERS.get(name)
        if handler is not None and args and isinstance(args[0], ColumnShard):
            done = handler(*args, **kwargs)
            if done is not NotImplemented:
                return done
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if changes(name, kwargs) or (name == "__get__" and attribute == "data"):
            raise WhaleError(
                f"`{attribute or name}` would change, or hang on, an output that is sharded over "
                "several devices: the trace of the model did not show it",
                hint="let it run when the model is captured, or work on a new tensor "
                "(`torch.where`, `masked_fill`)",
            )
        if name in _FACTS or (name == "__get__" and attribute not in _VIEWS):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return func(*_whole(args), **{key: _whole(value) for key, value in kwargs.items()})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise WhaleError(
            f"{func} reached a sharded output below torch functions",
            hint="the trace of the model did not show this code; let it run when the model is "
            "captured, or call `.full()` on the output first",
        )


def _lost(grad: torch.Tensor) -> None:
    raise WhaleError(
        "a gradient came back to a sharded output through code that torch functions do not show "
        "(an autograd.Function), where it would be lost",
        hint="the trace of the model did not show this code: it must run in the first batch as in "
        "all others",
    )


_FACTS = frozenset(
    "is_floating_point is_complex element_size get_device is_contiguous numel nelement __len__ "
    "is_signed is_inference".split()
)
_VIEWS = frozenset("T mT H mH real imag".split())
_CHANGES = frozenset(
    "register_hook retain_grad register_post_accumulate_grad_hook __setitem__ __set__ __delitem__ "
    "__iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ifloordiv__ __imod__ __ipow__ __iand__ "
    "__ior__ __ixor__ __ilshift__ __irshift__ backward untyped_storage storage data_ptr "
    "_typed_storage as_subclass".split()
)


def changes(name: str, kwargs: Any) -> bool:
    """Whether a torch function of this name changes a tensor, hangs on it, or reads its memory."""
    inplace = name.endswith("_") and not name.endswith("__")
    return (
        name in _CHANGES
        or inplace
        or kwargs.get("inplace") is True
        or kwargs.get("out") is not None
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


for _name in ("float", "double", "half", "bfloat16", "contiguous", "clone", "detach"):
    _HANDLERS[_name] = _same(_name)


@_handles("to")
def _to(x: ColumnShard, *args: Any, **kwargs: Any) -> Any:
    local = x.local.to(*_whole(args), **_whole(kwargs))
    return x.with_local(local) if local.device == x.local.device else NotImplemented


def _lead(whole: Sequence[int], shape: tuple[Any, ...]) -> list[int] | None:
    """The sizes before the last of a view that keeps the columns; None: it may not keep them."""
    if len(shape) == 1 and isinstance(shape[0], (tuple, list, torch.Size)):
        shape = tuple(shape[0])
    if not all(type(size) is int for size in shape) or not shape:
        return None
    if shape[-1] not in (whole[-1], -1):
        return None
    lead = list(shape[:-1])
    known = math.prod(size for size in lead if size != -1)
    if shape[-1] == -1 and (-1 in lead or known != math.prod(whole[:-1])):
        return None
    return lead


@_handles("view", "reshape")
def _view(x: ColumnShard, *shape: Any, **kwargs: Any) -> Any:
    lead = None if kwargs else _lead(x.shape, shape)
    if lead is None:
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
    if not _flattens_rows(x.dim(), start_dim, end_dim):
        return NotImplemented
    return x.with_local(x.local.reshape(x.local.shape[:-1].numel(), x.local.shape[-1]))


def _flattens_rows(dims: int, start_dim: int, end_dim: int) -> bool:
    return start_dim == 0 and dims > 1 and end_dim in (dims - 2, -2)


def _slices(index: Any) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Slices before and after an ellipsis, where all columns are taken; None: anything else."""
    items = index if isinstance(index, tuple) else (index,)
    places = [i for i, item in enumerate(items) if item is Ellipsis]
    if len(places) != 1 or not all(isinstance(i, slice) or i is Ellipsis for i in items):
        return None
    before, after = items[: places[0]], items[places[0] + 1 :]
    return (before, after) if after and after[-1] == slice(None) else None


@_handles("__getitem__")
def _getitem(x: ColumnShard, index: Any) -> Any:
    # Only slices of dims that are neither the rows (when bridged) nor the columns keep the shards
    # apart.
    found = _slices(index)
    if found is None:
        return NotImplemented
    before, after = found
    if x.shard.rows is not None and (before or len(after) >= x.dim()):
        return NotImplemented
    return x.with_local(x.local[index])


@_handles("argmax")
def _argmax(x: ColumnShard, dim: int | None = None, keepdim: bool = False) -> Any:
    if not _is_last(x.dim(), dim):
        return NotImplemented
    return _maximum(x, keepdim)[1]


def _is_last(dims: int, dim: int | None) -> bool:
    return dim in (-1, dims - 1)


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
    plain_form = weight is None and not label_smoothing and size_average is None and reduce is None
    if not plain_form or not _fits(x.dim(), target) or reduction not in ("none", "mean", "sum"):
        return NotImplemented
    kind = x.local.device.type
    # As torch has it: in float32 under autocast, and inside for half precision too.
    autocast = kind != "meta" and torch.is_autocast_enabled(kind)
    with torch.autocast(kind, enabled=False) if autocast else nullcontext():
        wide = x.local.dtype in (torch.float16, torch.bfloat16)
        losses = _losses(x.with_local(x.local.float()) if wide else x, target, ignore_index)
    if wide and not autocast:
        losses = losses.to(x.local.dtype)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    count = (target != ignore_index).sum()
    # As torch has it: without a valid label the mean is nan, and its gradient zero.
    none = torch.zeros((), dtype=losses.dtype, device=losses.device).masked_fill(
        count == 0, math.nan
    )
    return losses.sum() / count.clamp(min=1) + none


def _fits(dims: int, target: Any) -> bool:
    """Whether a target is one class for each row of logits [rows, columns]."""
    classes = isinstance(target, torch.Tensor) and not target.is_floating_point()
    return dims == 2 and classes and target.dim() == 1


def _check_labels(labels: torch.Tensor, valid: torch.Tensor, columns: int) -> None:
    wrong = valid & ((labels < 0) | (labels >= columns))
    if labels.is_cuda:
        assert_later(~wrong.any())
    elif wrong.any():
        raise IndexError(f"Target {int(labels[wrong][0])} is out of bounds.")


def _losses(x: ColumnShard, target: torch.Tensor, ignore_index: int) -> torch.Tensor:
    shard, local = x.shard, x.local
    unit = x.shape[-1] // shard.cuts[-1]
    labels = target
    if shard.rows is not None:
        labels = shard.communicator.all_gather(target, 0, shard.rows.scaled(local.shape[0]))
    low = shard.low * unit
    valid = labels != ignore_index
    _check_labels(labels, valid, x.shape[-1])
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


def outcome(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """What a torch function makes of sharded columns, its first argument.

    `sharded`: columns that are sharded still; `finished`: something whole, made without gathering
    them; `whole`: it gathers. Tensors are asked for their shapes and dtypes only.
    """
    x, rest = args[0], args[1:]
    keeps = finishes = False
    if name in ("view", "reshape"):
        keeps = not kwargs and _lead(x.shape, rest) is not None
    elif name == "flatten":
        ends = (rest[0] if rest else kwargs.get("start_dim", 0)), kwargs.get("end_dim", -1)
        keeps = _flattens_rows(x.dim(), ends[0], rest[1] if len(rest) > 1 else ends[1])
    elif name == "__getitem__":
        keeps = _slices(rest[0]) is not None
    elif name == "to":
        moves = [a for a in (*rest, *kwargs.values()) if isinstance(a, torch.device | str)]
        keeps = not moves and "device" not in kwargs
    elif name in ("float", "double", "half", "bfloat16", "contiguous", "clone", "detach"):
        keeps = True
    elif name == "argmax":
        finishes = _is_last(x.dim(), rest[0] if rest else kwargs.get("dim"))
    elif name == "cross_entropy":
        names = ("target", "weight", "size_average", "ignore_index", "reduce", "reduction")
        given = {**dict(zip((*names, "label_smoothing"), rest, strict=False)), **kwargs}
        finishes = (
            _fits(x.dim(), given.get("target"))
            and not given.get("label_smoothing")
            and all(given.get(n) is None for n in ("weight", "size_average", "reduce"))
        )
    return "sharded" if keeps else "finished" if finishes else "whole"
