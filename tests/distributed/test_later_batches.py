"""Losses beside a plain loop, over batches that have something in them which the first had not."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import whale as wh
from tests.distributed.beside import sgd
from tests.ranks import run_ranks

ROWS, IN, WIDTH, OUT = 6, 5, 7, 4
REPLICAS = {"": wh.replicate()}
STAGES = {"a": wh.stage(), "head": wh.stage()}
SPLIT = {"head": wh.split()}
TWO = {"pipeline.num_micro_batch": 2}
Loss = Callable[[Any, Any], Tensor] | None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(IN, WIDTH), nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.a(x)))


def compared(
    model: nn.Module,
    loss: Loss,
    data: Sequence[Any],
    layout: Mapping[str, Any] = REPLICAS,
    config: Mapping[str, Any] | None = None,
    evaluated: Sequence[Any] = (),
) -> str | float:
    """The greatest difference of a loss or of a tensor of the state, or the text of the refusal."""

    def run(net: nn.Module, given: Any) -> Tensor:
        given = copy.deepcopy(given)
        return net(*given) if loss is None else loss(net(*given[:-1]), given[-1])

    model = model.double()
    plain = copy.deepcopy(model)
    optimizer, wanted = sgd(plain.parameters()), []
    for given in data:
        optimizer.zero_grad()
        value = run(plain, given)
        value.backward()
        optimizer.step()
        wanted.append(value.item())
    with torch.no_grad():
        plain.eval()
        wanted += [run(plain, given).item() for given in evaluated]
    step = None
    try:
        step = wh.parallelize(
            wh.annotate(model, layout),
            optimizer=sgd,
            batch=data[0],
            loss=loss,
            config={"timeout_seconds": 20, **(config or {})},
        )
        found = [float(step(copy.deepcopy(given))["loss"]) for given in data]
        found += [float(step.evaluate(given)["loss"]) for given in evaluated]
        state = step.state_dict()
    except wh.WhaleError as error:
        assert error.hint
        return str(error)
    finally:
        if step is not None:
            step.close(forget=True)
    pairs = zip(found, wanted, strict=True)
    far = [0.0 if math.isnan(a) and math.isnan(b) else abs(a - b) for a, b in pairs]
    far += [float((state[k] - v).abs().max()) for k, v in plain.state_dict().items()]
    return max(far) if not any(map(math.isnan, far)) else float("inf")


# ---- batches ---------------------------------------------------------------------------------


def numbers(seed: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    drawn = torch.randn(rows, IN + OUT, generator=torch.Generator().manual_seed(seed))
    return drawn[:, :IN].double(), drawn[:, IN:].double()


def ids(seed: int, same: bool = False, rows: int = ROWS) -> Tensor:
    found = torch.randperm(30, generator=torch.Generator().manual_seed(seed))[:rows]
    if same:
        found[-1] = found[0]
    return found


def with_ids(seed: int, same: bool = False) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    x, y = numbers(seed)
    return x, (y, ids(seed, same))


def labelled(seed: int, valid: bool = True, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(OUT, (rows,), generator=generator)
    return numbers(seed, rows)[0], labels if valid else torch.full_like(labels, -100)


def large(seed: int) -> tuple[Tensor, Tensor]:
    """One large number in the rows of each of two replicas."""
    x, y = numbers(seed)
    y[0, 0] = y[-1, 0] = 40.0
    return x, y


def flagged(seed: int, flag: bool) -> tuple[Tensor, Tensor, Tensor]:
    return *numbers(seed), torch.tensor(flag)


def sized(seed: int, sizes: list[int]) -> tuple[Tensor, Tensor]:
    """Beyond its size, a row has nines."""
    x, y = numbers(seed)
    return x, y.masked_fill(torch.arange(OUT)[None] >= torch.tensor(sizes)[:, None], 9.0)


# ---- rows that interact where they are alike ---------------------------------------------------


def one_session(out: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    """Scores of rows with one id are pulled together."""
    y, session = target
    same = torch.triu(session[:, None] == session[None], diagonal=1)
    apart = (out[:, None] - out[None]).square().sum(-1)
    return F.mse_loss(out, y) + (apart * same).sum() / len(out)


def once_each(out: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    """Rows of one id share a weight."""
    y, session = target
    often = (session[:, None] == session[None]).sum(1)
    return ((out - y).square().mean(1) / often).mean()


class Table(Net):
    """An id is looked up by itself."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table, self.options = nn.Parameter(torch.randn(30, IN)), options

    def forward(self, found: Tensor) -> Tensor:
        return super().forward(F.embedding(found, self.table, **self.options))


def alike() -> dict[str, Any]:
    later = [with_ids(0), with_ids(1), with_ids(2, same=True)]
    looked_up = [(ids(i, i > 1), labelled(i)[1]) for i in range(3)]
    return {
        "one session": compared(Net(), one_session, later),
        "one session in stages": compared(Net(), one_session, later, STAGES, TWO),
        "once each": compared(Net(), once_each, later),
        "by frequency": compared(Table(scale_grad_by_freq=True), F.cross_entropy, looked_up),
        "plain table": compared(Table(), F.cross_entropy, looked_up),
    }


