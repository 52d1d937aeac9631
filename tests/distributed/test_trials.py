"""What the trials at build try, and leave as it was: evaluation, weights that forwards write to,
batches that code edits, named outputs, and what is no row."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import whale as wh
from tests.covering import part
from tests.ranks import run_ranks

ROWS, LENGTH, IN, WIDTH, OUT = 8, 5, 6, 8, 4
LENGTHS = torch.tensor([5, 5, 5, 5, 2, 2, 2, 2])
PADDED = torch.arange(LENGTH)[None] >= torch.tensor([5, 4, 3, 2, 5, 1, 2, 5])[:, None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(IN, WIDTH), nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Any:
        return self.head(torch.tanh(self.a(x)))


class Evaluates(Net):
    """Its output in evaluation is another."""

    def __init__(self, change: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out if self.training else self.change(self, out)


class Encoder(nn.Module):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.a, last = nn.Linear(IN, WIDTH), nn.LayerNorm(WIDTH) if norm else None
        self.encoder = nn.TransformerEncoder(layer, 2, last)
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor, padded: Tensor) -> Tensor:
        return self.head(self.encoder(self.a(x), src_key_padding_mask=padded).mean(1))


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Embedding(20, WIDTH, sparse=True), nn.Linear(WIDTH, OUT)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.a(ids).mean(1))


class Follows(nn.Module):
    """A teacher that follows in the forward."""

    def __init__(self, data: bool) -> None:
        super().__init__()
        self.a, self.head, self.data = Net(), nn.Linear(OUT, OUT), data
        self.teacher = copy.deepcopy(self.a).requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.training:
            with torch.no_grad():
                for p, q in zip(self.a.parameters(), self.teacher.parameters(), strict=True):
                    (q.data if self.data else q).lerp_(p, 0.1)
        return F.mse_loss(self.head(self.a(x)), self.teacher(x + 0.1).detach() + y)


class Normalises(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.head.weight.copy_(F.normalize(self.head.weight, dim=1))
        return super().forward(x)


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.head = nn.Linear(IN, WIDTH), nn.Linear(WIDTH, OUT)
        self.register_buffer("turn", torch.randn(LENGTH, WIDTH, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.fft.ifft(torch.fft.fft(self.a(x), dim=1) * self.turn, dim=1)
        return self.head(h.real.mean(1)) + self.turn.imag.sum()


class Packed(nn.Module):
    """Padded to the longest of the rows that it sees, and averaged over that, or over tokens."""

    def __init__(self, exact: bool) -> None:
        super().__init__()
        self.a, self.head, self.exact = nn.Linear(IN, WIDTH), nn.Linear(WIDTH, OUT), exact
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.a(x), lengths, batch_first=True, enforce_sorted=False)
        h, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        if self.exact:
            return self.head(h.sum(1) / lengths[:, None]).square().mean()
        return self.head(h).mean(1).square().mean()


class Scores(Net):
    def __init__(self, masked: bool) -> None:
        super().__init__()
        self.masked = masked

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        out = super().forward(x)
        right, valid = (out.argmax(1) == labels).double(), (labels != -100).double()
        mean = (right * valid).sum() / valid.sum() if self.masked else right.mean()
        return {
            "loss": F.cross_entropy(out, labels),
            "right": mean,
            "valid": valid.sum(),
            "each": right,
        }


class Penalised(Net):
    def __init__(self, penalty: Callable[[Net], Tensor]) -> None:
        super().__init__()
        self.penalty = penalty
        self.register_buffer("start", self.a.weight.detach().clone())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(super().forward(x), y) + 0.1 * self.penalty(self)


class Norm(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(IN, WIDTH), nn.BatchNorm1d(WIDTH, **options)
        self.head = nn.Linear(WIDTH, OUT)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.a(x))))


def numbers(*shape: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = partial(torch.randn, generator=generator, dtype=torch.float64)
    return [(made(ROWS, *shape), made(ROWS, OUT)) for _ in range(3)]


def labelled(low: int = 0, holes: bool = False) -> list[tuple[Tensor, Tensor]]:
    labels = [(x, torch.arange(ROWS) * 5 % OUT + low) for x, _ in numbers(IN)]
    for _, y in labels if holes else ():
        y[1:4] = -100
    return labels


def tokens() -> list[tuple[Tensor, Tensor]]:
    return [(torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) * 7 % 20, y) for _, y in numbers(IN)]


def from_one(out: Tensor, labels: Tensor) -> Tensor:
    labels -= 1
    return F.cross_entropy(out, labels)


def moved(out: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(out, target.mul_(0.5))


def orthogonal(net: Net) -> Tensor:
    weight = net.a.weight
    return (weight.t() @ weight - torch.eye(IN, dtype=weight.dtype)).square().sum()


def case(build: Callable[[], nn.Module], data: Callable[[], Any], **more: Any) -> dict[str, Any]:
    return {"build": build, "data": data, "refused": (), **more}


DP, TP, MIX, PP = "dp", "tp", "mix", "pp"
ALL = (DP, TP, MIX, PP)
MSE, CE = {"loss": F.mse_loss}, {"loss": F.cross_entropy}
CASES: dict[str, dict[str, Any]] = {
    "a bias read in evaluation": case(
        lambda: Evaluates(lambda net, out: out * (1 + net.head.bias.square().sum())),
        labelled, **CE, layouts=(TP, MIX), refused=(MIX,), text="head.bias",
    ),
    "the first bias read in evaluation": case(
        lambda: Evaluates(lambda net, out: out * net.a.bias.std()), labelled, **CE,
        refused=(PP,), text="a.bias",
    ),
    "rows that meet in evaluation": case(
        lambda: Evaluates(lambda net, out: out / out.norm(dim=0, keepdim=True)),
        labelled, **CE, layouts=(DP, MIX), refused=(DP, MIX), text="in evaluation",
    ),
    "no loss in evaluation": case(
        lambda: Evaluates(lambda net, out: out[0]), labelled, **CE, layouts=(DP,), evaluates=False,
    ),
    "an encoder": case(
        lambda: Encoder(False), lambda: [(x, PADDED, y) for x, y in numbers(LENGTH, IN)], **MSE,
    ),
    "an encoder with a norm": case(
        lambda: Encoder(True), lambda: [(x, PADDED, y) for x, y in numbers(LENGTH, IN)], **MSE,
    ),
    "an encoder, padded before": case(
        lambda: Encoder(False),
        lambda: [(x, PADDED.flip(1), y) for x, y in numbers(LENGTH, IN)],
        **MSE, refused=(DP, MIX), text="not at their end",
    ),
    "a sparse embedding": case(Sparse, tokens, **MSE),
    "a teacher": case(lambda: Follows(False), lambda: numbers(IN), layouts=(DP, TP)),
    "a teacher by data": case(lambda: Follows(True), lambda: numbers(IN), layouts=(DP, TP)),
    "weights normalised": case(Normalises, lambda: numbers(IN), **MSE, layouts=(DP, TP)),
    "labels edited": case(Net, lambda: labelled(1), loss=from_one, evaluates=False),
    "targets edited": case(Net, lambda: numbers(IN), loss=moved, evaluates=False),
    "complex buffers": case(Spectral, lambda: numbers(LENGTH, IN), **MSE, layouts=(DP, TP, PP)),
    "a mean over the longest": case(
        lambda: Packed(False),
        lambda: [(x, LENGTHS) for x, _ in numbers(LENGTH, IN)],
        example=lambda: [(x, torch.full((ROWS,), LENGTH)) for x, _ in numbers(LENGTH, IN)],
        layouts=(DP,), refused=(DP,), text="other lengths of rows",
    ),
    "a mean over the lengths": case(
        lambda: Packed(True),
        lambda: [(x, LENGTHS) for x, _ in numbers(LENGTH, IN)],
        example=lambda: [(x, torch.full((ROWS,), LENGTH)) for x, _ in numbers(LENGTH, IN)],
        layouts=(DP,),
    ),
    "a score by rows": case(
        lambda: Scores(False), labelled,
        outputs={"right": wh.mean, "valid": wh.sum, "each": wh.concat}, layouts=(DP, MIX),
    ),
    "a score by labels": case(
        lambda: Scores(True), lambda: labelled(holes=True),
        outputs={"right": wh.mean}, layouts=(DP,), refused=(DP,), text="the output 'right'",
    ),
    "an orthogonal weight": case(
        lambda: Penalised(orthogonal), lambda: numbers(IN), layouts=(DP,)
    ),
    "a weight near a buffer": case(
        lambda: Penalised(lambda net: F.mse_loss(net.a.weight, net.start)),  # type: ignore[arg-type]
        lambda: numbers(IN), layouts=(DP,),
    ),
    "a weight near a tensor": case(
        lambda: Penalised(lambda net: (net.a.weight - torch.ones(WIDTH, IN)).square().sum()),
        lambda: numbers(IN), layouts=(DP,),
    ),
    "a norm of all steps": case(lambda: Norm(momentum=None), lambda: numbers(IN), **MSE),
    "an untracked norm": case(
        lambda: Norm(track_running_stats=False), lambda: numbers(IN), **MSE
    ),
}  # fmt: skip
LAYOUTS: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    DP: lambda model: {"": wh.replicate()},
    TP: lambda model: {"": wh.split()},
    MIX: lambda model: {"": wh.replicate(), "head": wh.split()},
    PP: lambda model: {
        "|".join(name for name, _ in model.named_children() if name != "head"): wh.stage(),
        "head": wh.stage(),
    },
}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def built(case: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = case["build"]()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_complex():
                module._buffers[name] = buffer.to(torch.complex128)
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.double()
    return model


def plainly(case: dict[str, Any]) -> list[float]:
    model, loss = built(case), case.get("loss")
    optimizer, found = sgd([p for p in model.parameters() if p.requires_grad]), []

    def run(batch: Any) -> Any:
        named = model(*batch) if loss is None else loss(model(*batch[:-1]), batch[-1])
        return named if isinstance(named, dict) else {"loss": named}

    for batch in case["data"]():
        optimizer.zero_grad()
        named = run(batch)
        named["loss"].backward()
        optimizer.step()
        found += [float(named[name].detach().sum()) for name in ("loss", *case.get("outputs", ()))]
    if case.get("evaluates", True):
        model.eval()
        with torch.no_grad():
            found.append(float(run(case["data"]()[0])["loss"]))
    return found


def by_whale(case: dict[str, Any], layout: str) -> list[float]:
    model = built(case)
    wh.annotate(model, LAYOUTS[layout](model))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    example = case.get("example", case["data"])()[0]
    step = wh.parallelize(
        model,
        optimizer=sgd,
        batch=example,
        loss=case.get("loss"),
        outputs=case.get("outputs"),
        config={"timeout_seconds": 20},
    )
    try:
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, before[name]), name
        found = []
        for batch in case["data"]():
            named = step(batch)
            found += [
                float(named[name].detach().sum()) for name in ("loss", *case.get("outputs", ()))
            ]
        if case.get("evaluates", True):
            found.append(float(step.evaluate(case["data"]()[0])["loss"]))
        return found
    finally:
        step.close(forget=True)


def on_rank() -> dict[tuple[str, str], str | float]:
    torch.set_num_threads(1)
    wh.init()
    found: dict[tuple[str, str], str | float] = {}
    every = [(name, layout) for name, case in CASES.items() for layout in case.get("layouts", ALL)]
    for name, layout in part(every):
        case = CASES[name]
        want = plainly(case)
        try:
            got = by_whale(case, layout)
        except wh.WhaleError as error:
            found[name, layout] = str(error)
        except Exception as error:  # noqa: BLE001 - seen in the parent
            found[name, layout] = f"RAW {type(error).__name__}: {error}"
        else:
            pairs = zip(got, want, strict=True)
            found[name, layout] = max(abs(a - b) / max(abs(b), 1.0) for a, b in pairs)
    return found


def test_what_is_tried_is_exact_or_refused() -> None:
    problems = []
    for found in run_ranks(2, on_rank, timeout=300):
        for (name, layout), got in found.items():
            if layout in CASES[name]["refused"]:
                text = CASES[name]["text"]
                if not isinstance(got, str) or text not in got or "hint:" not in got:
                    problems.append(f"{name} [{layout}]: not refused by {text!r}: {got}")
            elif isinstance(got, str) or not got <= 1e-9 or math.isnan(got):
                problems.append(f"{name} [{layout}]: {got}")
    assert not problems, "\n".join(problems)


@pytest.mark.full
def test_an_encoder_with_dropout_is_verified() -> None:
    case = CASES["an encoder"]
    model = built(case)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    wh.annotate(model, LAYOUTS[PP](model))
    result = wh.verify(model, batch=case["data"]()[0], loss=F.mse_loss, cluster="1x2xCPU")
    assert str(result).startswith("equal"), str(result)
