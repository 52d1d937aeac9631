"""Small models under small layouts, and faults to plant in Whale: what the verifier must find.

A fault is planted in this process by monkeypatching and reaches the ranks by fork. It works only
where there is a process group, so that the one-device run, which has none, stays true.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import whale as wh
from whale.engine import step, updating
from whale.engine.checkpoint import gather
from whale.engine.lower import loss_parts, weights
from whale.engine.lower import lowered as lower
from whale.nn import batch_norm, column_shard, dropout, sharded
from whale.runtime import batch as batches
from whale.runtime import buckets, collectives, executor, grads, weighing
from whale.runtime.groups import Communicator, communicator

Plant = Callable[[pytest.MonkeyPatch], None]


def rank() -> int:
    """This process's rank; -1 outside a job, where faults must sleep."""
    return dist.get_rank() if dist.is_initialized() else -1


# ---- models --------------------------------------------------------------------------------------


class Residual(nn.Module):
    """Two Linear layers that split as a pair."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 8)
        self.act = nn.GELU()
        self.down = nn.Linear(8, dim)
        nn.init.normal_(self.down.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class Language(nn.Module):
    """Embedding, a residual pair, a head: everything a split or a tied weight needs."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.emb = nn.Embedding(12, 6)
        self.mlp = Residual(6)
        self.head = nn.Linear(6, 12, bias=not tied)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.mlp(self.emb(ids)))


class Join(nn.Linear):
    """A layer that reads two values."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(torch.tanh(x) + y)


class Skip(nn.Module):
    """The first layer's output is read by the second and by the third."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), Join(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        return self.c(self.b(first), first)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 5))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5))


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 5))


def gathered() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 5))


