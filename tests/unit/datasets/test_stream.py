"""A stream gives every sample once an epoch, goes on from a state, and on any number of shards."""

import json
import pickle
from collections import Counter

import pytest

from whale.datasets.stream import BLOCK, MixedStream
from whale.errors import WhaleError

SOURCES = {"a": list(range(700)), "b": [f"b{i}" for i in range(90)], "c": ["only"]}
WEIGHTS = {"a": 2.0, "b": 1.0, "c": 0.0001}


def stream(**changes):
    return MixedStream(
        **{"sources": SOURCES, "weights": WEIGHTS, "seed": 3, "buffer": 64} | changes
    )


def keys(drawn):
    return [(d.position, d.source, d.epoch, d.index, d.sample) for d in drawn]


def test_the_same_seed_gives_the_same_stream_and_another_seed_another():
    assert keys(stream().take(300)) == keys(stream().take(300))
    assert keys(stream().take(300)) != keys(stream(seed=4).take(300))
    turned = dict(reversed(SOURCES.items()))
    assert keys(stream(sources=turned).take(300)) == keys(stream().take(300))


def test_the_order_is_fixed_for_good():
    """A resumed run relies on it: a change here makes checkpoints go on with other samples."""
    assert [(d.source, d.index) for d in stream().take(8)] == [
        ("a", 471),
        ("b", 78),
        ("b", 73),
        ("b", 64),
        ("a", 475),
        ("a", 509),
        ("a", 492),
        ("b", 88),
    ]


@pytest.mark.parametrize("buffer", [1, 7, 64, 10_000])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 700])
def test_each_epoch_of_a_source_has_every_sample_once(length, buffer):
    only = MixedStream({"x": list(range(length))}, seed=1, buffer=buffer)
    for epoch in range(3):
        drawn = only.take(length)
        assert {d.epoch for d in drawn} == {epoch}
        assert sorted(d.index for d in drawn) == list(range(length))
        assert all(d.sample == d.index for d in drawn)


def test_each_source_of_a_mixture_goes_through_whole_epochs():
    seen = Counter((d.source, d.epoch, d.index) for d in stream().take(5 * BLOCK))
    assert set(seen.values()) == {1}
    whole = max(epoch for source, epoch, _ in seen if source == "a")
    assert whole >= 3
    for epoch in range(whole):
        assert {i for s, e, i in seen if (s, e) == ("a", epoch)} == set(range(700))


def test_epochs_differ_and_are_shuffled():
    only = MixedStream({"x": list(range(200))}, seed=1)
    first, second = ([d.index for d in only.take(200)] for _ in range(2))
    assert first != second
    assert first != list(range(200))
    # Of a random order about one number in 200 stays where it was.
    assert sum(i == index for i, index in enumerate(first)) < 10


def test_a_small_buffer_keeps_neighbours_together_but_mixes_windows():
    only = MixedStream({"x": list(range(1000))}, seed=1, buffer=10)
    tens = [d.index // 10 for d in only.take(1000)]
    windows = tens[::10]
    assert tens == [w for w in windows for _ in range(10)]
    assert windows != sorted(windows)


def test_every_block_has_the_weights_and_the_least_source_too():
    drawn = stream().take(3 * BLOCK)
    for start in range(0, 3 * BLOCK, BLOCK):
        counts = Counter(d.source for d in drawn[start : start + BLOCK])
        assert counts["c"] == 1
        assert abs(counts["a"] - 2 * BLOCK / 3) <= 2
        assert abs(counts["b"] - BLOCK / 3) <= 2


def test_without_weights_sources_come_by_their_length():
    counts = Counter(d.source for d in MixedStream({"a": [0] * 300, "b": [0] * 100}).take(BLOCK))
    assert abs(counts["a"] / counts["b"] - 3) < 0.02


@pytest.mark.parametrize("count", [2, 3, 8])
def test_shards_together_are_the_whole_stream(count):
    shards = [stream(shard=(i, count)).take(100) for i in range(count)]
    together = [drawn for row in zip(*shards, strict=True) for drawn in row]
    assert keys(together) == keys(stream().take(100 * count))


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 4), (4, 1), (3, 8), (8, 3)])
def test_a_run_goes_on_with_the_next_sample_on_other_shards(before, after):
    rounds = 1500 // before
    old = [stream(shard=(i, before)) for i in range(before)]
    seen = [d for row in zip(*(s.take(rounds) for s in old), strict=True) for d in row]
    states = [json.dumps(s.state()) for s in old]
    assert len(set(states)) == 1
    new = [stream(shard=(i, after)) for i in range(after)]
    for shard in new:
        shard.resume(json.loads(states[0]))
    seen += [d for row in zip(*(s.take(500) for s in new), strict=True) for d in row]
    assert keys(seen) == keys(stream().take(len(seen)))


def test_a_stream_travels_to_another_process_with_its_position():
    one = stream()
    one.take(77)
    other = pickle.loads(pickle.dumps(one))
    assert keys(other.take(5)) == keys(one.take(5))


def test_a_sample_that_fails_is_not_skipped():
    class Torn:
        broken = True

        def __len__(self):
            return 10

        def __getitem__(self, index):
            if self.broken:
                raise OSError("disk")
            return index

    source = Torn()
    torn = MixedStream({"x": source})
    with pytest.raises(OSError, match="disk"):
        next(torn)
    source.broken = False
    assert next(torn).position == 0


def test_the_randomness_of_a_sample_is_its_own():
    only = MixedStream({"x": [0, 1]}, seed=5)
    draws = [d.generator().random() for d in only.take(6)]
    again = MixedStream({"x": [0, 1]}, seed=5, shard=(1, 2))
    assert len(set(draws)) == 6
    assert [d.generator().random() for d in again.take(3)] == draws[1::2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shard": (2, 2)}, "shard 2 of 2"),
        ({"buffer": 0}, "buffer of 0"),
        ({"sources": {}, "weights": None}, "0 sources"),
        ({"sources": SOURCES | {"d": []}}, "'d' has no samples"),
        ({"weights": {"a": 1.0}}, r"weights for \['a'\], sources \['a', 'b', 'c'\]"),
        ({"weights": WEIGHTS | {"a": 0.0}}, "above zero"),
        ({"weights": WEIGHTS | {"a": float("nan")}}, "above zero"),
    ],
)
def test_wrong_arguments_are_refused(changes, message):
    with pytest.raises(WhaleError, match=message):
        stream(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 9}, "seed 3, this one has 9"),
        ({"buffer": 65}, "buffer 64, this one has 65"),
        ({"weights": WEIGHTS | {"a": 5.0}}, "sources"),
        ({"sources": SOURCES | {"a": [1]}}, "sources"),
    ],
)
def test_a_state_of_another_stream_is_refused(changes, message):
    other = stream(**changes)
    with pytest.raises(WhaleError, match=message):
        other.resume(stream().state())
