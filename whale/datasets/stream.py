"""An endless stream of samples, mixed from sources by weight: the same for every run of a seed.

Place in the flow: sources in, samples out, one after another for as long as training goes on. What
is at a position of the stream follows from the seed and the position alone, so a stream goes on
from a checkpoint at once, without reading anything again, and on another number of shards.

    [Note: Why nothing is lost or doubled]
    The stream is cut into blocks of 1,024 positions. Every block takes the same number of samples
    from a source, in an order of its own; so the k-th sample of a source is found by arithmetic.
    A source is gone through epoch by epoch, each in another order: sample k is number k modulo its
    length of epoch k divided by its length. Shards take positions in turn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from whale.datasets.samples import Source
from whale.errors import WhaleError

T = TypeVar("T")
Indices = npt.NDArray[np.int64]

BLOCK = 1024
"""Positions over which the weights hold exactly: a weight is kept to a thousandth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn(Generic[T]):
    """A sample and where it came from."""

    sample: T
    source: str
    epoch: int
    """How often its source had been gone through before."""
    index: int
    """Its number in its source."""
    position: int
    """Its place in the stream of all shards."""
    seed: int
    """The stream's."""

    def generator(self) -> np.random.Generator:
        """Randomness for what is done with the sample (what to mask, which caption to take).

        It depends on seed, source, epoch and index only: the same after a restart and on any shard,
        another each epoch.
        """
        return np.random.default_rng(_number(self.seed, self.source, self.epoch, self.index))


