"""`wh.shard`: each rank reads its own rows, nothing is lost or doubled, losses stay the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

import whale as wh
from tests.parity.layouts import LAYOUTS, LayerPaths
from tests.ranks import run_ranks
from whale.errors import WhaleError
from whale.ir.rows import needed_rows
from whale.runtime.batch import LazyBatch, LocalBatch, num_rows, take_rows

pytestmark = pytest.mark.usefixtures("untried")

SAMPLES = 20
ROWS = 6  # the last batch has 2: fewer than replicas, and than micro-batches
DIM = 5
SGD = partial(torch.optim.SGD, lr=0.1)
LAYOUT_NAMES = ("data-uneven", "accumulate-uneven", "widths", "data-pipeline-uneven")
QUICK = ("accumulate-uneven", "data-pipeline-uneven")

Sample = dict[str, Tensor]


def sample(index: int) -> Sample:
    generator = torch.Generator().manual_seed(index)
    x, y = torch.randn(2, DIM, generator=generator, dtype=torch.float64)
    return {"x": x, "y": y, "ids": torch.tensor(index)}


class Samples(Dataset[Sample]):
    """Keeps which samples were read in this process."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Sample:
        self.read.append(int(index))
        return sample(index)


class Stream(IterableDataset[Sample]):
    """The same samples in order."""

    def __iter__(self) -> Iterator[Sample]:
        return (sample(i) for i in range(SAMPLES))


