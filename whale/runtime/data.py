"""`wh.shard`: a loader of global batches, of which each rank reads only the rows it computes.

Place in the flow: between the user's DataLoader and Step. A batch comes out as a LazyBatch, the
promise of one global batch; the Step that gets it asks for the rows its plan gives this rank, and
only then are samples read. Nothing is lost or doubled: the global batches are the loader's own,
whatever the plan.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import replace
from functools import partial
from itertools import islice, tee
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from whale.config import Config
from whale.errors import WhaleError
from whale.ir.plan import Plan
from whale.ir.rows import needed_rows
from whale.ir.sharding import Span
from whale.runtime import batch as batches
from whale.runtime import signature
from whale.runtime.batch import LazyBatch, LocalBatch, Read, Reader
from whale.runtime.fingerprint import combined

Promise = tuple[int, Read]
"""Rows of a global batch, and how a Step's part of it is read."""


def shard(source: Iterable[Any], step: Reader | None = None, *, seed: int | None = None) -> Sharded:
    """The global batches of `source`, read row by row where this rank needs them.

    A DataLoader over a map-style dataset fetches and collates only the rank's own samples, in the
    loader's workers. An iterable-style dataset, or any iterable of global batches, is iterated by
    every rank, which keeps its own rows; the stream must be the same on all ranks. A rank that
    computes nothing of a batch reads one sample of it, for its shapes.

    Every rank must see the same global batches. A random sampler without a generator of its own is
    seeded with seed + epoch; one with a generator is used as it is. `collate_fn` must give each row
    the same shape in whatever company it comes (pad to a fixed length), and a dataset must give
    every rank the same sample for the same index.

    Args:
        source: A DataLoader that makes global batches, or an iterable of them.
        step: The Step that will train on them, which then come as `LocalBatch`; without, they
            come as `LazyBatch` and are read once a Step gets them.
        seed: Of the shuffling; default: `seed` of the step's Config, or of the default Config.
    """
    return Sharded(source, step, seed)


class Sharded:
    """The batches of a loader, for this rank; iterate it once per epoch. See `shard`."""

    def __init__(self, source: Iterable[Any], step: Reader | None, seed: int | None) -> None:
        config = step.config if step is not None else Config()
        self._source, self._step = source, step
        self._drop_last = config.io.drop_last
        self._epoch = 0
        self._samples = None
        if _is_map_loader(source):
            assert isinstance(source, DataLoader)
            self._samples = _Samples(source, config.seed if seed is None else seed)

    def set_epoch(self, epoch: int) -> None:
        """Numbers the next epoch (to resume a run); each iteration counts on from there."""
        self._epoch = epoch

    def __len__(self) -> int:
        assert isinstance(self._source, Sized)
        count = len(self._source)
        sampler = getattr(self._source, "batch_sampler", None)
        if self._drop_last and count > 1 and type(sampler) is BatchSampler:
            assert isinstance(sampler.sampler, Sized)
            count -= not sampler.drop_last and len(sampler.sampler) % sampler.batch_size != 0
        return count

    def __iter__(self) -> Iterator[LazyBatch | LocalBatch]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        if self._samples is not None:
            promises = self._samples.promises(epoch)
        else:
            promises = ((batches.num_rows(b), partial(_cut, b)) for b in self._source)
        for total_rows, read in self._without_short_end(promises):
            batch = LazyBatch(total_rows, partial(self._read, read))
            yield batch if self._step is None else batch.local(self._step)

    def _read(self, read: Read, step: Reader) -> LocalBatch:
        self._drop_last = self._drop_last or step.config.io.drop_last
        return read(step)

    def _without_short_end(self, promises: Iterable[Promise]) -> Iterator[Promise]:
        """With `io.drop_last`, all but a last batch that is smaller than one before it."""
        held: Promise | None = None
        largest = 0
        for promise in promises:
            if held is not None:
                yield held
                largest = max(largest, held[0])
            held = promise
            # Without a step it is known only once the first batch has been read.
            if not self._drop_last:
                yield held
                largest, held = max(largest, held[0]), None
        if held is not None and held[0] >= largest:
            yield held


class _Samples:
    """The samples of a map-style dataset, batch by batch, by index."""

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        self.loader, self.seed = loader, seed
        self.current: _Epoch | None = None
        self._generator = torch.Generator()
        self._indices = _Indices()
        self._inner: DataLoader[Any] | None = None

    def promises(self, epoch: int) -> Iterator[Promise]:
        """The batches of an epoch."""
        sampler = _seeded(self.loader, self.seed + epoch)
        ours, ahead = tee(list(indices) for indices in sampler)
        # Workers of all ranks draw alike: shards of one replica must see the same random crop.
        self._generator.manual_seed(self.seed + epoch)
        self.current = run = _Epoch(self, ahead)
        for number, indices in enumerate(ours):
            yield len(indices), partial(run.read, number, indices)

    def start(self, wanted: Iterator[list[int]]) -> Iterator[Any]:
        """Lists of indices -> collated batches, by a loader set up as the user's."""
        self._indices.wanted = wanted
        if self._inner is None:
            user = self.loader
            self._inner = DataLoader(
                user.dataset,
                batch_sampler=self._indices,  # type: ignore[arg-type]
                collate_fn=user.collate_fn,
                num_workers=user.num_workers,
                pin_memory=user.pin_memory,
                timeout=user.timeout,
                worker_init_fn=user.worker_init_fn,
                multiprocessing_context=user.multiprocessing_context,
                prefetch_factor=user.prefetch_factor,
                persistent_workers=user.persistent_workers,
                generator=self._generator,
            )
        return iter(self._inner)

    def fetch(self, indices: Sequence[int]) -> Any:
        """One list of indices -> a collated batch, in this process."""
        return self.loader.collate_fn([self.loader.dataset[i] for i in indices])