class MixedStream(Generic[T]):
    """Samples of several sources in the proportions of their weights, shuffled, without end.

    With shards, each of them makes a stream of the same sources, weights and seed, and iterates it
    in step with the others: one sample of each shard, then the next of each. `state` is then the
    same on all shards, and any number of shards may resume from it.
    """

    def __init__(
        self,
        sources: Mapping[str, Source[T]],
        weights: Mapping[str, float] | None = None,
        *,
        seed: int = 0,
        buffer: int = 16384,
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        """Makes the stream, at its beginning.

        Args:
            sources: Sets of samples by name; anything with a length and samples by number.
            weights: By name, how much of the stream comes from each; they need not add up to
                one. Default: as many as the source has samples.
            seed: Of all shuffling.
            buffer: Samples of a source that are shuffled among each other. An epoch goes through
                windows of this many neighbours, in random order, so that a source on disk is read
                nearly in sequence; a source that is not longer is shuffled as a whole.
            shard: (index, count): which part of the stream this one gives.
        """
        index, count = shard
        if not 0 <= index < count:
            raise WhaleError(
                f"shard {index} of {count}; the index goes from 0 to count - 1",
                hint="give (rank, world size), or leave `shard` out to get every sample",
            )
        if buffer < 1:
            raise WhaleError(
                f"a buffer of {buffer} samples; at least 1 is needed",
                hint="leave `buffer` out, or give as many samples as may be shuffled at once",
            )
        # By name: the order in which the caller happened to list them must not matter.
        self._sources = {name: sources[name] for name in sorted(sources)}
        self._names = list(self._sources)
        self._counts = _block_counts(self._sources, weights)
        self._seed, self._buffer = seed, buffer
        self._shard, self._num_shards = index, count
        self._position = 0

    def __iter__(self) -> Iterator[Drawn[T]]:
        return self

    def __next__(self) -> Drawn[T]:
        drawn = self.at(self._position + self._shard)
        # Only once it is read: a sample that fails is met again, not passed over in silence.
        self._position += self._num_shards
        return drawn

    def take(self, count: int) -> list[Drawn[T]]:
        """The next `count` samples of this shard."""
        return list(islice(self, count))

    def at(self, position: int) -> Drawn[T]:
        """The sample at a position of the whole stream; moves nothing."""
        block, offset = divmod(position, BLOCK)
        which, before = _block(self._counts, _number(self._seed, "block", block))
        number = int(which[offset])
        name = self._names[number]
        taken = block * self._counts[number] + int(before[offset])
        epoch, place = divmod(taken, len(self._sources[name]))
        index = self._index(name, epoch, place)
        return Drawn(
            sample=self._sources[name][index],
            source=name,
            epoch=epoch,
            index=index,
            position=position,
            seed=self._seed,
        )

    def state(self) -> dict[str, Any]:
        """Where the stream is, of all shards together; plain JSON, fit for `step.save(extra=...)`.

        True for all shards if each has taken equally many samples.
        """
        return {"position": self._position, **self._identity()}

    def resume(self, state: Mapping[str, Any]) -> None:
        """Goes on exactly where a stream was when `state()` was called there.

        The number of shards and this one's index may be others; sources, weights, seed and buffer
        decide what comes when and must be the same.
        """
        own = self._identity()
        for key, value in own.items():
            if state.get(key) != value:
                raise WhaleError(
                    f"the state is of a stream with {key} {state.get(key)!r}, this one has "
                    f"{value!r}",
                    hint="make the stream as it was made before, or start it without resuming",
                )
        self._position = int(state["position"])

    def _identity(self) -> dict[str, Any]:
        """All that decides the order of samples."""
        return {
            "seed": self._seed,
            "buffer": self._buffer,
            "sources": {
                name: [len(self._sources[name]), count]
                for name, count in zip(self._names, self._counts, strict=True)
            },
        }

    def _index(self, name: str, epoch: int, place: int) -> int:
        """The index in a source of what an epoch has at a place."""
        length = len(self._sources[name])
        order, starts = _windows(length, self._buffer, _number(self._seed, "source", name, epoch))
        nth = int(np.searchsorted(starts, place, side="right")) - 1
        first = int(order[nth]) * self._buffer
        within = _shuffled(
            min(self._buffer, length - first), _number(self._seed, "source", name, epoch, first)
        )
        return first + int(within[place - int(starts[nth])])


# Reads go on in one block and in one window of each source; the caches keep the orders of these.
# They are the module's, not the stream's, so that a stream can be sent to another process.


@lru_cache(maxsize=8)
def _block(counts: tuple[int, ...], key: int) -> tuple[Indices, Indices]:
    """For every place of a block: its source, and how many of it come before in the block."""
    which = np.repeat(np.arange(len(counts)), counts)[_shuffled(BLOCK, key)]
    before = np.empty(BLOCK, dtype=np.int64)
    for number, count in enumerate(counts):
        before[which == number] = np.arange(count)
    return which, before


@lru_cache(maxsize=64)
def _windows(length: int, buffer: int, key: int) -> tuple[Indices, Indices]:
    """The order in which an epoch goes through the windows of a source, and where each starts."""
    order = _shuffled(-(-length // buffer), key)
    lengths = np.minimum(buffer, length - order * buffer)
    return order, np.cumsum(lengths) - lengths


def _block_counts(
    sources: Mapping[str, Source[Any]], weights: Mapping[str, float] | None
) -> tuple[int, ...]:
    """How many samples of a block come from each source: largest remainders, at least one."""
    if not 1 <= len(sources) <= BLOCK:
        raise WhaleError(
            f"{len(sources)} sources; a stream is mixed from 1 to {BLOCK}",
            hint="put sources of one kind together into one",
        )
    if empty := [name for name, source in sources.items() if not len(source)]:
        raise WhaleError(
            f"source {empty[0]!r} has no samples; each needs at least one",
            hint="leave it out, or look at its selection (split, style)",
        )
    if weights is None:
        weights = {name: float(len(source)) for name, source in sources.items()}
    if set(weights) != set(sources):
        raise WhaleError(
            f"weights for {sorted(weights)}, sources {sorted(sources)}; each source needs one",
            hint="leave `weights` out to take every source by its length",
        )
    values = np.array([weights[name] for name in sources], dtype=np.float64)
    if not (np.isfinite(values) & (values > 0)).all():
        raise WhaleError(
            f"weights {dict(weights)}; each must be a number above zero",
            hint="leave out the source of which you want nothing",
        )
    # One place for each first, so that no weight is too small to be seen at all.
    exact = values / values.sum() * (BLOCK - len(values))
    counts = np.floor(exact).astype(np.int64) + 1
    short = BLOCK - int(counts.sum())
    for number in np.argsort(np.floor(exact) - exact, kind="stable")[:short]:
        counts[number] += 1
    return tuple(int(count) for count in counts)


def _number(*key: int | str) -> int:
    """64 bits that depend on the whole key; not `hash()`, which differs from process to process."""
    return int.from_bytes(hashlib.sha256(repr(key).encode("utf-8")).digest()[:8], "big")


@lru_cache(maxsize=128)
def _shuffled(length: int, key: int) -> Indices:
    """The numbers below `length` in an order that depends on `key` alone.

    Sorted by a hash of each number (the steps of SplitMix64) instead of a numpy generator, whose
    stream may change with numpy's version, and with it what a resumed run sees.
    """
    with np.errstate(over="ignore"):
        bits = (np.arange(1, length + 1, dtype=np.uint64) + np.uint64(key % 2**32)) * np.uint64(
            0x9E3779B97F4A7C15
        ) ^ np.uint64(key)
        bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        bits ^= bits >> np.uint64(31)
    return np.argsort(bits, kind="stable")