def vectors(rows: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels, of which some do not count: replicas have different counts."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 5, (rows,), generator=generator)
    labels[1] = -100
    return torch.randn(rows, 6, generator=generator), labels


def tokens(rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(0, 12, (rows, 3), generator=generator)
    labels[0, :2] = -100
    return torch.randint(0, 12, (rows, 3), generator=generator), labels


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


@dataclass(frozen=True)
class Case:
    """A model, how it is annotated, and on how many devices it runs."""

    build: Callable[[], nn.Module]
    entries: Callable[[], dict[str, Any]]
    batch: Any
    num_ranks: int = 2
    speeds: tuple[float, ...] | None = None
    config: dict[str, Any] = field(default_factory=dict)
    loss: Callable[[Any, Any], Tensor] | None = cross_entropy

    def model(self) -> nn.Module:
        """The same annotated model every time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return wh.annotate(self.build(), self.entries())


def replicated() -> dict[str, Any]:
    return {"": wh.replicate()}


def split() -> dict[str, Any]:
    return {"": wh.split()}


def staged(*patterns: str) -> Callable[[], dict[str, Any]]:
    return lambda: {pattern: wh.stage() for pattern in patterns}


MICRO_2 = {"pipeline.num_micro_batch": 2}
CASES: dict[str, Case] = {
    "data": Case(plain, replicated, vectors(5), config={"communication.bucket_bytes": 300}),
    "even": Case(plain, replicated, vectors(4)),
    "accumulate": Case(plain, replicated, vectors(6), config=MICRO_2),
    "norm": Case(normed, replicated, vectors(5), speeds=(2.0, 1.0)),
    "dropout": Case(dropping, replicated, vectors(5)),
    "tensor": Case(Language, split, tokens(4), speeds=(2.0, 1.0)),
    "tensor-even": Case(Language, split, tokens(4)),
    "gather": Case(gathered, split, vectors(4)),
    "clip": Case(Language, split, tokens(4), config={"optimizer.max_grad_norm": 0.01}),
    "tied": Case(lambda: Language(tied=True), staged("emb|mlp", "head"), tokens(4), config=MICRO_2),
    "pipeline": Case(
        Skip, staged("a|b", "c"), vectors(4), config={**MICRO_2, "pipeline.schedule": "gpipe"}
    ),
    "zero-bubble": Case(
        Skip, staged("a|b", "c"), vectors(4), config={**MICRO_2, "pipeline.schedule": "zero-bubble"}
    ),
    "skip": Case(Skip, staged("a", "b", "c"), vectors(4), num_ranks=3, config=MICRO_2),
}


# ---- gradients -----------------------------------------------------------------------------------


def _drop_buckets(*names: str) -> Plant:
    """The all-reduce of the buckets that hold these parameters does not happen; none: of all."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        launch = buckets.WholeBucket.launch

        def faulty(self: Any, *args: Any) -> None:
            if names and not self.names & set(names):
                launch(self, *args)

        monkeypatch.setattr(buckets.WholeBucket, "launch", faulty)

    return plant


def _after_wait(spoil: Callable[[Any], None]) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        wait = grads.GradientBuckets.wait

        def faulty(self: Any) -> None:
            wait(self)
            if rank() == 1:
                spoil(self)

        monkeypatch.setattr(grads.GradientBuckets, "wait", faulty)

    return plant


def _scale(change: Callable[[Tensor], Tensor]) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        scale = grads.GradientBuckets.scale
        monkeypatch.setattr(
            grads.GradientBuckets,
            "scale",
            lambda self, factor, names: scale(self, change(factor), names),
        )

    return plant


def _count(change: Callable[[Tensor, int], Tensor]) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        class Faulty(weighing.MeanTracker):
            def weigh(self, *args: Any, **kwargs: Any) -> weighing.Weighed:
                found = super().weigh(*args, **kwargs)
                count = change(found.count, self.rows)
                total = found.total * (count / found.count).to(found.total.dtype)
                return replace(found, total=total, count=count)

        monkeypatch.setattr(loss_parts, "MeanTracker", Faulty)

    return plant


def _local_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of squares, the one scalar that a training step sums by itself, stays this rank's."""
    total = step.Step._sum

    def local(self: step.Step, numbers: Tensor) -> Tensor:
        mine = numbers[0].clone()
        summed = total(self, numbers)
        if len(summed) != 3:  # the sums of an evaluation's loss
            summed[0] = mine
        return summed

    monkeypatch.setattr(step.Step, "_sum", local)


# ---- the executor --------------------------------------------------------------------------------


def _lost_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    backward = executor.Executor._backward_of

    def faulty(self: Any, action: Any) -> None:
        if action.micro_batch == self.plan.num_micro_batch - 1:
            self._flights.pop((action.stage, action.micro_batch))
        else:
            backward(self, action)

    monkeypatch.setattr(executor.Executor, "_backward_of", faulty)


def _lost_weight_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    run = executor.Executor._weight_gradients

    def faulty(self: Any, action: Any) -> None:
        if action.micro_batch == 0:
            self._deferred.pop((action.stage, action.micro_batch))
        else:
            run(self, action)

    monkeypatch.setattr(executor.Executor, "_weight_gradients", faulty)


def _shifted_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = executor.Executor._rows

    def faulty(self: Any, stage: int, micro_batch: int) -> tuple[int, int, int]:
        size, start, end = rows(self, stage, micro_batch)
        return (size, start, end) if micro_batch else (size, start + 1, end + 1)

    monkeypatch.setattr(executor.Executor, "_rows", faulty)


def _swapped_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two equal replicas gets the other's inputs beside its own labels."""
    take = batches.take_rows

    def faulty(batch: Any, low: int, high: int, device: Any = None) -> Any:
        part = take(batch, low, high, device)
        if rank() < 0 or high - low != 2:
            return part
        other = (low + 2) % 4
        return (take(batch, other, other + 2, device)[0], part[1])

    monkeypatch.setattr(batches, "take_rows", faulty)


def _no_border_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    send = executor.Executor._send

    def faulty(self: Any, kind: str, producer: int, consumer: int, micro_batch: int) -> None:
        if kind == "B":
            for key, value in self._local.items():
                if key[:4] == ("B", producer, micro_batch, consumer):
                    value.zero_()
        send(self, kind, producer, consumer, micro_batch)

    monkeypatch.setattr(executor.Executor, "_send", faulty)


def _overwritten_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    take = executor.Executor._take

    def faulty(
        self: Any, kind: str, stage: int, micro_batch: int, other: int, value: int
    ) -> Tensor:
        got = take(self, kind, stage, micro_batch, other, value)
        readers = [t for t, values in self._stages[stage].outgoing.items() if value in values]
        return got * 0 if kind == "B" and other != max(readers) else got

    monkeypatch.setattr(executor.Executor, "_take", faulty)


# ---- split modules -------------------------------------------------------------------------------


def _replace(module: Any, name: str, value: Any) -> Plant:
    return lambda monkeypatch: monkeypatch.setattr(module, name, value)


def _shifted_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    take = weights.take

    def faulty(tensor: Tensor, piece: Any) -> Tensor:
        if rank() != 1 or piece.whole:
            return take(tensor, piece)
        return take(tensor.roll(1, piece.dims[0][0]), piece)

    monkeypatch.setattr(weights, "take", faulty)


def _bias_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(self: Any, x: Tensor) -> Tensor:
        self.shared.clear()
        return self.shard.leave(sharded.product(self.module, x, self.module.bias))

    monkeypatch.setattr(sharded.Row, "__call__", faulty)


def _reversed_gather(x: Tensor, dim: int, sizes: list[int], group: str) -> Tensor:
    parts = communicator(group).all_gather(x, dim, sizes).split(sizes, dim)
    index = communicator(group).index
    # Only the own shard has a gradient, as in the true one.
    return torch.cat([x if i == index else p for i, p in reversed([*enumerate(parts)])], dim)


def _embedding_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    look_up = sharded.look_up

    def faulty(module: Any, ids: Tensor, padding: Any) -> Tensor:
        return look_up(module, (ids + (rank() == 1)) % module.weight.shape[0], padding)

    monkeypatch.setattr(sharded, "look_up", faulty)


def _losses(*, local_sum: bool, local_max: bool) -> Callable[..., Tensor]:
    """Vocabulary-parallel cross-entropy that forgets to ask the other shards."""

    def faulty(x: Any, target: Tensor, ignore_index: int) -> Tensor:
        shard, local = x.shard, x.local
        low = shard.low * (x.shape[-1] // shard.cuts[-1])
        valid = target != ignore_index
        own = valid & (target >= low) & (target < low + local.shape[-1])
        top = local.detach().max(-1, keepdim=True).values
        if not local_max:
            top = communicator(shard.group).all_gather(top, 1, [1, 1]).max(-1, keepdim=True).values
        shifted = local - top
        total = shifted.exp().sum(-1)
        total = total if local_sum else collectives.leave(total, shard.group)
        index = torch.where(own, target - low, torch.zeros_like(target))
        picked = shifted.gather(1, index.unsqueeze(1)).squeeze(1) * own
        return (total.log() - collectives.leave(picked, shard.group)) * valid

    return faulty


# ---- state ---------------------------------------------------------------------------------------


def _local_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch norm hears nothing of the others, neither in forward nor in backward."""
    monkeypatch.setattr(batch_norm, "gather", lambda x, dim, sizes, group: x)
    monkeypatch.setattr(batch_norm, "all_sum", lambda x, group: x)


def _no_tracking(monkeypatch: pytest.MonkeyPatch) -> None:
    track = batch_norm.SyncedBatchNorm._track

    def faulty(self: Any, *args: Any) -> None:
        if rank() != 1:
            track(self, *args)

    monkeypatch.setattr(batch_norm.SyncedBatchNorm, "_track", faulty)


def _optimizer(spoil: Callable[[torch.optim.Optimizer], None]) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        make = updating._made

        def faulty(*args: Any) -> torch.optim.Optimizer:
            made = make(*args)
            if rank() == 1:
                spoil(made)
            return made

        monkeypatch.setattr(updating, "_made", faulty)

    return plant


def _double_decay(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["weight_decay"] *= 2


def _no_step(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign, assignment]


def _other_start(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = lower.local_copy

    def faulty(*args: Any) -> Any:
        local, held = copy(*args)
        if rank() == 1:
            held.params["2.weight"].data[3, 1] += 1e-6
        return local, held

    monkeypatch.setattr(lower, "local_copy", faulty)


def _local_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = dropout.position_mask

    def faulty(x: Tensor, p: float, key: int, context: Any, *rest: Any) -> Tensor:
        if rank() >= 0:
            context = replace(context, first_row=0)
        return mask(x, p, key, context, *rest)

    monkeypatch.setattr(dropout, "position_mask", faulty)


def _bad_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    share = gather.Gatherer._share
    monkeypatch.setattr(gather.Gatherer, "_share", lambda *args: share(*args).flip(0))


# ---- the table -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A fault, and what must go wrong first: what kind of tensor, which of them, on which ranks."""

    case: str
    plant: Plant
    kind: str
    tensors: Collection[str] = ()
    """Exactly the tensors of that kind that differ then; none: left open."""
    ranks: tuple[int, ...] | None = None
    first_step: int = 1


ALL_PLAIN = [f"{i}.{which}" for i in (0, 2, 4) for which in ("weight", "bias")]


def _alone(_: Communicator, tensor: Tensor) -> tuple[Tensor, None]:
    """A sum that adds nobody else's part."""
    return tensor.clone(), None


FAULTS: dict[str, Fault] = {
    "one bucket not reduced": Fault(
        "data", _drop_buckets("2.weight"), "gradient", ["2.weight", "2.bias"], (0, 1)
    ),
    "no bucket reduced": Fault("data", _drop_buckets(), "gradient", ALL_PLAIN, (0, 1)),
    "gradient doubled on one rank": Fault(
        "data", _after_wait(lambda g: g.params["0.weight"].grad.mul_(2)), "gradient",
        ["0.weight"], (1,),
    ),
    "divided by N twice": Fault(
        "data", _scale(lambda factor: factor / 2), "gradient", ALL_PLAIN, (0, 1)
    ),
    "not divided by the count": Fault(
        "data", _scale(torch.ones_like), "gradient", ALL_PLAIN, (0, 1)
    ),
    "count of rows, not of valid labels": Fault(
        "data", _count(lambda count, rows: torch.tensor(float(rows))), "loss", ["loss"], (0, 1)
    ),
    "wrong count on one rank": Fault(
        "data", _count(lambda count, rows: count + (rank() == 1)), "loss", ["loss"], (0, 1)
    ),
    "tied weight not summed over stages": Fault(
        "tied", _drop_buckets("emb.weight"), "gradient", ["emb.weight"], (0, 1)
    ),
    "last micro-batch lost": Fault("accumulate", _lost_backward, "gradient", ALL_PLAIN, (0, 1)),
    "weight gradients of a micro-batch lost": Fault(
        "zero-bubble", _lost_weight_gradients, "gradient",
        ["a.weight", "a.bias", "b.weight", "b.bias"], (0,),
    ),
    "rows off by one": Fault("accumulate", _shifted_rows, "loss", ["loss"], (0, 1)),
    "inputs of two replicas swapped": Fault("even", _swapped_rows, "loss", ["loss"], (0, 1)),
    "cut shifted by one unit": Fault(
        "tensor", _shifted_cut, "weight",
        ["emb.weight", "mlp.up.weight", "mlp.up.bias", "mlp.down.weight", "head.weight",
         "head.bias"], (1,), first_step=0,
    ),
    "row split's bias on every rank": Fault(
        "tensor", _bias_on_every_rank, "loss", ["loss"], (0, 1)
    ),
    "enter without its backward sum": Fault(
        "tensor", _replace(Communicator, "start_all_reduce", _alone), "gradient",
        ["emb.weight", "mlp.up.weight", "mlp.up.bias", "mlp.down.weight", "mlp.down.bias"], (0, 1),
    ),
    "leave without its sum": Fault(
        "tensor", _replace(collectives, "leave", lambda x, group: x), "loss", ["loss"], (0, 1)
    ),
    "gather in the wrong order": Fault(
        "gather", _replace(collectives, "gather", _reversed_gather), "loss", ["loss"], (0, 1)
    ),
    "embedding shard's offset": Fault("tensor", _embedding_offset, "loss", ["loss"], (0, 1)),
    "vocabulary loss with a local sum": Fault(
        "tensor-even",
        _replace(column_shard, "_losses", _losses(local_sum=True, local_max=False)),
        "loss", ["loss"], (0, 1),
    ),
    "vocabulary loss with a local maximum": Fault(
        "tensor-even",
        _replace(column_shard, "_losses", _losses(local_sum=False, local_max=True)),
        "loss", ["loss"], (0, 1),
    ),
    "batch norm of local statistics": Fault(
        "norm", _local_statistics, "loss", ["loss"], (0, 1)
    ),
    "running mean not tracked on one rank": Fault(
        "norm", _no_tracking, "buffer",
        ["1.running_mean", "1.running_var", "1.num_batches_tracked"], (1,),
    ),
    "border gradient dropped": Fault(
        "pipeline", _no_border_gradient, "gradient",
        ["a.weight", "a.bias", "b.weight", "b.bias"], (0,),
    ),
    "skip edge's gradient overwritten": Fault(
        "skip", _overwritten_skip, "gradient", ["a.weight", "a.bias"], (0,)
    ),
    "norm of local shards only": Fault("clip", _local_norm, "gradient", (), (0, 1)),
    "weight decay twice on one rank": Fault(
        "data", _optimizer(_double_decay), "weight", ALL_PLAIN, (1,)
    ),
    "update skipped on one rank": Fault("data", _optimizer(_no_step), "weight", ALL_PLAIN, (1,)),
    "other initial weights on one rank": Fault(
        "data", _other_start, "weight", ["2.weight"], (1,), first_step=0
    ),
    "dropout keyed by the local row": Fault("dropout", _local_masks, "loss", ["loss"], (0, 1)),
    "gathered tensors in the wrong order": Fault(
        "tensor-even", _bad_gather, "gradient", (), (0, 1), first_step=2
    ),
}  # fmt: skip