# ---- what later batches have in them -----------------------------------------------------------


def two_large(out: Tensor, y: Tensor) -> Tensor:
    """Half as much where two numbers are large: no replica alone has two."""
    value = F.mse_loss(out, y)
    return value / 2 if (y.numpy() > 30.0).sum() > 1 else value


class Evaluates(Net):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if not self.training and len(x[x > 30.0]):
            out = out - out.mean(0)
        return out


class Counts(Net):
    """Its fourth forward sees all rows at once, and replicas tell each other two counts."""

    times: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("times", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        self.times += 1
        out = super().forward(x)
        if self.times == 4:
            out = out - out.mean(0)
        return F.cross_entropy(out, labels) + 0.1 * out.square().mean()


class Sizes(Net):
    """A mean over as many elements of each row as it says, beside one over all."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        far = (super().forward(x) - y).square()
        sizes = (y != 9.0).sum(1).tolist()
        picked = torch.cat([row[:size] for row, size in zip(far, sizes, strict=True)])
        return picked.mean() + far.sqrt().mean()


class Flagged(Net):
    def __init__(self, other: float) -> None:
        super().__init__()
        self.other = other

    def forward(self, x: Tensor, y: Tensor, flag: Tensor) -> Tensor:
        out = super().forward(x)
        more = torch.where(flag, out.abs().mean(), torch.full((), self.other).double())
        return F.mse_loss(out, y) + more


def something_new() -> dict[str, Any]:
    huge = (numbers(7)[0] * 100, numbers(7)[1])
    flags = [flagged(i, flag) for i, flag in enumerate((True, True, False, True))]
    full, halves = [OUT] * ROWS, [4, 4, 4, 2, 2, 2]
    return {
        "two large": compared(Net(), two_large, [numbers(0), numbers(1), large(2)]),
        "evaluated": compared(Evaluates(), F.mse_loss, [numbers(0)], evaluated=[huge]),
        "counts": compared(Counts(), None, [labelled(i) for i in range(5)]),
        "sizes": compared(Sizes(), None, [sized(0, full), sized(1, full), sized(2, halves)]),
        "all sizes alike": compared(Sizes(), None, [sized(0, full), sized(1, full)]),
        "flag": compared(Flagged(0.0), None, flags),
        "flag or a number": compared(Flagged(0.3), None, flags),
        "flag in stages": compared(Flagged(0.3), None, flags, STAGES, TWO),
        "softplus": compared(Net(), lambda o, y: F.softplus(F.mse_loss(o, y)), [numbers(0)]),
        "flat": compared(Net(), lambda o, y: F.mse_loss(o, y) + flat(o), [numbers(0)]),
    }


def flat(out: Tensor) -> Tensor:
    """Nothing on the first batch; a part of later rows may be beyond."""
    return F.hardshrink(out.mean(), 90.0)


def nothing() -> dict[str, Any]:
    """No label of the second batch is valid."""
    data = [labelled(0), labelled(1, valid=False), labelled(2)]
    loss = F.cross_entropy
    return {
        "replicas": compared(Net(), loss, data),
        "micro-batches": compared(Net(), loss, data, config=TWO),
        "split": compared(Net(), loss, data, SPLIT),
        "stages": compared(Net(), loss, data, STAGES),
        "stages, micro-batches": compared(Net(), loss, data, STAGES, TWO),
    }


# ---- ordinary losses ---------------------------------------------------------------------------


def accumulated(out: Tensor, y: Tensor) -> Tensor:
    total = torch.zeros((), dtype=out.dtype)
    total += F.l1_loss(out, y)
    total -= 0.2 * F.mse_loss(out, y)
    return total


def accumulated_beside(out: Tensor, y: Tensor) -> Tensor:
    total = torch.full((1,), 0.5, dtype=out.dtype)
    total.add_(F.l1_loss(out, y))
    return total.squeeze()


def concatenated(out: Tensor, y: Tensor) -> Tensor:
    means = torch.cat([F.l1_loss(out, y)[None], F.mse_loss(out[:, 1], y[:, 1]).view(1)])
    return (means * torch.tensor([0.3, 2.0], dtype=out.dtype)).sum()


def assigned(out: Tensor, y: Tensor) -> Tensor:
    each = torch.ones(3, dtype=out.dtype)
    each[0] = F.l1_loss(out, y)
    each[-1:] = 2.0 * F.mse_loss(out, y)
    return each.mean()


def features_first(out: Tensor, y: Tensor) -> Tensor:
    """In the second batch a replica has as many rows as there are features."""
    apart = (out - y).T
    return apart.square().sum(0).mean() + 0.1 * apart.abs().sqrt().mT.mean()


class Penalty(Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        gram = self.a.weight.mT @ self.a.weight
        return F.mse_loss(super().forward(x), y) + 0.1 * gram.square().mean()


def in_chunks(out: Tensor, y: Tensor) -> Tensor:
    """As losses over long texts are computed: sums of chunks, by the number of all."""
    total = torch.zeros((), dtype=out.dtype)
    for a, b in zip(out.chunk(2, 1), y.chunk(2, 1), strict=True):
        total = total + F.mse_loss(a.reshape(-1), b.reshape(-1), reduction="sum")
    return total / y.numel()


def looped(out: Tensor, y: Tensor) -> Tensor:
    """As many sums as rows."""
    return torch.stack([(a - b).abs().sum() for a, b in zip(out, y, strict=True)]).mean()


def normalised(out: Tensor, y: Tensor) -> Tensor:
    weights = y[:, 0].exp()
    return ((out - y).square().sum(1) * (weights / weights.sum())).sum()


class Fades(Net):
    """A coefficient of the batch, which comes to nothing."""

    def forward(self, x: Tensor, y: Tensor, much: Tensor) -> Tensor:
        out = super().forward(x)
        return F.mse_loss(out, y) + much * out.abs().mean()


class Prior(Net):
    """Its weights are held near one row of numbers."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        near = torch.linspace(0.0, 1.0, IN, dtype=x.dtype)
        return F.mse_loss(super().forward(x), y) + (self.a.weight - near).square().mean()


class Twice(nn.Module):
    """Experts that are called twice, whose bias moves in between."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.head = wh.nn.MoE(IN, 6, 4, balance="bias"), nn.Linear(IN, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.experts(self.experts(x)))


class RowByRow(Net):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        one = super().forward
        return torch.vmap(lambda a, b: F.cross_entropy(one(a), b))(x, labels).mean()


class Remembers(Net):
    """A memory that no row has a part in, of another size in every batch."""

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return super().forward(x + (x @ memory.T).softmax(-1) @ memory)


def remembering(seed: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    x, y = numbers(seed)
    return x, numbers(seed + 50, size)[0], y


def spectral() -> Net:
    net = Net()
    nn.utils.spectral_norm(net.a)
    return net


def ordinary() -> dict[str, Any]:
    data = [numbers(0), numbers(1, 2 * OUT), numbers(2, 3)]
    sizes = [9, ROWS, ROWS // 2, 5]
    memories = [remembering(i, size) for i, size in enumerate(sizes)]
    mse = F.mse_loss
    return {
        "accumulated": compared(Net(), accumulated, data),
        "accumulated in stages": compared(Net(), accumulated, data, STAGES, TWO),
        "accumulated beside": compared(Net(), accumulated_beside, data),
        "concatenated": compared(Net(), concatenated, data),
        "assigned": compared(Net(), assigned, data),
        "features first": compared(Net(), features_first, data),
        "penalty": compared(Penalty(), None, [numbers(i, rows) for i, rows in enumerate((6, 10))]),
        "in chunks": compared(Net(), in_chunks, data, config=TWO),
        "looped": compared(Net(), looped, data),
        "normalised": compared(Net(), normalised, data),
        "fades": compared(
            Fades(), None, [(*numbers(i), torch.tensor(0.5 * (i < 1)).double()) for i in range(3)]
        ),
        "prior": compared(Prior(), None, data),
        "experts twice": compared(Twice(), mse, [numbers(0), numbers(1)]),
        "row by row": compared(RowByRow(), None, [labelled(0), labelled(1)]),
        "memory": compared(Remembers(), mse, memories),
        "memory in micro-batches": compared(Remembers(), mse, memories, config=TWO),
        "spectral norm": compared(spectral(), mse, data),
    }


def on_rank() -> dict[str, dict[str, Any]]:
    wh.init({"timeout_seconds": 20})
    torch.manual_seed(0)
    found = {}
    for cases in (alike, something_new, nothing, ordinary):
        found[cases.__name__] = cases()
    return found


REFUSED = {
    "one session": "same numbers in some rows",
    "one session in stages": "same numbers in some rows",
    "once each": "in some rows|some rows alike",
    "by frequency": "scale_grad_by_freq",
    "two large": "the loss of 6 rows",
    "evaluated": "evaluated after step 1",
    "counts": "times = 3",
    "sizes": "in another ratio on some parts|means over different counts",
    "softplus": "softplus",
    "flat": "hardshrink",
}


def test_batches_are_as_on_one_device_or_refused():
    for ranks in run_ranks(2, on_rank, timeout=300):
        for name, cases in ranks.items():
            for case, found in cases.items():
                if case in REFUSED:
                    words = REFUSED[case].split("|")
                    assert isinstance(found, str), (name, case, found)
                    assert any(word in found for word in words), (name, case, found)
                else:
                    assert isinstance(found, float), (name, case, found)
                    assert found < 1e-9, (name, case, found)
