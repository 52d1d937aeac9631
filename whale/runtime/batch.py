"""The batch as Whale sees it: which tensors have rows, what goes to the model, what to the loss.

Place in the flow: used by capture (shapes), by the executor (rows of a rank) and by the data
loader. A batch is a tensor, a tuple (by position) or a mapping (by keyword); dim 0 is the batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from whale.config import Config
from whale.errors import WhaleError
from whale.ir.plan import Plan
from whale.ir.precision import Precision
from whale.ir.sharding import Span, cuts

Loss = Callable[[Any, Any], Any]


class Reader(Protocol):
    """Who a part of a batch is read for: a Step."""

    plan: Plan
    rank: int

    @property
    def config(self) -> Config:
        """Its settings."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalBatch:
    """The rows of a global batch that one rank holds, as `wh.shard(loader, step)` gives them.

    Attributes:
        data: The batch of exactly those rows.
        total_rows: Rows of the global batch.
        rows: The global rows held, ascending and disjoint.
        batched: By tensor of `data`, whether its dim 0 is the rows.
        content: Makes a number of the whole global batch, by which ranks know they mean the same.
    """

    data: Any
    total_rows: int
    rows: tuple[Span, ...]
    batched: tuple[bool, ...]
    content: Callable[[], int] | None = None

    def __iter__(self) -> Iterator[Any]:
        raise _not_unpacked(self)

    def position(self, low: int, high: int) -> Span:
        """Where the global rows [low, high) are in `data`."""
        starts = cuts(end - first for first, end in self.rows)
        for start, (first, end) in zip(starts, self.rows, strict=False):
            if first <= low and high <= end:
                return start + low - first, start + high - first
        if low >= high:
            return 0, 0
        raise WhaleError(
            f"rows {low} to {high} are asked of a LocalBatch that holds {list(self.rows)} of "
            f"{self.total_rows}",
            hint="it was read for another plan: give wh.shard the step that trains on it, or none",
        )


Read = Callable[[Reader], LocalBatch]


class LazyBatch:
    """A global batch of which a rank's rows are read when its Step gets it; see `wh.shard`."""

    def __init__(self, total_rows: int, read: Read) -> None:
        self.total_rows = total_rows
        self._read = read
        self._last: tuple[Plan, int, LocalBatch] | None = None

    def local(self, step: Reader) -> LocalBatch:
        """The rows that `step` needs on its rank, read once."""
        if self._last is None or self._last[0] is not step.plan or self._last[1] != step.rank:
            self._last = (step.plan, step.rank, self._read(step))
        return self._last[2]

    def __iter__(self) -> Iterator[Any]:
        raise _not_unpacked(self)


def _not_unpacked(batch: Any) -> WhaleError:
    """A promise of rows has no parts yet: who computes which rows is the Step's to say."""
    return WhaleError(
        f"a {type(batch).__name__} of wh.shard cannot be unpacked or iterated: the step takes it "
        "as one",
        hint="write `for batch in wh.shard(loader): step(batch)`; what must change in a batch "
        "changes in the dataset or in `collate_fn`",
    )


def localize(batch: Any, step: Reader) -> Any:
    """What a Step runs on: a LazyBatch's rows of this rank, any other batch as it is."""
    return batch.local(step) if isinstance(batch, LazyBatch) else batch


