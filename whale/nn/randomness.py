"""Randomness, keyed: every random function of torch that user code calls.

Place in the flow: a mode around a stage's forward, or around a plain model in one process
(`PlainDraws`), which then sees the very numbers that Whale would give it. A draw is named by the
module that makes it and its number among that module's draws in this forward. Its numbers are
functions of seed, step, name and place in the global batch, so they do not depend on the layout;
what has no batch in it is drawn once per micro-batch, the same everywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from whale.errors import WhaleError
from whale.nn.draws import Place
from whale.nn.dropout import drop, offsets_of
from whale.nn.random_calls import CALLS
from whale.nn.random_dropouts import COMPOSED, DROPOUTS, opened
from whale.runtime import recompute
from whale.runtime.compat import in_backward, version
from whale.runtime.context import StepContext
from whale.runtime.generators import check_unseeded
from whale.runtime.hashing import key_of

HANDLERS = {**CALLS, **DROPOUTS}
"""Every random function of torch that is keyed."""

Name = tuple[str, int]
"""The path of the module that draws, and which of its draws it is."""

UNKNOWN = -1
"""The batch dim of a draw whose rows cannot be told."""


@dataclasses.dataclass(frozen=True, slots=True)
class BatchDims:
    """Where the batch is in each draw: its number of dims and the batch's; None: it has none.

    `exact` says that every forward makes the same draws. Where it may skip some (a layer dropped by
    chance), numbers shift, and only what a module's draws of as many dims have in common is known.
    """

    by_name: Mapping[Name, tuple[int, int | None]] = dataclasses.field(default_factory=dict)
    exact: bool = True

    def of(self, name: Name, num_dims: int) -> int | None:
        """The batch dim of a draw; UNKNOWN where it cannot be told."""
        if not num_dims:
            return None
        found = self.by_name.get(name)
        if self.exact and found is not None and found[0] == num_dims:
            return found[1]
        alike = {
            dim for (path, _), (n, dim) in self.by_name.items() if (path, n) == (name[0], num_dims)
        }
        return alike.pop() if len(alike) == 1 else UNKNOWN


class CallNames:
    """Which module is running, and how many draws each has made in this forward.

    It is also what a recomputed forward comes back to, with the context.
    """

    def __init__(self, context: StepContext) -> None:
        self.context = context
        self.stack: list[str] = []
        self.counts: dict[str, int] = {}
        self.heads: tuple[int, int, int] | None = None
        """(first, own, all) units of the attention now running, when it is split."""
        self.drops_heads = False
        """Whether functional dropout in it sees some heads, in dim 1 of four."""
        self.closed = ""
        """Why nothing may be drawn in the code now running; empty: it may."""
        self.settled: dict[str, torch.Tensor] = {}
        """Buffers that a recompute must not change: other micro-batches ran in between."""

    def begin(self) -> None:
        """A forward begins."""
        self.stack.clear()
        self.counts.clear()
        self.heads, self.drops_heads, self.closed = None, False, ""

    def next(self, path: str | None = None) -> Name:
        """The name of the draw being made now, by the module at `path` if given."""
        if path is None:
            path = self.stack[-1] if self.stack else ""
        number = self.counts.get(path, 0)
        self.counts[path] = number + 1
        return path, number

    def follow(self, path: str, module: nn.Module) -> list[Any]:
        """Draws made while `module` runs are its own, but for those of modules in it."""

        def enter(*_: Any) -> None:
            self.stack.append(path)

        def leave(*_: Any) -> None:
            self.stack.pop()

        return [
            module.register_forward_pre_hook(enter, prepend=True),
            module.register_forward_hook(leave, always_call=True),
        ]

    def close(self, why: str, module: nn.Module) -> None:
        """Nothing may be drawn while `module` runs."""

        def enter(*_: Any) -> None:
            self.closed = why

        def leave(*_: Any) -> None:
            self.closed = ""

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)

    def position(self) -> Any:
        """Where the forward is now."""
        return (
            dataclasses.astuple(self.context),
            list(self.stack),
            dict(self.counts),
            self.heads,
            self.drops_heads,
            self.closed,
        )

    @contextmanager
    def at(self, position: Any) -> Iterator[None]:
        """Inside, the forward is where it was."""
        now = self.position()
        versions = {name: version(buffer) for name, buffer in self.settled.items()}
        self._go(position)
        try:
            yield
        finally:
            self._go(now)
            changed = [n for n, buffer in self.settled.items() if version(buffer) != versions[n]]
            if changed:
                raise WhaleError(
                    f"a checkpoint in the model changes the buffer {changed[0]} a second time when "
                    "it recomputes, and a pipeline runs other micro-batches in between: the order "
                    "is not that of one device",
                    hint="keep modules that track statistics (batch norm) out of checkpoints, or "
                    "use one micro-batch",
                )

    def _go(self, position: Any) -> None:
        values, stack, counts, self.heads, self.drops_heads, self.closed = position
        for field, value in zip(dataclasses.fields(self.context), values, strict=True):
            setattr(self.context, field.name, value)
        self.stack, self.counts = list(stack), dict(counts)


class Draws:
    """Where each draw of a model has its batch, and so the key and the rows of a draw."""

    def __init__(self, names: CallNames, dims: BatchDims) -> None:
        self.names, self.dims = names, dims
        self._known: dict[tuple[Name, int], int | None] = {}
        self.lenient = False
        """Whether a draw whose rows cannot be told is one of the micro-batch, wherever it is."""
        self.guarded = False
        """Whether generators are watched around the forward."""
        self.unplaced: list[Name] = []
        """Draws whose rows could not be told."""

    def dim(self, name: Name, num_dims: int) -> int | None:
        """The batch dim of a draw, looked up once."""
        if (name, num_dims) not in self._known:
            self._known[name, num_dims] = self.dims.of(name, num_dims)
        return self._known[name, num_dims]

    def where(self, name: Name, shape: Sequence[int]) -> tuple[int, int | None]:
        """The key of a draw, and its batch dim (None: one draw for the micro-batch)."""
        path, number = name
        context = self.names.context
        if self.names.closed:
            raise WhaleError(
                f"{path or 'the model'} draws random numbers {self.names.closed}",
                hint="draw them outside of this module, or do not split it",
            )
        if not recompute.rerunning():
            if in_backward():
                raise WhaleError(
                    f"{path or 'the model'} draws random numbers inside a backward, in code that "
                    "runs a forward again by itself: the step has moved on since",
                    hint="recompute with torch.utils.checkpoint, which Whale follows",
                )
            if self.guarded:
                check_unseeded()
        key = key_of(context.seed, context.step, path, number)
        dim = self.dim(name, len(shape))
        if dim is None:
            return key, None
        fits = 0 <= dim < len(shape) and (not context.rows or shape[dim] % context.rows == 0)
        if fits:
            return key, dim
        self.unplaced.append(name)
        if context.rows == context.micro_rows or self.lenient or not _count(shape):
            return key, None
        raise WhaleError(
            f"{path or 'the model'} draws random numbers of shape {tuple(shape)}, and it cannot be "
            f"told which of them belong to which row: this replica has {context.rows} of the "
            f"{context.micro_rows} rows of micro-batch {context.micro_batch}",
            hint="draw them with the batch as a dim of its own, in code that runs on any rows; or "
            "use one replica",
        )


def _count(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _head_span(local: int, units: tuple[int, int, int]) -> tuple[int, int, int]:
    first, own, every = units
    per_unit = local // own if own else 1
    return 1, first * per_unit, every * per_unit


class KeyedRandom(recompute.RerunMode):
    """Replaces random functions by keyed ones."""

    def __init__(self, draws: Draws, *, cut: bool = False) -> None:
        super().__init__()
        self.draws, self.names, self.cut = draws, draws.names, cut
        self.fold = 0
        """Heads that are in one dim with the rows, inside torch's own multi-head attention."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = HANDLERS.get(func)
        if handler is None:
            if func in COMPOSED:
                with self:
                    return opened(func, self)(*args, **kwargs)
            return func(*args, **kwargs)
        if kwargs.get("generator") is not None:
            return self.own_generator(handler, func, args, kwargs)
        kwargs.pop("generator", None)
        return handler(self, *args, **kwargs)

    # ---- what handlers ask for -------------------------------------------------------------------

    def place(self, shape: Sequence[int], device: Any = None) -> Place:
        """Where a draw of this shape is; it counts as made."""
        shape = tuple(shape)
        key, dim = self.draws.where(self.names.next(), shape)
        context = self.names.context
        if dim is None:
            key = key_of(key, context.micro_batch, "micro-batch", 0)
        rows = context.rows if dim is not None else (shape[0] if shape else 1)
        first = context.first_row if dim is not None else 0
        offsets = offsets_of(shape, first, rows, dim or 0, None) if shape else []
        return Place(
            key=key,
            shape=shape,
            offsets=tuple(offsets),
            batch_dim=dim or 0,
            device=torch.device(device) if device is not None else torch.get_default_device(),
        )

    def place_whole(self, shape: Sequence[int], device: Any = None) -> Place:
        """The same for numbers that make sense together only: a permutation."""
        path, context = self._path(), self.names.context
        dim = self.draws.dim((path, self.names.counts.get(path, 0)), 1)
        if dim is not None and context.rows != context.micro_rows:
            raise WhaleError(
                f"{path or 'the model'} draws a permutation of {shape[0]}, which has to do with "
                f"the rows, and this replica has {context.rows} of the {context.micro_rows} rows "
                "of a micro-batch",
                hint="mix rows before they come to the model, or use one replica",
            )
        return self.place(shape, device)

    def _path(self) -> str:
        return self.names.stack[-1] if self.names.stack else ""

    def dropped(self, x: torch.Tensor, p: float) -> torch.Tensor:
        """`x` with elements dropped, the others scaled."""
        if self.fold and x.dim() == 3 and x.shape[0] % self.fold == 0:
            apart = x.unflatten(0, (-1, self.fold)) if len(x) else x.unsqueeze(1)
            return self.dropped(apart, p).reshape(x.shape)
        if not x.dim():
            return self.dropped(x.unsqueeze(0), p).squeeze(0)
        if self.names.drops_heads and x.dim() == 4:
            return self.attention_dropped(x, p)
        key, dim = self.draws.where(self.names.next(), x.shape)
        return drop(x, p, key, self.names.context, dim, None)

    def attention_dropped(self, x: torch.Tensor, p: float) -> torch.Tensor:
        """The same of probabilities [rows, heads, ...], of which the heads may be a part."""
        heads = self.names.heads
        key, dim = self.draws.where(self.names.next(), x.shape)
        sharded = _head_span(x.shape[1], heads) if heads is not None else None
        return drop(x, p, key, self.names.context, dim, sharded)

    def spared(self, shape: Sequence[int]) -> None:
        """A call that could draw and does not, as dropout at 0."""
        self.names.next()

    def expect(self, shape: Sequence[int] | None) -> None:
        """What a handler is about to draw, where it computes much before; None: nothing."""

    def own_generator(self, handler: Any, func: Any, args: Any, kwargs: Any) -> Any:
        """A draw from a generator of the user's, whose numbers are the user's own.

        They are what one device draws as long as this rank makes all the draws of one device.
        """
        shape, _ = noted(self, handler, args, kwargs)
        dim = self.draws.dim(self.names.next(), len(shape or ()))
        context = self.names.context
        alone = context.rows == context.micro_rows
        if self.cut or not (alone or dim is None):
            raise WhaleError(
                f"{self._path() or 'the model'} draws numbers of shape {shape} from "
                "a torch.Generator of its own, "
                + (
                    "of which other stages would have to draw too"
                    if self.cut
                    else f"for {context.rows} of the {context.micro_rows} rows of a micro-batch"
                ),
                hint="leave `generator` out: draws are keyed by seed, step and row then",
            )
        return func(*args, **kwargs)