class _Indices:
    """The batch sampler of the inner loader, which outlives epochs where its workers persist."""

    wanted: Iterator[list[int]]

    def __iter__(self) -> Iterator[list[int]]:
        return self.wanted


class _Epoch:
    """One pass over a map-style dataset. The first read tells the plan; workers read on by it."""

    def __init__(self, samples: _Samples, ahead: Iterator[list[int]]) -> None:
        self.samples, self.ahead = samples, ahead
        self.plan: Plan | None = None
        self.rank = 0
        self.next_number = 0
        self.read_ahead: Iterator[Any] = iter(())

    def read(self, number: int, indices: list[int], step: Reader) -> LocalBatch:
        """The rank's rows of one batch."""
        spans = needed_rows(step.plan, step.rank, len(indices))
        if self.plan is None and self.samples.current is self:
            self.plan, self.rank, self.next_number = step.plan, step.rank, number
            self.read_ahead = self.samples.start(self._wanted(islice(self.ahead, number, None)))
        data = self._data(number, indices, spans, step)
        made = _collated(data, len(indices), spans)
        # Which samples they are is all that ranks can compare: each has read others.
        return replace(made, content=partial(_number_of, indices))

    def _wanted(self, ahead: Iterable[list[int]]) -> Iterator[list[int]]:
        assert self.plan is not None
        for indices in ahead:
            yield _chosen(indices, needed_rows(self.plan, self.rank, len(indices)))

    def _data(self, number: int, indices: list[int], spans: tuple[Span, ...], step: Reader) -> Any:
        same = step.plan is self.plan and step.rank == self.rank
        if not same or number < self.next_number or self.samples.current is not self:
            return self.samples.fetch(_chosen(indices, spans))
        for _ in range(self.next_number, number):
            next(self.read_ahead)
        self.next_number = number + 1
        return next(self.read_ahead)


def _is_map_loader(source: Iterable[Any]) -> bool:
    """Whether `source` fetches samples by index and collates them; all else gives batches."""
    if not isinstance(source, DataLoader):
        return False
    batch_sampler = source.batch_sampler
    for sampler in (source.sampler, batch_sampler, getattr(batch_sampler, "sampler", None)):
        if isinstance(sampler, DistributedSampler):
            raise WhaleError(
                f"the loader has a {type(sampler).__name__}, which gives each rank other samples; "
                "wh.shard takes global batches, the same on all ranks",
                hint="leave the sampler out (shuffle=True is fine), with the global batch size",
            )
    own_iteration = type(source).__iter__ is not DataLoader.__iter__
    streams = isinstance(source.dataset, IterableDataset)
    return not own_iteration and not streams and batch_sampler is not None


def _seeded(loader: DataLoader[Any], seed: int) -> Iterable[Any]:
    """The loader's batches of indices, shuffled alike on all ranks."""
    sampler = loader.batch_sampler
    assert sampler is not None
    if type(sampler) is BatchSampler:
        inner = _with_generator(sampler.sampler, seed)
        return BatchSampler(inner, sampler.batch_size, sampler.drop_last)
    return _with_generator(sampler, seed)


def _with_generator(sampler: Any, seed: int) -> Sampler[Any]:
    if getattr(sampler, "generator", 0) is not None:
        return sampler  # type: ignore[no-any-return]
    # A copy: the user's own sampler stays as random as it was.
    seeded = copy.copy(sampler)
    seeded.generator = torch.Generator().manual_seed(seed)
    return seeded  # type: ignore[no-any-return]


def _number_of(indices: Sequence[Any]) -> int:
    return combined(list(repr(list(indices)).encode()))


def _chosen(indices: list[int], spans: tuple[Span, ...]) -> list[int]:
    return [i for low, high in spans for i in indices[low:high]] or indices[:1]


def _collated(data: Any, total_rows: int, spans: tuple[Span, ...]) -> LocalBatch:
    """What `collate_fn` made of the samples of `spans`, or of one sample where there are none."""
    held = sum(high - low for low, high in spans)
    tensors = batches.leaves(data)
    batched = tuple(batches.has_rows(tensor, max(held, 1)) for tensor in tensors)
    if not any(batched):
        raise WhaleError(
            f"`collate_fn` was given {max(held, 1)} samples and returned tensors of shapes "
            f"{[tuple(t.shape) for t in tensors]}, none with that dim 0",
            hint="dim 0 is the batch: one row per sample",
        )
    if not held:
        cut = [t[:0] if rows else t for t, rows in zip(tensors, batched, strict=True)]
        data = batches.rebuild(data, cut)
    return LocalBatch(data=data, total_rows=total_rows, rows=spans, batched=batched)


def _cut(batch: Any, step: Reader) -> LocalBatch:
    """This rank's rows of a global batch that is there already."""
    total_rows = batches.num_rows(batch)
    spans = needed_rows(step.plan, step.rank, total_rows)
    tensors = batches.leaves(batch)
    batched = tuple(batches.has_rows(tensor, total_rows) for tensor in tensors)
    cut = [
        torch.cat([t[low:high] for low, high in spans or ((0, 0),)]) if rows else t
        for t, rows in zip(tensors, batched, strict=True)
    ]
    data = batches.rebuild(batch, cut)
    return LocalBatch(
        data=data,
        total_rows=total_rows,
        rows=spans,
        batched=batched,
        content=partial(signature.content, batch),
    )