class Model(nn.Module):
    """Returns which samples it saw, and the loss of each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor, ids: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        each = F.mse_loss(x, y, reduction="none").sum(1)
        return {"loss": each.mean(), "each": each, "ids": ids}


def whole_batch(rows: int = ROWS) -> dict[str, Tensor]:
    return torch.utils.data.default_collate([sample(i) for i in range(rows)])


def make_step(layout_name: str, more: dict[str, Any] | None = None) -> wh.Step:
    layout = LAYOUTS[layout_name]
    torch.manual_seed(0)
    model, batch = Model().double(), whole_batch()
    layout.annotate(model, LayerPaths(model, batch, None))
    return wh.parallelize(
        model,
        optimizer=SGD,
        batch=batch,
        config={**layout.config, **(more or {})},
        cluster=layout.cluster(),
        outputs={"ids": wh.concat, "each": wh.concat},
    )


def run_epoch(step: wh.Step, loader: Any) -> dict[str, Any]:
    """An epoch: losses, and what each sample lost."""
    losses, ids, each, evals = [], [], [], []
    for batch in loader:
        evals.append(float(step.evaluate(batch)["loss"]))
        metrics = step(batch)
        losses.append(float(metrics["loss"]))
        ids += metrics["ids"].tolist()
        each += metrics["each"].tolist()
    return {"losses": losses, "ids": ids, "each": each, "evals": evals}


def train_all_ways(layout_name: str, with_workers: bool) -> dict[str, Any]:
    """The same epoch from whole global batches, and from every kind of source."""
    wh.init()
    found: dict[str, Any] = {}

    def one_way(name: str, make: Any) -> None:
        step = make_step(layout_name)
        found[name] = run_epoch(step, make(step))
        found["plan"], found["rank"] = step.plan, step.rank
        step.close()

    counted = Samples()
    one_way("whole", lambda step: DataLoader(Samples(), ROWS))
    one_way("map", lambda step: wh.shard(DataLoader(counted, ROWS)))
    found["read"] = counted.read
    one_way("bound", lambda step: wh.shard(DataLoader(Samples(), ROWS), step))
    one_way("stream", lambda step: wh.shard(DataLoader(Stream(), ROWS)))
    one_way("list", lambda step: wh.shard(list(DataLoader(Samples(), ROWS)), step))
    if with_workers:
        one_way("workers", lambda step: wh.shard(DataLoader(Samples(), ROWS, num_workers=1)))
    return found


@pytest.mark.parametrize(
    "layout_name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in LAYOUT_NAMES],
)
def test_every_source_trains_as_the_whole_batch(layout_name: str) -> None:
    layout = LAYOUTS[layout_name]
    with_workers = layout_name == "accumulate-uneven"
    results = run_ranks(layout.num_ranks, train_all_ways, layout_name, with_workers, timeout=110.0)
    computed: dict[int, Counter[int]] = {}
    for rank, result in enumerate(results):
        whole = result["whole"]
        assert whole["ids"] == list(range(SAMPLES))
        assert len(whole["losses"]) == 4
        ways = {"map", "bound", "stream", "list"} | ({"workers"} if with_workers else set())
        for way in ways:
            assert result[way] == whole, (rank, way)
        expected = []
        for first in range(0, SAMPLES, ROWS):
            rows = min(ROWS, SAMPLES - first)
            spans = needed_rows(result["plan"], rank, rows)
            mine = [first + i for low, high in spans for i in range(low, high)]
            expected += mine or [first]
            for stage in result["plan"].stages_of(rank):
                computed.setdefault(stage, Counter()).update(mine)
        assert result["read"] == expected, rank
        assert layout.num_ranks == 1 or len(expected) < SAMPLES or layout_name == "widths"
    for stage, counts in computed.items():
        assert counts == Counter(range(SAMPLES)), stage


def shuffle_alike(rank_seeds: bool) -> dict[str, Any]:
    wh.init()
    step = make_step("data-uneven")
    # Nothing that ranks share by accident may be what makes them agree.
    torch.manual_seed(step.rank if rank_seeds else 0)
    weights = torch.arange(1.0, SAMPLES + 1)
    loaders = {
        "shuffle": DataLoader(Samples(), ROWS, shuffle=True),
        "bare batch sampler": DataLoader(
            Samples(), batch_sampler=BatchSampler(RandomSampler(range(SAMPLES)), ROWS, False)
        ),
        "weighted": DataLoader(Samples(), ROWS, sampler=WeightedRandomSampler(weights.tolist(), 9)),
        "generator": DataLoader(
            Samples(), ROWS, shuffle=True, generator=torch.Generator().manual_seed(3)
        ),
    }
    found: dict[str, Any] = {}
    for name, loader in loaders.items():
        sharded = wh.shard(loader)
        found[name] = [run_epoch(step, sharded)["ids"] for _ in range(2)]
        if name == "shuffle":
            assert loader.sampler.generator is None
            sharded.set_epoch(0)
            found["again"] = run_epoch(step, sharded)["ids"]
            found["other seed"] = run_epoch(step, wh.shard(loader, seed=1))["ids"]
    step.close()
    return found


def test_ranks_shuffle_alike_and_anew_each_epoch() -> None:
    results = run_ranks(3, shuffle_alike, True)
    assert results[0] == results[1] == results[2]
    assert run_ranks(3, shuffle_alike, False) == results
    for name in ("shuffle", "bare batch sampler", "generator"):
        first, second = results[0][name]
        assert sorted(first) == sorted(second) == list(range(SAMPLES)), name
        assert first != second, name
    first = results[0]["shuffle"][0]
    assert first == results[0]["again"]
    # Epoch 1 of seed 0 is epoch 0 of seed 1: a sum, as in torch's own samplers.
    assert results[0]["other seed"] == results[0]["shuffle"][1] != first
    generator = torch.Generator().manual_seed(3)
    plain = DataLoader(Samples(), ROWS, shuffle=True, generator=generator).batch_sampler
    assert results[0]["generator"][0] == [i for batch in plain for i in batch]


def drop_last_everywhere() -> dict[str, Any]:
    wh.init()
    found: dict[str, Any] = {}
    for name, config in (("kept", {}), ("dropped", {"io.drop_last": True})):
        step = make_step("data-uneven", config)
        for way, passed in (("late", None), ("bound", step)):
            sharded = wh.shard(DataLoader(Samples(), ROWS), passed)
            found[name, way] = run_epoch(step, sharded)["ids"]
            found[name, way, "len"] = len(sharded)
            source = wh.shard([whole_batch(2), whole_batch(6), whole_batch(2)], passed)
            found[name, way, "list"] = len(run_epoch(step, source)["losses"])
        found[name, "one"] = len(run_epoch(step, wh.shard([whole_batch(2)], step))["losses"])
        if name == "kept":
            loader = DataLoader(Samples(), ROWS, drop_last=True)
            found["loader"] = run_epoch(step, wh.shard(loader))["ids"]
        step.close()
    return found


def test_a_short_last_batch_is_kept_unless_told() -> None:
    for result in run_ranks(3, drop_last_everywhere):
        for way in ("late", "bound"):
            assert result["kept", way] == list(range(SAMPLES))
            assert result["kept", way, "len"] == 4
            assert result["kept", way, "list"] == 3
            assert result["dropped", way] == list(range(18))
            assert result["dropped", way, "len"] == 3
            assert result["dropped", way, "list"] == 2
        assert result["kept", "one"] == result["dropped", "one"] == 1
        assert result["loader"] == list(range(18))


def test_a_batch_is_read_when_asked_for_and_once() -> None:
    step = make_step("one")
    data = Samples()
    sharded = wh.shard(DataLoader(data, ROWS))
    first, second, third = islice(sharded, 3)
    assert isinstance(first, LazyBatch)
    assert (first.total_rows, data.read) == (ROWS, [])
    # The second is skipped at first and read out of order; an old epoch's batch still reads.
    assert torch.equal(third.local(step).data["ids"], torch.arange(12, 18))
    assert torch.equal(first.local(step).data["ids"], torch.arange(6))
    list(sharded)
    assert torch.equal(second.local(step).data["ids"], torch.arange(6, 12))
    assert sorted(data.read) == list(range(18))
    third.local(step)
    assert len(data.read) == 18
    step.close()


def test_the_users_loader_settings_are_kept() -> None:
    step = make_step("one")

    def collate(samples: list[Sample]) -> tuple[Tensor, Tensor]:
        return torch.stack([s["x"] for s in samples]), torch.ones(99)

    loader = DataLoader(
        Samples(), batch_sampler=BatchSampler(SequentialSampler(range(9)), 4, False),
        collate_fn=collate, num_workers=1, persistent_workers=True, prefetch_factor=3,
    )  # fmt: skip
    sharded = wh.shard(loader, step)
    for _ in range(2):
        sizes = [(b.total_rows, b.data[0].shape[0], b.batched) for b in sharded]
        assert sizes == [(4, 4, (True, False)), (4, 4, (True, False)), (1, 1, (True, False))]
    step.close()


def test_what_each_rank_would_see_apart_is_refused() -> None:
    sampler: Any = DistributedSampler(Samples(), num_replicas=2, rank=0)
    with pytest.raises(WhaleError, match="DistributedSampler") as error:
        wh.shard(DataLoader(Samples(), ROWS, sampler=sampler))
    assert "global batch size" in str(error.value.hint)


def test_a_collate_without_rows_is_refused() -> None:
    step = make_step("one")

    def packed(samples: list[Sample]) -> Tensor:
        return torch.cat([s["x"] for s in samples])

    with pytest.raises(WhaleError, match=r"given 6 samples and returned .*\(30,\)"):
        step(next(iter(wh.shard(DataLoader(Samples(), ROWS, collate_fn=packed)))))
    step.close()


def test_a_part_where_the_whole_is_needed_is_refused() -> None:
    lazy = next(iter(wh.shard(DataLoader(Samples(), ROWS))))
    with pytest.raises(WhaleError, match="LazyBatch stands where a whole global batch") as error:
        wh.parallelize(Model().double(), optimizer=SGD, batch=lazy)
    assert "next(iter(loader))" in str(error.value.hint)


def test_rows_of_a_local_batch() -> None:
    data = {"x": torch.arange(5), "scale": torch.ones(2)}
    batch = LocalBatch(data=data, total_rows=9, rows=((1, 3), (5, 8)), batched=(True, False))
    assert num_rows(batch) == 9
    assert take_rows(batch, 5, 7)["x"].tolist() == [2, 3]
    assert take_rows(batch, 1, 3)["scale"].shape == (2,)
    assert take_rows(batch, 4, 4)["x"].shape == (0,)
    with pytest.raises(WhaleError, match=r"rows 2 to 6 .* \[\(1, 3\), \(5, 8\)\] of 9") as error:
        take_rows(batch, 2, 6)
    assert "another plan" in str(error.value.hint)