class _Noted(Exception):  # noqa: N818 - it is an answer, not an error
    def __init__(self, shape: Sequence[int] | None, drawn: bool) -> None:
        self.shape, self.drawn = None if shape is None else tuple(shape), drawn


class _Noting(KeyedRandom):
    """Says the shape of a draw instead of drawing."""

    def place(self, shape: Sequence[int], device: Any = None) -> Place:
        raise _Noted(shape, True)

    def place_whole(self, shape: Sequence[int], device: Any = None) -> Place:
        raise _Noted(shape, True)

    def dropped(self, x: torch.Tensor, p: float) -> torch.Tensor:
        shape = tuple(x.shape)
        if self.fold and len(shape) == 3 and shape[0] % self.fold == 0:
            shape = (shape[0] // self.fold, self.fold, *shape[1:])
        raise _Noted(shape, True)

    def spared(self, shape: Sequence[int]) -> None:
        raise _Noted(shape, False)

    def expect(self, shape: Sequence[int] | None) -> None:
        raise _Noted(shape, shape is not None)


def noted(
    mode: KeyedRandom, handler: Any, args: Any, kwargs: Any
) -> tuple[tuple[int, ...] | None, bool]:
    """The shape of a random function's draw, if it can draw, and whether it does."""
    noting = _Noting(mode.draws)
    noting.fold = mode.fold
    given = {name: value for name, value in kwargs.items() if name != "generator"}
    try:
        handler(noting, *args, **given)
    except _Noted as found:
        return found.shape, found.drawn
    return None, False


class PlainDraws:
    """The same draws around a plain model: nothing in it is replaced, its modules are followed.

    A backward may recompute parts of the forward, so they are until `close`.

    Args:
        model: In one process, on all rows of its micro-batches or on some.
        dims: Where its draws have their batch: `Captured.random`.
        seed: Of the Config.
    """

    def __init__(self, model: nn.Module, dims: BatchDims, seed: int) -> None:
        self.names = CallNames(StepContext(seed=seed))
        self.draws = Draws(self.names, dims)
        self.mode = KeyedRandom(self.draws)
        self._hooks = follow_all(self.names, model.named_modules())

    def close(self) -> None:
        """Follows the model no longer."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def at(
        self,
        *,
        step: int,
        micro_batch: int = 0,
        first_row: int = 0,
        rows: int,
        micro_rows: int | None = None,
    ) -> Iterator[None]:
        """Around one forward, on `rows` rows that start at `first_row` of the global batch."""
        context = self.names.context
        context.step, context.micro_batch, context.first_row = step, micro_batch, first_row
        context.rows = rows
        context.micro_rows = rows if micro_rows is None else micro_rows
        self.names.begin()
        with recompute.scope(self.names), self.mode:
            yield


def follow_all(names: CallNames, modules: Iterable[tuple[str, nn.Module]]) -> list[Any]:
    """Follows these modules; the handles of the hooks."""
    return [hook for path, module in modules for hook in names.follow(path, module)]