def _walk(value: Any, fn: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, Mapping):
        return {key: _walk(item, fn) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return like_sequence(value, [_walk(item, fn) for item in value])
    if isinstance(value, (LazyBatch, LocalBatch)):
        raise WhaleError(
            f"a {type(value).__name__} stands where a whole global batch is needed",
            hint="parallelize takes `batch=next(iter(loader))`; batches of wh.shard go to the step",
        )
    return value


def like_sequence(value: Any, items: list[Any]) -> Any:
    """`items` in a list, tuple or named tuple as `value` is."""
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def leaves(batch: Any) -> list[torch.Tensor]:
    """The tensors of a batch, in order."""
    found: list[torch.Tensor] = []

    def add(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    _walk(batch, add)
    return found


def leaves_anywhere(value: Any) -> list[torch.Tensor]:
    """The tensors in nested containers of any object's attribute."""
    if isinstance(value, (LazyBatch, LocalBatch)):
        return []
    return leaves(value)


def rebuild(batch: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """`batch` with its tensors replaced, in order."""
    rest = iter(tensors)
    return _walk(batch, lambda _: next(rest))


def in_precision(batch: Any, precision: Precision, loss: Loss | None) -> Any:
    """`batch` with the floating inputs of the model in the dtype of its parameters.

    What a loss of its own is given beside the output stays as it is.
    """
    if not precision.parameters:
        return batch
    dtype = getattr(torch, precision.parameters)

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    if loss is None:
        return _walk(batch, cast)
    if isinstance(batch, Mapping):
        return {k: v if k == "labels" else _walk(v, cast) for k, v in batch.items()}
    return like_sequence(batch, [*(_walk(item, cast) for item in batch[:-1]), batch[-1]])


def own(batch: Any) -> Any:
    """`batch` with copies of its tensors, for code that may write to them.

    Tensors that share memory (the input and the labels of an autoencoder, a text and the same text
    one token later) share it in the copy too.
    """
    places = Counter(_place(t) for t in leaves(batch))
    shared = {place: [t for t in leaves(batch) if _place(t) == place] for place in places}
    copies: dict[Hashable, tuple[torch.Tensor, int]] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        place = _place(tensor)
        if places[place] < 2:
            return tensor.clone()
        if place not in copies:
            low = min(t.storage_offset() for t in shared[place])
            high = max(_end(t) for t in shared[place])
            whole = torch.as_strided(tensor.detach(), (high - low,), (1,), low)
            copies[place] = whole.clone(), int(low)
        memory, first = copies[place]
        start = tensor.storage_offset() - first
        return torch.as_strided(memory, tensor.shape, tensor.stride(), start)

    return _walk(batch, copy)


def _place(tensor: torch.Tensor) -> Hashable:
    """Whose memory it is in; its own, where that cannot be said."""
    plain = tensor.layout == torch.strided and not tensor.is_meta and tensor.numel()
    return (tensor.untyped_storage().data_ptr(), tensor.dtype) if plain else id(tensor)


def _end(tensor: torch.Tensor) -> int:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return int(tensor.storage_offset()) + 1 + sum((size - 1) * step for size, step in steps)


def num_rows(batch: Any) -> int:
    """Rows of the global batch: dim 0 of its `labels`, else of its first tensor that has one.

    What stands first in a mapping may have no rows, as positions have none; labels always do.
    """
    if isinstance(batch, LocalBatch):
        return batch.total_rows
    first = [batch["labels"]] if isinstance(batch, Mapping) and "labels" in batch else []
    sizes = [t.shape[0] for t in leaves([*first, batch]) if t.dim() > 0]
    if not sizes:
        raise WhaleError(
            f"the batch ({type(batch).__name__}) holds no tensor with a batch dim",
            hint="pass a tensor, a tuple of tensors or a mapping of tensors; dim 0 is the batch",
        )
    return sizes[0]


def refuse_layouts(batch: Any) -> None:
    """Sparse and nested tensors have no rows that could be cut, sent or traced."""
    for tensor in leaves(batch):
        if tensor.is_nested or tensor.layout != torch.strided:
            kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
            raise WhaleError(
                f"the batch holds a {kind} tensor of {tensor.dim()} dims and {tensor.dtype}; Whale "
                "cuts the rows of plain (strided) ones",
                hint="give a padded dense tensor and a mask or lengths, or the indices and values "
                "of each row as dense tensors, and make the sparse or nested one in the model",
            )


def has_rows(tensor: torch.Tensor, rows: int) -> bool:
    """Whether dim 0 of a batch tensor is the batch; others are passed whole to every rank."""
    return tensor.dim() > 0 and tensor.shape[0] == rows


def take_rows(batch: Any, low: int, high: int, device: torch.device | None = None) -> Any:
    """Rows [low, high) of every tensor that has rows."""
    if isinstance(batch, LocalBatch):
        low, high = batch.position(low, high)
        batched, batch = batch.batched, batch.data
    else:
        rows = num_rows(batch)
        batched = tuple(has_rows(tensor, rows) for tensor in leaves(batch))
    flags = iter(batched)

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        part = tensor[low:high] if next(flags) else tensor
        return part if device is None else part.to(device, non_blocking=True)

    return _walk(batch, cut)


def take_clear_rows(batch: LocalBatch, low: int, high: int, device: torch.device | None) -> Any:
    """Rows [low, high), or a few less: as many as no tensor without rows has first.

    In what is left of a batch, that a tensor has rows is seen by its size alone.
    """
    pairs = zip(leaves(batch.data), batch.batched, strict=True)
    sizes = {t.shape[0] for t, batched in pairs if not batched and t.dim()}
    fit = (count for count in range(high - low, 1, -1) if count not in sizes)
    return take_rows(batch, low, low + next(fit, high - low), device)


def spread_rows(batch: Any, count: int, device: torch.device) -> Any:
    """`count` rows spread evenly over a whole batch, first and last among them."""
    rows = num_rows(batch)
    index = torch.linspace(0, rows - 1, count).round().long()

    def pick(tensor: torch.Tensor) -> torch.Tensor:
        chosen = tensor[index.to(tensor.device)] if has_rows(tensor, rows) else tensor
        return chosen.to(device)

    return _walk(batch, pick)


def call_model(model: Callable[..., Any], loss: Loss | None, batch: Any) -> dict[str, Any]:
    """Runs the model, and the loss if given, on a batch: {"loss": ..., other named outputs}."""
    if loss is None:
        out = run_model(model, batch)
        return named_outputs(out)
    inputs, target = split_target(batch)
    out = run_model(model, inputs)
    named = named_outputs(loss(out, target), what="the loss function")
    named.setdefault("output", out)
    return named


def split_target(batch: Any) -> tuple[Any, Any]:
    """(inputs, target): with a loss, the last element or the key `labels` is the target."""
    if isinstance(batch, Mapping):
        if "labels" not in batch:
            raise WhaleError(
                f"the batch has keys {sorted(batch)}, none of them `labels`",
                hint="with `loss=`, a mapping batch carries its target under `labels`",
            )
        return {key: item for key, item in batch.items() if key != "labels"}, batch["labels"]
    if isinstance(batch, (tuple, list)) and len(batch) >= 2:
        return tuple(batch[:-1]), batch[-1]
    raise WhaleError(
        f"`loss=` was given, but the batch is {type(batch).__name__} without a target",
        hint="pass (inputs, target), or a mapping with `labels`, or leave `loss` out",
    )


def run_model(model: Callable[..., Any], inputs: Any) -> Any:
    """Calls the model with a batch without its target."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)


def named_outputs(out: Any, what: str = "the model") -> dict[str, Any]:
    """A model's outputs by name; `loss` is found as Hugging Face models return it."""
    if isinstance(out, torch.Tensor | int | float):
        named: dict[str, Any] = {"loss": out}
    elif isinstance(out, Mapping):
        named = dict(out)
    elif isinstance(out, (tuple, list)) and out:
        named = {"loss": out[0], **{str(i): item for i, item in enumerate(out)}}
    else:
        fields = getattr(type(out), "__slots__", ()) or getattr(out, "__dict__", ())
        found = {key: getattr(out, key, None) for key in fields}
        named = {key: item for key, item in found.items() if item is not None}
    value = named.get("loss")
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return named
    if isinstance(value, torch.Tensor):
        said = f"a `loss` of shape {tuple(value.shape)}, not one number"
        hint = "reduce it: loss.mean(), or wh.weighted_mean(loss.sum(), count); "
        hint += "a model that returns its output needs `loss=` in parallelize"
    elif value is not None:
        said = f"a `loss` that is {type(value).__name__}, not a tensor"
        hint = "return the tensor itself, without .item() or float()"
    else:
        keys = f" with {', '.join(map(str, named))}" if named else ""
        said = f"{type(out).__name__}{keys}, and no loss"
        hint = "return the loss, or a mapping or tuple that has it first, or pass `loss=` to "
        hint += "parallelize; models of transformers compute it when the batch has `labels`"
    raise WhaleError(f"{what} returned {said}", hint=hint)
